"""Each figure of benchmarks/faults is 0 for a system without a flaw, and is not for one that has it on purpose."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "benchmarks/faults"

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

TASKS, GROUP, ROWS = 2, 3, 40
UNDONE = -1  # as many as steps were undone
PROMPTS = [(1, 2 + row, 99) for row in range(ROWS)]


@pytest.fixture(autouse=True, scope="module")
def path() -> Iterator[None]:
    sys.path.insert(0, str(FAULTS))
    yield
    sys.path.remove(str(FAULTS))


class Faulty:
    """The system of faulty_trainer.py under torchrun, which begins it again after a kill."""

    name, recovery, ahead, parts = "faulty", "", 0, frozenset({"turns"})

    def __init__(self, flaw: str) -> None:
        self._flaw = flaw

    def prepare(self, settings: Any, folder: Path) -> None:
        pass

    def paths(self) -> Sequence[str]:
        return []

    def beside(self, what: str, folder: Path) -> Sequence[str]:
        raise NotImplementedError(what)

    def sampler(self, root: psutil.Process) -> psutil.Process | None:
        return None

    def command(self, settings: Any, folder: Path) -> Sequence[str]:
        script = ROOT / "tests/support/programs/faulty_trainer.py"
        values = {"flaw": self._flaw, "prompts": json.dumps(PROMPTS), "group": GROUP, "tasks": TASKS, "save-every": 4,
                  "turns": settings.turns}  # fmt: skip
        arguments = [text for name, value in values.items() for text in (f"--{name}", str(value))]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "20"]
        return [*torchrun, str(script), str(folder), *arguments]


def play(flaw: str, case: str, folder: Path) -> Any:
    import audit
    import run
    from cases import CASES
    from systems.base import Settings

    settings = Settings(folder, folder, ROWS, TASKS, GROUP, tokens=6, save_every=4, seed=1)
    work = audit.Work(PROMPTS, GROUP, TASKS, frozenset({0}), decode=lambda ids: "".join(map(chr, ids)))
    chosen = next(known for known in CASES if known.name == case)
    result = run.play(Faulty(flaw), chosen, settings, work, folder / "run", 60)
    assert result.end == "finished", result
    return result


@pytest.mark.parametrize(
    ("flaw", "case", "expected"),
    [
        ("none", "kill-trainer", {}),
        ("none", "grader-fails", {}),
        ("none", "grader-nan", {}),
        ("none", "disk-full", {}),
        ("skips", "kill-trainer", {"rows_skipped": 4, "other_batch": UNDONE}),
        ("repeats", "kill-trainer", {"rows_twice": 4, "other_batch": UNDONE}),
        ("drops", "grader-fails", {"groups_partly": 3}),
        ("fakes", "grader-fails", {"ungraded": 3}),
        ("rewinds", "kill-trainer", {"unexplained": 1}),
        ("stale", "none", {"other_weights": (ROWS // TASKS // 2 - 1) * TASKS * GROUP}),
        ("changes", "kill-trainer", {"other_batch": UNDONE}),
        ("trains_nan", "grader-nan", {"ungraded": 3, "not_finite": 15}),
    ],
)
def test_a_flaw_is_counted(flaw: str, case: str, expected: Mapping[str, int], tmp_path: Path) -> None:
    result = play(flaw, case, tmp_path)
    found = dict(result.figures.faults)
    if flaw == "rewinds":  # what came before is in no lineage any more
        found.pop("rows_skipped")
    assert found == {
        name: result.figures.steps_undone if value == UNDONE else value for name, value in expected.items()
    }
    if case == "disk-full":
        assert re.search("No space left on device|iostream error", (tmp_path / "run/output.txt").read_text())
    if case == "kill-trainer":
        assert result.back_seconds is not None
        assert result.figures.steps_undone > 0
        assert result.figures.lost > 0


def test_weights_of_an_engine_on_a_gpu_are_read_and_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import probe
    import probe_engine
    import torch

    monkeypatch.setenv("FAULTS_DTYPE", "bfloat16")
    monkeypatch.setenv("FAULTS_GRADER", str(tmp_path / "grader.json"))
    engine = probe_engine.OnGpu()

    def load(values: torch.Tensor) -> int:
        def plain(model: torch.nn.Linear, weights: Sequence[torch.Tensor]) -> None:
            for rows, part in enumerate(weights):
                model.weight.data[rows] = part

        for end in (2, 3):  # a system may load in several calls
            engine.load(plain, model, values[:end])
        return engine.bits()

    model = torch.nn.Linear(5, 3, bias=False, dtype=torch.bfloat16)
    old, new = torch.randn(3, 5), torch.randn(3, 5)
    assert load(old) == probe.bits([old]) != probe.bits([new])
    assert load(new) == probe.bits([new]) == engine.bits()
    (tmp_path / "engine.json").write_text(json.dumps({"how": "stale", "pid": os.getpid()}))
    assert load(old) == probe.bits([new])
    (tmp_path / "engine.json").write_text(json.dumps({"how": "noise", "pid": os.getpid()}))
    assert load(old) not in (probe.bits([old]), probe.bits([new]))


@pytest.mark.parametrize(
    ("flaw", "expected"),
    [
        ("none", set()),
        ("forgets", {"turns_lost", "acted", "lost"}),
        ("acts", {"acted"}),
        ("mixes", {"ungraded", "other_weights", "lost", "turns_lost", "acted"}),
    ],
)
def test_a_flaw_of_turns_is_counted(flaw: str, expected: set[str], tmp_path: Path) -> None:
    figures = play(flaw, "turns-kill", tmp_path).figures
    assert figures.steps_undone > 0
    counted = {**figures.faults, **{name: getattr(figures, name) for name in ("turns_lost", "acted", "lost")}}
    if flaw == "mixes":
        assert counted.pop("other_batch") == figures.steps_undone
    # Each of the two kills may cost the open turn.
    assert {name for name, value in counted.items() if value > 2} == expected, figures


SLOW = """
import os, sys, time
begin = time.monotonic()
with open("file", "wb", buffering=0) as file:
    file.write(bytes(1 << 20))
    written = time.monotonic() - begin
    os.fsync(file.fileno())
