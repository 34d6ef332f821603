"""The small shop: its search (BM25), and the pages a customer walks through, in WebShop's rich text."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from trinity.environments.webshop.backend import Page
from trinity.environments.webshop.catalogue import PRODUCTS, Product, goals
from trinity.environments.webshop.reward import reward

_WORD = re.compile(r"[a-z0-9]+")
_K1, _B = 1.2, 0.75
MAX_RESULTS = 50
MAX_QUERY_WORDS = 50


class Search:
    """Ranks a fixed catalogue (Robertson and Zaragoza 2009, with the usual k1 and b)."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = products
        self._words = [Counter(_WORD.findall(_text(product))) for product in products]
        self._mean_length = sum(map(Counter.total, self._words)) / len(products)
        self._documents = Counter(word for counts in self._words for word in counts)

    def find(self, query: str) -> list[Product]:
        """The best first; none that shares no word with the query."""
        wanted = _WORD.findall(query.lower())[:MAX_QUERY_WORDS]
        scored = [
            (self._score(wanted, words), product) for words, product in zip(self._words, self._products, strict=True)
        ]
        found = sorted((pair for pair in scored if pair[0] > 0), key=lambda pair: -pair[0])
        return [product for _, product in found[:MAX_RESULTS]]

    def _score(self, wanted: Sequence[str], words: Counter[str]) -> float:
        length = _K1 * (1 - _B + _B * words.total() / self._mean_length)
        return sum(self._rarity(word) * words[word] * (_K1 + 1) / (words[word] + length) for word in wanted)

    def _rarity(self, word: str) -> float:
        documents = self._documents[word]
        return math.log(1 + (len(self._products) - documents + 0.5) / (documents + 0.5))


def _text(product: Product) -> str:
    options = (value for values in product.options.values() for value in values)
    parts = (product.title, product.description, *product.bullets, *product.attributes, *options)
    return " ".join(parts).lower()


PER_PAGE = 10
BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews")
_ACTION = re.compile(r"(search|click)\[(.*)\]", re.DOTALL)
_SEARCH = Search(PRODUCTS)
GOALS = goals()
BY_ASIN = {product.asin: product for product in PRODUCTS}


@dataclass
class MiniShop:
    """One customer's visit. Actions that a page does not offer change nothing."""

    place: str = "index"  # index, results, item, one of SUB_PAGES, done
    results: list[Product] = field(default_factory=list)
    page: int = 1
    item: Product | None = None
    chosen: dict[str, str] = field(default_factory=dict)
    visited: set[str] = field(default_factory=set)
    score: float = 0.0

    def reset(self, session: int) -> Page:
        self.goal = GOALS[session % len(GOALS)]
        return self._page()

    def step(self, action: str) -> tuple[Page, float, bool]:
        """The next page, the reward, and whether the visit is over."""
        parsed = _ACTION.fullmatch(action.strip())
        if self.place != "done" and parsed:
            verb, argument = parsed.groups()
            if verb == "search":
                if argument.strip():
                    self._go_to_results(_SEARCH.find(argument))
            elif argument.strip().lower() in self._page().clickables:
                self._click(argument.strip().lower())
                if self.place == "done":
                    return self._page(), self.score, True
        return self._page(), 0.0, self.place == "done"

    def close(self) -> None:
        """Nothing is held."""

    def _go_to_results(self, found: list[Product]) -> None:
        self.place, self.results, self.page, self.item, self.chosen = "results", found, 1, None, {}

    def _click(self, button: str) -> None:
        if button == "search":  # the empty search bar
            return
        if button == BACK.lower():
            self.place, self.item, self.chosen = "index", None, {}
        elif button == NEXT.lower():
            self.page += 1
        elif button == PREVIOUS.lower():
            self._go_back()
        elif button.upper() in BY_ASIN and self.place == "results":
            self.place, self.item, self.chosen = "item", BY_ASIN[button.upper()], {}
            self.visited.add(button.upper())
        elif self.item is not None and button == BUY.lower():
            self.place, self.score = "done", reward(self.item, self.goal, self.chosen)
        elif button in {name.lower() for name in SUB_PAGES}:
            self.place = button.capitalize()
        elif self.item is not None:
            name = next(n for n, values in self.item.options.items() if button in values)
            self.chosen.pop(name, None)  # so that the latest choice is named first
            self.chosen[name] = button

    def _go_back(self) -> None:
        if self.place in SUB_PAGES:
            self.place = "item"
        elif self.place == "item":
            self.place, self.item, self.chosen = "results", None, {}
        else:
            self.page -= 1

    def _page(self) -> Page:
        lines, buttons = self._content()
        if self.place == "index":
            lines = ["WebShop", "Instruction:", self.goal.instruction, *lines]
        elif self.place != "done":
            lines = ["Instruction:", self.goal.instruction, _button(BACK), *lines]
            buttons = [BACK, *buttons]
        clicked = (
            [f"You have clicked {value}." for value in reversed(self.chosen.values())] if self.place == "item" else []
        )
        text = "\n".join([*clicked, *lines])
        clickables = tuple(button.lower() for button in buttons)
        return Page(text, self.place == "index", clickables, self.goal.instruction)

    def _content(self) -> tuple[list[str], list[str]]:
        """Returns lines and buttons of the current page, without the buttons of every page."""
        if self.place == "index":
            return [_button("Search")], ["search"]
        if self.place == "results":
            return self._results()
        if self.place == "done":
            return ["Thank you for shopping with us!", "Your score (min 0.0, max 1.0)", str(round(self.score, 4))], []
        assert self.item is not None
        if self.place == "item":
            return self._item(self.item)
        texts = {
            "Description": [self.item.description],
            "Features": list(self.item.bullets),
            "Reviews": ["No reviews yet."],
        }
        return [_button(PREVIOUS), *texts[self.place]], [PREVIOUS]

    def _results(self) -> tuple[list[str], list[str]]:
        shown = self.results[(self.page - 1) * PER_PAGE : self.page * PER_PAGE]
        turning = [PREVIOUS] * (self.page > 1) + [NEXT] * (self.page * PER_PAGE < len(self.results))
        lines = [f"Page {self.page} (Total results: {len(self.results)})", *map(_button, turning)]
        for product in shown:
            lines += [_button(product.asin, product.asin in self.visited), product.title, f"${product.price}"]
        return lines, [*turning, *(product.asin for product in shown)]

    def _item(self, item: Product) -> tuple[list[str], list[str]]:
        lines, values = [_button(PREVIOUS)], list[str]()
        for name, offered in item.options.items():
            lines += [name, *(f"  {_button(value, self.chosen.get(name) == value)}" for value in offered)]
            values += offered
        lines += [item.title, f"Price: ${item.price}", "Rating: N.A.", *map(_button, SUB_PAGES), _button(BUY)]
        return lines, [PREVIOUS, *SUB_PAGES, BUY, *values]


def _button(text: str, clicked: bool = False) -> str:
    return f"[clicked button] {text} [clicked button_]" if clicked else f"[button] {text} [button_]"
