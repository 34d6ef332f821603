"""Live traffic: plain calls at a run's endpoint are recorded, and clients' rewards make tasks of them.

The hook `traffic` is this package. The explorer calls `open_calls` and `recording`, the buffer `rewarded`; each imports
only its own service.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinity.traffic.calls import Calls
    from trinity.traffic.endpoint import Traffic
    from trinity.traffic.rewards import RewardedCalls


def open_calls(*args: Any) -> "Calls":
    """Returns the recorded calls of a run, as one explorer reads and writes them."""
    from trinity.traffic.calls import Calls

    return Calls(*args)


def recording(*args: Any) -> "Traffic":
    """Returns the endpoint's application with the recording of plain calls."""
    from trinity.traffic.endpoint import Traffic

    return Traffic(*args)


def rewarded(*args: Any) -> "RewardedCalls":
    """Returns the tasks of rewarded calls, for the buffer's feeder."""
    from trinity.traffic.rewards import RewardedCalls

    return RewardedCalls(*args)