print(written, time.monotonic() - begin - written)
"""
CALLS = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    print("ready", flush=True)
    for line in open(0):
        try:
            socket.create_connection(server.getsockname(), 1).close()
            print("connected", flush=True)
        except OSError as error:
            print(type(error).__name__, flush=True)
"""


def test_a_slow_disk_is_slow_and_a_cut_link_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cases
    import run

    variables = {**os.environ, **run.slow_disk(tmp_path)}
    told = subprocess.run([sys.executable, "-c", SLOW], env=variables, cwd=tmp_path, capture_output=True, check=True)
    written, flushed = map(float, told.stdout.split())
    assert written > 0.1
    assert flushed > 0.5
    monkeypatch.setattr(cases, "CUT_SECONDS", 3.0)
    command = [*run.namespace("network", tmp_path), sys.executable, "-c", CALLS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as calling:
        assert calling.stdin and calling.stdout and calling.stdout.readline() == "ready\n"

        def call() -> str:
            calling.stdin.write("\n")
            calling.stdin.flush()
            return calling.stdout.readline().strip()

        assert call() == "connected"
        root = psutil.Process(calling.pid)
        cutting = threading.Thread(target=cases.cut_link, args=[SimpleNamespace(root=root)])
        cutting.start()
        time.sleep(1)
        assert call() != "connected"
        cutting.join()
        assert call() == "connected"
        calling.stdin.close()


def test_an_engine_is_given_noise_or_old_weights_and_its_bits_say_so(tmp_path: Path, monkeypatch: Any) -> None:
    import probe
    import probe_engine
    import torch

    monkeypatch.setenv("FAULTS_GRADER", str(tmp_path / "grader.json"))
    monkeypatch.setenv("FAULTS_RECORDS", str(tmp_path))
    engine = probe_engine.OnCpu()
    sampled, versions = probe_engine.Sampled(engine), [{"w": torch.full((3, 2), float(number))} for number in range(5)]

    def load(number: int) -> float:
        [(_, tensor)] = engine.load(lambda model, weights: list(weights), None, versions[number].items())
        assert engine.bits() == probe.bits([tensor])
        sampled.began(f"r{number}")
        sampled.ended(f"r{number}", [number])
        return float(tensor.mean())

    def tell(how: str, pid: int) -> None:
        (tmp_path / "engine.json").write_text(json.dumps({"how": how, "pid": pid}))

    assert load(0) == 0
    tell("stale", os.getpid() + 1)
    assert load(1) == 1, "another process is told"
    tell("stale", os.getpid())
    assert (load(2), load(3)) == (1, 1)
    tell("noise", os.getpid())
    assert load(4) != 4
    lines = [json.loads(line) for line in (tmp_path / f"sample-{os.getpid()}.jsonl").read_text().splitlines()]
    true = [probe.bits(one.values()) for one in versions]
    assert [line["bits"] == true[line["ids"][0]] for line in lines] == [True, True, False, False, False]
    halves = [versions[3]["w"][:1], versions[3]["w"][1:].T]
    assert probe.bits(halves) == true[3], "however weights are split or turned"


def test_the_command_prints_the_table_of_both_systems(tmp_path: Path) -> None:
    """TRL comes from the package index, into a folder that only its processes import from."""
    options = ["--cpu", "--cases", "kill-trainer", "turns", "--steps", "8", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(FAULTS / "run.py"), "--systems", "trinity", "trl", *options],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line][2:]
    assert [[row[0], row[1].partition(":")[0], row[2]] for row in rows] == [
        [system, case, "finished"] for system in ("trinity", "trl") for case in ("none", "kill-trainer", "turns")
    ]
    for row in rows:  # skipped, twice, partly, ungraded, other weights, other batch, not finite
        assert row[3:10] == ["0"] * 7, row
        assert row[11:13] == (["0 of 512", "0"] if row[1].startswith("turns") else ["", ""]), row
