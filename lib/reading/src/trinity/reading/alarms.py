"""Alarms: one table for the pages, `trinity status` and the rules of Prometheus.

Rules with a text are evaluated here, rules with a query by Prometheus (docs/generate_alerts.py).
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trinity.reading.series import Line, newest, values
from trinity.reading.wire import provider_line

Facts = dict[str, Any]

_WAITING_STEPS = 10


@dataclass(frozen=True)
class Query:
    """A Prometheus alert.

    `query` and `summary` follow its rules; `{threshold}` is the threshold of the rule. `minutes`: how long the
    condition holds before the alert.
    """

    alert: str
    query: str
    summary: str
    minutes: int = 0
    critical: bool = False


@dataclass(frozen=True)
class Rule:
    """An alarm is raised above `threshold`.

    `text` states the problem, `fix` the remedy, and `page` where to look, below the address of the run. `{step}` in
    `page` is the newest trained step; before the first there is no page.
    """

    text: str = ""
    fix: str = ""
    threshold: float = 0.0
    level: str = "warn"
    page: str = ""
    query: Query | None = None


RULES = {
    "process": Rule(
        "{name} is {health}", "trinity log shows its last lines", level="bad", page="fleet",
        query=Query("TrinityServiceDown", 'up{job="trinity"} == 0',
                    "{{ $labels.service }} at {{ $labels.instance }} does not answer", 2, True),
    ),
    "nats": Rule(
        query=Query("TrinityNatsUnreachable", "trinity_buffer_nats_connected == 0",
                    "the buffer of {{ $labels.run }} has lost NATS", 1, True),
    ),
    "no_explorers": Rule(
        "no explorer is running", "trinity log shows why; mode explore of the same YAML starts one", level="bad",
        page="fleet",
        query=Query("TrinityNoExplorers",
                    "sum by (run) (trinity_sync_members) == 0 and on (run) trinity_sync_claim_age_seconds < 60",
                    "{{ $labels.run }} has a trainer and no explorer", 5, True),
    ),
    "waits": Rule(  # of the page: a share of the time of `steps`
        "the trainer waited {share:.0%} of the last {steps} steps for experience",
        "add an explorer, or let it sample ahead (docs/staleness.md)", 0.5, page="step/{step}/lanes",
        query=Query("TrinityTrainerWaits", "trinity_buffer_trainer_waiting_seconds > 900",
                    "the trainer of {{ $labels.run }} has waited {{ $value | humanizeDuration }} for a batch"),
    ),
    "explorer": Rule(
        "explorer {name}: {why}", "trinity explorers shows its state", page="fleet",
        query=Query("TrinityExplorerBehind", "min_over_time(trinity_sync_member_lag_versions[15m]) > 0",
                    "explorer {{ $labels.explorer }} of {{ $labels.run }} does not load the LIVE version", 5),
    ),
    "version_rejected": Rule(
        query=Query("TrinityVersionRejected", 'delta(trinity_sync_versions{state="rejected"}[15m]) > 0',
                    "a weight version of {{ $labels.run }} was rejected or withdrawn"),
    ),
    "dead_letters": Rule(
        "{dead} task{s} died", "trinity deadletters list shows them, retry feeds them again", page="dead",
        query=Query("TrinityTasksDie", "delta(trinity_buffer_dead_letters[15m]) > 0",
                    "tasks of {{ $labels.run }} end as dead letters"),
    ),
    "log_full": Rule(
        "the experience log has {share:.0%} of its room",
        "save checkpoints more often, or give the log more room (docs/runbook.md)", 0.9, page="step/{step}",
        query=Query("TrinityLogFillsUp",
                    "trinity_buffer_log_bytes / trinity_buffer_log_limit_bytes > {threshold}",
                    "the experience log of {{ $labels.run }} has {{ $value | humanizePercentage }} of its room", 5),
    ),
    "failures": Rule(  # failed attempts, of all that ended
        "{failing}", "trinity log shows the errors of explorers", 0.1, page="dead",
        query=Query("TrinityAttemptsFail",
                    "sum by (run) (rate(trinity_explorer_attempts_failed_total[15m])) / (sum by (run) "
                    "(rate(trinity_explorer_attempts_failed_total[15m])) + sum by (run) "
                    "(rate(trinity_explorer_groups_total[15m]))) > {threshold}",
                    "{{ $value | humanizePercentage }} of the attempts of {{ $labels.run }} fail", 10),
    ),
    "prompts_cut": Rule(
        "{prompts_cut}", "raise model.max_prompt_tokens, or shorten the prompts", page="step/{step}",
        query=Query("TrinityPromptsCut",
                    "sum by (run) (increase(trinity_explorer_prompts_cut_total[15m])) > {threshold}",
                    "prompts of {{ $labels.run }} are cut, and nothing of them is trained"),
    ),
    "kl": Rule(  # nats for a token, between engine and trainer with the same weights
        "KL of engine and trainer is {kl:.3g} nats a token",
        "engine and trainer compute with the same weights: compare their dtypes and versions (docs/algorithms.md)",
        0.01, page="step/{step}",
        query=Query("TrinityEnginesDiffer", 'abs(trinity_trainer_kl_nats{to="kernel"}) > {threshold}',
                    "engine and trainer of {{ $labels.run }} differ by {{ $value }} nats a token", 10),
    ),
    "provider": Rule(
        "provider {provider}", "trinity env list shows all of them", page="fleet",
        query=Query("TrinityProviderAway",
                    "max by (run, environment) (trinity_explorer_environment_away) > {threshold}",
                    "no provider of {{ $labels.environment }} of {{ $labels.run }} can be reached", 5),
    ),
    "no_variance": Rule(
        "{share:.0%} of the groups have the same reward in every rollout",
        "such groups teach nothing: choose harder or easier tasks, or more rollouts of each", 0.5, page="step/{step}",
    ),
    "truncated": Rule(
        "{share:.0%} of the responses were cut off", "raise model.max_response_tokens", 0.5, page="step/{step}",
    ),
    "staleness": Rule(  # bounds above the threshold: one of a step is reached by every run that samples ahead
        "the newest batch has experience {staleness} steps old, and the bound is {bound}",
        "explorers sample as far ahead as the bound allows (docs/staleness.md)", 1, page="step/{step}",
    ),
    "disk": Rule(
        "the disk of the job folder is {share:.0%} full", "make room, or keep fewer checkpoints "
        "(trainer.max_checkpoints_to_keep)", 0.95, level="bad", page="step/{step}",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Alarm:
    """`level`: bad or warn. `page`: where to look, below the address of the run; may be empty."""

    level: str
    text: str
    fix: str
    page: str = ""
    rule: str = ""


@dataclass(frozen=True)
class Known:
    """The facts that alarms are computed from; None or empty where unknown. `status` is that of `trinity status`.

    `disk`: used and total bytes of the disk with the job folder.
    """

    counts: Facts | None
    status: Facts | None
    trainer: list[Line]
    explorer: list[Line]
    disk: tuple[int, int] | None = None


def disk_of(folder: Path | None) -> tuple[int, int] | None:
    """Returns used and total bytes of a folder's disk; None without a folder."""
    try:
        usage = shutil.disk_usage(folder) if folder is not None else None
    except OSError:
        return None
    return (usage.total - usage.free, usage.total) if usage is not None else None


