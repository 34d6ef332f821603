"""`trinity regrade` creates a run that trains a run's stored groups again with other rewards, or without some of them.

It is a fork whose parts also hold the parent's later groups, whichever weights sampled them. A reward function scores
them in an environment service of this command, before the new run begins. The new run's buffer then has them as if its
explorers had sent them: its tasks count as fed, so nothing is sampled until they are used up.
"""

import asyncio
import contextlib
import hashlib
import json
import shlex
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from trinity import plugins
from trinity.commands import AsJson, Overrides, PluginDirs, StageOption, command, group
from trinity.commands.request import plugin_folders
from trinity.config import Config, ConfigError, load, make_plan
from trinity.config.parents import Regrade, parent_of
from trinity.config.schema.algorithm import RolloutCorrectionConfig
from trinity.config.workflows import scores_by_name
from trinity.data.experience import Group
from trinity.data.wire import decode_outcome
from trinity.lineage import wire
from trinity.lineage.fork import PLUGINS, Fork, find_parent, make_fork
from trinity.lineage.rewards import (
    NOT_GRADED,
    SKIPPED,
    WITHOUT_EXPLORER,
    WITHOUT_TASK,
    WITHOUT_VERSION,
    Changes,
    LeftOut,
    NotRecorded,
    Scored,
    rescored,
)
from trinity.reading.client import ScorerEnded, Scorers
from trinity.reading.errors import RunError
from trinity.reading.reader import JobStage, scorers
from trinity.reading.render import near, table, to_json, visible
from trinity.runtime import files
from trinity.runtime.errors import InvalidInput
from trinity.study.bisect import lines_of_steps
from trinity.weights.checkpoints import complete_steps

app = group()

REPORT = "regrade.json"
_REUSED = 8  # steps of the parent, unless --reuse says otherwise
_AT_ONCE = 8
_TELL_SECONDS = 10.0
_SHOWN = 5  # tasks, explorers or versions that an error names
_OPTIONS = {
    WITHOUT_TASK: "--without-tasks", WITHOUT_EXPLORER: "--without-explorer", WITHOUT_VERSION: "--without-versions",
}  # fmt: skip
_CAP = 2.0  # of truncated importance sampling, where the parent has no correction


@dataclass(frozen=True)
class Grader:
    """The new reward function and the folders of plugins. `file` has the function; None: it is installed."""

    name: str
    file: Path | None = None
    plugin_dirs: tuple[Path, ...] = ()


@command(app, "regrade")
def regrade(
    run: Annotated[str, typer.Argument(help="Job folder of the run, or <project>/<name> of one here")],
    overrides: Overrides = None,
    reward: Annotated[str, typer.Option("--reward", help="Name of a reward function, or FILE.py[:NAME]")] = "",
    start: Annotated[int, typer.Option("--from", min=0, help="Last step that stays; else the first kept")] = 0,
    reuse: Annotated[int, typer.Option("--reuse", min=1, help="Steps whose groups are trained again")] = _REUSED,
    without_task: Annotated[list[str] | None, typer.Option("--without-tasks", help="Task id, or pattern")] = None,
    without_explorer: Annotated[list[str] | None, typer.Option("--without-explorer", help="Explorer's id")] = None,
    without_version: Annotated[list[str] | None, typer.Option("--without-versions", help="FIRST-LAST")] = None,
    name: Annotated[str, typer.Option("--name", help="Name of the new run; else <name>-regrade")] = "",
    stage: StageOption = "",
    plugin_dir: PluginDirs = None,
    report: Annotated[bool, typer.Option("--report", help="How far off-policy the steps of RUN are")] = False,
    as_json: AsJson = False,
) -> int:
    """Create a run that trains stored groups again with other rewards, or without some of them."""
    job_stage = find_parent(run, stage)
    if report:
        return _report(job_stage, as_json)
    left_out = LeftOut(
        tuple(without_task or ()), tuple(without_explorer or ()), tuple(map(_versions, without_version or ()))
    )
    if not reward and left_out == LeftOut():
        raise RunError("give --reward NAME, or what to leave out: --without-tasks, -explorer, -versions", 2)
    plan = make_plan(job_stage.config)
    if plan.offline or plan.policy == "replay":
        kind = "learns from a dataset" if plan.offline else "may use a group several times (replay)"
        raise RunError(f"{job_stage.name} {kind}: a regrade needs groups that each step uses once", 2)
    grader = _grader(reward, plugin_folders(plugin_dir))
    kept = complete_steps(job_stage.folder)
    if not start and not kept:
        raise RunError(f"{job_stage.name} keeps no checkpoint to begin at", 2)
    start = start or kept[0]
    given = [*_with_reward(job_stage.config, grader), *_with_correction(job_stage, overrides or []), *(overrides or [])]
    change = _Regrading(start + reuse, start, grader, left_out, without_version or [])
    made = make_fork(job_stage, start, given, name, change)
    folders = "".join(f" --plugin-dir {shlex.quote(near(folder))}" for folder in plugin_dir or [])
    notes = [*change.notes, *_notes(job_stage.config, grader)]
    made = replace(made, command=made.command + folders, notes=notes)
    facts = change.changes.as_json()
    if as_json:
        print(to_json({**asdict(made), "changes": facts}))
        return 0
    print(_text(made, facts, grader, start, change.last_step))
    return 0


