"""Short runs with and without kills: each ends well, and nothing is started again that was not killed.

Four runs as they are, then four in which one process is killed, and so on: SFT alone, GRPO, SFT alone, LoRA.
"""

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chaos.cases import WHOLE_RUN, Case, Chosen, Row
from support.programs.run import Status, TrinityRun, write_config
from trinity.runtime.process import is_alive

ROOT = Path(__file__).parents[2]
KINDS = ("sft", "grpo", "sft", "lora")
VICTIMS = {
    "sft": ("trainer", "buffer"),
    "grpo": ("trainer", "buffer", "explorer", "sync"),
    "lora": ("trainer", "buffer", "explorer", "sync"),
}
INVARIANTS = {
    "end": "a short run ends with exit code 0 and leaves no process",
    "abort": "no process aborts at its end",
    "again": "nothing is started again that was not killed",
}
_STEPS = {"sft": 16, "grpo": 5, "lora": 5}
_LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
_START_SECONDS, _FINISH_SECONDS, _LEFT_SECONDS = 240, 300, 10


def play(chosen: Chosen) -> Sequence[Row]:
    rng, folder = random.Random(f"{chosen.seed}/short"), Path(tempfile.mkdtemp(prefix="trinity-chaos-short-"))
    found: dict[str, list[str]] = {name: [] for name in INVARIANTS}
    for number in range(1, chosen.runs + 1):
        kind = KINDS[(number - 1) % len(KINDS)]
        victim = rng.choice(VICTIMS[kind]) if (number - 1) // len(KINDS) % 2 else ""
        begin, name = time.monotonic(), f"run {number} ({kind}{f', {victim} killed' if victim else ''})"
        violations = _play_run(kind, victim, rng.uniform(0, 1), folder / str(number))
        for invariant, text in violations:
            found[invariant].append(f"{name}, in {folder / str(number)}: {text}")
        told = "; ".join(text for _, text in violations) or "well"
        chosen.say(f"{name}: {told}, {time.monotonic() - begin:.0f} s")
        if not violations:
            shutil.rmtree(folder / str(number))
    if not any(folder.iterdir()):
        folder.rmdir()
    return [Row("short-runs", text, chosen.runs, tuple(found[name])) for name, text in INVARIANTS.items()]


def _play_run(kind: str, victim: str, delay_seconds: float, folder: Path) -> list[tuple[str, str]]:
    """One run; `victim` is killed within a second of the first step. Violations: invariant and text."""
    folder.mkdir()
    environment = {f"TRINITY_{name}_PATH": str(ROOT / "build/quickstart" / where)
                   for name, where in (("MODEL", "model"), ("TASKSET", "data"))}  # fmt: skip
    run = TrinityRun(_config(kind, folder), folder, **environment)
    try:
        run.start()
        status = run.until(lambda s: s["step"], _START_SECONDS, "the first step")
        time.sleep(delay_seconds)
        killed = Counter([victim] if victim and _kill(status, victim) else [])
        code = run.finish(_FINISH_SECONDS)
        left = run.left_alive(_LEFT_SECONDS)
        return judge(run.job, run.output, code, left, killed)
    except AssertionError as error:
        return [("end", str(error)), *judge(run.job, run.output, 0, [], Counter({victim: 1}))]
    finally:
        run.end()


def judge(job: Path, output: Path, code: int, left: Sequence[str], killed: Mapping[str, int]) -> list[tuple[str, str]]:
    """What does not hold, by what a run left in its job folder and on its output."""
    found = [("end", f"exit code {code}: {output.read_text()[-500:]}")] if code else []
    found += [("end", f"still there: {process}") for process in left]
    for file in [*sorted(job.rglob("log/*.out")), output]:
        for line in file.read_text(errors="replace").splitlines():
            if "terminate called" in line or "Fatal Python error" in line or "finished_with_error" in line:
                found.append(("abort", f"{file.name}: {line}"))
    for file in sorted(job.rglob("log/*.log")):
        starts = sum(event.get("event") == "service.started" for event in _events(file))
        if starts > 1 + killed.get(file.stem, 0):
            found.append(("again", f"{file.stem} was started {starts} times, killed {killed.get(file.stem, 0)} times"))
    return found


def _events(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines() if line.startswith("{")]


def _kill(status: Status, name: str) -> bool:
    """kill -9, unless it has ended."""
    pid = next(int(process["pid"]) for process in status["processes"] if process["name"] == name)
    if not is_alive(pid):
        return False
    os.kill(pid, signal.SIGKILL)
    return True


def _config(kind: str, folder: Path) -> Path:
    source, target = ROOT / "examples/quickstart/arithmetic.yaml", folder / "short.yaml"
    changes: dict[str, Any] = {"name": "short"}
    if kind == "sft":
        changes["stages"] = {0: {"buffer": {"total_steps": _STEPS[kind]}, "trainer": {"save_interval": 4}}}
        write_config(source, target, changes)
        text = target.read_text()
        target.write_text(text[: text.index("- stage_name: rft")])
        return target
    changes |= {
        "model": {"max_response_tokens": 8, **({"lora_configs": [_LORA]} if kind == "lora" else {})},
        "algorithm": {"repeat_times": 2},
        "buffer": {"batch_size": 4, "total_steps": _STEPS[kind], "explorer_input": {"eval_tasksets": []}},
        "trainer": {"save_interval": 2},
        "stages": [],
    }
    return write_config(source, target, changes)


CASES = [Case("short-runs", "short runs, with and without a kill: no abort, no needless start", WHOLE_RUN, 50, play)]
