"""From each alarm to a token in three links; tests/ui clicks them in a browser."""

import re
from pathlib import Path
from urllib.parse import urljoin

import pytest
from starlette.testclient import TestClient

from support.fakes.pages.alarms import CASES, CLICKS, CLICKS_OF_A_STEP, prepare
from trinity.reading.alarms import RULES
from trinity.ui.app import make_app
from trinity.ui.places import Places

pytestmark = pytest.mark.core

KEY = "the-key"


def test_every_alarm_of_a_page_has_its_case() -> None:
    assert CASES.keys() == {name for name, rule in RULES.items() if rule.text}


@pytest.mark.parametrize("rule", CASES)
def test_three_links(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    prepare(tmp_path / "job", CASES[rule], monkeypatch)
    with TestClient(make_app(Places(None), KEY), base_url="http://127.0.0.1") as client:
        client.get(f"/?key={KEY}")
        (alarm,) = re.findall(r"<li class=.*?</li>", client.get("/run/job").text)
        assert RULES[rule].fix in alarm
        (link,) = re.findall(r'href="([^"]*)"', alarm)
        for part in CLICKS.get(link.rpartition("/")[2], CLICKS_OF_A_STEP):
            links = re.findall(r'href="([^"]*)"', client.get(link).text.partition("<tbody")[2])
            link = urljoin(link, next(one for one in links if part in one))
        assert "/sample/" in link
        assert 'title="token 0: id ' in client.get(link).text