def _versions(text: str) -> range:
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
        raise RunError(f"--without-versions {text}: give FIRST-LAST, such as 23-25", 2)
    return range(int(first), int(last or first) + 1)


def _grader(reward: str, plugin_dirs: Sequence[Path]) -> Grader | None:
    """Finds the reward function. Raises RunError with the known names, or with the plugin that is gone."""
    if not reward:
        return None
    try:
        plugins.load(plugin_dirs)
        path, _, name = reward.partition(":")
        if not path.endswith(".py"):
            return _installed(reward, plugin_dirs)
        file = Path(path).expanduser().absolute()
        if not file.is_file():
            raise RunError(f"--reward {reward}: there is no file {file}", 2)
        before = set(plugins.REWARD_FUNCTIONS)
        with _alone(file) as folder:
            plugins.load([folder])
    except plugins.PluginError as error:
        raise RunError(f"--reward {reward}: {error}", 2) from None
    found = sorted(set(plugins.REWARD_FUNCTIONS) - before)
    if name and name not in found:
        raise RunError(f"--reward {reward}: the file has {', '.join(found) or 'no reward function'}", 2)
    if not name and len(found) != 1:
        what = f"has {', '.join(found)}: give FILE.py:NAME" if found else "has no reward function (@reward_function)"
        raise RunError(f"--reward {reward}: the file {what}", 2)
    return Grader(name or found[0], file=file, plugin_dirs=tuple(plugin_dirs))


@contextlib.contextmanager
def _alone(file: Path) -> Any:
    """Yields a folder that holds a copy of one file."""
    with tempfile.TemporaryDirectory(prefix="trinity-") as folder:
        shutil.copy2(file, folder)
        yield Path(folder)


def _installed(name: str, plugin_dirs: Sequence[Path]) -> Grader:
    from trinity.config.names import reward_functions

    if name not in reward_functions():
        raise RunError(
            f"--reward {name}: no such reward function; known: {', '.join(sorted(reward_functions()))}; one of a "
            "plugin needs its folder (--plugin-dir) or its file (--reward FILE.py)",
            2,
        )
    return Grader(name, plugin_dirs=tuple(plugin_dirs))


def _with_reward(config: Config, grader: Grader | None) -> list[str]:
    """Returns the overrides by which later tasks, and evaluations of the same function, get the new one."""
    if grader is None:
        return []
    source = config.buffer.explorer_input
    found = source.by_key()
    trained = {source.reward_of(one) for key, one in found if not key.startswith("eval")}
    changed = []
    for key, taskset in found:
        if not key.startswith("eval") or source.reward_of(taskset) in trained:
            place = f"buffer.explorer_input.{key}"
            changed.append(f"{place}.default_reward_fn_type={grader.name}")
            if taskset.format.reward_fn_key:
                changed.append(f"{place}.format.reward_fn_key=''")
    return changed


