"""Where a conversation's key-value blocks are: which engine has sampled the beginning of a prompt."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

_BLOCK = 32  # tokens
_KEPT = 200_000  # blocks; some 30 MB
# An engine with more sequences than this many times its share, and a few, gets no further turns.
_SHARE, _FEW = 1.25, 4


class Homes:
    """Engines by the beginnings of prompts that they have seen, the latest of some millions of tokens.

    A turn's prompt begins with the prompt before it. Its engine still has the key-value blocks of that, and another
    engine would compute them again.
    """

    def __init__(self, engines: int) -> None:
        self._running = [0] * engines
        self._engine_of: OrderedDict[int, int] = OrderedDict()

    @property
    def running(self) -> Sequence[int]:
        """Sequences of each engine."""
        return self._running

    def enter(self, tokens: Sequence[int], sequences: int) -> int:
        """Returns the engine for a prompt, and counts its sequences until `leave`.

        That is the engine with the longest known beginning if this is at least a third of the prompt, unless it is
        overloaded; else the least busy engine.
        """
        blocks = list(_blocks(tokens)) if len(self._running) > 1 else []
        chosen = min(range(len(self._running)), key=self._running.__getitem__)
        known = next((index for index in reversed(range(len(blocks))) if blocks[index] in self._engine_of), -1)
        if 3 * (known + 1) * _BLOCK >= len(tokens) > 0:
            home = self._engine_of[blocks[known]]
            share = (sum(self._running) + sequences) / len(self._running)
            chosen = home if self._running[home] + sequences <= _SHARE * share + _FEW else chosen
        for block in blocks:
            self._engine_of[block] = chosen
            self._engine_of.move_to_end(block)
        while len(self._engine_of) > _KEPT:
            self._engine_of.popitem(last=False)
        self._running[chosen] += sequences
        return chosen

    def leave(self, engine: int, sequences: int) -> None:
        self._running[engine] -= sequences


def _blocks(tokens: Sequence[int]) -> Iterator[int]:
    """Yields a hash of each beginning of whole blocks."""
    data, size, before = np.asarray(tokens, np.int32).tobytes(), 4 * _BLOCK, 0
    for end in range(size, len(data) + 1, size):
        before = hash((before, data[end - size : end]))
        yield before
