"""Records the experts to which vLLM's workers on CPUs route the tokens of each request.

vLLM records them itself in the model runner of GPUs (`enable_return_routed_experts`), and refuses to elsewhere. On CPUs
the worker is in the process of the engine core: its model runner fills vLLM's capturer, this module sorts the rows by
request, and the scheduler puts them into a request's last output. Without a prefix cache every token of a prompt is
computed by its own request (start.py switches it off).
"""

from typing import Any

import numpy as np

WANTED = "trinity_routes"  # key of VllmConfig.additional_config


class Recorder:
    """Rows of running requests. Aborted requests are dropped as their end reaches the worker."""

    def __init__(self) -> None:
        self._parts: dict[str, list[tuple[int, np.ndarray]]] = {}

    def note(self, request: str, start: int, rows: np.ndarray) -> None:
        """rows [tokens, layers, chosen]: of the request's tokens from `start` on."""
        self._parts.setdefault(request, []).append((start, rows))

    def forget(self, request: str) -> None:
        self._parts.pop(request, None)

    def __contains__(self, request: str) -> bool:
        return request in self._parts

    def take(self, request: str, tokens: int) -> np.ndarray:
        """Returns the rows of the first `tokens` tokens and forgets the request.

        A token that was computed again after a preemption keeps its first route: by that it was sampled.
        """
        parts = self._parts.pop(request)
        end = max(start + len(rows) for start, rows in parts)
        whole = np.zeros((end, *parts[0][1].shape[1:]), parts[0][1].dtype)
        for start, rows in reversed(parts):
            whole[start : start + len(rows)] = rows
        return whole[:tokens]


RECORDER = Recorder()


def install() -> None:
    """Patches vLLM's model runner of CPUs, which records only if its configuration asks for it."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runner: Any = CPUModelRunner
    load, execute = runner.load_model, runner.execute_model

    def load_model(self: Any, *args: Any, **options: Any) -> None:
        load(self, *args, **options)
        self.trinity_routes = _capturer(self) if WANTED in (self.vllm_config.additional_config or {}) else None

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **options: Any) -> Any:
        result = execute(self, scheduler_output, *args, **options)
        if self.trinity_routes is not None:
            _note(self, scheduler_output)
        return result

    runner.load_model, runner.execute_model = load_model, execute_model


def _capturer(runner: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        RoutedExpertsCapturer,
        bind_routed_experts_capturer,
    )

    capturer = RoutedExpertsCapturer(runner.vllm_config.scheduler_config.max_num_batched_tokens, runner.vllm_config)
    bind_routed_experts_capturer(runner.model, capturer)
    return capturer


def _note(runner: Any, scheduled: Any) -> None:
    for request in scheduled.finished_req_ids:
        RECORDER.forget(request)
    if not scheduled.total_num_scheduled_tokens:
        return
    rows = runner.trinity_routes.snapshot_routing_data(scheduled.total_num_scheduled_tokens).numpy()
    at = 0
    for index, request in enumerate(runner.input_batch.req_ids):
        count = scheduled.num_scheduled_tokens[request]
        RECORDER.note(request, int(runner.input_batch.num_computed_tokens_cpu[index]), rows[at : at + count])
        at += count
