"""The pages over HTTP: what they show of a job folder and a ledger, and whom they refuse."""

import base64
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from support.fakes.pages.recorded_run import (
    GROUPS,
    STEPS,
    Doctored,
    dead_letter,
    ledger,
    make_job,
    serve_ledger,
    write_account,
    write_versions,
)
from trinity.reading.wire import VersionRow
from trinity.ui import tokens
from trinity.ui.app import make_app
from trinity.ui.places import Places
from trinity.ui.source import Source

pytestmark = pytest.mark.core

KEY = "the-key"
CLASSES = re.compile(r'<span class="([^"]*)" title="token')
EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>\x1b[2J\u202e&quot;"


class Browser:
    """Asks for pages with the key."""

    def __init__(self, client: TestClient, run: str) -> None:
        self._client, self._run = client, run

    def get(self, page: str = "", status: int = 200) -> str:
        """A page of the run."""
        answer = self._client.get(f"/run/{self._run}{page}")
        assert answer.status_code == status, answer.text
        return re.sub(r">\s+<", "><", answer.text)

    def runs(self) -> str:
        return self._client.get("/").text


@pytest.fixture
def browse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Browser]]:
    """Makes a job, and a browser that has its key. Without a ledger the job has no NATS store."""
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    monkeypatch.delenv("TRINITY_NATS_URL", raising=False)
    clients: list[TestClient] = []

    def make(
        found: Doctored | None = None, change: Callable[[dict[str, Any]], Any] = lambda row: None, dead: Any = ()
    ) -> Browser:
        make_job(tmp_path / "job", change)
        if found is not None:
            serve_ledger(monkeypatch, found, dead)
        client = TestClient(make_app(Places(None), KEY), base_url="http://127.0.0.1")
        client.__enter__()
        clients.append(client)
        assert client.get(f"/?key={KEY}").status_code == 200
        return Browser(client, "job")

    yield make
    for client in clients:
        client.__exit__(None, None, None)


def test_from_the_list_of_runs_to_a_token(browse: Callable[..., Browser]) -> None:
    browser = browse(ledger())
    assert 'href="/run/job"' in browser.runs()
    overview = browser.get()
    assert 'href="/run/job/step/2"' in overview
    step = browser.get("/step/2")
    assert 'href="2/group/5"' in step
    assert "sums/0/5" in step
    group = browser.get("/step/2/group/5")
    assert 'href="../sample/1"' in group
    assert "accuracy" in group
    sample = browser.get("/step/2/sample/1?by=mask")
    shown = re.findall(r'<span class="([^"]*)" title="([^"]*)">', sample)
    assert len(shown) == 4
    step = "ratio 1, trainer - engine 0, entropy 0.0625"
    assert shown[0] == ("", f"token 0: id 10, weights 1, log-probability -0.05, {step}")
    assert shown[3][0] == "masked"
    assert shown[3][1].startswith("token 3: id 13, weights 2, log-probability -9, ")
    assert shown[3][1].endswith(", not trained")
    assert CLASSES.findall(browser.get("/step/2/sample/1?by=version")) == ["v1", "v1", "v2", "v2"]
    assert CLASSES.findall(browser.get("/step/2/sample/1?by=advantage")) == ["up1", "up1", "up1", "masked"]
    assert CLASSES.findall(browser.get("/step/2/sample/1?by=logprob")) == ["s4", "s3", "s2", "s0"]
    assert re.search(r"trinity view --step 2 --index 1 --job \S+/job<", sample)


def test_the_bar_is_sound_and_counts_are_those_of_the_buffer(browse: Callable[..., Browser]) -> None:
    overview = browse(ledger()).get()
    assert 'class="ledger sound"' in overview
    assert f"<b>{STEPS * GROUPS + 1}</b> fed" in overview


@pytest.mark.parametrize(
    ("doctor", "said"),
    [
        (lambda found: found.entries[1].groups.pop(0), "not dropped and not waiting: group 5"),
        (lambda found: found.move(5, 3), "group 5 is in step 2 and again in step 3"),
        (lambda found: found.last.cursor.__setattr__("stored", 13), "step 3 counts 13 stored groups"),
    ],
    ids=["missing", "twice", "count"],
)
def test_a_doctored_ledger_turns_the_bar_red(doctor: Any, said: str, browse: Callable[..., Browser]) -> None:
    found = ledger()
    doctor(found)
    overview = browse(found).get()
    assert 'class="ledger broken"' in overview
    assert said in overview


def test_cut_tasks_are_a_part_of_the_bar_and_named_at_their_step(browse: Callable[..., Browser]) -> None:
    page = browse(ledger(cut={2: [101, 102]}, late={3: [102]}))
    overview = page.get()
    assert 'class="ledger sound"' in overview
    assert re.search(r'<b class="part-3">2</b>\s+cut', overview) and "cut: 2" in overview
    step = page.get("/step/2")
    assert "the step did not wait for these tasks" in step and "sums/0/101" in step
    assert re.search(r'class="state cut">cut<', page.get("/task/101"))
    assert "the step did not wait for these tasks" not in page.get("/step/1")


