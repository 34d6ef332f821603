"""Tables in a browser: sorted, filtered, searched; one click to the worst sample; axe finds no violation."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from support.fakes.pages.alarms import STATUS
from support.fakes.pages.recorded_run import (
    STEPS,
    dead_letter,
    ledger,
    make_job,
    serve_ledger,
    serve_status,
    serve_versions,
    write_account,
    write_versions,
)

pytestmark = pytest.mark.extended

AXE = Path(__file__).parent / "axe" / "axe-4.14.1.min.js"
PAGES = (
    "/", "/run/job", "/run/job/step/2", "/run/job/step/2/group/5", "/run/job/step/2/sample/1?by=logprob",
    "/run/job/step/2/lanes", "/run/job/step/2/sample/1/trace", "/run/job/task/5", "/run/job/dead", "/run/job/dead/50",
    "/run/job/compare", "/run/job/compare/other", "/run/job/waste?price=2", "/run/job/fleet?axis=step",
    "/run/job/versions", "/run/job/versions/1", "/lineage", "/run/job/versions/2/provenance",
    "/run/job/search?text=it", "/run/job/log", "/run/job/config",
)  # fmt: skip
FOUND = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations
  .map((one) => `${one.id}: ${one.nodes.map((node) => node.target).join(", ")}`)"""


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: Any, watch: Any) -> Callable[..., Any]:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    serve_ledger(monkeypatch, ledger(), [dead_letter(50, "no scorer")])
    serve_versions(monkeypatch, "sound")
    serve_status(monkeypatch, STATUS)

    def change(row: dict[str, Any]) -> None:
        if row["ordinal"] == 11 and row["rollout"] == 1:
            row |= {"reward": -2.0, "response": "It is Seven."}

    job = make_job(tmp_path / "job", change)
    write_account(job)
    write_versions(job, "none")
    line = {"event": "trainer.step.done", "level": "info", "time": "2026-11-24T01:12:12Z"}
    (job / "log/trainer.log").write_text(json.dumps(line) + "\n")
    make_job(tmp_path / "other")
    address = served(None)
    return lambda **how: watch(address, **how)


def column(page: Page, number: int) -> list[str]:
    return page.locator(f"main table tbody tr:visible td:nth-child({number})").all_inner_texts()


def test_one_click_from_the_run_to_the_worst_sample_of_the_newest_step(pages: Any) -> None:
    watched = pages()
    page = watched.open("/run/job")
    page.get_by_role("link", name="worst sample of the newest step").click()
    page.wait_for_url(f"**/run/job/step/{STEPS}/sample/5")
    assert page.get_by_text("It is Seven.").count() > 0
    page = watched.open(f"/run/job/step/{STEPS}")
    page.get_by_role("link", name="worst sample").click()
    page.wait_for_url(f"**/run/job/step/{STEPS}/sample/5")
    assert watched.wrong == []


def test_a_table_is_sorted_by_a_head_and_filtered_by_its_box(pages: Any) -> None:
    watched = pages()
    page = watched.open(f"/run/job/step/{STEPS}")
    assert column(page, 1) == ["9", "10", "11", "12"]
    head = page.get_by_role("button", name="group", exact=True)
    head.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert column(page, 1) == ["12", "11", "10", "9"], "by number and by the keyboard"
    assert page.locator("th[aria-sort=descending]").inner_text() == "group"
    page.get_by_role("button", name="least", exact=True).click()
    assert column(page, 1) == ["11", "9", "10", "12"]
    page.locator(".filter").fill("SUMS/0/1")
    assert column(page, 1) == ["11", "10", "12"]
    page.locator(".filter").fill("")
    for _ in range(2):
        page.get_by_role("button", name="least", exact=True).click()
    assert column(page, 1) == ["9", "10", "11", "12"], "the third click brings the order of the page"
    assert watched.wrong == []


def test_a_live_page_keeps_order_and_filter(pages: Any) -> None:
    watched = pages()
    page = watched.open("/run/job")
    steps = page.locator("#tables table").last
    steps.get_by_role("button", name="step", exact=True).click()
    first = steps.locator("tbody td").first
    assert first.inner_text() == "1"
    page.evaluate("document.querySelector('#tables tbody').dataset.old = 'yes'")
    page.evaluate("htmx.ajax('GET', '/run/job/now', {target: '#now', swap: 'innerHTML'})")
    page.wait_for_function("!document.querySelector('[data-old]')")
    expect(first).to_have_text("1")
    assert watched.wrong == []


def test_a_text_in_a_response_is_found(pages: Any) -> None:
    watched = pages()
    page = watched.open("/run/job")
    page.get_by_role("link", name="search", exact=True).click()
    page.get_by_label("text").fill("seven")
    page.keyboard.press("Enter")
    page.wait_for_url("**/search?text=seven")
    assert column(page, 1) == [str(STEPS)]
    page.locator("tbody a").click()
    page.wait_for_url(f"**/step/{STEPS}/sample/5")
    assert watched.wrong == []


def test_tables_of_a_phone_scroll_and_are_not_cut(pages: Any) -> None:
    watched = pages(width=390)
    for path in PAGES:
        page = watched.open(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
        cut = page.evaluate("""[...document.querySelectorAll("main table")].filter((table) => {
          const box = table.closest(".wide"), scrolls = box && getComputedStyle(box).overflowX === "auto";
          return !scrolls && table.getBoundingClientRect().right > innerWidth;
        }).length""")
        assert cut == 0, path
        narrow = page.evaluate("""[...document.querySelectorAll(".tiles, .lanes td svg")].filter((one) =>
          one.getBoundingClientRect().width < (one.matches(".tiles") ? 340 : 200)).length""")
        assert narrow == 0, f"{path}: tiles beside the heading, or lanes that show nothing"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation(scheme: str, pages: Any) -> None:
    watched = pages(scheme=scheme)
    found: dict[str, list[str]] = {}
    for path in PAGES:
        page = watched.open(path)
        page.wait_for_load_state("networkidle")
        cdp = page.context.new_cdp_session(page)  # the page's policy allows no script of ours, the debugger does
        cdp.send("Runtime.evaluate", {"expression": AXE.read_text()})
        found[path] = page.evaluate(FOUND)
    assert {path: problems for path, problems in found.items() if problems} == {}
