"""The pages in Chinese: every word of theirs has one, and no page shows the English one."""

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from jinja2 import Environment
from starlette.testclient import TestClient

from support.fakes.pages.recorded_run import RECORDED, counts_of, ledger
from trinity.reading.alarms import RULES, Alarm, Known, alarms
from trinity.ui import screens, texts
from trinity.ui.app import make_app
from trinity.ui.places import Places

pytestmark = pytest.mark.core

KEY = "the-key"
TEMPLATES = sorted(Path(texts.__file__).parent.glob("templates/*.html"))
CHINESE = texts.catalogue("zh")
# What templates write out of values: states of runs and tasks, fates of seconds, colourings.
STATES = {"live", "stopped", "finished", "ended", "unknown", "trained", "dropped", "dead", "requeued", "waiting",
          "outstanding", "cut"}  # fmt: skip
FATES = {"recomputed", "skipped", "duplicate", "failed", "dead_letter", "evaluated", "aborted", "publishing", "saving",
         "starting", "restarting", "idle", "other"}  # fmt: skip
OTHERS = {"overview", "versions", "fleet", "waste", "dead letters", "compare", "version", "advantage", "mask", "ratio",
          "entropy", "search", "log", "configuration"}  # fmt: skip
PAGES = ("", "/versions?axis=step", "/versions/3/provenance", "/fleet", "/waste?price=2", "/dead", "/dead/7",
         "/compare", "/compare/two", "/step/4", "/step/4/lanes", "/step/4/group/15", "/step/4/sample/0",
         "/step/4/sample/0?by=advantage",
         "/step/4/sample/0?by=mask", "/step/4/sample/0?by=logprob", "/step/4/sample/0?by=ratio",
         "/step/3/sample/0/trace", "/task/11", "/task/7",
         "/task/99")  # fmt: skip
# Words of the recorded run in cells of tables: a metric, and what of a sample was cut.
CELLS = {"reward", "response"}


def own_words() -> set[str]:
    """All texts that pages write themselves."""
    found = {json.loads(f'"{text}"') for path in TEMPLATES
             for text in re.findall(r'_\("((?:[^"\\]|\\.)*)"\)', path.read_text())}  # fmt: skip
    found |= {*texts.PATTERNS, *STATES, *FATES, *OTHERS, *screens._TIMES.values()}
    counts = counts_of(ledger())
    tiles = screens._tiles(counts, None, [])
    found |= {text for name, _, beside in tiles for text in (name, beside) if not re.search(r"\d", text)} - {""}
    return found | {text for rule in RULES.values() if rule.text for text in (rule.text, rule.fix)}


def test_the_catalogue_has_each_text_and_no_other() -> None:
    assert own_words() == CHINESE.keys()
    assert all(value.strip() for value in CHINESE.values())


def test_fields_of_a_text_are_those_of_its_translation() -> None:
    for english, chinese in CHINESE.items():
        theirs, ours = (set(re.findall(r"\{(\w+)|(%s)", text)) for text in (english, chinese))
        assert ours <= theirs, english


def test_a_job_and_a_task_have_one_word_each() -> None:
    for english, chinese in CHINESE.items():
        assert bool(re.search(r"\bjobs?\b", english, re.IGNORECASE)) == ("作业" in chinese), english
        assert "任务" in chinese or not re.search("task", english, re.IGNORECASE), english


@pytest.mark.parametrize("path", TEMPLATES, ids=[path.stem for path in TEMPLATES])
def test_a_template_writes_no_word_by_itself(path: Path) -> None:
    lexed = Environment().lex(path.read_text())
    html = "".join(value if kind == "data" else "" for _, kind, value in lexed)
    html = re.sub(r"<(code|kbd)\b.*?</\1>", "", html, flags=re.DOTALL)
    for attribute in re.findall(r'(?:title|placeholder|aria-label)="([^"]*)"', html):
        assert not re.search("[A-Za-z]{2}", attribute), attribute
    words = re.findall("[A-Za-z]{2,}", re.sub(r"<[^>]*>", " ", html))
    assert [word for word in words if word != "Trinity"] == []


