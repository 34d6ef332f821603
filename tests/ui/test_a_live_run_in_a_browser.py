"""`trinity ui` beside a run and after it: the page follows the run, and the run does not notice the page.

Processes are forked, and transformers samples where vLLM would (support/programs/forked_run.py).
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from support.programs.forked_run import ForkedRun
from support.programs.run import write_config

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS, GROUPS = 12, 4


@pytest.fixture
def run(repository: Path, quickstart_model: Path, quickstart_data: Path, tmp_path: Path) -> Iterator[ForkedRun]:
    short = {
        "stages": [],
        "buffer": {"batch_size": GROUPS, "total_steps": STEPS, "explorer_input": {"eval_tasksets": []}},
    }
    config = write_config(repository / "examples/quickstart/arithmetic.yaml", tmp_path / "arithmetic.yaml", short)
    paths = {"TRINITY_MODEL_PATH": str(quickstart_model), "TRINITY_TASKSET_PATH": str(quickstart_data)}
    found = ForkedRun(config, tmp_path, **paths)
    yield found
    found.end()


def aside(call: Callable[..., Any], *arguments: Any) -> Any:
    """A call in a thread of its own: in this one the browser's event loop is running."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call, *arguments).result()


class Ui:
    """`trinity ui` on a run's YAML."""

    def __init__(self, run: ForkedRun) -> None:
        command = [sys.executable, "-m", "trinity.cli.main", "ui", "--writes", "--config", str(run.config)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=run.environment)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=30)


def test_the_page_follows_a_run_and_shows_it_when_it_has_ended(run: ForkedRun, watch: Callable[..., Any]) -> None:
    run.start()
    aside(run.until, lambda status: (status["step"] or 0) >= 1, 200, "the first step")
    for _ in range(2):  # the first page is killed with its service
        ui = Ui(run)
        watched = watch(ui.address)
        expect(watched.page.locator(".state")).to_have_text("live")
        expect(watched.page.locator("#ledger.sound")).to_be_visible()
        expect(watched.page.get_by_role("heading", name="Explorers")).to_be_visible()
        before = watched.page.locator(".tile b").first.inner_text()
        expect(watched.page.locator(".tile b").first).not_to_have_text(before, timeout=60_000)
        watched.page.get_by_role("link", name="versions", exact=True).click()
        first = watched.page.locator("tr", has=watched.page.get_by_role("link", name="0", exact=True))
        for button, beside in (("pin", "by operator"), ("unpin", "pin")):
            first.get_by_role("button", name=button, exact=True).click()
            expect(first).to_contain_text(beside)
        assert watched.wrong == []
        ui.kill()
    assert aside(run.finish, 200) == 0, run.tail()
    trained = [json.loads(line)["step"] for line in (run.job / "monitor/batches.jsonl").read_text().splitlines()]
    assert trained == list(range(1, STEPS + 1))

    ui = Ui(run)
    watched = watch(ui.address)
    expect(watched.page.locator(".state")).to_have_text("finished")
    expect(watched.page.locator("#ledger.sound")).to_contain_text(f"every stored group up to step {STEPS}")
    watched.page.locator("tbody a", has_text=str(STEPS)).first.click()
    watched.page.locator("tbody a").first.click()
    watched.page.locator("tbody a").first.click()
    assert watched.page.locator(".block span").count() > 0
    watched.page.get_by_role("link", name="ratio", exact=True).click()
    watched.page.wait_for_url("**by=ratio")
    assert watched.page.locator(".block .s2").count() > 0
    assert watched.page.locator(".block .unknown").count() == 0
    kept = [
        json.loads(line)["arrays"] for line in (run.job / "buffer/experience_buffer.jsonl").read_text().splitlines()
    ]
    assert all({"new_logprobs", "entropy", "clipped"} <= arrays.keys() for arrays in kept), "each trained token"
    assert not any("proximal_logprobs" in arrays for arrays in kept), "a step is one update"
    assert watched.wrong == []
    ui.kill()
