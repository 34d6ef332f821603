"""Every page in a browser: nothing that a run wrote is run, it fits a phone, keys move, colours can be read."""

import base64
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.fakes.pages.alarms import STATUS
from support.fakes.pages.recorded_run import (
    RECORDED,
    Doctored,
    dead_letter,
    ledger,
    make_job,
    serve_ledger,
    serve_status,
    serve_versions,
    write_account,
    write_versions,
)
from trinity.reading.errors import RunError
from trinity.ui import screens

pytestmark = pytest.mark.extended

PAGES = (
    "/", "/run/job", "/run/job/step/2", "/run/job/step/2/group/5", "/run/job/step/2/sample/1?by=logprob",
    "/run/job/dead", "/run/job/dead/50", "/run/job/step/2/lanes", "/run/job/step/2/sample/1/trace", "/run/job/task/5",
    "/run/job/compare", "/run/job/compare/other", "/run/job/waste?price=2", "/run/job/fleet", "/run/job/versions",
    "/run/job/versions/1", "/lineage", "/run/job/versions/2/provenance",
)  # fmt: skip
EVIL = (
    "<script>alert('a')</script><img src=x onerror=\"alert('b')\"><svg onload=alert('c')>"
    "</pre></span>{{ 7*7 }}<a href=\"javascript:alert('d')\">x</a>\x1b[31m\x00\u202e'\" onmouseover=alert('e') x="
)
# The contrast of every text with what lies behind it, as WCAG 2.1 defines it: the lowest, and its text.
CONTRAST = """() => {
  const parse = (color) => { const n = color.match(/[\\d.]+/g).map(Number); return n.length > 3 ? n : [...n, 1]; };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color[3] === 1) return color;
    }
    return [255, 255, 255, 1];
  };
  const hasText = (node) => [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
  const found = [...document.querySelectorAll("body *")]
    .filter((node) => hasText(node) && node.getClientRects().length)
    .map((node) => {
      const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), `${node.tagName}.${node.className}: ${node.textContent.slice(0, 40)}`];
    });
  return found.sort((x, y) => x[0] - y[0])[0];
}"""


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: Any, watch: Any) -> Callable[..., Any]:
    """Serves a job with a ledger, and opens it."""
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    served_at: list[str] = []

    def make(found: Doctored | None = None, change: Any = lambda row: None, other: bool = False, **how: Any) -> Any:
        if not served_at:
            serve_ledger(monkeypatch, found or ledger(), [dead_letter(50, EVIL)])
            serve_versions(monkeypatch, EVIL)
            explorer = STATUS["explorers"][0] | {"name": EVIL, "failure": EVIL, "host": EVIL}
            serve_status(monkeypatch, STATUS | {"explorers": [explorer]})
            job = make_job(tmp_path / "job", change)
            write_account(job, EVIL, EVIL)
            write_versions(job, EVIL)
            if other:
                make_job(tmp_path / "other")
            served_at.append(served(None if other else job))
        return watch(served_at[0], **how)

    return make


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_and_can_be_read(scheme: str, pages: Any) -> None:
    for width in (1280, 390):
        watched = pages(width=width, scheme=scheme, other=True)
        for path in PAGES:
            page = watched.open(path)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, path
            contrast, text = page.evaluate(CONTRAST)
            assert contrast >= 4.5, f"{path}: {contrast:.2f} at {text}"
        for colouring in ("version", "advantage", "mask", "ratio", "gap", "entropy"):
            contrast, text = watched.open(f"/run/job/step/2/sample/1?by={colouring}").evaluate(CONTRAST)
            assert contrast >= 4.5, f"{colouring}: {contrast:.2f} at {text}"
        paper = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", paper))) < 200) is (scheme == "dark")
        assert watched.wrong == []


def test_nothing_that_a_run_wrote_is_run(pages: Any) -> None:
    def change(row: dict[str, Any]) -> None:
        row |= dict.fromkeys(("prompt", "response", "task_id", "truncation"), f"{EVIL}{row['ordinal']}")
        row["metrics"] = {EVIL: 1.0}

    found = ledger()
    entry = found.entries[1]
    entry.skip_reason = entry.groups[0].task_id = EVIL
    entry.operators.append(EVIL)
    found.drop(2, 50)
    entry.dropped[0].reason = EVIL
    watched = pages(found, change, other=True)
    shown = EVIL.replace("\x1b", r"\x1b").replace("\x00", r"\x00").replace("\u202e", r"\u202e")
    for path in PAGES:
        page = watched.open(path)
        page.mouse.move(300, 400)
        assert page.locator("main script, main img, main [onload], main [onmouseover]").count() == 0
        assert page.locator("a[href^=javascript]").count() == 0
        if path.count("/") > 2 and "lanes" not in path and path != "/run/job/compare":
            assert shown in page.locator("main").inner_text(), path
    assert watched.wrong == []


def test_from_an_alarm_to_the_token_by_keys_alone(pages: Any) -> None:
    watched = pages()
    page = watched.open("/")
    for pressed, arrived in (
        (["j", "Enter"], "/run/job"),
        (["j", "j", "Enter"], "/run/job/step/2"),
        (["j", "j", "k", "Enter"], "/run/job/step/2/group/5"),
        (["j", "j", "Enter"], "/run/job/step/2/sample/1"),
        (["u"], "/run/job/step/2/group/5"),
        (["g", "3", "Enter"], "/run/job/step/3"),
    ):
        for key in pressed:
            page.keyboard.press(key)
        page.wait_for_url(f"**{arrived}")
    page.keyboard.press("/")
    page.keyboard.type("sums/0/11")
    assert page.locator("tbody tr:visible").count() == 1
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/run/job/step/3/group/11")
    assert watched.wrong == []