def _with_correction(job_stage: JobStage, overrides: Sequence[str]) -> list[str]:
    """Returns the overrides that turn importance correction on; none if run or overrides have one, or it cannot be.

    A loss with a ratio gets that to the weights that sampled, also if a batch makes several updates. Its clip then
    bounds how far stored steps move a token's probability; a cap with `decoupled` would not (docs/benchmarks.md).
    """
    key = "algorithm.rollout_correction"
    plan = make_plan(load(job_stage.config_file, overrides, plugins_loaded=False)).algorithm
    asked = plan.correction != RolloutCorrectionConfig() or any(one.startswith(key) for one in overrides)
    if asked:
        return []
    if "ratio" in plan.loss_traits:
        return [f"{key}.decoupled=false"]
    for cap in ("token_cap", "sequence_cap"):
        given = [f"{key}.decoupled=true", f"{key}.{cap}={_CAP}"]
        with contextlib.suppress(ConfigError):
            load(job_stage.config_file, [*overrides, *given], plugins_loaded=False)
            return given
    return []


def _notes(config: Config, grader: Grader | None) -> list[str]:
    notes, source = [], config.buffer.explorer_input
    for key, taskset in source.by_key():
        workflow = source.workflow_of(taskset, key.startswith("eval"))
        if grader is not None and not scores_by_name(workflow):
            notes.append(f"{key}: {workflow} has rewards of its own; later groups and evaluations get those")
    return notes


