"""Addresses and modules outside the environment service that its operator allows tasks to reach.

Rows and arguments come from the network. The operator's settings do not: they are environment variables of the service,
which its worker processes inherit.
"""

import os
import re
from typing import Any
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, build_opener

from trinity.runtime.errors import InvalidInput

ADDRESSES_VARIABLE = "TRINITY_ENVIRONMENT_ALLOWED_ADDRESSES"
MODULES_VARIABLE = "TRINITY_ENVIRONMENT_ALLOWED_MODULES"
LOOPBACK = "localhost,127.0.0.1,[::1]"
# No user, no escapes: parsers of URLs read such a name in different ways.
_NETLOC = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\])(:(\d{1,5}))?", re.ASCII)
_VISIBLE = re.compile(r"[!-~]+")  # parsers drop or refuse the rest, each in its own way


def check_address(url: str, field: str) -> None:
    """Raises InvalidInput unless the operator allows the URL's host, or its host and port."""
    try:
        netloc = urlsplit(url).netloc.lower()
    except ValueError:
        netloc = ""
    found = _NETLOC.fullmatch(netloc) if _VISIBLE.fullmatch(url) else None
    if found is None or int(found[3] or 0) > 65535:
        what = "must be a URL with a host, and a port if it has one, in printable ASCII"
        raise InvalidInput(field, f"is {url[:200]!r}, {what}")
    allowed = _names(ADDRESSES_VARIABLE, LOOPBACK)
    if netloc not in allowed and found[1] not in allowed:
        raise InvalidInput(
            field,
            f"is {url[:200]!r}, an address that the environment service may not call; its operator adds {netloc} to "
            f"{ADDRESSES_VARIABLE} (now: {', '.join(sorted(allowed)) or 'none'})",
        )


class _NoRedirects(HTTPRedirectHandler):
    """A redirect may lead to an address that is not allowed. Without its handler it is an HTTPError."""

    def redirect_request(self, *_: Any) -> None:
        return None


def opener() -> OpenerDirector:
    """Returns an opener for HTTP to allowed addresses, without a proxy: environments are near."""
    return build_opener(ProxyHandler({}), _NoRedirects())


def check_module(module: str, field: str) -> None:
    """Raises InvalidInput unless the operator lets tasks import the module into the service."""
    if module not in _names(MODULES_VARIABLE, ""):
        raise InvalidInput(
            field,
            f"names the module {module[:200]!r}, which would be imported into the environment service; its operator "
            f"adds it to {MODULES_VARIABLE}, or installs a package that provides the environment",
        )


def _names(variable: str, default: str) -> set[str]:
    given = os.environ.get(variable) or default
    return {name.strip() if variable == MODULES_VARIABLE else name.strip().lower() for name in given.split(",")} - {""}
