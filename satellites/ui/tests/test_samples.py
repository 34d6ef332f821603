"""Ways to a sample: the worst one, a search, the spread of a group; its reference answer; notes, log, configuration."""

import html
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from support.fakes.pages.recorded_run import STEPS, Doctored, ledger, make_job, serve_ledger, write_account
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.ui.app import make_app
from trinity.ui.places import Places

pytestmark = pytest.mark.core

KEY = "the-key"
Open = Callable[..., TestClient]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    monkeypatch.delenv("TRINITY_NATS_URL", raising=False)
    clients: list[TestClient] = []

    def make(
        change: Callable[[dict[str, Any]], Any] = lambda row: None,
        writes: bool = False,
        taskset: dict[str, Any] | None = None,
        dataset: bool = False,
    ) -> TestClient:
        file = make_job(tmp_path / "job", change) / "config.json"
        config = json.loads(file.read_text())
        if taskset is not None:
            config["buffer"]["explorer_input"]["taskset"] = taskset
        entries = ledger()
        if dataset:
            entries = Doctored([pb.LedgerEntry(step=1, policy="dataset", rows=[4, 7])])
            read = {"name": "worked", "storage_type": "file", "path": str(tmp_path)}
            config |= {"mode": "train", "algorithm": {"algorithm_type": "sft"}}
            config["buffer"] = {"train_batch_size": 2, "total_steps": 9, "trainer_input": {"experience_buffer": read}}
        file.write_text(json.dumps(config))
        serve_ledger(monkeypatch, entries)
        clients.append(TestClient(make_app(Places(None), KEY, writes=writes), base_url="http://127.0.0.1"))
        clients[-1].__enter__()
        clients[-1].get(f"/?key={KEY}")
        return clients[-1]

    yield make
    for client in clients:
        client.__exit__(None, None, None)


def plain(text: str) -> str:
    return re.sub(r">\s+<", "><", text)


@pytest.mark.parametrize(("ordinal", "place"), [(9, 0), (12, 6)])
def test_worst_is_the_lowest_reward_of_the_newest_step(ordinal: int, place: int, opened: Open) -> None:
    def change(row: dict[str, Any]) -> None:
        if row["rollout"] == 0 and row["ordinal"] in (1, ordinal):
            row["reward"] = -3.5

    client = opened(change)
    assert 'href="/run/job/worst"' in client.get("/run/job").text
    answer = client.get("/run/job/worst")
    assert answer.url.path == f"/run/job/step/{STEPS}/sample/{place}"
    assert "<b>-3.5</b>" in answer.text
    assert f'href="{STEPS}/sample/{place}"' in client.get(f"/run/job/step/{STEPS}").text


def test_without_samples_worst_is_a_sentence(opened: Open, tmp_path: Path) -> None:
    client = opened()
    (tmp_path / "job/buffer/experience_buffer.jsonl").unlink()
    answer = client.get("/run/job/worst")
    assert answer.status_code == 404 and "no experience is kept" in answer.text
    assert client.get("/run/none/worst").status_code == 404
    assert "worst sample" not in client.get("/run/job/step/2").text


def test_a_run_on_a_dataset_has_neither_samples_nor_versions(opened: Open, tmp_path: Path) -> None:
    client = opened(dataset=True)
    write_account(tmp_path / "job", "trainer")
    run = client.get("/run/job")
    assert run.status_code == 200 and "/worst" not in run.text, run.text
    linked = re.findall(r'href="(/run/job[^"]*)"', run.text)
    assert len(linked) > 5 and [link for link in linked if client.get(link).status_code != 200] == []
    versions = client.get("/run/job/versions")
    assert "tests/job learns from a dataset, without explorers: it publishes no versions" in versions.text


def test_groups_show_their_prompt_and_the_spread_of_their_rewards(opened: Open) -> None:
    def change(row: dict[str, Any]) -> None:
        row |= {"prompt": f"how much is {row['ordinal']}?", "reward": [0.125, 7.5][row["rollout"]]}

    step = plain(opened(change).get("/run/job/step/2").text)
    cells = (
        '<td class="preview">how much is 5?</td><td class="n">0.5</td><td class="n">0.125</td><td class="n">7.5</td>'
    )
    assert cells in step


