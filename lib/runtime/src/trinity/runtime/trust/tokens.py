"""Tokens: what the processes of a run on one machine show each other.

<identity folder>/tokens/<role> holds a role's token, 256 random bits. Who may read the file has the role; a token whose
file is removed or replaced is not taken any more.
"""

import contextlib
import hashlib
import hmac
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path

from trinity.runtime import files
from trinity.runtime.trust.roles import Role

_BYTES = 32
_TICK_NS = 1_000_000_000


def make_tokens(folder: Path) -> None:
    """A token for each role below this identity folder, unless it has tokens. Folders have mode 0700, files 0600."""
    if has_tokens(folder):
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".tokens.", dir=folder))
    for role in Role:
        files.write_atomic(made / role, secrets.token_urlsafe(_BYTES).encode(), mode=0o600)
    try:
        os.rename(made, _folder_of(folder))
    except OSError:  # another process was faster
        shutil.rmtree(made)
        if not has_tokens(folder):
            raise
    files.sync_folder(folder)


def has_tokens(identity_folder: Path) -> bool:
    """Returns True if tokens are there and this user may read them."""
    return os.path.exists(_folder_of(identity_folder))


def _folder_of(identity_folder: Path) -> Path:
    return identity_folder / "tokens"


class OwnToken:
    """The token of one role, for a process that calls others."""

    def __init__(self, identity_folder: Path, role: Role) -> None:
        self._path = _folder_of(identity_folder) / role
        self._stamp = (0, 0)
        self._token = ""

    def read(self) -> str:
        """The token as the file has it now; empty if the file is not there, not for this user, or damaged."""
        try:
            found = self._path.stat()
            if (stamp := (found.st_mtime_ns, found.st_ino)) != self._stamp:
                self._token, self._stamp = _token_of(self._path), stamp
        except OSError:
            return ""
        return self._token


class KnownTokens:
    """The tokens that a server takes: those in the folder now. Files are replaced, not written in place."""

    def __init__(self, identity_folder: Path) -> None:
        self._folder = _folder_of(identity_folder)
        self._read_at = 0  # the folder's time of change when it was read, in ns; 0: read it again
        self._digests: list[tuple[bytes, Role]] = []

    def role_of(self, token: str) -> Role | None:
        """The role that a token stands for. The time this takes does not depend on where tokens differ."""
        self._refresh()
        shown, found = _digest(token), None
        for digest, role in self._digests:
            if hmac.compare_digest(digest, shown):
                found = role
        return found

    def _refresh(self) -> None:
        try:
            changed = os.stat(self._folder).st_mtime_ns
        except OSError:
            self._read_at, self._digests = 0, []
            return
        if changed == self._read_at:
            return
        # Two changes within a tick of the disk's clock look the same: what changed just now is read again.
        self._read_at = changed if time.time_ns() - changed > _TICK_NS else 0
        self._digests = []
        for role in Role:
            with contextlib.suppress(OSError):
                if token := _token_of(self._folder / role):
                    self._digests.append((_digest(token), role))


def _token_of(path: Path) -> str:
    """Returns the token in a file; empty for bytes that no header can carry. Raises OSError."""
    text = path.read_bytes().decode("ascii", "replace").strip()
    return text if text.isascii() and text.isprintable() else ""


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
