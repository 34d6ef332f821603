"""What is an alarm, and that each says what to do."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.fakes.pages.recorded_run import counts_of, ledger
from trinity.reading.alarms import RULES, Known, alarms, disk_of

sys.path.insert(0, str(Path(__file__).parents[3] / "docs"))

import generate_alerts

pytestmark = pytest.mark.core

WAITING = [{"step": step, "time/wait": 3.0, "time/step": 1.0} for step in range(10)]
EXPLORER = {"name": "one", "version": 3, "failure": ""}
PROVIDER = {"provider": "games", "health": "serving", "since_seconds": None, "offers": ["chess"], "reason": ""}
PROCESS = {"name": "sync", "health": "SERVING"}


def status(**changes: Any) -> dict[str, Any]:
    found = {"trainer_state": "training", "explorers": [EXPLORER], "providers": [PROVIDER], "processes": [PROCESS]}
    return found | changes


def found(
    counts: dict[str, Any] | None = None,
    status: dict[str, Any] | None = None,
    trainer: list[dict[str, Any]] | None = None,
    **explorer: float,
) -> list[str]:
    known = Known(counts_of(ledger()) | (counts or {}), status, trainer or [], [{"step": 7, **explorer}])
    made = alarms(known)
    assert all(one.level in ("bad", "warn") and one.rule in RULES for one in made)
    assert all(one.fix for one in made)
    return [f"{one.level}: {one.text}" for one in made]


def test_a_sound_run_has_none() -> None:
    assert found(status=status(), trainer=[{**line, "time/wait": 0.5} for line in WAITING]) == []
    assert alarms(Known(None, None, [], [])) == []
    assert found({"staleness_max": 1}) == [], "a bound of one step is reached by every run that samples ahead"


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ({"counts": {"failing": "3 attempts failed", "failed_attempts": 3}}, "warn: 3 attempts failed"),
        ({"counts": {"dead_letters": 2}}, "warn: 2 tasks died"),
        ({"counts": {"prompts_cut": "all 4 prompts are longer"}}, "bad: all 4 prompts are longer"),
        ({"counts": {"log_bytes": 95, "log_limit_bytes": 100}}, "warn: the experience log has 95% of its room"),
        ({"counts": {"staleness_max": 3, "max_staleness_steps": 3}}, "warn: the newest batch has experience 3 st"),
        ({"trainer": WAITING}, "warn: the trainer waited 75% of the last 10 steps for experience"),
        ({"trainer": [{"step": 1, "actor/mismatch/kernel_kl": -0.02}]}, "warn: KL of engine and trainer is -0.02"),
        ({"group_advantages/skipped_group_ratio": 0.5}, "warn: 50% of the groups have the same reward"),
        ({"rollout/response_truncated/mean": 0.75}, "warn: 75% of the responses were cut off"),
        ({"status": status(explorers=[])}, "bad: no explorer is running"),
        ({"status": status(explorers=[EXPLORER | {"version": -1}])}, "warn: explorer one: it serves no version yet"),
        ({"status": status(explorers=[EXPLORER | {"failure": "no"}])}, "warn: explorer one: no"),
        ({"status": status(providers=[PROVIDER | {"health": "away"}])}, "warn: provider games: away"),
        ({"status": status(processes=[PROCESS | {"health": "DEAD"}])}, "bad: sync is DEAD"),
    ],
)  # fmt: skip
def test_each_alarm_alone(known: dict[str, Any], said: str) -> None:
    (one,) = found(**known)
    assert one.startswith(said)


def test_the_worst_comes_first() -> None:
    failing = {"failing": "x", "failed_attempts": 9}
    levels = [line.partition(":")[0] for line in found(failing, status(explorers=[]), WAITING)]
    assert levels == ["bad", "warn", "warn"]


def test_few_failures_are_no_alarm() -> None:
    assert found({"failing": "1 attempts failed", "failed_attempts": 1}) == []


def test_a_full_disk_is_one(tmp_path: Path) -> None:
    (one,) = alarms(Known(None, None, [], [], (96, 100)))
    assert (one.level, one.text) == ("bad", "the disk of the job folder is 96% full")
    assert not alarms(Known(None, None, [], [], (95, 100)))
    used, size = disk_of(tmp_path) or (0, 0)
    assert 0 < used <= size
    assert disk_of(None) is disk_of(tmp_path / "missing") is None


def test_each_rule_is_looked_for_and_says_what_to_do() -> None:
    assert all((rule.text and rule.fix) or rule.query for rule in RULES.values())


@pytest.mark.parametrize("target", generate_alerts.TARGETS, ids=lambda path: path.parent.name)
def test_the_rules_of_prometheus_are_those_of_the_table(target: Path) -> None:
    assert target.read_text() == generate_alerts.document(), "`make docs` writes them again"
    rules = yaml.safe_load(target.read_text())["groups"][0]["rules"]
    by_name = {rule["alert"]: rule for rule in rules}
    table = [(rule.query, rule.threshold) for rule in RULES.values() if rule.query]
    assert [query.alert for query, _ in table] == list(by_name)
    for query, threshold in table:
        assert by_name[query.alert]["annotations"]["summary"] == query.summary
        assert query.query.partition("{threshold}")[0] in by_name[query.alert]["expr"]
        assert "{threshold}" not in query.query or by_name[query.alert]["expr"].endswith(f"> {threshold:g}")