class _Texts(HTMLParser):
    """Texts of a page, but those that a run wrote, and the switch of the language."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._path: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "input", "br", "rect", "polyline"):
            self._path.append((tag, dict(attrs).get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        while self._path and self._path.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        tags = {tag for tag, _ in self._path}
        is_token = any("block" in css.split() for _, css in self._path)
        text = data.strip(" \n\t,;:.()")
        is_recorded = bool(tags & {"pre", "code", "kbd", "dl", "button"}) or (text in CELLS and "td" in tags)
        if text and not is_token and not is_recorded:
            self.found.append(text)


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setenv("TRINITY_CHECKPOINT_ROOT_DIR", str(tmp_path))
    for name in ("one", "two"):
        shutil.copytree(RECORDED, tmp_path / name)
        (tmp_path / name / ".lock").touch()
    with TestClient(make_app(Places(None), KEY), base_url="http://127.0.0.1") as found:
        found.get(f"/?key={KEY}")
        yield found


@pytest.mark.parametrize("path", ["/", "/lineage", *(f"/run/one{page}" for page in PAGES)])
def test_no_page_shows_english_words_in_chinese(path: str, client: TestClient) -> None:
    page = client.get(path, headers={"accept-language": "zh-CN,zh;q=0.9,en;q=0.8"}).text
    assert '<html lang="zh">' in page
    parser = _Texts()
    parser.feed(page)
    english = {text for text in CHINESE if re.search("[A-Za-z]", text) and CHINESE[text] != text}
    assert [text for text in parser.found if text in english] == []
    assert sum(bool(re.search("[\u4e00-\u9fff]", text)) for text in parser.found) > 3


@pytest.mark.parametrize(
    ("chosen", "remembered", "accepted", "language"),
    [
        ("zh", "en", "en", "zh"), ("", "zh", "en", "zh"), ("", "", "zh-CN,en;q=0.8", "zh"), ("", "", "fr, zh", "zh"),
        ("", "", "", "en"), ("<script>", "../zh", "\x00,;,zh_CN", "en"), ("", "", "de-CH", "en"),
    ],
)  # fmt: skip
def test_the_language_is_the_switch_then_what_it_was_then_the_browsers(
    chosen: str, remembered: str, accepted: str, language: str
) -> None:
    assert texts.language(chosen, remembered, accepted) == language


def test_the_switch_is_remembered(client: TestClient) -> None:
    assert "Task accounting" in client.get("/run/one").text
    assert "任务核算" in client.get("/run/one?lang=zh").text
    assert "任务核算" in client.get("/run/one").text
    assert "Task accounting" in client.get("/run/one?lang=en").text
    assert "Task accounting" in client.get("/run/one?lang=../../zh").text


def test_numbers_and_names_of_an_alarm_stay() -> None:
    (one,) = alarms(Known(None, None, [], [{"step": 1, "rollout/response_truncated/mean": 0.75}]))
    of_alarm = texts.functions("zh")["alarm_text"]
    assert of_alarm(one) == "75% 的回复被截断"
    evil = Alarm("warn", "explorer <b>\n{why}: no", "", rule="explorer")
    assert of_alarm(evil) == "探索器 <b>\n{why}：no"
    assert texts.functions("zh")["_"]("dropped (stale)") == "丢弃（stale）"
    assert texts.functions("en")["_"]("dropped (stale)") == "dropped (stale)"


def test_punctuation_of_templates_is_chinese_on_chinese_pages() -> None:
    template = '<p>{{ a }}, <b>{{ a }}</b>: {{ a }}. <a href="/x,y?z={{ a }}">{{ a }}</a>; 1.5 {{ a }}.</p>'
    found = Environment(extensions=[texts.ChinesePunctuation]).from_string(template).render(a="组")
    assert found == '<p>组，<b>组</b>：组。<a href="/x,y?z=组">组</a>；1.5 组。</p>'


def test_the_chinese_pages_use_chinese_punctuation(client: TestClient) -> None:
    for path in ("/run/one", "/run/one/step/4", "/run/one/dead", "/run/one/waste?price=2"):
        page = client.get(path, headers={"accept-language": "zh"}).text
        assert re.findall("[\u4e00-\u9fff](?:</[a-z]+>)?[,;:](?=[ <])", page) == [], path
