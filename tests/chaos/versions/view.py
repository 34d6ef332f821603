"""A run's versions, members and explorers, queried over gRPC."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from trinity.api.explorer.v1 import explorer_pb2, explorer_pb2_grpc
from trinity.api.sync.v1 import sync_pb2, sync_pb2_grpc

_BUSY_SECONDS = 60.0


class RunView:
    """One run of one sync service."""

    def __init__(self, sync: str, run: str) -> None:
        self._sync, self.run = sync, run

    def members(self) -> dict[str, sync_pb2.Member]:
        answer = self._ask("ListMembers", sync_pb2.ListMembersRequest(run=self.run))
        return {member.explorer_id: member for member in answer.members}

    def versions(self) -> dict[int, sync_pb2.WeightVersion]:
        answer = self._ask("ListVersions", sync_pb2.ListVersionsRequest(run=self.run))
        return {version.manifest.version: version for version in answer.versions}

    def rollback(self, version: int) -> sync_pb2.RollbackRecord:
        return self._ask("Rollback", sync_pb2.RollbackRequest(run=self.run, version=version, reason="test")).rollback

    def _ask(self, call: str, request: Any) -> Any:
        with grpc.insecure_channel(self._sync) as channel:
            stub = sync_pb2_grpc.SyncServiceStub(channel)
            return getattr(stub, call)(request, timeout=20, wait_for_ready=True)


def generate(address: str, prompt: Sequence[int], max_tokens: int, seconds: float = 120) -> Any:
    """One completion of an explorer, without an end token."""
    request = explorer_pb2.GenerateRequest(prompt_token_ids=prompt)
    request.sampling.n, request.sampling.temperature, request.sampling.top_p = 1, 1.0, 1.0
    request.sampling.max_tokens, request.sampling.ignore_eos = max_tokens, True
    request.sampling.repetition_penalty = 1.0
    with grpc.insecure_channel(address) as channel:
        stub = explorer_pb2_grpc.ExplorerServiceStub(channel)
        return stub.Generate(request, timeout=seconds).completions[0]


@contextlib.contextmanager
def busy(address: str, prompt: Sequence[int], max_tokens: int) -> Iterator[list[Any]]:
    """Completions one after the other, as long as the context lasts, also while the explorer fails."""
    done: list[Any] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            try:
                done.append(generate(address, prompt, max_tokens, _BUSY_SECONDS))
            except grpc.RpcError:
                over.wait(0.2)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join(_BUSY_SECONDS + 5)
