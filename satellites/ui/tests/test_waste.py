"""The page on the seconds of devices: they add up, have a price, and a damaged account leaves the rest."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from support.fakes.pages.recorded_run import ledger, make_job, serve_ledger, write_account
from trinity.reading.accounts.device_log import folder_of
from trinity.ui.app import make_app
from trinity.ui.places import Places

pytestmark = pytest.mark.core

KEY = "the-key"
EVIL = "<script>alert(1)</script>\x1b[2J\u202e"


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    make_job(tmp_path / "job")
    serve_ledger(monkeypatch, ledger())
    with TestClient(make_app(Places(None), KEY), base_url="http://127.0.0.1") as found:
        found.get(f"/?key={KEY}")
        yield found


def test_the_fates_add_up_and_the_dearest_groups_lead_to_their_tasks(client: TestClient, tmp_path: Path) -> None:
    write_account(tmp_path / "job")
    page = re.sub(r">\s+<", "><", client.get("/run/job/waste").text)
    seconds = dict(re.findall(r'</span> ([a-z_ ]+)</td>.*?<td class="n">([0-9.]+)</td><td class="n">[0-9.]+ %', page))
    assert sum(map(float, seconds.values())) == 20.0
    assert (seconds["trained"], seconds["idle"], seconds["failed"]) == ("6", "10", "1")
    assert 'href="/run/job/task/12"' in page
    assert "died" in page
    assert re.search(r"trinity cost --job \S+/job<", page)


def test_ends_of_the_trainer_have_their_cause_and_their_seconds(client: TestClient, tmp_path: Path) -> None:
    write_account(tmp_path / "job")
    assert "Ends of the trainer" not in client.get("/run/job/waste").text
    path = folder_of(tmp_path / "job") / "main.jsonl"
    events = path.read_text().splitlines()
    died = {"time": 1.7e9 + 4, "event": "died", "name": "trainer", "pid": 21, "reason": f"node b is lost: {EVIL}"}
    again = {"time": 1.7e9 + 6, "event": "started", "name": "trainer", "pid": 23}
    path.write_text("\n".join([*events[:4], json.dumps(died), json.dumps(again), *events[4:]]))
    page = re.sub(r">\s+<", "><", client.get("/run/job/waste").text)
    assert re.search(r'<td>node b is lost: &lt;script[^<]*</td><td class="n">1</td><td class="n">[0-9.]+</td>', page)
    assert EVIL not in page


def test_a_price_gives_money_for_a_thousand_trained_tokens(client: TestClient, tmp_path: Path) -> None:
    write_account(tmp_path / "job")
    page = client.get("/run/job/waste?price=36").text
    assert "<b>0.2</b>" in page  # 20 s of devices
    assert "<b>2.083</b>" in page  # 12 groups of 8 tokens
    for wrong in ("-1", "nan", "inf", "1e9", EVIL):
        answer = client.get("/run/job/waste", params={"price": wrong})
        assert answer.status_code == 404
        assert "is no number from 0 to 1,000,000" in answer.text
        assert "<script>alert" not in answer.text


def test_without_an_account_the_page_says_so(client: TestClient) -> None:
    answer = client.get("/run/job/waste")
    assert answer.status_code == 404
    assert "has no account of devices" in answer.text


DAMAGED: tuple[dict[str, Any] | list[Any], ...] = (
    {"time": 1.0, "event": "began", "name": "x"},
    {"time": 1.0, "event": "began", "name": "x", "service": "trainer", "devices": "two"},
    {"time": 1.0, "event": "began", "name": ["x"], "service": "trainer", "devices": 1},
    {"time": 1.0, "event": "began", "name": "x", "service": "trainer", "devices": -1},
    {"time": 1.0, "event": "started", "name": "trainer"},
    {"time": "now", "event": "beat"},
    {"time": 1.0, "event": {}},
    [1],
)


def test_damaged_lines_are_left_out(client: TestClient, tmp_path: Path) -> None:
    write_account(tmp_path / "job")
    whole = client.get("/run/job/waste").text
    path = folder_of(tmp_path / "job") / "main.jsonl"
    lines = path.read_text()
    path.write_text("".join(json.dumps(line) + "\n" for line in DAMAGED) + "[" * 9999 + "\n\x00\n" + lines + '{"ti')
    for name, text in (("a", "{"), ("b", "[1]"), ("c", '{"seconds": 3}'), ("d", '{"seconds": {"stored": "x"}}')):
        (folder_of(tmp_path / "job") / f"{name}-22.json").write_text(text)
    assert client.get("/run/job/waste").text == whole


def test_names_in_an_account_are_text(client: TestClient, tmp_path: Path) -> None:
    write_account(tmp_path / "job", name=EVIL, fate=EVIL)
    page = client.get("/run/job/waste").text
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J\\u202e") == 2
