"""The error for parts of Trinity-RFT that have no counterpart; it names the page of the guide."""

from trinity.plugins import PluginError

PAGE = "docs/from_trinity.md"


class NotMapped(PluginError):
    """A plugin uses what Trinity-RFT has and Trinity has not."""

    def __init__(self, what: str, anchor: str = "") -> None:
        super().__init__(f"{what}; see {PAGE}{'#' if anchor else ''}{anchor}")
