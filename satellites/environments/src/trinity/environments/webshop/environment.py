"""WebShop as a text game."""

import re
from contextlib import closing
from typing import Any

from trinity.environments.arguments import Arguments
from trinity.environments.game import FORMAT_HINT, OnInvalid, TextGame, Turn, TurnRules, Unsolvable, replies
from trinity.environments.webshop.backend import Shop
from trinity.environments.webshop.http import HttpShop
from trinity.environments.webshop.local import LocalShop
from trinity.environments.webshop.mini import BY_ASIN, GOALS, MiniShop
from trinity.sdk.environment import Description

_ACTION = re.compile(r"(search|click)\[(.+)\]", re.IGNORECASE)
_FREE_TO_REPEAT = ("search[", "next", "prev")


class WebShop(TextGame):
    """Buy what the instruction asks for. The reward comes with `click[buy now]`: 1 for exactly that, less for less.

    A row is {"session_id": n} (or R3L's {"task_desc": "n"}). `backend`: `mini` (default), `local` with
    `num_products`, or `http` with `url` and `timeout_seconds`. `sparse: true`: 1 for a score of 0.99 at least, else 0.
    The episode's reward is that of its last step: what a mistake took, a later purchase makes good.
    """

    description = Description(
        "webshop", "Find and buy what a customer asks for.", step_timeout_seconds=60, reset_timeout_seconds=600
    )
    isolation = "thread"
    defaults = TurnRules(
        max_steps=15, on_invalid_format=OnInvalid.END, end_penalty=0.1, max_repeats=2, rewards_add_up=False
    )
    instructions = (
        "You are shopping online. Find what the instruction asks for, choose its options, and buy it.\n"
        "Actions: search[keywords] where there is a search bar, click[button] for a button of the page. "
        f"{FORMAT_HINT}"
    )

    def begin(self, task: Arguments, args: Arguments, seed: int) -> str:
        self.sparse = args.boolean("sparse", False)
        session = _session(task, seed)
        self.shop = self.held.enter_context(closing(_backend(args)))
        self.page = self.shop.reset(session)
        self.goal = self.page.instruction
        return self.page.text

    def actions(self) -> list[str]:
        search = ["search[<keywords>]"] if self.page.search_bar else []
        return search + [f"click[{c}]" for c in self.page.clickables if not (search and c == "search")]

    def refusal(self, action: str) -> str:
        parsed = _ACTION.fullmatch(action)
        if not parsed:
            return f"{action!r} is neither search[keywords] nor click[button]"
        verb, argument = parsed[1].lower(), parsed[2].strip().lower()
        if verb == "search":
            return "" if self.page.search_bar else "this page has no search bar"
        return "" if argument in self.page.clickables else f"this page has no button {argument!r}"

    def repeatable(self, action: str) -> bool:
        return any(word in action.lower() for word in _FREE_TO_REPEAT)

    def play(self, action: str) -> Turn:
        verb, _, argument = action.partition("[")
        action = f"{verb.lower()}[{argument if verb.lower() == 'search' else argument.lower()}"
        self.page, score, done = self.shop.step(action)
        reward = float(score >= 0.99) if self.sparse else score
        return Turn(self.page.text, reward, done, done and score >= 1, {"score": score, "bought": float(done)})

    @classmethod
    def oracle(cls, task: dict[str, Any], args: dict[str, Any], seed: int) -> list[str]:
        """Solves tasks of the small shop, which knows the product behind each goal."""
        if args.get("backend", "mini") != "mini":
            raise Unsolvable("only the goals of the mini shop are known")
        goal = GOALS[_session(Arguments(task, "task"), seed) % len(GOALS)]
        choices = [f"click[{value}]" for value in goal.options.values()]
        title = BY_ASIN[goal.asin].title
        return replies([f"search[{title}]", f"click[{goal.asin.lower()}]", *choices, "click[buy now]"])


def _backend(args: Arguments) -> Shop:
    kind = args.choice("backend", "mini", ["mini", "local", "http"])
    url = args.text("url", "")
    if bool(url) != (kind == "http"):
        raise args.wrong("url", url, "given with backend http, and left out with any other")
    if kind == "http":
        return HttpShop(url, args.number("timeout_seconds", 30.0, low=0.1))
    if kind == "local":
        products = args.integer("num_products", 0, low=0)
        return LocalShop(products or None)
    return MiniShop()


def _session(task: Arguments, seed: int) -> int:
    if "session_id" not in task and "task_desc" in task:
        text = str(task.get("task_desc", ""))
        if not text.isascii() or not text.isdigit() or len(text) > 9:
            raise task.wrong("task_desc", text, "a session's number")
        return int(text)
    return task.integer("session_id", seed, low=0)
