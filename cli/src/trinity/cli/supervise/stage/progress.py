"""Progress of a stage as named texts: what a display shows, and what of it is new."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from trinity.reading.children import Child
from trinity.reading.client import Answers
from trinity.reading.render import visible
from trinity.reading.wire import failing, prompts_cut
from trinity.weights.wire import ExplorerState

# Facts that a stage has only while something is wrong.
TROUBLES = ("failing", "prompts_cut", "provider_away", "no_room", "weights")

_LOSSES = ("actor/sft_loss", "actor/dpo_loss", "actor/pg_loss", "actor/loss")
_KLS = ("actor/kl_loss", "actor/reward_kl", "actor/ppo_kl")
_RECENT_STEPS = 20  # of which the remaining time is estimated
_BAR = 24  # characters


@dataclass(frozen=True)
class Starting:
    """A process that does not serve yet: what it does, and for how long it has been starting."""

    name: str
    phase: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.phase}, {self.seconds:.0f} s" if self.seconds else self.phase


def starting(children: Iterable[Child]) -> list[Starting]:
    """Returns processes that do not serve yet or wait for another."""
    return [
        Starting(child.name, child.waits or child.phase, child.start_seconds)
        for child in children
        if child.start_seconds or child.waits
    ]


@dataclass
class Pace:
    """Estimates when the last step is done, from the newest steps that this command has seen."""

    began: float = field(default_factory=time.monotonic)
    _seen: list[tuple[int, float]] = field(default_factory=list)

    def note(self, step: int) -> None:
        if self._seen and self._seen[-1][0] > step:  # a trainer that died continues at its checkpoint
            self._seen.clear()
        if not self._seen or self._seen[-1][0] < step:
            self._seen = [*self._seen[-_RECENT_STEPS:], (step, time.monotonic())]

    def text(self, last_step: int) -> str:
        """Returns the elapsed and the remaining time; only the elapsed one before two steps were seen."""
        now = time.monotonic()
        elapsed = f"{clock(now - self.began)} elapsed"
        if len(self._seen) < 2:
            return elapsed
        (first, begin), (step, end) = self._seen[0], self._seen[-1]
        left = (last_step - step) * (end - begin) / (step - first) - (now - end)
        return f"{elapsed}, {clock(max(left, 0.0))} left"


def clock(seconds: float) -> str:
    """Returns 65 s as 1:05, and 3700 s as 1:01:40."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def bar(step: int, last_step: int) -> str:
    full = _BAR * min(step, last_step) // last_step
    return "━" * full + "╌" * (_BAR - full)


def facts(
    view: Answers, last_step: int = 0, pace: Pace | None = None, starting: Sequence[Starting] = ()
) -> dict[str, str]:
    """Returns the known values of a stage by name. `last_step`: of the plan, until the trainer reports it."""
    shown: dict[str, str] = {}
    trainer, buffer = view.trainer, view.buffer
    last = (trainer.last_step if trainer is not None else 0) or last_step
    if trainer is not None and trainer.state != "starting" and last:
        if pace is not None:
            pace.note(trainer.step)
        shown["step"] = f"{trainer.step}/{last}" + (f", {pace.text(last)}" if pace is not None else "")
    for one in starting:
        shown[one.name] = str(one)
    if trainer is not None:
        shown |= _of_trainer(dict(trainer.metrics))
    if buffer is not None and buffer.groups_per_step and buffer.fed:
        if buffer.ledger_step:
            shown["reward"] = f"{buffer.reward_mean:.3f}"
        shown |= _of_evaluations(view)
        shown["staleness"] = f"{buffer.staleness_max}/{buffer.max_staleness_steps}"
    else:
        shown |= _of_evaluations(view)
    if view.members:
        shown["tokens/s"] = f"{view.tokens_per_second:.0f}"
    if trainer is not None and trainer.state not in ("training", "waiting", "starting"):
        shown["trainer"] = trainer.state
    if trainer is not None and trainer.nodes:
        shown["machines"] = str(len(trainer.nodes))
    if waits := view.waiting_for:
        shown["waits for"] = visible(waits)
    shown |= _of_tasks(view)
    return {**shown, **_troubles(view)}


def _of_trainer(metrics: dict[str, float]) -> dict[str, str]:
    named = {"loss": _LOSSES, "kl": _KLS, "length": ("sample/response_length_mean",)}
    found = {name: next((metrics[key] for key in keys if key in metrics), None) for name, keys in named.items()}
    shown = {name: f"{value:.4g}" for name, value in found.items() if value is not None}
    if "sample/reward_mean" not in metrics and (speed := metrics.get("perf/tokens_per_second")):
        shown["tokens/s"] = f"{speed:.0f}"  # of training; explorers tell theirs
    return shown


def _of_evaluations(view: Answers) -> dict[str, str]:
    buffer = view.buffer
    if buffer is None:
        return {}
    shown = {}
    newest: dict[str, str] = {}  # of each taskset
    for one in buffer.evaluations:
        for key in sorted(one.metrics):
            if key.startswith("accuracy/"):
                newest[one.taskset] = f"{one.metrics[key]:.3f} of {one.taskset} after step {one.step}"
                answered = one.metrics.get(key.replace("accuracy/", "answered/"), 1.0)
                newest[one.taskset] += f", {1 - answered:.0%} without an answer" if answered < 1 else ""
                break
    if newest:
        shown["accuracy"] = visible("; ".join(newest.values()))
    if buffer.evaluations_outstanding:
        shown["evaluates"] = f"{buffer.evaluations_outstanding} tasks left"
    return shown


def _of_tasks(view: Answers) -> dict[str, str]:
    shown, buffer = {}, view.buffer
    if buffer is not None and buffer.groups_per_step and buffer.fed:
        shown["groups"] = f"{buffer.stored} stored, {buffer.outstanding} out, {buffer.dead_letters} dead"
        shown["groups"] += f", {buffer.cut_tasks} cut" if buffer.cut_tasks else ""
    if view.members:
        versions = ",".join(str(member.version) if member.version >= 0 else "none" for member in view.members)
        shown["explorers"] = f"{len(view.members)} (version {versions})"
    return shown


def _troubles(view: Answers) -> dict[str, str]:
    shown, buffer = {}, view.buffer
    if buffer is not None and buffer.groups_per_step and buffer.fed:
        if failures := failing(buffer):
            shown["failing"] = failures
        if cut := prompts_cut(buffer):
            shown["prompts_cut"] = cut
    if waiting := [one.explorer_id for one in view.members if one.state == ExplorerState.WAITING_FOR_PROVIDER]:
        shown["provider_away"] = f"tasks of {visible(', '.join(waiting))} wait for it; `trinity env list` names it"
    if waiting := [one.explorer_id for one in view.members if one.state == ExplorerState.WAITING_FOR_LOG]:
        shown["no_room"] = f"NATS takes no groups of {visible(', '.join(waiting))}; `trinity log` has its reason"
    if failed := [f"{one.explorer_id}: {one.failure}" for one in view.members if one.failure]:
        shown["weights"] = visible(f"not loaded by {'; '.join(failed)}")
    return shown