def test_what_a_run_wrote_is_shown_and_never_markup(browse: Callable[..., Browser], tmp_path: Path) -> None:
    def change(row: dict[str, Any]) -> None:
        row |= dict.fromkeys(("prompt", "response", "task_id", "truncation"), f"{EVIL}{row['ordinal']}")
        row["metrics"] = {EVIL: 1.0}

    found = ledger()
    found.entries[1].skip_reason = found.entries[1].groups[0].task_id = EVIL
    browser = browse(found, change, [dead_letter(50, EVIL)])
    write_account(tmp_path / "job", EVIL)
    write_versions(tmp_path / "job", EVIL)
    for page in ("", "/step/2", "/step/2/group/5", "/step/2/sample/7", "/dead", "/dead/50", "/fleet", "/versions"):
        text = browser.get(page)
        assert "<script>alert" not in text
        assert "<img" not in text
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", text)
        assert page == "" or r"&lt;script&gt;alert(1)&lt;/script&gt;" in text
        assert page == "" or r"\x1b[2J\u202e&amp;quot;" in text


def test_dead_letters_are_listed_by_cause(browse: Callable[..., Browser]) -> None:
    letters = [dead_letter(ordinal, "no scorer") for ordinal in (3, 4)] + [dead_letter(9, "too slow")]
    browser = browse(ledger(), dead=letters)
    listed = browser.get("/dead")
    assert re.search(r'<a href="dead/4">no scorer</a></td><td class="n">2</td>', listed)
    assert len(re.findall(r'<td class="n"><a href="dead/\d+">', listed)) == 3
    assert re.search(r"no scorer: <code.*>trinity deadletters retry 3 4 --job \S+/job</code>", listed)
    shown = browser.get("/dead/4")
    assert "trinity deadletters retry 4" in shown
    assert "&#34;question&#34;: &#34;no scorer&#34;" in shown
    assert "has no letter" in browser.get("/dead/5", 404)


@pytest.mark.parametrize(("page", "name"), [("", "overview"), ("/dead", "dead letters")])
def test_the_part_of_the_run_that_is_shown_is_marked(page: str, name: str, browse: Callable[..., Browser]) -> None:
    assert re.findall(r'aria-current="page">([a-z ]+)<', browse(ledger()).get(page)) == [name]


def test_without_dead_letters_there_are_none(browse: Callable[..., Browser]) -> None:
    assert "None." in browse(ledger()).get("/dead")


@pytest.mark.parametrize("page", ["/versions", "/versions/1", "/fleet"])
def test_what_lives_in_services_alone_is_not_there_afterwards(page: str, browse: Callable[..., Browser]) -> None:
    assert "does not" in browse().get(page, 404)