@pytest.mark.parametrize("key", ["answer", "solution"])
def test_a_sample_shows_the_answer_of_its_row_and_the_parts_of_its_reward(
    key: str, opened: Open, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    lines = [json.dumps({"question": str(row), key: f"it is {row} <b>"}) for row in range(9)]
    (data / "train.jsonl").write_text("\n".join(lines))

    def change(row: dict[str, Any]) -> None:
        row |= {"task_id": f"sums/0/3/{row['ordinal']}", "metrics": {"accuracy": 0.5, "format": -0.25}}

    taskset = {"name": "sums", "path": str(data), "format": {"prompt_key": "question", "response_key": key}}
    client = opened(change, taskset=taskset)
    for page in ("sample/1", "group/5"):
        assert "it is 5 &lt;b&gt;" in client.get(f"/run/job/step/2/{page}").text
    sample = client.get("/run/job/step/2/sample/1").text
    assert "<dt>accuracy</dt><dd>0.5</dd>" in sample and "<dt>format</dt><dd>-0.25</dd>" in sample
    assert "Reference answer" not in client.get("/run/job/step/3/sample/1").text, "the taskset has no row 9"


def test_search_finds_a_text_whatever_its_case_in_the_newest_steps_first(opened: Open) -> None:
    def change(row: dict[str, Any]) -> None:
        if row["ordinal"] in (2, 11):
            row["response"] = f"Then <i>Straße (a+b) of {row['ordinal']}"

    client = opened(change)
    found = plain(client.get("/run/job/search", params={"text": "STRASSE"}).text)
    assert f"0 samples; searched steps 1 to {STEPS}" in found
    found = plain(client.get("/run/job/search", params={"text": "<I>straße (A+B)"}).text)
    links = re.findall(r'href="(/run/job/step/\d/sample/\d)"', found)
    assert links == [f"/run/job/step/3/sample/{place}" for place in (4, 5)] + [
        f"/run/job/step/1/sample/{place}" for place in (2, 3)
    ]
    assert "Then <mark>&lt;i&gt;Straße (a+b)</mark> of 11" in found
    assert "searched" not in client.get("/run/job/search").text


def test_notes_are_kept_in_the_folder_only_where_writing_is_allowed(opened: Open, tmp_path: Path) -> None:
    client = opened(writes=True)
    token = re.findall(r'name="token" value="([^"]*)"', client.get("/run/job").text)[0]
    written = "tried <b>\r\nmore “steps”"
    answer = client.post("/run/job/notes", data={"token": token, "notes": written})
    assert answer.url.path == "/run/job" and "tried &lt;b&gt;\nmore “steps”</textarea>" in answer.text
    assert (tmp_path / "job/notes.txt").read_text() == "tried <b>\nmore “steps”"
    assert client.post("/run/job/notes", data={"token": "x", "notes": "other"}).status_code == 400
    reader = TestClient(make_app(Places(None), KEY), base_url="http://127.0.0.1", cookies={"trinity_ui": KEY})
    assert "tried &lt;b&gt;" in reader.get("/run/job").text and "<textarea" not in reader.get("/run/job").text
    assert reader.post("/run/job/notes", data={"token": token, "notes": "other"}).status_code in (404, 405)
    assert "tried" in (tmp_path / "job/notes.txt").read_text()


def test_the_log_has_the_newest_lines_of_a_level_first(opened: Open, tmp_path: Path) -> None:
    client = opened()
    lines = [
        {"event": "trainer.step.done", "level": level, "time": f"2026-11-24T01:12:{second:02}Z", "step": second}
        for second, level in enumerate(["debug", "info", "error", "info"])
    ]
    (tmp_path / "job/log/trainer.log").write_text("".join(json.dumps(line) + "\n" for line in lines) + "no JSON <b>\n")
    page = client.get("/run/job/log").text
    assert re.findall(r"step=(\d)", page) == ["3", "2", "1"] and "no JSON &lt;b&gt;" in page
    assert re.findall(r"step=(\d)", client.get("/run/job/log?level=error").text) == ["2"]
    assert client.get("/run/job/log?level=loud").status_code == 404


def test_overlaid_runs_show_where_their_yamls_differ(opened: Open, tmp_path: Path) -> None:
    client = opened()
    for name, rate in (("two", 0.5), ("three", 0.25)):
        config = json.loads((make_job(tmp_path / name) / "config.json").read_text())
        config["algorithm"] |= {"repeat_times": 4, "optimizer": {"lr": rate}}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    page = plain(client.get("/run/job/overlay?run=two&run=three").text)
    assert re.findall(r'data-run="([^"]*)"', page) == [f"/run/{name}/curves" for name in ("job", "two", "three")]
    rows = dict(re.findall(r"<tr><td>([\w.]+)</td>((?:<td[^>]*>[^<]*</td>)+)", html.unescape(page)))
    values = {name: re.findall(r">([^<]+)<", row) for name, row in rows.items()}
    assert values["algorithm.repeat_times"] == ["2", "4", "4"]
    assert values["algorithm.optimizer.lr"][1:] == ["0.5", "0.25"]
    assert "buffer.batch_size" not in values
    assert "batch_size" in client.get("/run/job/config").text
    assert client.get("/run/job/overlay?run=none").status_code == client.get("/run/job/overlay").status_code == 404
