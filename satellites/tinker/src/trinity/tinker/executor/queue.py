"""Commands that wait: each tenant's in the order of the log, and between tenants by start-time fair queuing.

Goyal, Vin and Cheng, "Start-time Fair Queueing" (SIGCOMM 1996): the next command is the one with the least start tag
S = max(v, F of its tenant's command before). v is the largest S of a command that was taken; F = S + seconds that the
command took, which need not be known before. The seconds of two tenants that both wait all the time differ by at most
the longest command of each (theorem 1 there).

A tenant that was idle begins at v - c instead of v, as a process that slept in Linux's fair scheduler: so it goes first
for up to c seconds, and a tenant that mostly pauses never waits for two commands of another.

A tenant keeps its turn for the rest of a pass, and for what follows its pass, until it is q seconds ahead of another.
Equal tenants that took turns command by command would all wait, and then all sample, at the same time. The seconds of
two tenants differ by up to q more.
"""

from collections import deque
from collections.abc import Mapping

from trinity.tinker.commands.log import Command, Kind

_WITHOUT_EFFECT = (Kind.SESSION, Kind.SAMPLER, Kind.REFUSED)  # here: the gateway knows them
_AHEAD_SECONDS = 5.0  # c
_TURN_SECONDS = 2.0  # q
_MOST_BEGUN = 16
OF_ONE_MODEL = (Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP)  # neither reads nor changes another model


class FairQueue:
    """add, for each command of the log; take -> charge -> end, by the only executor, which may take commands of other
    tenants before the end of some."""

    def __init__(self, position: int, executed: Mapping[str, int], most: int = 1, most_bytes: int = 0) -> None:
        """position: every command up to it is executed. executed: a tenant's commands up to which are, too.
        most, most_bytes: commands that are taken at once, and bytes of the passes among them."""
        self._read, self._time = position, 0.0
        self._skipped, self._most, self._most_bytes = dict(executed), most, most_bytes
        self._waiting: dict[str, deque[Command]] = {}
        self._tags: dict[str, float] = {}  # F by tenant, seconds
        self._virtual = 0.0
        self._newest = ""  # the tenant that was served last
        self._taken: dict[str, Command] = {}  # the first one of a tenant that has not ended
        self.bytes = 0

    def __bool__(self) -> bool:
        """Returns True if `take` has a command."""
        return bool(self._order())

    def add(self, command: Command) -> None:
        """Appends the next command of the log, unless it is executed or has no effect."""
        self._read, self._time = command.position, command.time
        if command.kind not in _WITHOUT_EFFECT and command.position > self._skipped.get(command.tenant, 0):
            self._waiting.setdefault(command.tenant, deque()).append(command)
            self.bytes += len(command.body)

    def take(self) -> list[Command]:
        """Returns the next command, and commands of other models that can be executed together with it.

        They are steps and passes, one pass of each model. Those of a tenant are next to each other, in their order.
        """
        taken: list[Command] = []
        for tag, _, tenant in self._order():
            queue = self._waiting[tenant]
            while queue and self._fits(queue[0], taken):
                self._virtual = self._virtual if taken else max(self._virtual, tag)
                taken.append(queue.popleft())
                self._tags[tenant] = tag
                self._taken.setdefault(tenant, taken[-1])
                self._newest = taken[0].tenant
            if not queue:
                del self._waiting[tenant]
        self.bytes -= sum(len(command.body) for command in taken)
        return taken

    def counts(self) -> dict[str, int]:
        """Returns how many commands of each tenant wait."""
        return {tenant: len(queue) for tenant, queue in self._waiting.items()}

    def charge(self, tenant: str, seconds: float) -> None:
        """Adds seconds of commands that were taken."""
        self._tags[tenant] += seconds

    def is_behind(self, tenant: str) -> bool:
        """Returns True if a command of another tenant should go before the rest of one of this tenant, which is taken.

        False if so many tenants' commands have begun that their gradients may take much memory.
        """
        order = self._order()
        return bool(order) and order[0][0] < self._tags[tenant] - _TURN_SECONDS and len(self._taken) < _MOST_BEGUN

    def end(self, taken: list[Command]) -> None:
        """Counts commands as executed."""
        for command in taken:
            self._taken.pop(command.tenant, None)

    def reached(self) -> tuple[int, float]:
        """Returns the position up to which every command is executed; and a time, seconds since 1970, from which on all
        others were accepted."""
        first = [*self._taken.values(), *(queue[0] for queue in self._waiting.values())]
        if not first:
            return self._read, self._time
        oldest = min(first, key=lambda command: command.position)
        return oldest.position - 1, oldest.time

    def _order(self) -> list[tuple[float, int, str]]:
        """Returns tag, position and tenant of the commands that may be next, the next one first."""
        begin = self._virtual - _AHEAD_SECONDS
        found = (
            (max(begin, self._tags.get(tenant, begin)), queue[0].position, tenant)
            for tenant, queue in self._waiting.items()
            if tenant not in self._taken
        )
        return sorted(found, key=lambda one: (one[0] - self._turn_of(one[2]), one[1]))

    def _turn_of(self, tenant: str) -> float:
        """Returns the seconds for which the tenant keeps its turn."""
        goes_on = tenant == self._newest and self._waiting[tenant][0].kind is not Kind.FORWARD_BACKWARD
        return _TURN_SECONDS if goes_on else 0.0

    def _fits(self, command: Command, taken: list[Command]) -> bool:
        if not taken:
            return True
        if len(taken) >= self._most or {command.kind, taken[0].kind} - {*OF_ONE_MODEL}:
            return False
        passes = [one for one in taken if one.kind is Kind.FORWARD_BACKWARD]
        if command.kind is not Kind.FORWARD_BACKWARD or not passes:
            return True
        size = sum(len(one.body) for one in passes) + len(command.body)
        return size <= self._most_bytes and all(one.model != command.model for one in passes)