def test_a_version_says_what_a_rollback_to_it_would_withdraw(
    browse: Callable[..., Browser], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ledger()
    for newest in (1, 2, 3):
        found.last.cursor.pending.add(ordinal=100 + newest, newest_version=newest)
    listed = [_version(number, "REJECTED" if number == 3 else "RETIRED") for number in (3, 2, 1)]

    async def version(_: Source, number: int) -> dict[str, Any]:
        return {**asdict(_version(number, "RETIRED")), "offers": [], "canary": None, "tensors": 1, "files": 1,
                "base_model": "", "explorers": []}  # fmt: skip

    async def versions(_: Source) -> list[VersionRow]:
        return listed

    monkeypatch.setattr(Source, "version", version)
    monkeypatch.setattr(Source, "versions", versions)
    browser = browse(found)
    cells = re.findall(r"<th>([^<]*)</th><td>([^<]*)</td>", browser.get("/versions/1"))
    assert cells == [
        ("versions it withdraws", "1: 2 - 2"),
        ("updates it undoes", "3 - 4"),
        ("stored groups it drops", "2"),
    ]
    assert "trinity weights rollback 1 --job" in browser.get("/versions/1")
    assert "weights rollback" not in browser.get("/versions/2"), "no newer one could be withdrawn"


def _version(number: int, state: str) -> VersionRow:
    """Of every second step."""
    return VersionRow(number, 2 * number, state, 0, 8, None, None, ["folder"], False, None, False, 1e9, "", True)


def test_a_job_without_a_ledger_shows_what_its_folder_has(browse: Callable[..., Browser], tmp_path: Path) -> None:
    browser = browse()
    overview = browser.get()
    assert "has no NATS store" in overview
    assert 'href="/run/job/step/3"' in overview
    assert "has no NATS store" in browser.get("/step/2")
    assert "sample/1" in browser.get("/step/2/group/5")
    (tmp_path / "job/buffer/experience_buffer.jsonl").unlink()
    assert "no experience is kept" in browser.get("/step/3/sample/1", 404)
    (tmp_path / "job/monitor/trainer.jsonl").write_text('{"step": "x"}\nnothing\n[1]\n')
    assert "has no NATS store" in browser.get()
    assert "has no NATS store" in browser.get("/step/2", 404)


def test_a_damaged_job_is_named_and_the_others_are_shown(browse: Callable[..., Browser], tmp_path: Path) -> None:
    browser = browse()
    make_job(tmp_path / "other")
    (tmp_path / "other/config.json").write_text("{")
    text = browser.runs()
    assert 'href="/run/job"' in text
    assert 'href="/run/other"' not in text
    assert str(tmp_path / "other") in text


@pytest.mark.parametrize(
    "page",
    [
        "/step/99",
        "/step/2/group/99",
        "/step/2/sample/99",
        "/step/99/sample/1",
        "/step/x",
        "/nothing",
        f"/step/{'9' * 30}",
        f"/step/{'9' * 30}/sample/1",
        f"/dead/{'9' * 30}",
        f"/step/{'9' * 5000}",
        "/step/0",
        "/step/-1",
    ],
)
def test_what_is_not_there_is_a_sentence(page: str, browse: Callable[..., Browser]) -> None:
    assert "This page cannot be shown" in browse(ledger()).get(page, 404)


def test_damaged_arrays_leave_the_text(browse: Callable[..., Browser]) -> None:
    sample = browse(ledger(), lambda row: row.update(arrays={"token_ids": "AAA"})).get("/step/2/sample/1")
    assert "the tokens cannot be shown" in sample
    assert "It is 2." in sample


@pytest.mark.parametrize("value", [[1], "x", None, 7])
def test_a_field_of_another_kind_leaves_the_rest_of_a_page(value: Any, browse: Callable[..., Browser]) -> None:
    wrong = dict.fromkeys(("advantage", "arrays", "metrics", "versions"), value)
    browser = browse(ledger(), lambda row: row.update(wrong, response=[value]))
    for page in ("/step/2/group/5", "/step/2/sample/1", "/step/2/sample/1/tokens/1", "/step/2/sample/1/trace"):
        assert "This page cannot be shown" not in browser.get(page)
    assert "<dt>reward</dt><dd>1</dd>" in browser.get("/step/2/sample/1")


@pytest.mark.parametrize("line", [{"time": "abc"}, {"sample/reward_mean": 10**400}])
def test_a_damaged_monitor_hides_no_run(line: dict[str, Any], browse: Callable[..., Browser], tmp_path: Path) -> None:
    browser = browse()
    make_job(tmp_path / "other")
    (tmp_path / "other/monitor/trainer.jsonl").write_text(json.dumps({"step": 1, **line}) + "\n")
    text = browser.runs()
    assert 'href="/run/job"' in text and 'href="/run/other"' in text


def test_an_evaluation_does_not_hide_the_batch_of_its_step(browse: Callable[..., Browser], tmp_path: Path) -> None:
    browser = browse(ledger())
    lines = [
        {"step": 1, "rollout/reward/mean": 0.25, "group_advantages/skipped_group_ratio": 0.75},
        {"step": 2, "rollout/reward/mean": 0.5, "group_advantages/skipped_group_ratio": 0.75},
        {"step": 1, "eval/test/accuracy/mean@1": 0.125},
        {"step": 2, "eval/test/accuracy/mean@1": 0.875},
    ]
    (tmp_path / "job/monitor/explorer.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, reward, accuracy in ((1, "0.25", "0.125"), (2, "0.5", "0.875")):
        page = browser.get(f"/step/{step}")
        assert f"<dt>rollout/reward/mean</dt><dd>{reward}</dd>" in page
        assert f"<dt>eval/test/accuracy/mean@1</dt><dd>{accuracy}</dd>" in page
    overview = browser.get()
    assert "75% of the groups have the same reward" in overview
    assert '<td>test</td><td>accuracy</td><td class="n">0.125</td><td class="n">0.875</td>' in overview


def test_a_long_response_comes_in_parts(browse: Callable[..., Browser], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_FIRST", 3)
    browser = browse(ledger())
    sample = browser.get("/step/2/sample/1?by=mask")
    assert len(re.findall(r'title="token \d', sample)) == 3
    more = re.search(r'data-more="/run/job(/step/2/sample/1/tokens/3\?by=mask)"', sample)
    assert more
    rest = browser.get(more[1])
    assert re.findall(r'title="token (\d)', rest) == ["3"]
    assert "data-more" not in rest
    assert "title=" not in browser.get("/step/2/sample/1/tokens/99")


def test_tokens_show_what_the_step_had_of_them(browse: Callable[..., Browser]) -> None:
    browser = browse(ledger())
    shades = {by: CLASSES.findall(browser.get(f"/step/2/sample/1?by={by}")) for by in ("ratio", "gap", "entropy")}
    assert shades == {
        "ratio": ["s2", "clipped s4", "s1", "s0"],
        "gap": ["s2", "s4", "s1", "s0"],
        "entropy": ["s0", "s2", "s3", "s4"],
    }
    page = browser.get("/step/2/sample/1?by=ratio")
    said = "log-probability -0.5, ratio 1.35, trainer - engine 0.3, entropy 1, clipped"
    assert f"token 1: id 11, weights 1, {said}" in page
    assert page.count(", clipped") == 1
    assert "not recorded" not in page


def test_values_that_were_not_recorded_are_no_zeros(browse: Callable[..., Browser]) -> None:
    def change(row: dict[str, Any]) -> None:
        for name in ("new_logprobs", "entropy", "clipped")[row["rollout"] * 2 :]:
            del row["arrays"][name]

    browser = browse(ledger(), change)
    for by in ("ratio", "gap", "entropy"):
        page = browser.get(f"/step/2/sample/0?by={by}")
        assert CLASSES.findall(page) == ["unknown"] * 4
        assert "<b>not recorded</b>: buffer.save_token_values was off" in page
        assert page.count("ratio and entropy not recorded") == 4
    page = browser.get("/step/2/sample/1?by=ratio")
    assert "the loss clips nothing" in page
    assert "clipped" not in " ".join(CLASSES.findall(page))


def test_the_gap_is_of_the_weights_that_the_step_began_with(browse: Callable[..., Browser]) -> None:
    began = base64.b64encode(np.array([-0.05, -0.5, -2.0, -8.95], "<f4").tobytes()).decode()
    browser = browse(ledger(), lambda row: row["arrays"].update(proximal_logprobs=began))
    assert CLASSES.findall(browser.get("/step/2/sample/1?by=gap")) == ["s2", "s2", "s2", "s3"]
    assert CLASSES.findall(browser.get("/step/2/sample/1?by=ratio")) == ["s2", "clipped s4", "s1", "s0"]


def test_the_box_goes_to_a_step(browse: Callable[..., Browser]) -> None:
    browser = browse(ledger())
    assert "<h1>Step 2" in browser.get("/go?step=2")
    assert "Task accounting" in browser.get("/go?step=2%2F..%2F..")


@pytest.mark.parametrize("wrong", ["/", "/?key=other", "/run/job", "/static/style.css", "/?key=é"])
def test_without_the_key_there_is_nothing(wrong: str, tmp_path: Path) -> None:
    for cookies in ({}, {"trinity_ui": "other"}):
        client = TestClient(make_app(Places(tmp_path), KEY), base_url="http://127.0.0.1", cookies=cookies)
        assert client.get(wrong).status_code == 403


def test_another_host_or_method_is_refused_and_every_answer_has_the_policy(browse: Callable[..., Browser]) -> None:
    browse(ledger())
    client = TestClient(make_app(Places(None), KEY), base_url="http://127.0.0.1", cookies={"trinity_ui": KEY})
    for page in ("/", "/nothing", "/static/keys.js", "/?key=other"):
        answer = client.get(page)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
    assert client.get("/", headers={"host": "evil.example"}).status_code == 400
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, "/").status_code == 405


def test_pages_hold_no_inline_script_and_no_inline_style(browse: Callable[..., Browser]) -> None:
    browser = browse(ledger())
    for page in ("", "/step/2", "/step/2/group/5", "/step/2/sample/1"):
        text = browser.get(page)
        assert not re.search(r"<script(?! src=\"/static/)|<style|\sstyle=|\son[a-z]+=|javascript:|https?://", text)
    assert json.loads(re.search(r"content='(\{.*?\})'", browser.get())[1])["allowEval"] is False  # type: ignore[index]


def test_a_live_run_of_another_version_takes_no_page_from_the_others(
    browse: Callable[..., Browser], tmp_path: Path
) -> None:
    browser = browse(ledger())
    make_job(tmp_path / "other")
    (tmp_path / "other/run").mkdir()
    (tmp_path / "other/run/main.json").write_text(json.dumps({"pid": os.getpid(), "kind": "both"}))
    (tmp_path / "other/.lock").touch()
    assert "seems to be of another version" in browser.runs()
    browser.get()


@pytest.mark.parametrize("record", [b"[" * 100_000, b"[1]", b"\xff"])
def test_a_record_that_is_none_is_a_sentence(record: bytes, browse: Callable[..., Browser], tmp_path: Path) -> None:
    browser = browse()
    (tmp_path / "job/recorded.json").write_bytes(record)
    assert "is no record of a run; record it again" in browser.get()
