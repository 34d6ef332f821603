"""How much of each tenant waits: commands that are accepted and not executed, by number and bytes."""

from collections import Counter, defaultdict, deque

from trinity.runtime.errors import Full
from trinity.tinker.commands.log import Command, now


class Quotas:
    """The executor answers each tenant in the order of the log, so a result tells that all of the tenant's commands
    before it are executed. A command that is older than the results that are kept counts as executed."""

    def __init__(self, most_commands: int, most_bytes: int, kept_seconds: float) -> None:
        """Limits for each tenant, and how long results are kept. A single command is never too large."""
        self._most_commands, self._most_bytes, self._kept_seconds = most_commands, most_bytes, kept_seconds
        self._waiting: defaultdict[str, deque[tuple[int, int]]] = defaultdict(deque)  # position, bytes; oldest first
        self._bytes: Counter[str] = Counter()
        self._done: Counter[str] = Counter()

    def check(self, tenant: str, size: int) -> None:
        """Raises Full for a command of so many bytes that a tenant may not add now."""
        waiting, held = len(self._waiting[tenant]), self._bytes[tenant]
        if waiting and (waiting >= self._most_commands or held + size > self._most_bytes):
            problem = f"{waiting} commands with {held} bytes of this tenant wait, and this one has {size}"
            raise Full(f"{problem}; at most {self._most_commands} and {self._most_bytes} bytes may; wait for results")

    def add(self, command: Command) -> None:
        """Counts an accepted command that gets a result."""
        if command.position > self._done[command.tenant] and command.time > now() - self._kept_seconds:
            self._waiting[command.tenant].append((command.position, command.size))
            self._bytes[command.tenant] += command.size

    def done(self, tenant: str, position: int) -> None:
        """Counts a tenant's commands up to a position as executed."""
        self._done[tenant] = max(self._done[tenant], position)
        waiting = self._waiting[tenant]
        while waiting and waiting[0][0] <= self._done[tenant]:
            self._bytes[tenant] -= waiting.popleft()[1]
