"""How much of each tenant waits: commands that are accepted and not executed, by number and bytes."""

from collections import Counter, deque

from trinity.data.tenants.log import Command, now
from trinity.runtime.errors import Full


class Quotas:
    """The executor answers in the order of the log, so a result tells that all commands before it are executed. A
    command that is older than the results that are kept counts as executed."""

    def __init__(self, most_commands: int, most_bytes: int, kept_seconds: float) -> None:
        """Limits for each tenant, and how long results are kept. A single command is never too large."""
        self._most_commands, self._most_bytes, self._kept_seconds = most_commands, most_bytes, kept_seconds
        self._waiting: deque[tuple[int, str, int]] = deque()  # position, tenant, bytes; oldest first
        self._commands: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._done = 0

    def check(self, tenant: str, size: int) -> None:
        """Raises Full for a command of so many bytes that a tenant may not add now."""
        waiting, held = self._commands[tenant], self._bytes[tenant]
        if waiting and (waiting >= self._most_commands or held + size > self._most_bytes):
            problem = f"{waiting} commands with {held} bytes of this tenant wait, and this one has {size}"
            raise Full(f"{problem}; at most {self._most_commands} and {self._most_bytes} bytes may; wait for results")

    def add(self, command: Command) -> None:
        """Counts an accepted command that gets a result."""
        if command.position > self._done and command.time > now() - self._kept_seconds:
            self._waiting.append((command.position, command.tenant, len(command.body)))
            self._commands[command.tenant] += 1
            self._bytes[command.tenant] += len(command.body)

    def done(self, position: int) -> None:
        """Counts the commands up to a position as executed."""
        self._done = max(self._done, position)
        while self._waiting and self._waiting[0][0] <= self._done:
            _, tenant, size = self._waiting.popleft()
            self._commands[tenant] -= 1
            self._bytes[tenant] -= size
