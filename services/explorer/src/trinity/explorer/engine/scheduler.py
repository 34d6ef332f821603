"""The scheduler that runs in vLLM's engine core. It sends responses when they are complete (see held_outputs.py) and
invalidates the prefix cache at every pause.

New weights are loaded while the scheduler is paused, so no block computed before a pause may serve a request that
starts after it. A salt given by the client is not enough: a request that waits in vLLM's queue during a load, or is on
its way there, still carries the old one. `reset_prefix_cache` is no help either: it refuses while blocks are in use,
and running requests keep theirs.

So every request's block hashes are salted with the number of pauses so far. No later request finds blocks from before
the pause, and they are evicted in time. A request that runs across the pause gets a salt of its own: its new blocks
depend on old blocks and new weights, so no other request may share them.
"""

from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

from trinity.explorer.engine.held_outputs import DeferredOutputs


class InvalidatePrefixCacheOnPause:
    """Mixed into vLLM's scheduler. Uses `requests`, and of a request `block_hashes` and `cache_salt`."""

    requests: dict[str, Any]
    _pauses = 0

    def set_pause_state(self, pause_state: PauseState) -> None:
        if pause_state is PauseState.PAUSED_ALL:
            self._pauses += 1
            for request in self.requests.values():
                self._mark(request)
        super().set_pause_state(pause_state)  # type: ignore[misc]

    def add_request(self, request: Request) -> None:
        self._mark(request)
        super().add_request(request)  # type: ignore[misc]

    def _mark(self, request: Any) -> None:
        """Later hashes are made from the last one, or from the salt if there is none yet."""
        owner = request.request_id if request.num_computed_tokens else ""
        mark = f"/{self._pauses}/{owner}"
        request.cache_salt = f"{request.cache_salt or ''}{mark}"
        request.block_hashes[:] = [block_hash + mark.encode() for block_hash in request.block_hashes]


def make_scheduler(vllm_config: Any, **arguments: Any) -> Any:
    """The scheduler class that vLLM would choose for this configuration, with both mixins."""
    vllm_config.scheduler_config.scheduler_cls = None
    chosen: Any = vllm_config.scheduler_config.get_scheduler_cls()
    missing = [name for name in ("set_pause_state", "add_request", "update_from_output") if not hasattr(chosen, name)]
    if missing or not hasattr(Request, "update_block_hashes"):
        raise RuntimeError(
            f"{chosen.__name__} of this vLLM has no {' and no '.join(missing) or 'block hashes'}: its prefix cache "
            "cannot be kept apart from new weights; use vLLM 0.26 to 0.32"
        )
    scheduler = type(f"Trinity{chosen.__name__}", (InvalidatePrefixCacheOnPause, DeferredOutputs, chosen), {})
    return scheduler(vllm_config=vllm_config, **arguments)
