"""The clock of leases. It counts only time in which this process could hear their holders.

While the process is stopped, swapped out or far behind with its work, no lease can be renewed, so this clock nearly
stands still and live leases stay live. It is read several times a second as long as any run is open.
"""

import time

_MOST_SECONDS = 1.0

_now = 0.0
_looked_at = time.monotonic()


def now() -> float:
    """Returns the seconds since the process started, without the time that it lost."""
    global _now, _looked_at
    looked_at = time.monotonic()
    _now += min(looked_at - _looked_at, _MOST_SECONDS)
    _looked_at = looked_at
    return _now
