"""Lanes, tasks, traces, two runs compared, and the bundle: on a recorded run."""

import asyncio
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from support.fakes.pages.recorded_run import RECORDED
from trinity.cli.main import app as trinity
from trinity.lineage.replay_report import Report, Step, Weights
from trinity.ui import main
from trinity.ui.app import make_app
from trinity.ui.bundle import write
from trinity.ui.places import Places

pytestmark = pytest.mark.core

KEY = "the-key"
EVIL = "<script>alert(1)</script>\x1b[2J"
Get = Callable[..., str]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs that holds the recorded run twice: as `one` and as `two`."""
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    monkeypatch.delenv("TRINITY_NATS_URL", raising=False)
    for name in ("one", "two"):
        shutil.copytree(RECORDED, tmp_path / name)
        (tmp_path / name / ".lock").touch()
    return tmp_path


@pytest.fixture
def get(runs: Path) -> Iterator[Get]:
    with TestClient(make_app(Places(None), KEY), base_url="http://127.0.0.1") as client:
        client.get(f"/?key={KEY}")

        def page(path: str, status: int = 200) -> str:
            answer = client.get(f"/run{path}")
            assert answer.status_code == status, answer.text
            return re.sub(r">\s+<", "><", answer.text)

        yield page


def test_the_recorded_run_adds_up(get: Get) -> None:
    overview = get("/one")
    assert 'class="ledger sound"' in overview
    assert "every stored group up to step 8" in overview


def test_a_task_shows_its_failed_attempts_its_step_and_its_samples(get: Get) -> None:
    page = get("/one/task/11")
    assert re.search(r'class="state trained">trained', page)
    assert page.count("<td>explorer.attempt.failed</td>") == 2
    assert "<td>buffer.task.requeued</td>" in page
    assert 'href="/run/one/step/3/sample/0"' in page
    assert "requeued" in get("/one/task/3")
    assert "outstanding" in get("/one/task/999")


def test_lanes_have_each_group_of_the_step(get: Get) -> None:
    page = get("/one/step/8/lanes")
    assert re.findall(r'href="/run/one/task/(\d+)"', page) == ["31", "32", "33", "34"]
    assert page.count('class="sampled"') == page.count('class="trained"') == 4
    assert "no ledger entry" in get("/one/step/9/lanes", 404)


def test_a_trace_goes_from_the_attempt_to_the_weights(get: Get) -> None:
    page = get("/one/step/3/sample/0/trace")
    found = [re.sub("<.*?>", "", name) for name in re.findall(r"<tr><th>(.*?)</th>", page)]
    assert found[1:] == [
        "attempt 1 failed scorer_error", "attempt 2 failed scorer_error", "sampled by explorer attempt 1",
        "waits for its batch", "trained step 3", "version 3 becomes LIVE", "explorer loads it", "explorer loads it",
    ]  # fmt: skip


def test_failed_attempts_lead_to_the_samples_of_the_task(get: Get) -> None:
    page = get("/one/dead")
    assert re.findall(r'task/(\d+)">sums/0/\d/\d</a></td><td class="n">(\d)', page) == [
        ("7", "2"), ("11", "2"), ("7", "1"), ("11", "1")
    ]  # fmt: skip
    assert 'href="/run/one/step/3/sample/0"' in get("/one/task/11")


def test_an_explorer_of_any_name_has_failed_attempts_and_loads(get: Get, runs: Path) -> None:
    logs = runs / "one/log"
    shutil.copy(logs / "explorer.log", logs / "environment.log")  # whose lines count for nothing
    (logs / "explorer.log").rename(logs / "extra.log")
    assert get("/one/task/11").count("<td>explorer.attempt.failed</td>") == 2
    assert get("/one/step/3/sample/0/trace").count("extra loads it") == 2


def log(runs: Path, event: str, **fields: object) -> None:
    """Another line of sync's log of the run `one`, a second later."""
    path = runs / "one/log/sync.log"
    end = datetime.fromisoformat(json.loads(path.read_text().splitlines()[-1])["time"])
    with path.open("a") as lines:
        lines.write(json.dumps({"event": event, "time": (end + timedelta(seconds=1)).isoformat(), **fields}) + "\n")