def test_a_page_that_renews_itself_keeps_the_chosen_row(pages: Any) -> None:
    watched = pages()
    page = watched.open("/run/job")
    for _ in range(2):
        page.keyboard.press("j")
    page.evaluate("document.activeElement.closest('tr').dataset.old = 'yes'")
    page.evaluate("htmx.ajax('GET', '/run/job/now', {target: '#now', swap: 'innerHTML'})")
    page.wait_for_function("!document.querySelector('tr[data-old]')")
    assert page.evaluate("document.activeElement.getAttribute('href')") == "/run/job/step/2"
    assert watched.wrong == []


@pytest.mark.parametrize(("lost", "colour"), [(0, "rgb(0, 114, 178)"), (1, "rgb(179, 38, 30)")], ids=["blue", "red"])
def test_the_bar_turns_red_where_a_group_is_missing(lost: int, colour: str, pages: Any) -> None:
    found = ledger()
    del found.entries[2].groups[:lost]
    page = pages(found).open("/run/job")
    assert page.evaluate("getComputedStyle(document.querySelector('.bar rect')).fill") == colour
    assert page.get_by_text("not dropped and not waiting: group 9").count() == lost


def test_colours_of_tokens_follow_the_choice(pages: Any) -> None:
    watched = pages()
    page = watched.open("/run/job/step/2/sample/1")
    colours = "[...document.querySelectorAll('.block span')].map((one) => getComputedStyle(one).backgroundColor)"
    by_version = page.evaluate(colours)
    assert by_version[0] == by_version[1] != by_version[2] == by_version[3]
    page.get_by_role("link", name="mask", exact=True).click()
    page.wait_for_url("**by=mask")
    by_mask = page.evaluate(colours)
    assert by_mask[0] == by_mask[2] != by_mask[3]
    page.get_by_role("link", name="log-probability", exact=True).click()
    page.wait_for_url("**by=logprob")
    assert len(set(page.evaluate(colours))) == 4
    for name, link in (("gap", "trainer − engine"), ("entropy", "entropy"), ("ratio", "ratio")):
        page.get_by_role("link", name=link, exact=True).click()
        page.wait_for_url(f"**by={name}")
        assert len(set(page.evaluate(colours))) == 4, name
    lines = "[...document.querySelectorAll('.block span')].map((one) => getComputedStyle(one).textDecorationLine)"
    assert page.evaluate(lines) == ["none", "underline", "none", "none"], "the clipped one"
    assert watched.wrong == []


def test_a_long_response_comes_as_one_scrolls_and_after_a_failure(pages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    count, failed, shown = 6000, [True], screens.sample_tokens

    async def once_failing(*given: Any, **how: Any) -> dict[str, Any]:
        if given[3] and failed:
            failed.pop()
            raise RunError("not now")
        return await shown(*given, **how)

    def change(row: dict[str, Any]) -> None:
        ids = np.arange(2, count + 4, dtype="<i4")
        row |= {"arrays": {"token_ids": base64.b64encode(ids.tobytes()).decode()}, "response_tokens": count}

    monkeypatch.setattr(screens, "sample_tokens", once_failing)
    watched = pages(change=change)
    page = watched.open("/run/job/step/2/sample/1?by=logprob")
    tokens = page.locator(".block span")
    assert tokens.count() == 2048, "further ones are asked for when one scrolls to them"
    deadline = time.monotonic() + 30
    while page.locator("[data-more]").count():
        assert time.monotonic() < deadline
        page.evaluate("window.scrollBy(0, 5000)")
        page.wait_for_timeout(50)
    assert tokens.count() == count
    titles = page.evaluate("[...document.querySelectorAll('.block span')].map((one) => parseInt(one.title.slice(6)))")
    assert titles == list(range(count)), "each once, in order"
    assert failed == []
    assert [said for said in watched.wrong if "404" not in said] == []


def test_the_demo_as_a_bundle_opens_from_disk(watch: Any, tmp_path: Path) -> None:
    command = ["-m", "trinity.cli.main", "ui", "--demo", "--bundle", str(tmp_path / "out")]
    first = subprocess.check_output([sys.executable, *command], text=True).splitlines()[0]
    watched = watch(Path(first).as_uri())
    page = watched.page
    assert page.evaluate("getComputedStyle(document.querySelector('#ledger')).borderRadius") == "6px"
    for _ in range(3):  # step, group, sample, by the script of the folder
        before = page.url
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_url(lambda url, before=before: url != before)
    assert page.locator(".block span").count() > 0
    assert watched.wrong == []


def test_a_letter_is_dropped_by_two_clicks(pages: Any) -> None:
    watched = pages()
    page = watched.open("/run/job/dead/50")
    page.locator("summary").click()
    page.get_by_role("button", name="drop this letter").click()
    page.wait_for_url("**/run/job/dead")
    assert page.get_by_text("None.").count() == 1
    assert watched.wrong == []


def test_lanes_take_most_of_the_page(served: Any, watch: Any, tmp_path: Path) -> None:
    job = Path(shutil.copytree(RECORDED, tmp_path / "job"))
    watched = watch(served(job))
    for path in ("step/2/lanes", "step/4/sample/0/trace"):
        page = watched.open(f"/run/{tmp_path.name}~job/{path}")
        assert page.locator(".lanes td svg").first.bounding_box()["width"] > 500
