"""`trinity ui` killed twenty times beside a run, in the middle of its answers: the run and its ledger do not change.

Processes are forked, and transformers samples where vLLM would (support/programs/forked_run.py). No browser is needed.
Limits of time are those of the run's own first steps, so that a machine with other work fails no test.
"""

import asyncio
import contextlib
import http.client
import http.cookiejar
import json
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.programs.forked_run import ForkedRun
from support.programs.run import process_of, write_config
from trinity.reading.reader import any_buffer, find_job_stage
from trinity.ui.audit import Audit, count_problems

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(1800)]

KILLS, GROUPS, STEPS_BEFORE, MANY = 20, 4, 20, 100_000
PAGES = ("", "/fleet", "/versions", "/waste", "/dead", "/step/1", "/step/1/lanes", "/step/1/sample/0", "/now")
Entries = list[tuple[dict[str, Any], dict[str, Any] | None]]


@pytest.fixture
def run(repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path: Path) -> Iterator[ForkedRun]:
    short = {
        "stages": [],
        "buffer": {"batch_size": GROUPS, "total_steps": MANY, "explorer_input": {"eval_tasksets": []}},
    }
    config = write_config(repository / "examples/quickstart/arithmetic.yaml", tmp_path / "arithmetic.yaml", short)
    paths = {"TRINITY_MODEL_PATH": str(quickstart_model), "TRINITY_TASKSET_PATH": str(quickstart_data)}
    found = ForkedRun(config, tmp_path, **paths)
    yield found
    found.end()


class Pages:
    """`trinity ui`, and a reader that asks for one page after the other until the service is dead."""

    def __init__(self, run: ForkedRun, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        command = [sys.executable, "-m", "trinity.cli.main", "ui", "--config", str(run.config)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=run.environment
        )
        assert self._process.stdout is not None
        self._address = self._process.stdout.readline().strip()
        self.answers = 0
        self.refused: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        opener = urllib.request.build_opener(cookies)
        with contextlib.suppress(OSError, http.client.HTTPException):
            opener.open(self._address, timeout=self._patience_seconds).read()
            while True:
                for page in PAGES:
                    try:
                        opener.open(self._address.partition("?")[0] + page, timeout=self._patience_seconds).read()
                    except urllib.error.HTTPError as error:
                        self.refused.append(f"{page}: {error}")
                    self.answers += 1

    def kill_after(self, answers: int) -> None:
        """kill -9 once it has answered so often. The reader ends when a page does not come."""
        while self.answers < answers:
            assert self._reader.is_alive(), "no answer"
            time.sleep(0.01)
        self._process.kill()
        self._process.communicate(timeout=30)
        self._reader.join(self._patience_seconds)
        assert self.refused == []


def entries(job: Path) -> tuple[Entries, dict[str, Any]]:
    """The whole ledger, and the buffer's counts."""

    async def read() -> tuple[Entries, dict[str, Any]]:
        async with any_buffer(find_job_stage(job=job)) as reader:
            counts = await reader.buffer.counts()
            steps = range(1, counts["ledger_step"] + 1)
            return [await reader.buffer.accounted_entry(step) for step in steps], counts

    return asyncio.run(read())


def test_the_ledger_is_what_it_was_and_the_run_has_not_noticed(run: ForkedRun) -> None:
    started = time.monotonic()
    run.start()
    run.until(lambda status: (status["step"] or 0) >= STEPS_BEFORE, 900, f"step {STEPS_BEFORE}")
    patience = max(60.0, 2 * (time.monotonic() - started))
    before, _ = entries(run.job)
    began = time.time()
    for number in range(KILLS):
        Pages(run, patience).kill_after(1 + number % len(PAGES))
    ended = time.time()
    during, _ = entries(run.job)
    last = run.until(lambda status: status["step"] > len(during), patience, "a step after the last kill")
    assert all(process_of(last, name)["restarts"] == 0 for name in ("trainer", "explorer", "buffer", "sync"))
    run.signal(signal.SIGTERM)
    run.finish(patience)

    after, counts = entries(run.job)
    assert len(before) < len(during) < len(after)
    assert before == after[: len(before)]
    assert during == after[: len(during)]
    audit = Audit()
    for entry, account in after:
        audit.read(entry, account)
    assert [*audit.problems(), *count_problems(counts)] == []
    trained = [json.loads(line)["step"] for line in (run.job / "monitor/batches.jsonl").read_text().splitlines()]
    assert trained == list(range(1, len(trained) + 1))
    lines = [json.loads(line) for line in (run.job / "monitor/trainer.jsonl").read_text().splitlines()]
    times: dict[bool, list[float]] = {False: [], True: []}
    for line in lines:
        times[began < line["time"] < ended].append(line["time/step"])
    print(*(f"{statistics.median(part):.4f} s a step, of {len(part)}" for part in times.values()), sep="; pages: ")
