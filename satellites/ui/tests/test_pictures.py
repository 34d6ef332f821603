"""Pictures of samples on the pages: shown beside the prompt, served whole or not at all, and part of a bundle."""

import asyncio
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from support.fakes.data.vision import picture
from support.fakes.pages.recorded_run import ledger, make_job, serve_ledger
from trinity.ui import pictures
from trinity.ui.app import make_app
from trinity.ui.bundle import write
from trinity.ui.places import Places

pytestmark = pytest.mark.core

KEY = "the-key"
WHITE = picture(colour="white")
NAME = f"{hashlib.sha256(WHITE).hexdigest()}.png"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job whose samples are all about one picture."""
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    monkeypatch.delenv("TRINITY_NATS_URL", raising=False)

    def change(row: dict[str, Any]) -> None:
        row["images"] = [f"buffer/images/{NAME}", "buffer/images/../../config.json", 'x"><script>', 3]

    made = make_job(tmp_path / "job", change)
    (made / "buffer/images").mkdir()
    (made / "buffer/images" / NAME).write_bytes(WHITE)
    serve_ledger(monkeypatch, ledger(), ())
    return made


@pytest.fixture
def client(job: Path) -> Iterator[TestClient]:
    with TestClient(make_app(Places(None), KEY), base_url="http://127.0.0.1") as found:
        found.get(f"/?key={KEY}")
        yield found


@pytest.mark.parametrize("page", ["/step/2/sample/1", "/step/2/sample/1?by=mask", "/step/2/group/5"])
def test_a_page_shows_its_picture_as_the_run_kept_it(page: str, client: TestClient) -> None:
    text = client.get(f"/run/job{page}").text
    (link,) = re.findall(r'<img class="picture" src="([^"]*)"', text)
    answer = client.get(f"/run/job{page.partition('?')[0]}/../{link}")
    assert (answer.status_code, answer.content, answer.headers["content-type"]) == (200, WHITE, "image/png")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in text.replace('<script src="', "")


@pytest.mark.parametrize(
    "name", ["config.json", "..%2f..%2fconfig.json", f"{'0' * 64}.png", f"{NAME[:-4]}.html", f"{NAME[:-4]}.svg"]
)
def test_nothing_else_of_the_job_is_served(name: str, client: TestClient) -> None:
    answer = client.get(f"/run/job/picture/{name}")
    assert answer.status_code == 404
    assert "text/html" in answer.headers["content-type"]
    assert client.get(f"/run/none/picture/{NAME}").status_code == 404


def test_a_picture_that_was_changed_is_not_served(job: Path, client: TestClient) -> None:
    (job / "buffer/images" / NAME).write_bytes(WHITE[:-1])
    answer = client.get(f"/run/job/picture/{NAME}")
    assert answer.status_code == 404
    assert "has another sha256 than its name" in answer.text


def test_without_the_key_there_is_no_picture(job: Path) -> None:
    client = TestClient(make_app(Places(None), KEY), base_url="http://127.0.0.1")
    assert client.get(f"/run/job/picture/{NAME}").status_code == 403


def test_rows_without_pictures_have_none() -> None:
    assert pictures.names({}) == pictures.names({"images": None}) == pictures.names({"images": "a.png"}) == []


def test_a_bundle_has_the_pictures_of_its_pages(job: Path, tmp_path: Path) -> None:
    places, folder = Places(job), tmp_path / "bundle"
    app = make_app(places, KEY)
    asyncio.run(write(app, ("trinity_ui", KEY), f"/run/{next(iter(places.find()))}", folder, 60))
    shown = 0
    for page in folder.glob("run/**/*.html"):
        for link in re.findall(r'\ssrc="([^"]*/picture/[^"]*)"', page.read_text()):
            assert (page.parent / link).resolve().read_bytes() == WHITE
            shown += 1
    assert shown > 3
