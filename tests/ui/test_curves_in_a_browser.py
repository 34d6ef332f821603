"""Curves in a browser: drawn without network under the page's policy, by any name, zoomed, smoothed and overlaid."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from support.fakes.pages.recorded_run import make_job

pytestmark = pytest.mark.extended

PLOTS = "[...document.querySelectorAll('.u-wrap canvas')]"
# Whether the drawn pixels of each chart have a colour of a line.
INKED = f"""{PLOTS}.map((one) => {{
  const {{data}} = one.getContext('2d').getImageData(0, 0, one.width, one.height);
  for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 200 && data[at + 2] - data[at] > 60) return true;
  return false;
}})"""


def write(job: Path, steps: int, rate: float) -> None:
    lines = (
        {"step": step, "time": 1.7e9 + 2 * step, "sample/reward_mean": 1 - math.exp(-rate * step), "actor/entropy": 2.0,
         "actor/grad_norm": 900.0 if step == steps // 2 else 1.0 + step % 5, "made/by_hand": float(step)}
        for step in range(1, steps + 1)
    )  # fmt: skip
    (job / "monitor/trainer.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: Any, watch: Any) -> Callable[..., Any]:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    for name, steps, rate in (("one", 10_000, 1e-3), ("two", 300, 1e-2)):
        write(make_job(tmp_path / name), steps, rate)
    address = served(None)
    return lambda **how: watch(address, **how)


def names(page: Page) -> list[str]:
    page.wait_for_selector("figure .u-wrap")
    return page.locator("figcaption").all_inner_texts()


def drag(page: Page, chart: str, begin: float, end: float) -> None:
    over = page.locator(f"figure[data-name='{chart}'] .u-over")
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box
    page.mouse.move(box["x"] + begin * box["width"], box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], box["y"] + 60, steps=4)
    page.mouse.up()


def legend(page: Page, chart: str) -> list[str]:
    return page.locator(f"figure[data-name='{chart}'] .u-value").all_inner_texts()


@pytest.mark.parametrize("width", [1280, 390])
def test_curves_are_drawn_and_read_by_hovering(width: int, opened: Any) -> None:
    watched = opened(width=width)
    page = watched.open("/run/one")
    assert names(page) == ["sample/reward_mean", "actor/entropy", "actor/grad_norm"]
    assert page.evaluate(INKED) == [True] * 3
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    over = page.locator("figure[data-name='actor/grad_norm'] .u-over")
    over.hover()
    step, value = legend(page, "actor/grad_norm")
    assert 3_000 < int(step) < 7_000 and float(value) >= 1
    assert abs(int(legend(page, "sample/reward_mean")[0]) - int(step)) < 100, "the others follow"
    assert watched.wrong == []


def test_a_metric_by_its_name_time_logarithm_and_smoothing(opened: Any) -> None:
    watched = opened()
    page = watched.open("/run/one")
    names(page)
    page.locator("[name=metric]").fill("by_ha.d|entropy")
    page.wait_for_selector("figure[data-name='made/by_hand']")
    assert names(page) == ["actor/entropy", "made/by_hand"]
    page.locator("[name=x]").select_option("time")
    page.locator("figure[data-name='made/by_hand'] .u-over").hover()
    hours = legend(page, "made/by_hand")[0]
    assert hours.endswith(" h"), hours
    page.locator("[name=log]").check()
    page.locator("[name=metric]").fill("grad_norm")
    page.wait_for_selector("figure[data-name='actor/grad_norm']")
    page.locator("[name=smooth]").fill("0.98")
    page.wait_for_function("document.querySelectorAll('figure .u-value').length === 3")
    assert page.evaluate(INKED) == [True]
    page.locator("[name=metric]").fill("(")
    page.wait_for_function("!document.querySelector('figure')")
    assert watched.wrong == []


def test_a_zoomed_part_has_every_step(opened: Any) -> None:
    watched = opened()
    page = watched.open("/run/one")
    names(page)
    with page.expect_response(lambda answer: "/curves?" in answer.url and "grad_norm" in answer.url) as asked:
        drag(page, "actor/grad_norm", 0.49, 0.51)
    steps, _, values = asked.value.json()["series"]["actor/grad_norm"]
    assert len(steps) == steps[-1] - steps[0] + 1 > 100 and 900 in values
    assert asked.value.request.url.startswith(watched.address), "from nowhere else"
    page.locator("figure[data-name='actor/grad_norm'] .u-over").dblclick()
    assert page.evaluate(INKED) == [True] * 3
    assert watched.wrong == []


def test_two_runs_are_overlaid_from_the_page_of_one(opened: Any) -> None:
    watched = opened()
    page = watched.open("/run/one/compare")
    page.get_by_role("checkbox").check()
    page.get_by_role("button", name="compare the chosen runs").click()
    assert names(page) == ["sample/reward_mean", "actor/entropy", "actor/grad_norm"]
    labels = page.locator("figure").first.locator(".u-label").all_inner_texts()
    assert labels == ["step", "tests/one", "tests/two"]
    over = page.locator("figure").first.locator(".u-over")
    box = over.bounding_box()
    over.hover(position={"x": 0.015 * box["width"], "y": 40})
    step, first, second = legend(page, "sample/reward_mean")
    assert 0 < int(step) <= 300 and "–" not in (first, second), "both have values in the first steps"
    assert page.evaluate(INKED) == [True] * 3
    assert watched.wrong == []