def alarms(known: Known) -> list[Alarm]:
    """Returns the alarms, worst first."""
    lines = known.trainer or known.explorer
    step = lines[-1]["step"] if lines else None
    found = [_on_page(one, step) for one in (*_of_tasks(known), *_of_learning(known), *_of_services(known))]
    return sorted(found, key=lambda one: one.level != "bad")


def _alarm(rule_name: str, *, level: str = "", **facts: Any) -> Alarm:
    rule = RULES[rule_name]
    return Alarm(level or rule.level, rule.text.format(**facts), rule.fix, rule.page, rule_name)


def _on_page(alarm: Alarm, step: int | None) -> Alarm:
    """Fills the step into the page, or removes the page if there is no step."""
    page = alarm.page if step is not None or "{" not in alarm.page else ""
    return replace(alarm, page=page.format(step=step))


def _of_tasks(known: Known) -> Iterator[Alarm]:
    counts = known.counts or {}
    failed = counts.get("failed_attempts", 0)
    if counts.get("failing") and failed > RULES["failures"].threshold * (failed + counts["stored"]):
        yield _alarm("failures", failing=counts["failing"])
    if dead := counts.get("dead_letters"):
        yield _alarm("dead_letters", dead=dead, s="s" if dead > 1 else "")
    if cut := counts.get("prompts_cut"):
        yield _alarm("prompts_cut", level="bad" if cut.startswith("all ") else "", prompts_cut=cut)
    limit = counts.get("log_limit_bytes") or 0
    if limit and counts["log_bytes"] > RULES["log_full"].threshold * limit:
        yield _alarm("log_full", share=counts["log_bytes"] / limit)
    if known.disk is not None and known.disk[0] > RULES["disk"].threshold * known.disk[1]:
        yield _alarm("disk", share=known.disk[0] / known.disk[1])


def _of_learning(known: Known) -> Iterator[Alarm]:
    for name, metric in (
        ("no_variance", "group_advantages/skipped_group_ratio"),
        ("truncated", "rollout/response_truncated/mean"),
    ):
        if (share := newest(known.explorer, metric) or 0.0) >= RULES[name].threshold:
            yield _alarm(name, share=share)
    kl = newest(known.trainer, "actor/mismatch/kernel_kl")
    if kl is not None and abs(kl) > RULES["kl"].threshold:
        yield _alarm("kl", kl=kl)
    counts = known.counts or {}
    bound = counts.get("max_staleness_steps") or 0
    if bound > RULES["staleness"].threshold and counts["staleness_max"] >= bound:
        yield _alarm("staleness", staleness=counts["staleness_max"], bound=bound)


def _of_services(known: Known) -> Iterator[Alarm]:
    status = known.status
    lines = known.trainer[-_WAITING_STEPS:]
    waits, works = sum(values(lines, "time/wait")), sum(values(lines, "time/step"))
    if len(lines) == _WAITING_STEPS and waits > RULES["waits"].threshold * (waits + works):
        yield _alarm("waits", share=waits / (waits + works), steps=len(lines))
    if status is None:
        return
    if known.counts is not None and status["trainer_state"] and not status["explorers"] and known.counts["fed"]:
        yield _alarm("no_explorers")
    for one in status["explorers"]:
        if one["version"] < 0 or one["failure"]:
            yield _alarm("explorer", name=one["name"], why=one["failure"] or "it serves no version yet")
    for one in status["providers"]:
        if one["health"] != "serving":
            yield _alarm("provider", provider=provider_line(one))
    for process in status["processes"]:
        if process["health"] in ("DEAD", "NOT_SERVING", "UNAVAILABLE"):
            yield _alarm("process", name=process["name"], health=process["health"])
