"""A sample token by token: which weights sampled each, whether it is trained, and how likely it was."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from trinity.cli.commands.view import arrays
from trinity.weights.checkpoints import newest_model

_COLOURS = 6  # of versions, in turn
# Log-probabilities down to these, in nats, have the shades 0, 1, 2, 3; what is lower the last.
_SHADES = (-0.1, -0.7, -2.3, -4.6)
_BLOCK = 64  # tokens that a browser lays out together
_FIRST = 2048  # tokens that a page has before one scrolls on
_AT_ONCE = 512  # tokens that a browser asks for together: of more, it drops frames while one scrolls


@dataclass(frozen=True)
class Token:
    """One token of a response. `version` and `logprob` are None where they are not recorded."""

    text: str
    token_id: int
    place: int
    version: int | None
    is_trained: bool
    logprob: float | None
    css: str

    @property
    def about(self) -> str:
        """For the pointer."""
        version = "" if self.version is None else f", weights {self.version}"
        logprob = "" if self.logprob is None else f", log-probability {self.logprob:.3f}"
        trained = "" if self.is_trained else ", not trained"
        return f"token {self.place}: id {self.token_id}{version}{logprob}{trained}"


def blocks(row: dict[str, Any], tokenizer: Tokenizer | None, first: int) -> tuple[list[list[Token]], int]:
    """The response's tokens from `first` on in blocks, and the next first; 0 behind the last.

    Empty for a row without arrays. ValueError for arrays that are damaged.
    """
    kept = arrays(row)
    if "token_ids" not in kept:
        return [], 0
    ids = kept["token_ids"][row["prompt_tokens"] :]
    end = first + (_AT_ONCE if first else _FIRST)
    found = list(_tokens(row, kept, ids, range(first, min(end, len(ids))), tokenizer))
    parts = [found[begin : begin + _BLOCK] for begin in range(0, len(found), _BLOCK)]
    return parts, end if end < len(ids) else 0


def _tokens(
    row: dict[str, Any], kept: dict[str, np.ndarray], ids: np.ndarray, places: range, tokenizer: Tokenizer | None
) -> Iterator[Token]:
    nothing = np.array([])
    mask, logprobs = kept.get("mask", nothing), kept.get("logprobs", nothing)
    versions = _versions(row.get("versions") or [], places)
    advantage = _sign(row.get("advantage"))
    for place in places:
        token_id, version = int(ids[place]), versions.get(place)
        is_trained = place >= len(mask) or bool(mask[place])
        logprob = float(logprobs[place]) if place < len(logprobs) else None
        css = [f"v{version % _COLOURS}"] if version is not None else []
        css += [f"l{_shade(logprob)}"] if logprob is not None else []
        css += [advantage] if is_trained else ["masked"]
        yield Token(_text(tokenizer, token_id), token_id, place, version, is_trained, logprob, " ".join(css))


def _versions(spans: list[list[int]], places: range) -> dict[int, int]:
    """The version of each of these places, from the spans [version, first, end]."""
    parts = ((version, range(max(first, places.start), min(end, places.stop))) for version, first, end in spans)
    return {place: version for version, part in parts for place in part}


def _sign(advantage: Any) -> str:
    if not isinstance(advantage, (int, float)) or not advantage:
        return "a0"
    strong = "2" if abs(advantage) >= 1 else "1"
    return ("up" if advantage > 0 else "down") + strong


def _shade(logprob: float) -> int:
    return next((shade for shade, limit in enumerate(_SHADES) if logprob >= limit), len(_SHADES))


def _text(tokenizer: Tokenizer | None, token_id: int) -> str:
    if tokenizer is None:
        return str(token_id)
    return str(tokenizer.decode([token_id], skip_special_tokens=False) or tokenizer.id_to_token(token_id) or token_id)


def tokenizer_of(folder: Path | None, model: str) -> Tokenizer | None:
    """The model's tokenizer, from its folder or from a checkpoint of the run; None where neither has one."""
    places = [Path(model).expanduser()]
    if folder is not None and (newest := newest_model(folder)) is not None:
        places.append(newest[1])
    places += [folder] if folder is not None else []  # of a copied run
    file = next((place / "tokenizer.json" for place in places if (place / "tokenizer.json").is_file()), None)
    return _load(file, file.stat().st_mtime) if file is not None else None


@lru_cache(maxsize=4)
def _load(file: Path, written: float) -> Tokenizer | None:
    """None for a file that is no tokenizer."""
    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises Exception itself
        return None
