"""The cases of weight_cases.py, task_cases.py and nats_cases.py, each on a world of its own, and those with engines."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

from chaos import nats_cases, task_cases, weight_cases  # noqa: F401  (they register themselves)
from chaos.cases import NO_ENGINE, QUICK_RUNS, REAL_ENGINE, Case, Chosen, Row
from chaos.striking import CASES as WEIGHT_CASES
from chaos.striking import WeightCase, play
from chaos.versions.world import World
from support.servers.nats import NatsCluster

ROOT = Path(__file__).parents[2]
STOP_SECONDS, STOP_SECONDS_QUICK = 60.0, 12.0
_ENGINE_RUNS = 2
_ENGINE_SECONDS = 1500
_WITH_ENGINES = ("tests/chaos/test_explorers_come_and_go.py", "tests/integration/test_weights_on_real_vllm.py")


def play_runs(case: WeightCase, chosen: Chosen) -> Sequence[Row]:
    """This many runs, one after the other or a few at a time."""
    folder = Path(tempfile.mkdtemp(prefix=f"trinity-chaos-{case.name}-"))
    nats = NatsCluster(folder / "nats") if case.cluster else None
    with World(folder, stop_seconds=STOP_SECONDS_QUICK if chosen.quick else STOP_SECONDS, nats=nats) as world:
        assert world.s3.pid, "it is there before several ask for it"

        def one(index: int) -> list[str]:
            begin, seed = time.monotonic(), f"{chosen.seed}/{case.name}/{index}"
            found = play(case, world, f"run-{index}", seed)
            chosen.say(f"{case.name} {index + 1} of {chosen.runs}: {len(found)} violations, {_since(begin)}")
            return [f"{what} (seed {seed}, {folder / f'run-{index}'})" for what in found]

        if case.at_once == 1:
            played = [one(index) for index in range(chosen.runs)]
        else:
            pool = ThreadPoolExecutor(case.at_once)
            try:
                played = list(pool.map(one, range(chosen.runs)))
            finally:
                pool.shutdown(cancel_futures=True)
    violations = [what for found in played for what in found]
    if not violations:
        shutil.rmtree(folder)
    return [Row(case.name, case.invariant, chosen.runs, tuple(violations))]


def play_engines(chosen: Chosen) -> Sequence[Row]:
    """The tests with real vLLM engines, this many times; each test is a case."""
    found: dict[str, list[str]] = {}
    for index in range(chosen.runs):
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", "pytest", "-q", *_WITH_ENGINES, f"--junitxml={report}"]
            seconds = STOP_SECONDS_QUICK if chosen.quick else STOP_SECONDS
            environment = {"TRINITY_CHAOS_SEED": f"{chosen.seed}/{index}", "TRINITY_CHAOS_STOP_SECONDS": f"{seconds}"}
            subprocess.run(
                command, cwd=ROOT, env={**os.environ, **environment}, timeout=_ENGINE_SECONDS, stdout=sys.stderr
            )
            for test in ElementTree.parse(report).iter("testcase"):
                wrong = [part.get("message", "failed") for part in test if part.tag in ("failure", "error")]
                found.setdefault(str(test.get("name")), []).extend(f"{what} (run {index + 1})" for what in wrong)
        chosen.say(f"real engines, {index + 1} of {chosen.runs}: {_since(begin)}")
    return [
        Row("real vLLM engines", name.removeprefix("test_").replace("_", " "), chosen.runs, tuple(wrong))
        for name, wrong in found.items()
    ]


def _since(begin: float) -> str:
    return f"{time.monotonic() - begin:.0f} s"


CASES = [
    *(
        Case(name, case.invariant, NO_ENGINE, QUICK_RUNS, partial(play_runs, case))
        for name, case in WEIGHT_CASES.items()
    ),
    Case("real-vllm", "all of this with vLLM engines, and what engines alone can get wrong", REAL_ENGINE, _ENGINE_RUNS,
         play_engines),
]  # fmt: skip
