"""What WebShop is played on."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Page:
    """What the customer sees. `clickables` in lower case; `search_bar`: whether the page has one."""

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
