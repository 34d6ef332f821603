"""Shortens the polling of vLLM's engine core and workers, both of which import this."""

from typing import Any

from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform

_POLLING_SECONDS = 0.001
_LOOK_AGAIN_MS = 10


def poll_briefly_on_cpus() -> None:
    """Make them sleep until the next message on a CPU, where vLLM polls for a second after each message.

    A polling worker occupies a core. On two cores the threads of a trainer then wait for each other, and a step of
    0.03 s takes a second. vLLM has no option for this.

    ZeroMQ drops the notification of a message that follows another within about 3 million clock ticks (SNDHWM is 1,
    and a socket looks at most that often whether there is room again). That is more than the polling takes on a slow
    clock, so a sleeper looks again without one. vLLM's own 5 s, of 0.26 a minute, would stall a step.
    """
    if current_platform.is_cpu():
        condition: Any = shm_broadcast.SpinCondition
        poll_or_sleep = condition.wait

        def wait(self: Any, timeout_ms: int | None = None) -> None:
            self.busy_loop_s = _POLLING_SECONDS
            poll_or_sleep(self, _LOOK_AGAIN_MS if timeout_ms is None else min(timeout_ms, _LOOK_AGAIN_MS))

        condition.wait = wait
