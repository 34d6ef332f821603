"""The gRPC edge of the explorer."""

import json
from collections.abc import Callable, Sequence

import grpc.aio
import numpy as np

from trinity.api.common.v1 import task_pb2
from trinity.api.explorer.v1 import explorer_pb2 as pb
from trinity.api.explorer.v1 import explorer_pb2_grpc
from trinity.data.experience import Limits, SamplingParams
from trinity.data.wire import sampling_from_proto, to_tensor
from trinity.explorer.chat import ChatTokenizer
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.running import Running
from trinity.explorer.sessions.front import told
from trinity.explorer.sessions.offers import OutsideSessions
from trinity.explorer.types import Completion
from trinity.runtime.errors import InvalidInput, Unavailable
from trinity.runtime.messages import to_message


class ExplorerServicer(explorer_pb2_grpc.ExplorerServiceServicer):
    def __init__(self, running: Running) -> None:
        self._running = running

    def add_to(self, server: grpc.aio.Server) -> str:
        """Add the servicer. Returns the full name of the gRPC service."""
        explorer_pb2_grpc.add_ExplorerServiceServicer_to_server(self, server)
        return str(pb.DESCRIPTOR.services_by_name["ExplorerService"].full_name)

    def _engines(self) -> tuple[EnginePool, ChatTokenizer]:
        if self._running.pool is None or self._running.tokenizer is None:
            raise Unavailable("the explorer is still starting")
        return self._running.pool, self._running.tokenizer

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> pb.GenerateResponse:
        pool, tokenizer = self._engines()
        prompt = list(request.prompt_token_ids)
        check_prompt(prompt, self._running.limits, "prompt_token_ids")
        completions = await pool.generate(prompt, _sampling(request.sampling))
        return pb.GenerateResponse(completions=[_completion(c, tokenizer.text) for c in completions])

    async def Chat(self, request: pb.ChatRequest, context: grpc.aio.ServicerContext) -> pb.ChatResponse:
        pool, tokenizer = self._engines()
        try:
            messages = json.loads(request.messages_json)
        except (ValueError, RecursionError) as error:
            raise InvalidInput("messages_json", f"is not JSON: {error}") from None
        if not isinstance(messages, list) or not messages:
            raise InvalidInput("messages_json", "must be a JSON list of at least one message")
        prompt = tokenizer.prompt(messages)
        check_prompt(prompt, self._running.limits, "messages_json")
        completions = await pool.generate(prompt, _sampling(request.sampling))
        return pb.ChatResponse(
            prompt_token_ids=prompt, completions=[_completion(c, tokenizer.reply) for c in completions]
        )

    def _outside(self) -> OutsideSessions:
        if self._running.outside is None:
            raise Unavailable("the explorer is still starting, or works on no tasks")
        return self._running.outside

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.OpenSessionResponse:
        outside = self._outside()
        offer = await outside.open(request.taskset, request.task_id, request.wait_seconds, request.limit_seconds)
        answer = told(offer, offer.agent.base_url)
        return pb.OpenSessionResponse(row_json=json.dumps(answer.pop("row")), **answer)

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.CloseSessionResponse:
        closed = self._outside().close(request.key, list(request.rewards), dict(request.metrics))
        return to_message(closed, pb.CloseSessionResponse)

    async def AbandonSession(
        self, request: pb.AbandonSessionRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbandonSessionResponse:
        self._outside().abandon(request.key, request.reason)
        return pb.AbandonSessionResponse()

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainResponse:
        if request.grace_seconds < 0:
            raise InvalidInput("grace_seconds", f"is {request.grace_seconds}, must be >= 0")
        finished, returned = await self._running.drain(request.grace_seconds)
        return pb.DrainResponse(finished=finished, returned=returned)

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext) -> pb.StatusResponse:
        running, follower, pool = self._running, self._running.follower, self._running.pool
        progress, outside = running.progress, running.outside
        return pb.StatusResponse(
            explorer_id=running.explorer_id,
            run=running.run_id,
            state=running.state().wire_name,
            weight_version=follower.version if follower else -1,
            weight_step=follower.step if follower else -1,
            running_tasks=progress.running_tasks,
            groups_stored=progress.groups_stored,
            failed_attempts=progress.failed_attempts,
            tokens_generated=pool.tokens_generated if pool else 0,
            tokens_per_second=pool.tokens_per_second() if pool else 0.0,
            weight_updates=follower.reports.updates if follower else 0,
            last_pause_seconds=follower.reports.last_pause_seconds if follower else 0.0,
            sessions_waiting=outside.waiting if outside else 0,
            sessions_open=outside.open_now if outside else 0,
        )


def _sampling(message: task_pb2.SamplingParams) -> SamplingParams:
    """Fill absent fields with 1: the nucleus of all tokens, one completion, no penalty."""
    filled = task_pb2.SamplingParams(top_p=1.0, n=1, repetition_penalty=1.0)
    filled.MergeFrom(message)
    return sampling_from_proto(filled)


def check_prompt(token_ids: Sequence[int], limits: Limits, field: str) -> None:
    """Raises InvalidInput if the engine cannot continue the prompt."""
    if not 1 <= len(token_ids) < (limits.tokens or len(token_ids) + 1):
        raise InvalidInput(field, f"has {len(token_ids)} tokens, must have 1 to {limits.tokens - 1}")
    if min(token_ids) < 0 or max(token_ids) >= limits.ids_below:
        raise InvalidInput(field, f"has token id {max(token_ids)}; ids of this model are below {limits.ids_below}")


def _completion(completion: Completion, text: Callable[[np.ndarray], str]) -> pb.Completion:
    return to_message(
        completion,
        pb.Completion,
        token_ids=to_tensor(completion.token_ids),
        logprobs=to_tensor(completion.logprobs),
        text=text(completion.token_ids),
        routes=None,
    )
