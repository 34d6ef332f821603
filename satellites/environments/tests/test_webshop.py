"""WebShop: the small shop's pages, actions and reward, and the adapters to other engines."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.fakes.environments.playing import play
from support.servers.webshop_server import Shops, webshop_server
from trinity.config.workflows import R3L_RULES
from trinity.environments.replies import write
from trinity.environments.webshop import local
from trinity.environments.webshop.catalogue import PRODUCTS, goals
from trinity.environments.webshop.environment import WebShop
from trinity.environments.webshop.mini import GOALS, MiniShop
from trinity.environments.webshop.reward import kind_factor, reward, token_set_ratio
from trinity.runtime.errors import Conflict, InvalidInput, TimedOut, Unavailable

pytestmark = pytest.mark.core


@pytest.mark.parametrize("session", range(len(GOALS)))
def test_the_oracle_buys_the_right_thing_for_every_customer(session: int) -> None:
    task = {"session_id": session}
    played = play(WebShop(), WebShop.oracle(task, {}, 0), task)
    assert (played.reward, played.won) == (1, True)


def test_the_pages_read_like_webshops() -> None:
    shop = MiniShop()
    first = shop.reset(0)
    assert first.text.startswith("WebShop\nInstruction:\ni need a ")
    assert (first.search_bar, first.clickables) == (True, ("search",))
    results, _, _ = shop.step("search[coffee]")
    assert "Page 1 (Total results: 2)" in results.text
    assert "[button] B0MINI0007 [button_]\nMorning Ridge" in results.text
    assert not results.search_bar
    item, _, _ = shop.step("click[b0mini0007]")
    assert "flavor name\n  [button] hazelnut [button_]" in item.text
    chosen, _, _ = shop.step("click[24 ounce]")
    chosen, _, _ = shop.step("click[vanilla]")
    assert chosen.text.startswith("You have clicked vanilla.\nYou have clicked 24 ounce.\nInstruction:")
    assert "  [clicked button] vanilla [clicked button_]" in chosen.text
    page, _, _ = shop.step("click[features]")
    assert "Fair trade beans" in page.text
    assert page.clickables == ("back to search", "< prev")
    assert shop.step("click[< prev]")[0] == chosen
    assert "[clicked button] B0MINI0007" in shop.step("click[< prev]")[0].text
    assert shop.step("click[back to search]")[0] == first


def test_what_a_page_does_not_offer_changes_nothing() -> None:
    shop = MiniShop()
    first = shop.reset(0)
    for action in ("click[buy now]", "click[b0mini0001]", "search[]", "buy", "", "click[", "click[search]"):
        assert shop.step(action) == (first, 0.0, False)


def test_results_come_in_pages_of_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    shop = MiniShop()
    shop.reset(0)
    shop._go_to_results([replace(PRODUCTS[0], asin=f"B{n:09}") for n in range(23)])
    assert shop._page().clickables[1:3] == ("next >", "b000000000")
    assert shop.step("click[next >]")[0].clickables[1:3] == ("< prev", "next >")
    last = shop.step("click[next >]")[0]
    assert last.clickables == ("back to search", "< prev", "b000000020", "b000000021", "b000000022")
    assert "Page 2 " in shop.step("click[< prev]")[0].text


def test_the_reward_is_the_share_of_what_was_asked_for() -> None:
    goal = next(g for g in goals() if g.asin == "B0MINI0001" and len(g.attributes) == 2)
    jacket = PRODUCTS[0]
    assert reward(jacket, goal, goal.options) == 1
    assert reward(jacket, goal, {}) == pytest.approx(3 / 5)
    assert reward(replace(jacket, price=999.0), goal, goal.options) == pytest.approx(4 / 5)
    plain = replace(jacket, attributes=(), bullets=(), description="", title="Mens Rain Jacket")
    assert reward(plain, goal, goal.options) == pytest.approx(3 / 5)
    other_color = {**goal.options, "color": "purple"}
    assert reward(jacket, goal, other_color) == pytest.approx(4 / 5)


def test_another_kind_of_thing_is_worth_less() -> None:
    goal = next(g for g in goals() if g.asin == "B0MINI0001")
    mug = next(p for p in PRODUCTS if p.asin == "B0MINI0005")
    coat = PRODUCTS[1]
    assert kind_factor(PRODUCTS[0], goal) == 1
    assert kind_factor(coat, goal) == 1  # another query, but the same shelf
    assert kind_factor(replace(mug, title="Stoneware Cups"), goal) == 0
    assert kind_factor(replace(mug, title="Cups for Hiking"), goal) == 0.5
    long_goal = replace(goal, title=" ".join(["jacket", *(f"w{'x' * n}" for n in range(1, 15))]))
    assert kind_factor(replace(mug, title="a jacket"), long_goal) == 0.1


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("machine wash", "machine wash", True),
        ("machine wash", "machine washable", True),
        ("wash machine", "Machine  wash", True),
        ("light weight", "lightweight", True),
        ("rubber sole", "rubber sole that grips", True),
        ("long sleeve", "short sleeve", False),
        ("", "x", False),
    ],
)
def test_attributes_are_compared_by_their_words(first: str, second: str, same: bool) -> None:
    assert (token_set_ratio(first, second) > 85) is same


@given(st.text("ab c", max_size=20), st.text("ab c", max_size=20))
def test_the_token_set_ratio_is_symmetric_and_bounded(first: str, second: str) -> None:
    assert 0 <= token_set_ratio(first, second) <= 100
    assert token_set_ratio(first, second) == pytest.approx(token_set_ratio(second, first))


def test_a_second_equal_action_ends_the_visit_unless_it_turns_pages() -> None:
    searches = [write("search[coffee]"), write("click[back to search]")] * 3
    assert not play(WebShop(), searches, {"session_id": 1}).last.done
    clicks = [write("search[coffee]"), write("click[b0mini0007]"), write("click[vanilla]"), write("click[vanilla]")]
    played = play(WebShop(), clicks, {"session_id": 1})
    assert (played.last.done, played.reward) == (True, -0.1)


def test_actions_of_other_pages_are_told_and_a_reply_without_one_ends() -> None:
    played = play(WebShop(), [write("click[buy now]"), write("search[tea]"), write("search[mug]")], {"session_id": 1})
    assert "no button 'buy now'" in played.observations[1].text
    assert "no search bar" in played.last.text
    assert played.last.metrics["invalid_action"] == 2
    assert play(WebShop(), ["hm\nhm"], {"session_id": 1}).reward == -0.1


def test_by_r3ls_rules_the_reward_is_that_of_the_last_step() -> None:
    args, task = R3L_RULES["webshop"].environment_args, {"session_id": 1}
    wrong = write("click[nowhere]")
    bought = play(WebShop(), [wrong, *WebShop.oracle(task, {}, 0)], task, args)
    assert bought.reward == pytest.approx(1)
    assert bought.last.metrics["reward"] == pytest.approx(1)
    assert bought.won
    assert play(WebShop(), [wrong, write("search[tea]")], task, args).reward == pytest.approx(0)
    assert play(WebShop(), [wrong, write("search[tea]"), wrong], task, args).reward == pytest.approx(-0.1)
    assert play(WebShop(), [wrong, "no action"], task, args).reward == pytest.approx(-0.1)


def test_sparse_rewards_leave_only_success() -> None:
    goal = GOALS[0]
    half = [write("search[" + goal.query + "]"), write(f"click[{goal.asin}]"), write("click[buy now]")]
    assert 0 < play(WebShop(), half, {"session_id": 0}).reward < 1
    assert play(WebShop(), half, {"session_id": 0}, {"sparse": True}).reward == 0
    oracle = WebShop.oracle({"session_id": 0}, {}, 0)
    assert play(WebShop(), oracle, {"session_id": 0}, {"sparse": True}).reward == 1


def test_r3ls_rows_name_the_session_as_text() -> None:
    assert play(WebShop(), [], {"task_desc": "7"}).last.text == play(WebShop(), [], {"session_id": 7}).last.text
    with pytest.raises(InvalidInput, match=r"task\.task_desc"):
        WebShop().reset({"task_desc": "seven"}, {}, 0)


@pytest.fixture
def server() -> Iterator[tuple[str, Shops]]:
    with webshop_server() as running:
        yield running


def test_a_visit_over_http_is_the_same_visit(server: tuple[str, Shops]) -> None:
    url, shops = server
    task, args = {"session_id": 3}, {"backend": "http", "url": url}
    replies = [write("search[coffee]"), write("click[nowhere]"), write("click[back to search]")]
    replies += WebShop.oracle(task, {}, 0)
    here, there = play(WebShop(), replies, task), play(WebShop(), replies, task, args)
    assert there.observations == here.observations
    assert there.won
    assert not shops.open


@pytest.mark.parametrize(
    ("path", "broken", "error"),
    [
        ("create", b'"no number"', InvalidInput),
        ("create", b"<html>", InvalidInput),
        ("available_actions", b"[]", InvalidInput),
        ("observation", 2.0, TimedOut),
        ("observation", b'"' + b"x" * 5_000_000 + b'"', InvalidInput),
    ],
)
def test_a_server_that_answers_nonsense_is_named(
    server: tuple[str, Shops], path: str, broken: bytes | float, error: type[Exception]
) -> None:
    url, shops = server
    shops.broken[path] = broken
    with pytest.raises(error, match=r"webshop"):
        play(WebShop(), [], {"session_id": 1}, {"backend": "http", "url": url, "timeout_seconds": 0.5})


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"):
        play(WebShop(), [], {"session_id": 1}, {"backend": "http", "url": "http://127.0.0.1:9"})
    with pytest.raises(InvalidInput, match=r"args\.url"):
        play(WebShop(), [], {"session_id": 1}, {"backend": "http"})
    with pytest.raises(InvalidInput, match=r"args\.url"):
        play(WebShop(), [], {"session_id": 1}, {"backend": "http", "url": "file:///etc/passwd"})
    with pytest.raises(InvalidInput, match=r"args\.url: is 'http://x', must be given with backend http"):
        play(WebShop(), [], {"session_id": 1}, {"url": "http://x"})


INSTALLED = '''
from trinity.environments.webshop.mini import MiniShop

made = []


class WebAgentTextEnv:
    """The interface of the real one around the mini shop."""

    def __init__(self, observation_mode, num_products, human_goals, server=None):
        assert observation_mode == "text_rich"
        self.server = server or object()
        self.shop = MiniShop()
        made.append(self)

    def reset(self, session):
        self.page = self.shop.reset(session)

    def step(self, action):
        self.page, reward, done = self.shop.step(action)
        return self.page.text, reward, done, None

    observation = property(lambda self: self.page.text)

    def get_instruction_text(self):
        return self.page.instruction

    def get_available_actions(self):
        return {"has_search_bar": self.page.search_bar, "clickables": list(self.page.clickables)}

    def close(self):
        pass
'''


def test_an_installed_web_agent_site_is_played_and_shares_its_goods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "web_agent_site/envs"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(INSTALLED)
    monkeypatch.setenv("WEBSHOP_PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(local, "_servers", {})
    for session in range(3):
        task = {"session_id": session}
        assert play(WebShop(), WebShop.oracle(task, {}, 0), task, {"backend": "local"}).won
    made = sys.modules["web_agent_site.envs"].made
    assert len({id(environment.server) for environment in made}) == 1
    for name in ("web_agent_site.envs", "web_agent_site"):
        del sys.modules[name]


def test_without_web_agent_site_the_error_names_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEBSHOP_PATH", raising=False)
    with pytest.raises(Conflict, match="princeton-nlp/WebShop"):
        play(WebShop(), [], {}, {"backend": "local"})
    monkeypatch.setenv("WEBSHOP_PATH", str(tmp_path))
    with pytest.raises(Conflict, match="holds no folder web_agent_site"):
        play(WebShop(), [], {}, {"backend": "local"})
