"""How vLLM's engine core and workers wait for each other's messages. Both import this."""

from typing import Any

from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform

_POLLING_SECONDS = 0.001
_LOOK_AGAIN_MS = 10


def poll_briefly_on_cpus() -> None:
    """On a CPU they sleep until the next message comes, where vLLM polls for a second after each one.

    A polling worker takes one core from whatever else runs there: a trainer on two cores, whose threads then wait for
    each other, takes a second for a step of 0.03 s. vLLM has no option for this.

    ZeroMQ drops the notification of a message that follows another within about 3 million clock ticks (SNDHWM is 1,
    and a socket looks at most that often whether there is room again). That is more than the polling takes on a slow
    clock, so a sleeper looks again without one: vLLM's own 5 s would stall a step.
    """
    if current_platform.is_cpu():
        condition: Any = shm_broadcast.SpinCondition  # each instance sets the attribute, some before this is called
        condition.busy_loop_s = property(lambda _: _POLLING_SECONDS, lambda *_: None)
        shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = _LOOK_AGAIN_MS
