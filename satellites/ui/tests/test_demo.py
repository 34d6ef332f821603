"""`trinity ui --demo`: two recorded runs that learn, with text that a person reads, and nothing of the machine."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from trinity.ui import demo
from trinity.ui.app import make_app
from trinity.ui.places import Places

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    with demo.unpacked() as folder:
        yield folder
    assert not folder.exists()


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[TestClient]:
    with TestClient(make_app(Places(None, root), "key"), base_url="http://127.0.0.1") as found:
        found.get("/?key=key")
        yield found


def runs(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob("*/*/config.json"))


def test_it_is_small() -> None:
    assert demo.ARCHIVE.stat().st_size < 1_000_000


def test_there_are_two_runs_which_compare_offers(client: TestClient, root: Path) -> None:
    keys = re.findall(r'href="/run/([^"/]+)"', client.get("/").text)
    assert len(set(keys)) == len(runs(root)) == 2
    assert client.get("/").text.count('class="state finished"') == 2
    page = client.get(f"/run/{keys[0]}/compare").text
    assert keys[1] in page


def test_each_learns(root: Path) -> None:
    for run in runs(root):
        rows = [json.loads(line) for line in (run / "monitor/trainer.jsonl").read_text().splitlines()]
        rewards = [row["sample/reward_mean"] for row in rows]
        fourth = len(rewards) // 4
        assert sum(rewards[-fourth:]) > 1.2 * sum(rewards[:fourth]), run.name
        found = [json.loads(line) for line in (run / "monitor/explorer.jsonl").read_text().splitlines()]
        evaluated = [row for row in found if any(name.startswith("eval/") and "accuracy" in name for name in row)]
        name = next(name for name in evaluated[0] if name.startswith("eval/") and "accuracy" in name)
        assert evaluated[-1][name] > evaluated[0][name], run.name


def test_prompts_and_responses_can_be_read(root: Path) -> None:
    for run in runs(root):
        texts = [json.loads(line) for line in (run / "buffer/experience_buffer.jsonl").read_text().splitlines()]
        odd = [
            row["response"] for row in texts if not (row["prompt"] + row["response"]).replace("\n", "").isprintable()
        ]
        assert len(odd) <= len(texts) / 100, odd[:3]


def test_a_sample_shows_its_reference_answer(client: TestClient, root: Path) -> None:
    key = "~".join(runs(root)[0].relative_to(root).parts)
    page = client.get(f"/run/{key}/worst").text
    assert "Reference answer" in page and "####" in page


def test_nothing_of_the_machine_is_in_it(root: Path) -> None:
    texts = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert [path for path, text in texts.items() if re.search(rb"/(home|root|tmp|work|data)/", text)] == []
    assert not [path for path in texts if "tokens" in path.parts]
