"""The recorded run with what raises one alarm of the pages and no other, for each of them."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.fakes.pages.recorded_run import RECORDED, serve_status
from trinity.reading.wire import Member
from trinity.ui import screens

STEP, RETRIED = 8, 11  # the newest of the recorded run; its task that died once
EXPLORER = Member(
    name="explorer", state="serving", version=8, lag=0, transport="folder", transports=["folder"], dtype="float32",
    engines=1, tensor_parallel_size=1, tokens_per_second=9.0, tokens_generated=9, last_pause_seconds=0.1,
    canary_max_error=0.0, host="here", pid=7, address="127.0.0.1:7", seconds_since_report=1.0, failure="",
)  # fmt: skip
PROVIDER = {"provider": "games", "health": "serving", "since_seconds": None, "offers": ["chess"], "reason": ""}
PROCESS = {"pid": 7, "address": "127.0.0.1:7", "health": "SERVING", "weight_version": 8, "restarts": 0}
PROCESSES = [{"name": name, "service": name, **PROCESS} for name in ("trainer", "explorer")]
STATUS: dict[str, Any] = {
    "nodes": [], "losses": [],
    "trainer_state": "training", "step": STEP, "tokens_per_second": 9.0, "weights": {"live": 8},
    "explorers": [dataclasses.asdict(EXPLORER)], "providers": [PROVIDER], "processes": PROCESSES,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "process": {"status": {"processes": [PROCESSES[0], PROCESSES[1] | {"health": "DEAD"}]}},
    "no_explorers": {"status": {"explorers": []}},
    "explorer": {"status": {"explorers": [dataclasses.asdict(EXPLORER) | {"version": -1}]}},
    "provider": {"status": {"providers": [PROVIDER | {"health": "away"}]}},
    "waits": {"trainer": {"time/wait": 9.0}, "steps": 10},
    "dead_letters": {"counts": {"dead_letters": 1}},
    "failures": {"counts": {"failing": "9 attempts failed", "failed_attempts": 9}},
    "log_full": {"counts": {"log_bytes": 95, "log_limit_bytes": 100}},
    "prompts_cut": {"counts": {"prompts_cut": "3 prompts are longer"}},
    "kl": {"trainer": {"actor/mismatch/kernel_kl": 0.5}},
    "no_variance": {"explorer": {"group_advantages/skipped_group_ratio": 0.75}},
    "truncated": {"explorer": {"rollout/response_truncated/mean": 0.75}},
    "staleness": {"counts": {"staleness_max": 3, "max_staleness_steps": 3}},
    "disk": {"disk": (99, 100)},
}
# Where links lead, in the order in which they are clicked: from the page of an alarm, by its last part, or from a step.
CLICKS = {"fleet": ("/group/", "sample/"), "lanes": ("/task/", "sample/"), "dead": (f"/task/{RETRIED}", "sample/")}
CLICKS_OF_A_STEP = ("/group/", "sample/")
QUIET = {"group_advantages/skipped_group_ratio": 0.0, "rollout/response_truncated/mean": 0.0}


def prepare(job: Path, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorded run, with what raises this alarm and no other."""
    shutil.copytree(RECORDED, job)
    (job / ".lock").touch()
    file = job / "recorded.json"
    found = json.loads(file.read_text())
    counts = {"fed": 33, "stored": 32, "dead_letters": 0, "outstanding": 1}
    found["counts"] |= counts | case.get("counts", {})
    file.write_text(json.dumps(found))
    for role, quiet in (("trainer", {"time/wait": 0.0}), ("explorer", QUIET)):
        file = job / f"monitor/{role}.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        early = [lines[0] | {"step": step} for step in range(STEP - case.get("steps", 0) + 1, 1)]
        changed = [line | quiet | case.get(role, {}) for line in early + lines]
        file.write_text("".join(json.dumps(line) + "\n" for line in changed))

    serve_status(monkeypatch, STATUS | case["status"] if "status" in case else None)
    monkeypatch.setattr(screens, "disk_of", lambda folder: case.get("disk", (1, 100)))
