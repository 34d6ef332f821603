"""What deserves a look: one list, with what to do about each and where the page shows it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trinity.cli.commands.wire import provider_line
from trinity.observe.series import Line, newest, values

Facts = dict[str, Any]

# Shares of groups, responses, and of the room of the log; the last is that of the alert TrinityLogFillsUp.
_NO_VARIANCE, _TRUNCATED, _LOG_FULL = 0.5, 0.5, 0.9
_KL = 0.01  # nats for a token, between engine and trainer with the same weights
_WAITS, _WAITING_STEPS = 0.5, 10  # share of the time of so many steps


@dataclass(frozen=True)
class Alarm:
    """`level`: bad or warn. `page`: where to look, below the run's address; empty for where the alarm itself is."""

    level: str
    text: str
    fix: str
    page: str = ""


@dataclass(frozen=True)
class Known:
    """What alarms are made from; None or empty where it is not known. `status` is that of `trinity status`."""

    counts: Facts | None
    status: Facts | None
    trainer: list[Line]
    explorer: list[Line]


def alarms(known: Known) -> list[Alarm]:
    """The worst first."""
    found = [*_of_tasks(known), *_of_learning(known), *_of_services(known)]
    return sorted(found, key=lambda one: one.level != "bad")


def _of_tasks(known: Known) -> Iterator[Alarm]:
    counts = known.counts or {}
    if failing := counts.get("failing"):
        yield Alarm("warn", failing, "trinity log shows the errors of explorers")
    if dead := counts.get("dead_letters"):
        letters = f"{dead} task{'s' if dead > 1 else ''} died"
        yield Alarm("warn", letters, "trinity deadletters retry feeds them again", "dead")
    if cut := counts.get("prompts_cut"):
        level = "bad" if cut.startswith("all ") else "warn"
        yield Alarm(level, cut, "raise model.max_prompt_tokens, or shorten the prompts")
    limit = counts.get("log_limit_bytes") or 0
    if limit and counts["log_bytes"] > _LOG_FULL * limit:
        share = f"the experience log has {counts['log_bytes'] / limit:.0%} of its room"
        yield Alarm("warn", share, "save checkpoints more often, or give the log more room (docs/runbook.md)")


def _of_learning(known: Known) -> Iterator[Alarm]:
    last = f"step/{known.explorer[-1]['step']}" if known.explorer else ""
    if (share := newest(known.explorer, "group_advantages/skipped_group_ratio") or 0.0) >= _NO_VARIANCE:
        fix = "such groups teach nothing: choose harder or easier tasks, or more rollouts of each"
        yield Alarm("warn", f"{share:.0%} of the groups have the same reward in every rollout", fix, last)
    if (share := newest(known.explorer, "rollout/response_truncated/mean") or 0.0) >= _TRUNCATED:
        yield Alarm("warn", f"{share:.0%} of the responses were cut off", "raise model.max_response_tokens", last)
    kl = newest(known.trainer, "actor/mismatch/kernel_kl")
    if kl is not None and abs(kl) > _KL:
        fix = "engine and trainer compute with the same weights: compare their dtypes and versions (docs/algorithms.md)"
        yield Alarm("warn", f"KL of engine and trainer is {kl:.3g} nats a token", fix, last)
    counts = known.counts or {}
    bound = counts.get("max_staleness_steps") or 0
    if bound > 1 and counts["staleness_max"] >= bound:
        text = f"the newest batch has experience {counts['staleness_max']} steps old, and the bound is {bound}"
        yield Alarm("warn", text, "explorers are ahead as far as they may be (docs/staleness.md)", last)


def _of_services(known: Known) -> Iterator[Alarm]:
    status = known.status
    lines = known.trainer[-_WAITING_STEPS:]
    waits, works = sum(values(lines, "time/wait")), sum(values(lines, "time/step"))
    if len(lines) == _WAITING_STEPS and waits > _WAITS * (waits + works):
        text = f"the trainer waited {waits / (waits + works):.0%} of the last {len(lines)} steps for experience"
        yield Alarm("warn", text, "add an explorer, or let it sample ahead (docs/staleness.md)")
    if status is None:
        return
    if known.counts is not None and status["trainer_state"] and not status["explorers"] and known.counts["fed"]:
        yield Alarm("bad", "no explorer is there", "trinity log shows why; mode explore of the same YAML starts one")
    for one in status["explorers"]:
        if one["version"] < 0 or one["failure"]:
            why = one["failure"] or "it serves no version yet"
            yield Alarm("warn", f"explorer {one['name']}: {why}", "trinity explorers shows its state", "fleet")
    for one in status["providers"]:
        if one["health"] != "serving":
            yield Alarm("warn", f"provider {provider_line(one)}", "trinity env list shows all of them")
    for process in status["processes"]:
        if process["health"] in ("DEAD", "NOT_SERVING", "UNAVAILABLE"):
            yield Alarm("bad", f"{process['name']} is {process['health']}", "trinity log shows its last lines", "fleet")
