"""The interface of WebShop's backends."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Page:
    """The customer's view of a page. `clickables` in lower case; `search_bar`: if the page has one."""

    text: str
    search_bar: bool
    clickables: tuple[str, ...]
    instruction: str


class Shop(Protocol):
    """One visit."""

    def reset(self, session: int) -> Page:
        """Begin the visit of the customer with this number."""

    def step(self, action: str) -> tuple[Page, float, bool]:
        """`search[words]` or `click[button]`: the next page, the reward, and whether the visit is over."""

    def close(self) -> None:
        """Release what the visit holds."""