def test_a_stopped_run_shows_when_versions_were_live_and_loaded(get: Get, runs: Path) -> None:
    log(runs, "sync.version.staged", version=9, step=9, state="STAGED")
    log(runs, "sync.version.rejected", version=9, reason=f"{EVIL} differs")
    log(runs, "sync.run.rolled_back", version=10, reason="worse")
    page = get("/one/versions")
    lanes = dict(re.findall(r"<tr><th>(\d)</th><td>(.*?)</td>", page))
    assert list(lanes) == list("9876543210")
    assert [lanes["3"].count(f'class="{what}"') for what in ("sampled", "published", "failed")] == [1, 2, 0]
    assert [lanes["9"].count(f'class="{what}"') for what in ("waited", "sampled", "failed")] == [1, 0, 1]
    assert r"\x1b[2J differs" in page and "<script>alert" not in page
    assert '<td class="n">10</td><td class="preview">worse</td>' in page


def places(page: str, css: str) -> list[float]:
    return [float(x) for x in re.findall(rf'<rect class="{css}" x="([\d.]+)"', page)]


@pytest.mark.parametrize("path", ["/one/fleet", "/one/versions"])
def test_lanes_are_drawn_in_time_or_in_steps(path: str, get: Get, runs: Path) -> None:
    monitor = runs / "one/monitor/trainer.jsonl"
    steps = [json.loads(line)["step"] for line in monitor.read_text().splitlines()]
    in_time, in_steps = get(path), get(f"{path}?axis=step")
    assert 'href="?axis=time" aria-current="true"' in in_time and 'href="?axis=step" aria-current="true"' in in_steps
    assert places(in_time, "published") != places(in_steps, "published")
    assert re.findall(r'text-anchor="\w+">(\d+)<', in_steps) == [str(step) for step in sorted(set(steps))]
    assert get(f"{path}?axis=<script>").count("aria-current") == in_time.count("aria-current")
    monitor.unlink()
    assert "?axis=" not in get(f"{path}?axis=step"), "no step is known"


def test_a_stopped_run_shows_how_long_its_processes_lived(get: Get, runs: Path) -> None:
    page = get("/one/fleet")
    lanes = dict(re.findall(r"<tr><th>(\w+)</th><td>(.*?)</td>", page))
    assert [lanes["explorer"].count(f'class="{what}"') for what in ("alive", "failed", "published")] == [2, 1, 9]
    assert [lanes["trainer"].count(f'class="{what}"') for what in ("alive", "trained", "waited")] == [1, 8, 8]
    shutil.rmtree(runs / "one/monitor/devices")
    assert "its processes are gone" in get("/one/fleet", 404)


@pytest.mark.parametrize("number", ["NaN", "-1e308", "1e400"])
def test_damaged_numbers_leave_the_rest_of_a_page(number: str, get: Get, runs: Path) -> None:
    damaged = [("trainer", "time/step", 0), ("trainer", "time", 0), ("devices/main", "time", 1)]
    for name, field, lines in [*damaged, ("../buffer/experience_buffer", "reward", 0)]:
        file = runs / f"one/monitor/{name}.jsonl"
        file.write_text(re.sub(rf'"{field}": [^,}}]+', f'"{field}": {number}', file.read_text(), count=lines))
    for page in ("", "/waste?price=2", "/step/4", "/step/4/lanes", "/step/3/group/11", "/step/3/sample/0/trace"):
        assert "This page cannot be shown" not in get(f"/one{page}")


def test_without_the_logs_a_trace_shows_what_is_left(get: Get, runs: Path) -> None:
    shutil.rmtree(runs / "one/log")
    (runs / "one/log").mkdir()
    page = get("/one/step/3/sample/0/trace")
    assert "attempt 1 failed" not in page
    assert "sampled by explorer" in page


def test_what_a_log_says_is_text(get: Get, runs: Path) -> None:
    log = runs / "one/log/explorer.log"
    log.write_text(log.read_text().replace("scorer_error", json.dumps(EVIL)[1:-1]) + "[1]\n{\n\xff\n")
    with log.open("a") as lines:
        lines.write('{"event": "explorer.attempt.failed", "task": ["x"], "error": 7}\n')
    for path in ("/one/task/11", "/one/step/3/sample/0/trace", "/one/dead"):
        page = get(path)
        assert r"&lt;script&gt;alert(1)&lt;/script&gt;\x1b[2J" in page
        assert "<script>alert" not in page


