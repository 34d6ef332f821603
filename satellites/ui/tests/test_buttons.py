"""Buttons that change dead letters and pins: there only when asked for, and only for the process's own pages."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from support.fakes.pages.recorded_run import dead_letter, ledger, make_job, serve_ledger, serve_sync, write_versions
from trinity.ui.app import make_app
from trinity.ui.places import Places

pytestmark = pytest.mark.core

KEY = "the-key"
PAGE = "/run/job/dead"


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[TestClient]:
    """With the key, on a run with letters 7 to 9. The parameter: whether there are buttons."""
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    make_job(tmp_path / "job")
    buffer = serve_ledger(monkeypatch, ledger(), [dead_letter(ordinal, "boom") for ordinal in (7, 8, 9)])
    writes = getattr(request, "param", True)
    with TestClient(make_app(Places(None), KEY, writes=writes), base_url="http://127.0.0.1") as found:
        assert found.get(f"/?key={KEY}").status_code == 200
        found.app_state["buffer"] = buffer
        yield found


def letters(client: TestClient) -> list[int]:
    return [int(one) for one in re.findall(r'<td class="n"><a href="dead/([0-9]+)"', client.get(PAGE).text)]


def form(client: TestClient, page: str, what: str) -> dict[str, str]:
    """The fields of the form that does this."""
    (found,) = re.findall(f'action="{PAGE}/{what}">(.*?)</form>', client.get(page).text)
    return dict(re.findall(r'name="([a-z]+)" value="([^"]*)"', found))


@pytest.mark.parametrize("what", ["retry", "drop"])
def test_letters_of_a_cause_or_one_alone_are_changed(client: TestClient, what: str) -> None:
    assert letters(client) == [7, 8, 9]
    done = client.post(f"{PAGE}/{what}", data=form(client, f"{PAGE}/8", what), follow_redirects=False)
    assert (done.status_code, done.headers["location"]) == (303, PAGE)
    assert letters(client) == [7, 9]
    assert client.post(f"{PAGE}/{what}", data=form(client, PAGE, what)).status_code == 200
    assert letters(client) == []
    assert client.app_state["buffer"].retried == ([8, 7, 9] if what == "retry" else [])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"token": "guessed"}, "load the page again"),
        ({"token": ""}, "load the page again"),
        ({"ordinals": ""}, "must be 1 to 100 ordinals"),
        ({"ordinals": "7 -8"}, "must be 1 to 100 ordinals"),
        ({"ordinals": "7 " * 101}, "must be 1 to 100 ordinals"),
        ({"ordinals": "9" * 19}, "must be 1 to 100 ordinals"),
        ({"ordinals": "<b>"}, "&lt;b&gt;"),
        ({"ordinals": "7" * 70_000}, "more than 65536 bytes"),
        ({str(number): "x" for number in range(9)}, "load the page again"),
    ],
)
def test_other_forms_change_nothing(client: TestClient, changed: dict[str, str], said: str) -> None:
    given = {**form(client, PAGE, "drop"), **changed}
    answer = client.post(f"{PAGE}/drop", data=given)
    assert answer.status_code == 400
    assert said in answer.text
    assert letters(client) == [7, 8, 9]


async def test_a_browser_that_leaves_in_a_form_ends_in_no_traceback(client: TestClient) -> None:
    """Sent to the application itself: a client that is there cannot leave."""
    sent: list[Any] = []
    received = iter([{"type": "http.request", "body": b"token=", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(received)

    async def send(message: Any) -> None:
        sent.append(message)

    cookies = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
    headers = [(b"host", b"127.0.0.1"), (b"cookie", cookies.encode())]
    scope = {"type": "http", "method": "POST", "path": f"{PAGE}/drop", "query_string": b"", "headers": headers}
    await client.app(scope, receive, send)
    assert sent[0]["status"] == 400
    assert letters(client) == [7, 8, 9]


def test_a_letter_that_is_gone_is_named(client: TestClient) -> None:
    answer = client.post(f"{PAGE}/retry", data={**form(client, PAGE, "retry"), "ordinals": "7 99"})
    assert answer.status_code == 404
    assert "99 has no letter" in answer.text
    assert letters(client) == [7, 8, 9]


def test_without_the_key_the_token_is_of_no_use(client: TestClient) -> None:
    given = form(client, PAGE, "drop")
    client.cookies.clear()
    assert client.post(f"{PAGE}/drop", data=given).status_code == 403


def test_a_version_is_pinned_and_unpinned_as_the_operator(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = serve_sync(monkeypatch)
    write_versions(tmp_path / "job", "alice")
    for what, pinned in (("pin", True), ("unpin", False)):
        page = client.get("/run/job/versions").text
        assert ("by alice" in page) is not pinned, "the log says alice, but it counts while the version is pinned"
        (token,) = re.findall(
            f'action="/run/job/versions/1/{what}"><input type="hidden" name="token" value="([^"]+)"', page
        )
        refused = client.post(f"/run/job/versions/1/{what}", data={"token": token[:-1]})
        assert (refused.status_code, "load the page again" in refused.text) == (400, True)
        done = client.post(f"/run/job/versions/1/{what}", data={"token": token}, follow_redirects=False)
        assert (done.status_code, done.headers["location"]) == (303, "/run/job/versions")
        assert sync.asked[-1:] == [("operator", 1, pinned)]
    assert len(sync.asked) == 2
    assert client.post("/run/job/versions/7/pin", data={"token": token}).status_code == 404
    assert client.post("/run/none/versions/1/pin", data={"token": token}).status_code == 404
    assert client.post("/run/job/versions/1/delete", data={"token": token}).status_code == 404
    assert len(sync.asked) == 2


@pytest.mark.parametrize("client", [False], indirect=True)
def test_a_reader_pins_nothing(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = serve_sync(monkeypatch)
    page = client.get("/run/job/versions").text
    assert "<th>state</th>" in page
    assert "method" not in page
    assert client.post("/run/job/versions/1/pin", data={"token": ""}).status_code in (404, 405)
    assert (sync.role, sync.asked) == ("reader", [])


@pytest.mark.parametrize("client", [False], indirect=True)
def test_there_are_none_unless_asked_for(client: TestClient) -> None:
    for page in (PAGE, f"{PAGE}/7"):
        assert "method" not in client.get(page).text
    assert client.post(f"{PAGE}/drop", data={"token": "", "ordinals": "7"}).status_code in (404, 405)
    assert letters(client) == [7, 8, 9]
