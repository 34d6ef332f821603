"""WebShop's reward: how much of what the customer wanted was bought."""

import re
from collections.abc import Mapping, Sequence

from trinity.environments.webshop.catalogue import Goal, Product

SIMILAR = 85
COLORS = (
    "black", "white", "grey", "gray", "silver", "red", "pink", "orange", "yellow", "gold", "green", "blue", "navy",
    "purple", "brown", "beige", "camel", "sand", "charcoal",
)  # fmt: skip
_WORD = re.compile(r"[a-z0-9]+")


def reward(bought: Product, goal: Goal, chosen: Mapping[str, str]) -> float:
    """From 0 to 1: the product's kind, times the share of attributes, options and price limit that are met."""
    attributes = sum(_has_attribute(bought, attribute) for attribute in goal.attributes)
    options = sum(any(similar(_plain(o), _plain(wanted)) for o in chosen.values()) for wanted in goal.options.values())
    price = bought.price <= goal.price_upper
    met, asked = attributes + options + price, len(goal.attributes) + len(goal.options) + 1
    return kind_factor(bought, goal) * met / asked


def kind_factor(bought: Product, goal: Goal) -> float:
    """1 for the kind of thing that was wanted, down to 0 for something whose title has nothing in common with it."""
    wanted, found = _nouns(goal.title), _nouns(bought.title)
    overlap = len(wanted & found) / len(wanted) if wanted else 0.2
    shared = {part.strip() for part in goal.category.split("›")} & {part.strip() for part in bought.category.split("›")}
    if overlap == 0:
        return 0.0
    if overlap < 0.1:
        return 0.1
    return 1.0 if bought.query == goal.query or len(shared) >= 2 or overlap > 0.2 else 0.5


def _nouns(title: str) -> set[str]:
    """All words of letters stand in for the nouns that WebShop finds with spaCy."""
    return {word for word in _WORD.findall(title.lower()) if word.isalpha()}


def _has_attribute(bought: Product, wanted: str) -> bool:
    texts = " ".join((bought.title, *bought.bullets, bought.description)).lower()
    return any(similar(wanted, attribute) for attribute in bought.attributes) or wanted.lower() in texts


def _plain(option: str) -> str:
    """An option, reduced to the first known colour in it."""
    found = _WORD.findall(option.lower())
    return next((word for word in found if word in COLORS), option.lower())


def similar(first: str, second: str) -> bool:
    """Tells if the token set ratio (0 to 100, as in thefuzz) of two texts is above 85."""
    return token_set_ratio(first, second) > SIMILAR


def token_set_ratio(first: str, second: str) -> float:
    """The best likeness among the common words, and the common words followed by what each text has besides."""
    left, right = set(_WORD.findall(first.lower())), set(_WORD.findall(second.lower()))
    if not left or not right:
        return 0.0
    common = " ".join(sorted(left & right))
    texts = [" ".join(filter(None, (common, " ".join(sorted(rest))))) for rest in (left - right, right - left)]
    pairs = [tuple(texts)] + ([(common, text) for text in texts] if common else [])
    return max(_ratio(a, b) for a, b in pairs)


def _ratio(first: Sequence[str], second: Sequence[str]) -> float:
    """100 times twice the longest common subsequence over both lengths."""
    row = [0] * (len(second) + 1)
    for a in first:
        diagonal = 0
        for column, b in enumerate(second, 1):
            above = row[column]
            row[column] = diagonal + 1 if a == b else max(above, row[column - 1])
            diagonal = above
    return 100 * 2 * row[-1] / (len(first) + len(second))