@dataclass
class _Regrading:
    """Replaces the rewards in the parts of a fork: trinity.lineage.fork.Change."""

    through_step: int
    step: int
    grader: Grader | None
    left_out: LeftOut
    without_versions: Sequence[str]
    changes: Changes = field(default_factory=Changes)
    notes: list[str] = field(default_factory=list)
    last_step: int = 0
    _skipped: set[int] = field(default_factory=set)  # ordinals of groups that the parent trained in no step
    _alone: asyncio.Lock = field(default_factory=asyncio.Lock)
    _has_ended: bool = False  # a scoring process

    def __call__(self, config: Config, making: Path, parts: Path) -> Regrade:
        given = list(_read(parts))
        self.last_step = min(self.through_step, sum(wire.group_part(part) is None for part in given))
        if self.last_step <= self.step:
            raise RunError(f"the run has no step after {self.step}, so there are no groups to train again", 2)
        self._check_filters(given)
        file = self.grader.file if self.grader is not None else None
        if file is not None:
            (making / PLUGINS).mkdir()
            shutil.copy2(file, making / PLUGINS)
        changed = asyncio.run(self._changed(given, making / PLUGINS if file is not None else None, config))
        left = sum(self.changes.left_out.values())
        if not self.changes.groups:
            why = next(iter(self.changes.failures), f"{left} groups are left out")
            raise RunError(f"no stored group of steps {self.step + 1} to {self.last_step} can be trained: {why}")
        with parts.open("wb") as out:
            out.writelines(len(part).to_bytes(4, "little") + part for part in changed)
            out.flush()
        files.write_json(making / REPORT, self.changes.as_json())
        return Regrade(
            self.last_step, self.grader.name if self.grader is not None else "",
            hashlib.sha256(file.read_bytes()).hexdigest() if file is not None else "",
            self.changes.groups + left, dict(self.changes.left_out),
            self.left_out.tasks, self.left_out.explorers, tuple(self.without_versions),
        )  # fmt: skip

    def _check_filters(self, parts: Sequence[bytes]) -> None:
        """Notes what stays in the weights, and what steps skipped. Raises RunError for a filter without a group."""
        found: Counter[tuple[str, str]] = Counter()
        trained: Counter[tuple[str, str]] = Counter()
        there: dict[str, set[str]] = {reason: set() for reason in _OPTIONS}
        for part in parts:
            if (entry := wire.entry_part(part)) is None:
                stored = _stored(part)
                found.update(self.left_out.of(stored))
                there[WITHOUT_TASK].add(stored.task.task_id)
                there[WITHOUT_EXPLORER].add(stored.explorer_id)
                there[WITHOUT_VERSION] |= set(map(str, stored.versions))
            elif entry["step"] > self.step and entry["skip_reason"]:
                self._skipped.update(group["ordinal"] for group in entry["groups"])
            elif entry["step"] <= self.step:
                for group in entry["groups"]:
                    trained.update(self.left_out.matches(group["task_id"], "", *group["versions"]))
        for reason, pattern in self.left_out.given():
            option, count = f"{_OPTIONS[reason]} {pattern}", trained[reason, pattern]
            stay = f"{count} groups that steps up to {self.step} have trained stay in the weights"
            if not found[reason, pattern]:
                known = sorted(there[reason], key=lambda name: (len(name), name))  # numbers in their order
                named = ", ".join(known[:_SHOWN]) + (f" and {len(known) - _SHOWN} more" if known[_SHOWN:] else "")
                why = f", and {stay}: give an earlier --from" if count else f"; there are {named}"
                steps = f"{self.step + 1} to {self.last_step}"
                raise RunError(f"{option}: no stored group of steps {steps} matches{why}", 2)
            if count:
                self.notes.append(f"{option}: {stay}")
            elif reason == WITHOUT_EXPLORER:  # which the ledger does not name
                self.notes.append(f"{option}: groups that steps up to {self.step} have trained stay in the weights")

    async def _changed(self, parts: Sequence[bytes], own: Path | None, config: Config) -> list[bytes]:
        """Returns the parts with other rewards, in their order."""
        room = asyncio.Semaphore(_AT_ONCE)
        retries, source = config.explorer.max_retry_times, config.buffer.explorer_input
        args = {one.name: json.dumps(one.reward_fn_args) for _, one in source.by_key()}

        number, done = sum(wire.group_part(part) is not None for part in parts), 0

        async def change(part: bytes, scoring: Scorers | None) -> bytes:
            nonlocal done
            if wire.group_part(part) is None:
                return part
            async with room:
                changed = await self._regraded(part, scoring, args, retries)
            done += 1
            return changed

        async def tell() -> None:
            while True:
                await asyncio.sleep(_TELL_SECONDS)
                failed = sum(self.changes.failures.values())
                print(f"{done} of {number} groups are done, {failed} failed", file=sys.stderr, flush=True)

        async with self._scoring(own, config) as scoring:
            telling = asyncio.create_task(tell())
            try:
                return list(await asyncio.gather(*(change(part, scoring) for part in parts)))
            finally:
                telling.cancel()

    @contextlib.asynccontextmanager
    async def _scoring(self, own: Path | None, config: Config) -> AsyncIterator[Scorers | None]:
        if self.grader is None:
            yield None
            return
        folders = [*self.grader.plugin_dirs, *([own] if own is not None else [])]
        async with scorers(folders, config.explorer.reward_bound) as scoring:
            yield scoring

    async def _regraded(self, part: bytes, scoring: Scorers | None, args: dict[str, str], retries: int) -> bytes:
        """`args`: of the reward function, by taskset."""
        stored, outcome = _stored(part), _outcome(part)
        reason = SKIPPED if stored.task.ordinal in self._skipped else self.left_out.reason(stored)
        scores: Scored = [(one.reward, {}) for one in stored.experiences]
        if not reason and scoring is not None:
            found = await self._scores(stored, scoring, args.get(stored.task.taskset, "{}"), retries)
            scores, reason = (found, "") if found is not None else (scores, NOT_GRADED)
        if reason:
            self.changes.left_out[reason] += 1
            return wire.regraded_part(part, outcome, reason)
        self.changes.add(stored, [reward for reward, _ in scores])
        if self.grader is not None:
            outcome = wire.regraded(outcome, scores, self.grader.name, args.get(stored.task.taskset, "{}"))
        return wire.regraded_part(part, outcome, "")

    async def _scores(self, stored: Group, scoring: Scorers, args: str, retries: int) -> Scored | None:
        """Returns the scores; None if the function fails as often as a task of the run may fail.

        Once a scoring process has ended, groups are scored one after the other, so that the next end is known to be of
        the group in it. What the log lacks is no failure of a group: raises RunError.
        """
        grader = self.grader
        assert grader is not None
        error, failures = "", 0
        while failures <= retries:
            is_alone = self._has_ended
            try:
                async with self._alone if is_alone else contextlib.nullcontext():
                    return await rescored(stored, grader.name, lambda items: scoring.score(grader.name, items, args))
            except NotRecorded:
                raise
            except ScorerEnded as problem:
                error, failures, self._has_ended = str(problem), failures + is_alone, True
            except RunError as problem:
                error, failures = str(problem), failures + 1
        self.changes.failures[error] += 1
        return None


