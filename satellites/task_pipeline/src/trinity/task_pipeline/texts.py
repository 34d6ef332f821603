"""Measures of texts: definitions of character, word and n-gram."""

import json
import unicodedata
import zlib
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from numpy import uint64
    from numpy.typing import NDArray

Unit = Literal["character", "word"]

_USUAL = frozenset(".,;:!?'\"()-。，、；：！？（）「」“”‘’…")
_MULTIPLIER, _MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9  # odd constants of splitmix64


def text_of(value: Any) -> str:
    """A column as text: text unchanged, a conversation as its contents, other values as JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, list) and value and all(isinstance(m, dict) and "content" in m for m in value):
        return "\n".join(text_of(message["content"]) for message in value)
    return json.dumps(value, ensure_ascii=False, default=str)


def normalised(text: str, lowercase: bool = True, ignore_punctuation: bool = False) -> str:
    """NFKC text with single blanks, optionally in lower case and with only letters and digits."""
    text = unicodedata.normalize("NFKC", text)
    if lowercase:
        text = text.casefold()
    if ignore_punctuation:
        text = "".join(char if char.isalnum() else " " for char in text)
    return " ".join(text.split())


def alphanumeric_share(text: str) -> float:
    """Share of letters and digits in all characters. 0 for empty text."""
    return sum(map(str.isalnum, text)) / len(text) if text else 0.0


def symbol_share(text: str) -> float:
    """Share of characters other than letters, marks, digits, white space and usual punctuation. 0 for empty text."""
    return sum(map(_is_symbol, text)) / len(text) if text else 0.0


def _is_symbol(char: str) -> bool:
    if char.isalnum() or char.isspace() or char in _USUAL:
        return False
    return unicodedata.category(char)[0] not in "LMN"


def repeated_share(text: str, unit: Unit, size: int) -> float:
    """1 - distinct / all n-grams of `size` words or characters. 0 for at most one n-gram."""
    parts: Any = text.split() if unit == "word" else text
    grams = [tuple(parts[i : i + size]) for i in range(len(parts) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def quality(text: str) -> float:
    """Mean of three shares, in [0, 1]. 0 for empty text.

    The shares are letters and digits, and non-symbols, among characters other than white space; and distinct word
    3-grams.
    """
    dense = "".join(text.split())
    if not dense:
        return 0.0
    return (alphanumeric_share(dense) + 1 - repeated_share(text, "word", 3) + 1 - symbol_share(dense)) / 3


def gram_hashes(text: str, unit: Unit, size: int) -> "NDArray[uint64]":
    """A 64-bit hash of every n-gram of the normalised text, shape [n-grams], equal on all machines.

    A text shorter than `size`, also an empty text, is one n-gram.
    """
    import numpy as np

    plain = normalised(text)
    if unit == "word":
        codes = np.array([zlib.crc32(word.encode("utf-8", "replace")) for word in plain.split()], dtype=np.uint64)
    else:
        codes = np.frombuffer(plain.encode("utf-32-le", "replace"), dtype="<u4").astype(np.uint64)
    size = min(size, len(codes)) or 1
    if not len(codes):
        codes = np.zeros(1, dtype=np.uint64)
    hashes = np.zeros(len(codes) - size + 1, dtype=np.uint64)
    for offset in range(size):
        hashes = hashes * np.uint64(_MULTIPLIER) + codes[offset : offset + len(hashes)] + np.uint64(1)
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(_MIX)
    return hashes ^ (hashes >> np.uint64(31))
