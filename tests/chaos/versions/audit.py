"""Violations of a run with versions, found from the explorers' responses and sync's final state.

Tokens are recomputed from the weights of the version that they name; nothing here asks the explorers' own checks.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trinity.api.sync.v1 import sync_pb2 as pb

_EXACT = 1e-4  # nats; nothing is rounded on the way
_SERVABLE = (pb.VERSION_STATE_VERIFIED, pb.VERSION_STATE_LIVE, pb.VERSION_STATE_RETIRED)


@dataclass(frozen=True)
class Given:
    """A response: R tokens after `prompt`, their log-probabilities [R], and the version of each as spans."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: np.ndarray
    spans: Sequence[Any]

    @classmethod
    def of(cls, prompt: Sequence[int], completion: Any) -> "Given":
        """From explorer.v1's Completion."""
        tokens = np.frombuffer(completion.token_ids.data, np.int32).tolist()
        return cls(prompt, tokens, np.frombuffer(completion.logprobs.data, np.float32), completion.version_spans)


@dataclass
class Records:
    """All that is known of a run that came to rest.

    `serving` is what the members that ought to live report; `alive` their names. `logprobs`: of each token but the
    first, by the weights of a version.
    """

    given: list[Given]
    versions: dict[int, pb.WeightVersion]
    serving: dict[str, pb.Member]
    alive: set[str]
    logprobs: Callable[[int, Sequence[int]], Sequence[float]]


def judge(records: Records) -> list[str]:
    """Violations as text, without duplicates."""
    return list(dict.fromkeys([*_served(records), *_answers(records)]))


def _served(records: Records) -> list[str]:
    """One version is LIVE; every living member serves it and computes its canary."""
    live = [number for number, version in records.versions.items() if version.state == pb.VERSION_STATE_LIVE]
    found = [] if len(live) == 1 else [f"the versions {live} are LIVE at once"]
    found += [f"{name} is no member any more" for name in sorted(records.alive - records.serving.keys())]
    for name, member in records.serving.items():
        if name in records.alive and member.version not in live:
            found.append(f"{name} serves version {member.version}; LIVE is {live}")
        if name in records.alive and not 0 <= member.canary_max_error < _EXACT:
            found.append(f"{name} computes the canary with a difference of {member.canary_max_error:g}")
    return found


def _answers(records: Records) -> list[str]:
    """Every token is sampled by the version that it names, and no version was bad."""
    found = [] if records.given else ["no explorer ever answered: nothing can be said"]
    for given in records.given:
        if [span.start for span in given.spans] + [len(given.tokens)] != [0] + [span.end for span in given.spans]:
            found.append(f"the spans {[(s.start, s.end) for s in given.spans]} do not cover {len(given.tokens)} tokens")
            continue
        for span in given.spans:
            if not _was_good(records.versions, span.version):
                found.append(f"tokens were given by version {span.version}, which was never good")
                continue
            tokens = [*given.prompt, *given.tokens][len(given.prompt) + span.start - 1 : len(given.prompt) + span.end]
            expected = np.asarray(records.logprobs(span.version, tokens))
            if not np.abs(expected - given.logprobs[span.start : span.end]).max() <= _EXACT:
                found.append(f"tokens said to be by version {span.version} are not what its weights give")
    return found


def _was_good(versions: Mapping[int, pb.WeightVersion], number: int) -> bool:
    about = versions.get(number)
    return about is not None and (about.state in _SERVABLE or "withdrawn by a rollback" in about.reason)


def names_both_numbers(version: pb.WeightVersion) -> bool:
    """Returns True if a rejection has the expected and the computed number."""
    numbers = [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", version.reason)]
    wanted = version.measured.expected, version.measured.computed
    return all(any(abs(number - value) < 1e-3 for number in numbers) for value in wanted)
