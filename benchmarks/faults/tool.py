"""The tool that every system's episodes of several turns call. It records each step that it executed.

An answer depends on all that was said before it, so an episode that joins turns of two attempts fits no record.
"""

import hashlib
from collections.abc import Sequence

from probe import record


class Tool:
    """One episode of `turns` replies to a row. `said`: replies and answers so far, of an episode that continues."""

    def __init__(self, row: int, turns: int, said: Sequence[str] = ()) -> None:
        self.row, self.turns, self.said = row, turns, list(said)

    def step(self, reply: str) -> tuple[str, float | None]:
        """Returns the answer and, after the last turn, the episode's reward: the share of digits in its replies."""
        self.said.append(reply)
        turn = len(self.said) // 2 + 1
        done = turn == self.turns
        record("tool", row=self.row, said=self.said, done=done)
        if done:
            replies = "".join(self.said[::2])
            value = sum(character.isdigit() for character in replies) / max(len(replies), 1)
            record("grade", row=self.row, said=self.said, value=value)
            return "", value
        told = "\n".join([str(self.row), *self.said]).encode()
        self.said.append(f"turn {turn + 1}: {hashlib.blake2b(told, digest_size=4).hexdigest()}")
        return self.said[-1], None
