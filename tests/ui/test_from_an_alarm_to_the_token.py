"""From each alarm to a token in three clicks. satellites/ui/tests follows the same links without a browser."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.fakes.pages.alarms import CASES, CLICKS, CLICKS_OF_A_STEP, prepare
from trinity.reading.alarms import RULES

pytestmark = pytest.mark.extended


@pytest.mark.parametrize("rule", CASES)
def test_three_clicks(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: Callable[[Path], str], watch: Callable[..., Any]
) -> None:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    prepare(tmp_path / "job", CASES[rule], monkeypatch)
    watched = watch(served(tmp_path / "job"))
    page = watched.open("/run/job")
    alarm = page.locator(".alarms li")
    assert alarm.count() == 1, alarm.all_inner_texts()
    assert alarm.get_by_text(RULES[rule].fix).count() == 1
    alarm.get_by_role("link").click()
    page.wait_for_url("**/run/job/**")
    place = page.url.rpartition("/")[2]
    for part in CLICKS.get(place, CLICKS_OF_A_STEP):
        before = page.url
        page.locator(f"tbody a[href*='{part}']").first.click()
        page.wait_for_url(lambda url, before=before: url != before)
    assert "/sample/" in page.url
    assert page.locator(".block span").first.get_attribute("title").startswith("token 0: id ")
    assert watched.wrong == []
