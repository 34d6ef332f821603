"""Files of keys, for HTTP clients: one key on each line, sent as `Authorization: Bearer <key>`."""

import hashlib
import hmac
import secrets
from pathlib import Path

from trinity.runtime import files
from trinity.runtime.errors import InvalidInput


class KeyFile:
    """The file is read for every check, so an added key works and a removed one fails from the next request on."""

    def __init__(self, path: Path, field: str) -> None:
        """`field`: the setting that names the file. Raises InvalidInput if it cannot be read or has no key."""
        self._path = path
        try:
            if not self._digests():
                raise InvalidInput(field, f"{path} has no key; write one on each line")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is no text"
            raise InvalidInput(field, f"{path} cannot be read: {reason}") from None

    def allows(self, authorization: str) -> bool:
        """Returns True if an Authorization header carries one of the keys, False while the file cannot be read."""
        scheme, _, key = authorization.partition(" ")
        try:
            known = self._digests()
        except (OSError, UnicodeDecodeError):
            return False
        given = _digest(key.strip())
        found = [hmac.compare_digest(given, digest) for digest in known]  # all of them: the time tells nothing
        return scheme.lower() == "bearer" and any(found)

    def _digests(self) -> list[bytes]:
        return [_digest(line.strip()) for line in self._path.read_text().splitlines() if line.strip()]


def make_key_file(path: Path, prefix: str = "") -> Path:
    """Creates a file with a new key of 256 random bits, readable only by its owner, unless it exists."""
    if not path.exists():
        files.write_atomic(path, f"{prefix}{secrets.token_urlsafe(32)}\n".encode(), mode=0o600)
    return path


def _digest(key: str) -> bytes:
    """Returns a digest, equally long for all keys: hmac.compare_digest leaks lengths."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
