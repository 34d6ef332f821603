"""A worker reads an adapter in a thread before vLLM adds it, so that its steps go on meanwhile."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from trinity.explorer.engine.adapters import HeldAdapters
from trinity.explorer.engine.worker import WorkerExtension

pytestmark = pytest.mark.core


class Manager:
    """Reads adapters as vLLM's manager does. `may_end`: a read waits for it. `readers`: threads that read, by id."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.readers: dict[int, str] = {}

    def _load_adapter(self, request: LoRARequest) -> str:
        assert self.may_end.wait(20)
        self.readers[request.lora_int_id] = threading.current_thread().name
        if request.lora_path == "damaged":
            raise ValueError("no safetensors")
        return f"read {request.lora_path}"


class Worker(WorkerExtension):
    def __init__(self) -> None:
        self.manager = Manager()
        self.model_runner = SimpleNamespace(lora_manager=self.manager)


def test_the_file_is_read_in_a_thread_and_taken_once() -> None:
    worker = Worker()
    worker.read_adapter("a", 1, "first")
    assert not worker.adapter_is_read()
    worker.manager.may_end.set()
    assert worker.manager._load_adapter(LoRARequest("b", 2, "other")) == "read other"
    assert worker.manager._load_adapter(LoRARequest("a", 1, "first")) == "read first"
    here = threading.current_thread().name
    assert worker.manager.readers[2] == here != worker.manager.readers[1]
    assert worker.manager._load_adapter(LoRARequest("a", 1, "again")) == "read again"


def test_an_error_is_that_of_the_load_and_the_next_read_is_independent() -> None:
    worker = Worker()
    worker.manager.may_end.set()
    worker.read_adapter("a", 1, "damaged")
    with pytest.raises(ValueError, match="no safetensors"):
        worker.manager._load_adapter(LoRARequest("a", 1, "damaged"))
    worker.read_adapter("b", 2, "cut off before its load")
    worker.read_adapter("c", 3, "third")
    assert worker.manager._load_adapter(LoRARequest("c", 3, "third")) == "read third"


async def test_an_adapter_is_added_only_when_every_worker_has_read_it(tmp_path: Path) -> None:
    said: list[Any] = []
    answers = iter([[True, False], [True, True]])

    class Vllm:
        async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
            said.append(method)
            return next(answers) if method == "adapter_is_read" else [None, None]

        async def add_lora(self, request: LoRARequest) -> bool:
            said.append("add_lora")
            return True

    await HeldAdapters(Vllm(), 1).load("policy", tmp_path)
    assert said == ["read_adapter", "adapter_is_read", "adapter_is_read", "add_lora"]
