"""The pages of a run as a folder of HTML files that opens from disk, without the service.

The application is called in this process: first the page of the run, then the pages behind its links, nearest first.
Links to pages outside the folder become text.
"""

import html
import re
import shutil
from collections import deque
from pathlib import Path
from urllib.parse import quote, unquote, urljoin, urlsplit

from starlette.types import ASGIApp, Message

_LINK = re.compile(r'(?<=\s)(href|src)="([^"]*)"')
_ASKING = re.compile(r'\s(?:hx-[a-z]+|data-more)="[^"]*"|<form.*?</form>|<meta name="htmx-config"[^>]*>', re.S)
_PICTURE = re.compile(r"/picture/[0-9a-f]{64}\.[a-z]+$")
_HTMX = re.compile(r'<script src="/static/htmx[^>]*></script>\n?')
_HEAD = """<meta charset="utf-8">
<meta http-equiv="content-security-policy" content="default-src 'none'; script-src file: 'self'; \
style-src file: 'self'; img-src file: 'self'">"""


async def write(app: ASGIApp, key: tuple[str, str], first: str, folder: Path, most: int) -> int:
    """Writes at most `most` pages, starting at the path `first`, into an empty folder. Returns their number.

    `key`: name and value of the cookie of the application.
    """
    cookie = f"{key[0]}={key[1]}"
    found: dict[str, str] = {}
    moved: dict[str, str] = {}
    waiting, known = deque([first]), {first}
    while waiting and len(found) < most:
        path = waiting.popleft()
        status, content, location = await _get(app, path, cookie)
        if location:
            moved[path] = location
        elif status == 200:
            found[path] = content.decode()
        for link in [location] if location else _links(path, found.get(path, "")):
            if link.startswith(first) and not link.endswith("/compare") and link not in known:
                known.add(link)
                waiting.append(link)
    shown = {link for path, text in found.items() for link in _links(path, text, "src") if _PICTURE.search(link)}
    for path in sorted(shown):
        status, content, _ = await _get(app, path, cookie)
        if status == 200:
            _written(folder / _file(path), content)
        else:
            shown.remove(path)
    for path, text in found.items():
        _written(folder / _file(path), _rewritten(path, text, found.keys() | shown, moved).encode())
    shutil.copytree(Path(__file__).parent / "static", folder / "static")
    return len(found)


def _written(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


async def _get(app: ASGIApp, path: str, cookie: str) -> tuple[int, bytes, str]:
    """Returns status and content of one page, and where it redirects to."""
    url = urlsplit(path)
    headers = [(b"host", b"127.0.0.1"), (b"cookie", cookie.encode())]
    scope = {"type": "http", "method": "GET", "http_version": "1.1", "scheme": "http", "root_path": "",
             "path": unquote(url.path), "raw_path": url.path.encode(), "query_string": url.query.encode(),
             "headers": headers, "server": ("127.0.0.1", 80), "client": None}  # fmt: skip
    status, parts, location = 0, list[bytes](), ""

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, location
        status = message.get("status", status)
        location = dict(message.get("headers", ())).get(b"location", location.encode()).decode()
        parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(parts), location


def _links(path: str, text: str, kind: str = "href") -> list[str]:
    return [_target(path, link) for name, link in _LINK.findall(text) if name == kind]


def _target(path: str, link: str) -> str:
    return urljoin(path, html.unescape(link)).partition("#")[0]


def _file(path: str) -> str:
    """Returns the file of a page or picture. Characters of the path stay quoted, so that none leaves the folder."""
    url = urlsplit(path)
    parts = [part for part in url.path.split("/") if part not in ("", ".", "..")]
    if not _PICTURE.search(path):
        parts.append(f"{quote(url.query, safe='=').replace('=', '-')}.html" if url.query else "index.html")
    return "/".join(parts)


def _rewritten(path: str, text: str, pages: object, moved: dict[str, str]) -> str:
    """Returns the page with links to files next to it, and without elements that need a service."""
    up = "../" * _file(path).count("/")

    def link(match: re.Match[str]) -> str:
        target = _target(path, match[2])
        target = moved.get(target, target)
        if target.startswith("/static/"):
            return f'{match[1]}="{up}{target[1:]}"'
        if target in pages:  # type: ignore[operator]
            return f'{match[1]}="{up}{html.escape(quote(_file(target)))}"'
        return ""

    text = _ASKING.sub("", _HTMX.sub("", text)).replace('<meta charset="utf-8">', _HEAD)
    return _LINK.sub(link, text)
