"""Replies that the engine sampled, and whether what was trained is exactly these, each after the tokens before it."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from trinity.data.experience import Experience

Reply = tuple[tuple[int, ...], tuple[int, ...]]  # (all tokens before it, its tokens)


def sampled_replies(path: Path) -> Counter[Reply]:
    """Replies of a file with a line `[ids before, ids]` for each."""
    return Counter((tuple(before), tuple(ids)) for before, ids in map(json.loads, path.open()))


def trained_replies(experience: Experience) -> list[Reply]:
    ids, mask = experience.token_ids.tolist(), experience.action_mask
    found = []
    for begin in (at for at in range(len(mask)) if mask[at] and (at == 0 or not mask[at - 1])):
        end = next((at for at in range(begin, len(mask)) if not mask[at]), len(mask))
        at = experience.prompt_length + begin
        found.append((tuple(ids[:at]), tuple(ids[at : experience.prompt_length + end])))
    return found


def count_trained(experiences: Iterable[Experience], sampled: Counter[Reply]) -> int:
    """Number of trained replies. Raises AssertionError for a reply that was not sampled there, or trained twice."""
    left, count = sampled.copy(), 0
    for experience in experiences:
        for reply in trained_replies(experience):
            assert left[reply] > 0, "a reply in the batch that the engine did not sample there"
            left[reply] -= 1
            count += 1
    return count
