"""Certificates that are refused before they expire: a file with a serial number on each line, in hexadecimal.

`trinity certs revoke` writes it. What comes after `#` says whose it was. It is read again when it changes.
"""

from collections.abc import Iterable
from pathlib import Path

import structlog

from trinity.runtime import files
from trinity.runtime.errors import InvalidInput

log = structlog.get_logger(__name__)

FILE = "revoked"  # its name, next to ca.crt
_HEAD = "# Serial numbers of certificates that are refused; `trinity certs revoke` writes them.\n"
_LONGEST = 40  # digits of a serial number: 20 bytes (RFC 5280)


def parse_serial(text: str) -> int:
    """The number, as openssl and `trinity certs` write it. InvalidInput for another text."""
    digits = text.strip().replace(":", "")
    if not 0 < len(digits) <= _LONGEST or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
        raise InvalidInput("serial", f"is {text.strip()[:80]!r}, must be a serial number of 1 to {_LONGEST} hex digits")
    return int(digits, 16)


def parse(text: str) -> frozenset[int]:
    """The numbers of a file. InvalidInput names a line that is none."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return frozenset(parse_serial(line) for line in lines if line)


def add(text: str, serials: Iterable[tuple[int, str]]) -> str:
    """The text of a file with more numbers; each has a remark, which says whose it was."""
    known = parse(text)
    text += "\n" if text and not text.endswith("\n") else ""  # an editor may leave out the last one
    return (text or _HEAD) + "".join(f"{one:040x}  # {remark}\n" for one, remark in serials if one not in known)


class RevokedList:
    """The numbers that the file has now. A file that is lost or broken takes none of them back."""

    def __init__(self, path: Path, field: str, *, must_exist: bool) -> None:
        """`field`: the setting that names the file. InvalidInput if it cannot be read, or is missing but must exist."""
        self._path, self._field = path, field
        self._stamp = files.stamp(path)
        self._serials = self._read() if must_exist or self._stamp is not None else frozenset()

    def __contains__(self, serial: object) -> bool:
        stamp = files.stamp(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._serials = self._read()
                log.info("trust.revocations.read", path=str(self._path), certificates=len(self._serials))
            except InvalidInput as error:
                log.warning("trust.revocations.unreadable", reason=str(error), still_refused=len(self._serials))
        return serial in self._serials

    def _read(self) -> frozenset[int]:
        try:
            return parse(self._path.read_text())
        except OSError as error:
            raise InvalidInput(self._field, f"{self._path} cannot be read: {error.strerror}") from None
        except (InvalidInput, UnicodeDecodeError) as error:
            raise InvalidInput(self._field, f"{self._path} is no list of serial numbers: {error}") from None
