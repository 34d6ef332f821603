"""A sample token by token: the weights that sampled each, whether it is trained, and its probability."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from trinity.study.view import arrays
from trinity.weights.checkpoints import newest_model

COLOURINGS = ("version", "advantage", "mask", "logprob", "ratio", "gap", "entropy")
_COLOURS = 6  # of versions, in turn
# Between the shades 0, 1, 2, ... of a value: of log-probabilities and entropies in nats.
_LIMITS = {
    "logprob": (-4.6, -2.3, -0.7, -0.1),
    "ratio": (0.8, 0.95, 1.05, 1.25),
    "gap": (-0.1, -0.01, 0.01, 0.1),
    "entropy": (0.1, 0.7, 1.5, 3.0),
}
_BLOCK = 128  # tokens that a browser lays out together
_FIRST = 2048  # tokens that a page has before one scrolls on
_AT_ONCE = 512  # tokens that a browser asks for together: of more, it drops frames while one scrolls


@dataclass(frozen=True)
class Token:
    """One token of a response; None means not recorded.

    `values` by their names in _LIMITS: logprob under the weights that sampled; ratio, gap and entropy of the trainer's
    step (`_values`). clipped: by the policy loss.
    """

    text: str
    token_id: int
    place: int
    version: int | None
    is_trained: bool
    values: dict[str, float]
    clipped: bool
    css: str

    @property
    def about(self) -> str:
        """Text for the pointer."""
        version = "" if self.version is None else f", weights {self.version}"
        known = "".join(f", {_ABOUT[name]} {value:.4g}" for name, value in self.values.items())
        step = "" if "ratio" in self.values else ", ratio and entropy not recorded"
        trained = "" if self.is_trained else ", not trained"
        return f"token {self.place}: id {self.token_id}{version}{known}{', clipped' * self.clipped}{step}{trained}"


_ABOUT = {"logprob": "log-probability", "ratio": "ratio", "gap": "trainer - engine", "entropy": "entropy"}


def recorded(row: dict[str, Any]) -> frozenset[str]:
    """Returns the trainer's records on the row's tokens: values of _LIMITS, and "clipped" if its loss has a clip."""
    kept = row.get("arrays") or {}
    return frozenset(name for name, array in _RECORDED.items() if array in kept)


_RECORDED = {"logprob": "logprobs", "ratio": "new_logprobs", "gap": "new_logprobs", "entropy": "entropy",
             "clipped": "clipped"}  # fmt: skip


def blocks(row: dict[str, Any], tokenizer: Tokenizer | None, first: int, by: str) -> tuple[list[list[Token]], int]:
    """Returns the response's tokens from `first` on in blocks, and the next first; 0 at the end.

    `by`: of COLOURINGS. Empty for a row without arrays. Raises ValueError for damaged arrays.
    """
    kept = arrays(row)
    if "token_ids" not in kept:
        return [], 0
    ids = kept["token_ids"][row["prompt_tokens"] :]
    end = first + (_AT_ONCE if first else _FIRST)
    found = list(_tokens(row, kept, ids, range(first, min(end, len(ids))), tokenizer, by))
    parts = [found[begin : begin + _BLOCK] for begin in range(0, len(found), _BLOCK)]
    return parts, end if end < len(ids) else 0


def _tokens(
    row: dict[str, Any],
    kept: dict[str, np.ndarray],
    ids: np.ndarray,
    places: range,
    tokenizer: Tokenizer | None,
    by: str,
) -> Iterator[Token]:
    nothing = np.array([])
    mask, clipped, known = kept.get("mask", nothing), kept.get("clipped", nothing), _values(kept)
    versions = _versions(row.get("versions") or [], places)
    advantage = _sign(row.get("advantage"))
    for place in places:
        token_id, version = int(ids[place]), versions.get(place)
        is_trained = place >= len(mask) or bool(mask[place])
        is_clipped = place < len(clipped) and bool(clipped[place])
        values = {name: float(array[place]) for name, array in known.items() if place < len(array)}
        css = ["clipped"] if is_clipped and by == "ratio" else []
        if by in _LIMITS:
            css.append(f"s{bisect_right(_LIMITS[by], values[by])}" if by in values else "unknown")
        elif by == "version":
            css += [f"v{version % _COLOURS}"] if version is not None else []
        elif not is_trained:
            css.append("masked")
        elif by == "advantage":
            css.append(advantage)
        text = _text(tokenizer, token_id)
        yield Token(text, token_id, place, version, is_trained, values, is_clipped, " ".join(css))


def _values(kept: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the recorded values of each response token, float64 [R], by their names in _LIMITS.

    ratio: of the token's probabilities under the weights of the step's last update and under the weights that sampled
    it. gap: the trainer's log-probability at the begin of the step minus the engine's.
    """
    found = {name: kept[array].astype(float) for name, array in (("logprob", "logprobs"),) if array in kept}
    if "logprobs" in kept and "new_logprobs" in kept:
        engine, new = found["logprob"], kept["new_logprobs"].astype(float)
        found["ratio"] = np.exp(np.clip(new - engine, -700, 700))
        found["gap"] = kept.get("proximal_logprobs", new) - engine
    return found | {name: kept[name].astype(float) for name in ("entropy",) if name in kept}


def _versions(spans: list[list[int]], places: range) -> dict[int, int]:
    """Returns the version of each of these places, from the spans [version, first, end]."""
    parts = ((version, range(max(first, places.start), min(end, places.stop))) for version, first, end in spans)
    return {place: version for version, part in parts for place in part}


def _sign(advantage: Any) -> str:
    if not isinstance(advantage, (int, float)) or not advantage:
        return "a0"
    strong = "2" if abs(advantage) >= 1 else "1"
    return ("up" if advantage > 0 else "down") + strong


def _text(tokenizer: Tokenizer | None, token_id: int) -> str:
    if tokenizer is None:
        return str(token_id)
    return str(tokenizer.decode([token_id], skip_special_tokens=False) or tokenizer.id_to_token(token_id) or token_id)


def tokenizer_of(folder: Path | None, model: str) -> Tokenizer | None:
    """Returns the model's tokenizer, from its folder or from a checkpoint of the run; None if neither has one."""
    places = [Path(model).expanduser()]
    if folder is not None and (newest := newest_model(folder)) is not None:
        places.append(newest[1])
    places += [folder] if folder is not None else []  # of a copied run
    file = next((place / "tokenizer.json" for place in places if (place / "tokenizer.json").is_file()), None)
    return _load(file, file.stat().st_mtime) if file is not None else None


@lru_cache(maxsize=4)
def _load(file: Path, written: float) -> Tokenizer | None:
    """Returns None for a file that is no tokenizer."""
    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises Exception itself
        return None