def test_equal_runs_are_equal_and_one_token_is_found(get: Get, runs: Path) -> None:
    assert 'href="compare/two"' in get("/one/compare")
    assert "Equal, bit for bit: 8 steps" in get("/one/compare/two")
    file = runs / "two/buffer/experience_buffer.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    lines[40] = re.sub(r'"reward": [0-9.]+', '"reward": 77.0', lines[40])
    file.write_text("".join(lines))
    page = get("/one/compare/two")
    assert 'class="ledger broken" id="difference"' in page
    assert re.search(r"step <b>2</b>: task \S+ rollout \d, turn 0, reward", page)
    assert "77.0 in <a" in page
    rows = re.findall(r"<tr>(.*?)</tr>", page.partition('id="paired"')[2].partition("</section>")[0], flags=re.DOTALL)
    assert len(rows) == 1 + 8 + 1, "a head, eight steps, and the whole"
    assert "±" in rows[-1]
    assert page.count("&#34;sample/reward_mean&#34;:[[1,2,3") == 2, "both curves"
    assert "no run three" in get("/one/compare/three", 404)


def test_replays_are_listed_and_say_what_differs(get: Get, runs: Path) -> None:
    for name, value in (("from_3", 0.5), ("from_3_2", 0.25)):
        steps = [Step(3, 4, {"actor/loss": 0.5}, {"actor/loss": 0.5}), Step(4, 4, {EVIL: 0.5}, {EVIL: value})]
        report = Report("one", "", 2, 1, "cpu", steps, Weights(4, False, 0, {}))
        (runs / f"one/replay/{name}").mkdir(parents=True)
        (runs / f"one/replay/{name}/replay.json").write_text(json.dumps(report.as_json()))
        os.utime(runs / f"one/replay/{name}/replay.json", (1.7e9, 1.7e9 + value))
    for damaged in ("[", '{"steps": [7]}', '{"steps": [{"step": 1e999, "different": [], "compared": 1}]}'):
        folder = runs / f"one/replay/damaged_{len(damaged)}"
        folder.mkdir()
        (folder / "replay.json").write_text(damaged)
    listed = re.findall(r"<tr><td>(from_\w+)</td><td>3–4</td><td>(.*?)</td>", get("/one/compare"))
    assert [(name, re.sub("<.*?>", "", found)) for name, found in listed] == [
        ("from_3", "equal, bit for bit"), ("from_3_2", "the first difference: step 4")
    ]  # fmt: skip
    page = get("/one/step/4")
    assert "replay from_3: equal, bit for bit" in page
    assert r"replay from_3_2: other values of &lt;script&gt;alert(1)&lt;/script&gt;\x1b[2J</p>" in page
    assert "replay from_3_2: equal, bit for bit" in get("/one/step/3")
    assert "replay from" not in get("/one/step/5")


def test_a_bundle_links_only_to_its_own_files(runs: Path, tmp_path: Path) -> None:
    places = Places(runs / "one")
    app = make_app(places, KEY)
    folder = tmp_path / "bundle"
    count = asyncio.run(write(app, ("trinity_ui", KEY), f"/run/{next(iter(places.find()))}", folder, 60))
    pages = list(folder.glob("run/**/*.html"))
    assert count == len(pages) == 60
    for page in pages:
        text = page.read_text()
        assert "hx-" not in text
        assert "content-security-policy" in text
        for link in re.findall(r'\s(?:href|src)="([^"]*)"', text):
            assert (page.parent / link).resolve().is_relative_to(folder), link
            assert (page.parent / link).is_file(), link


def test_the_command_writes_a_bundle_of_the_demo_once(tmp_path: Path) -> None:
    runner, command = CliRunner(), ["ui", "--demo", "--bundle", str(tmp_path / "out"), "--pages", "3"]
    done = runner.invoke(trinity, command)
    assert done.exit_code == 0
    printed = done.output.splitlines()
    assert Path(printed[0]).is_file()
    assert printed[1] == "3 pages"
    assert "is no empty folder" in runner.invoke(trinity, command).output


def test_a_bundle_of_a_job_with_stages_is_of_its_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age, stage in enumerate(("rft", "sft")):
        shutil.copytree(RECORDED, tmp_path / "job" / stage)
        os.utime(tmp_path / "job" / stage / "config.json", (1e9 - age, 1e9 - age))
    first: list[str] = []

    async def write(app: Any, key: Any, page: str, folder: Path, most: int) -> int:
        first.append(page)
        return 1

    monkeypatch.setattr(main, "write", write)
    command = ["ui", "--job", str(tmp_path / "job"), "--bundle", str(tmp_path / "out")]
    done = CliRunner().invoke(trinity, command)
    assert done.exit_code == 0, done.output
    assert [page.rpartition("~")[2] for page in first] == ["rft"]