def _outcome(part: bytes) -> bytes:
    found = wire.group_part(part)
    assert found is not None
    return found[1]


def _stored(part: bytes) -> Group:
    try:
        stored = decode_outcome(_outcome(part))
    except InvalidInput as error:
        raise RunError(f"a stored group cannot be decoded: {error}") from None
    assert isinstance(stored, Group)
    return stored


def _read(path: Path) -> Any:
    with path.open("rb") as file:
        while head := file.read(4):
            yield file.read(int.from_bytes(head, "little"))


def _text(made: Fork, facts: dict[str, Any], grader: Grader | None, start: int, last: int) -> str:
    rewarded = f" with rewards of {grader.name}" if grader is not None else ""
    lines = [
        f"{made.name} trains {facts['groups']} groups of {made.parent} after step {start}, up to step {last},{rewarded}"
        " again; then it samples",
        f"rewards changed: {facts['rewards_changed']} of {facts['rollouts']}, in {facts['groups_changed']} groups; "
        f"mean {facts['reward_before']:.4g} -> {facts['reward_after']:.4g}",
        f"advantages: mean difference {facts['advantage_difference_mean']:.3g}; "
        f"{facts['advantages_of_other_sign']} rollouts have another sign",
        f"order changed in {facts['groups_reordered']} groups; {facts['groups_without_signal']} groups have equal "
        "rewards",
    ]
    lines += [f"left out: {count} groups ({reason})" for reason, count in facts["left_out"].items()]
    lines += [visible(f"failed: {count} groups: {error}") for error, count in facts["failures"].items()]
    if facts["tasks"]:
        columns = {
            "most affected task": lambda one: one["task"],
            "reward": lambda one: f"{one['before']:.3f}",
            "new": lambda one: f"{one['after']:.3f}",
        }
        lines.append(table(facts["tasks"], columns))
    return "\n".join([*lines, *(f"note: {note}" for note in made.notes), f"run it by: {made.command}"])


def _report(job_stage: JobStage, as_json: bool) -> int:
    """Prints how far off-policy the regraded steps are, and the first steps after them."""
    parent = parent_of(job_stage.job)
    if parent is None or parent.regrade is None:
        raise RunError(f"{job_stage.name} is no regrade: give --report the job folder that `trinity regrade` made", 2)
    names = {
        "regraded": "sample/regraded_groups", "staleness": "sample/staleness_mean", "kl": "actor/mismatch/stale_kl",
        "ratio": "actor/mismatch/stale_ratio", "reward": "sample/reward_mean",
    }  # fmt: skip
    steps: list[dict[str, Any]] = [
        {"step": int(line["step"]), **{key: line.get(name) for key, name in names.items()}}
        for line in lines_of_steps(job_stage.folder / "monitor" / "trainer.jsonl")
        if int(line["step"]) > parent.step
    ]
    last = max((one["step"] for one in steps if one["regraded"]), default=parent.step)
    changes = files.read_json(job_stage.job / REPORT)
    if as_json:
        print(to_json({"parent": asdict(parent), "last_regraded_step": last, "steps": steps, "changes": changes}))
        return 0
    shown = [one for one in steps if one["step"] <= last + 3]
    columns = {key: lambda one, key=key: "-" if one[key] is None else f"{one[key]:.4g}" for key in ("step", *names)}
    print(table(shown, columns) if shown else f"{job_stage.name} has trained no step yet")
    print(f"steps {parent.step + 1} to {last} trained groups of {parent.name}; later steps have groups of this run")
    return 0
