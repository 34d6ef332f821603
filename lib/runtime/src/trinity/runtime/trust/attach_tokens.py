"""Tokens of environment providers that attach: a file of their digests, with a name and an expiry each.

Who reads the file cannot attach by it. `trinity env tokens` changes it; the environment service follows it.
"""

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog
from pydantic import TypeAdapter, ValidationError

from trinity.runtime import files
from trinity.runtime.errors import AlreadyExists, InvalidInput, NotFound, Unavailable
from trinity.runtime.process import FileLock

log = structlog.get_logger(__name__)

FILE_NAME = "attach_tokens.json"
_DAY_SECONDS = 86_400.0


@dataclass(frozen=True)
class AttachToken:
    """`sha256`: of the token, hexadecimal. Times are Unix seconds; `expires_at` 0: never."""

    name: str
    sha256: str
    expires_at: float = 0.0
    created_at: float = 0.0

    @property
    def expired(self) -> bool:
        return 0 < self.expires_at <= time.time()


_FILE = TypeAdapter(list[AttachToken])


def read_tokens(path: Path) -> list[AttachToken]:
    """Those of a file; none if there is no file. Raises InvalidInput if it holds something else."""
    try:
        return _FILE.validate_json(path.read_bytes())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InvalidInput(str(path), f"cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise InvalidInput(str(path), f"is no file of attach tokens: {error.errors()[0]['msg']}") from None


def create_token(path: Path, name: str, days: int) -> str:
    """Returns a new token, which nothing stores: the file has only its digest. Raises AlreadyExists, InvalidInput."""
    if not 1 <= len(name) <= 200 or not name.isprintable():
        raise InvalidInput("name", f"is {name[:200]!r}, must be 1 to 200 printable characters")
    token, now = secrets.token_urlsafe(32), time.time()

    def added(tokens: list[AttachToken]) -> list[AttachToken]:
        if any(one.name == name for one in tokens):
            raise AlreadyExists(f"{path} has a token named {name!r}; revoke it first, or take another name")
        return [*tokens, AttachToken(name, _digest(token), now + days * _DAY_SECONDS, now)]

    _change(path, added)
    return token


def revoke_token(path: Path, name: str) -> None:
    """Raises NotFound, InvalidInput."""

    def without(tokens: list[AttachToken]) -> list[AttachToken]:
        kept = [one for one in tokens if one.name != name]
        if len(kept) == len(tokens):
            raise NotFound(f"{path} has no token named {name!r}")
        return kept

    _change(path, without)


class AttachTokens:
    """The tokens that an environment service accepts: the token of its settings, and the file's current tokens."""

    def __init__(self, shared: str = "", path: Path | None = None) -> None:
        """Raises InvalidInput if the file is there and has something else."""
        self._shared = AttachToken("", _digest(shared)) if shared else None
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._tokens: list[AttachToken] = read_tokens(path) if path is not None else []

    def find(self, token: str) -> AttachToken | None:
        """The valid one or an expired one; None: it is not known."""
        known = [*([self._shared] if self._shared else []), *self._read()]
        shown = _digest(token)
        found = [one for one in known if hmac.compare_digest(one.sha256, shown)]  # all: the time tells nothing
        return found[0] if found else None

    def problem(self, found: AttachToken) -> str:
        """Why a token that was found is not valid any more; empty: it is."""
        if found == self._shared:
            return ""
        now = next((one for one in self._read() if (one.name, one.sha256) == (found.name, found.sha256)), None)
        if now is None:
            return f"the token {found.name!r} was revoked"
        return f"the token {found.name!r} has expired" if now.expired else ""

    @property
    def empty(self) -> bool:
        return self._shared is None and not self._read()

    def _read(self) -> list[AttachToken]:
        """Returns the file's tokens: the last good ones for a damaged file, none for a removed file."""
        if self._path is None:
            return []
        before, self._stamp = self._stamp, files.stamp(self._path)
        if self._stamp is None:
            self._tokens = []
        elif self._stamp != before:
            try:
                self._tokens = read_tokens(self._path)
            except InvalidInput as error:
                log.error("trust.tokens.unreadable", reason=str(error))
        return self._tokens


def _change(path: Path, change: Callable[[list[AttachToken]], list[AttachToken]]) -> None:
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    if not lock.acquire():
        raise Unavailable(f"another command changes {path} now; try again")
    try:
        changed = change(read_tokens(path))
        content = json.dumps([asdict(one) for one in changed], indent=1)
        files.write_atomic(path, f"{content}\n".encode(), mode=0o600)
    finally:
        lock.release()


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()
