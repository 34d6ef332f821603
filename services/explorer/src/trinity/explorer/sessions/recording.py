"""Records vLLM's outputs in sessions, and makes prompts of recorded tokens."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from trinity.data.experience import SamplingParams
from trinity.data.images import PlacedImage, expanded, placed
from trinity.explorer.engine.engine import Engine, completion_of
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.serving.endpoint import PooledClient
from trinity.explorer.sessions.images import shown
from trinity.explorer.sessions.samples import Turn
from trinity.explorer.sessions.session import CALL, Call
from trinity.explorer.types import UNREAD_LOGPROBS, EngineFailed, is_refusal
from trinity.explorer.weights.load_history import LoadHistory, WeightsWithdrawn
from trinity.runtime.errors import InvalidInput

# Characters of a private use area mark a reply in a rendered text. Real text does not have them.
_REPLY = "\ue0a4\ue0a5\ue0a6"
# vLLM's sampling parameters that change a distribution, with their neutral values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "thinking_token_budget": (None,),  # vLLM would insert the end of the thoughts
}


class RecordingClient(PooledClient):
    """Records calls of sessions. A call that the engines fail fails its session."""

    def __init__(self, pool: EnginePool, rewrites_history: bool = False) -> None:
        """`rewrites_history`: the chat template changes former turns."""
        super().__init__(pool)
        self._rewrites_history = rewrites_history

    @cached_property
    def renderer(self) -> Any:
        return RecordingRenderer(self._pool.engines[0], self._rewrites_history)

    async def generate(self, prompt: Any, sampling_params: Any = None, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        call = CALL.get()
        recording = Recording(call, sampling_params) if call is not None else None
        try:
            plain = call is None or not call.session.name  # a session keeps to the newest version
            made = self.good_outputs(prompt, sampling_params, *args, tried=plain, **kwargs)
            async with contextlib.aclosing(made) as outputs:
                async for engine, serials, output in outputs:
                    if recording is not None:
                        tokens = await recording.note(output, serials, self._pool.loads)
                        self._pool.count(engine, tokens)
                    yield output
        except WeightsWithdrawn as error:
            if call is not None:
                call.session.fail(error)
            raise
        except Exception as error:
            if call is not None and is_refusal(error):
                call.refused = not call.sampled
            elif call is not None:
                call.session.fail(EngineFailed(f"vLLM failed: {type(error).__name__}: {error}"))
            raise


class RecordingRenderer:
    """vLLM's renderer with another treatment of histories that have recorded replies or images.

    Such a history is rendered with a mark for each reply. Only the text between marks is encoded; replies keep their
    sampled tokens. If the template changes former turns or refuses the marks, the history is encoded as one text.
    Images take their placeholders here, and reach the engine as a workflow's do.
    """

    def __init__(self, engine: Engine, rewrites_history: bool) -> None:
        self._engine, self._rewrites_history = engine, rewrites_history
        self._renderer = engine.llm.renderer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    async def render_chat_async(
        self, conversations: Sequence[list[Any]], chat_params: Any, tok_params: Any = None, **options: Any
    ) -> Any:
        call = CALL.get()
        if call is None or len(conversations) != 1:
            return await self._renderer.render_chat_async(conversations, chat_params, tok_params, **options)
        (messages,) = conversations
        replies = [] if self._rewrites_history else call.session.tree.recognise(messages)
        images = any(shown(message, call.session.images) for message in messages)
        segments = await self._segments(call, messages, dict(replies), chat_params) if replies else None
        if segments is None and images:
            replies, segments = [], await self._segments(call, messages, {}, chat_params)
        if segments is None:
            found, (prompt,) = await self._renderer.render_chat_async(conversations, chat_params, tok_params, **options)
            call.place = call.session.tree.place([prompt["prompt_token_ids"]], [])
            return found, [prompt]
        tokens, placed_images = zip(*segments, strict=True)
        call.place = call.session.tree.place(tokens, [turn for _, turn in replies], placed_images)
        prompts = [{"prompt_token_ids": call.place.tokens}]
        made = await self._renderer.render_cmpl_async(prompts, tok_params, **options)
        if made[0]["prompt_token_ids"] != call.place.tokens:  # `truncation: auto` of /v1/responses has cut it
            call.place = call.session.tree.place([made[0]["prompt_token_ids"]], [])
        if images:
            made = [{**made[0], **await self._engine.vllm_prompt(call.place.tokens, call.place.images, "")}]
        return [messages], made

    async def _segments(
        self, call: Call, messages: list[Any], replies: Mapping[int, Turn], chat_params: Any
    ) -> list[tuple[list[int], Sequence[PlacedImage]]] | None:
        """Token ids before, between and after the replies, each with its images; None if the template does not keep the
        marks. Raises ValueError for images that have no place in them."""
        mark = {"role": "assistant", "content": _REPLY}
        marked = [mark if index in replies else message for index, message in enumerate(messages)]
        files: list[list[bytes]] = [[]]
        for index, message in enumerate(messages):
            if index in replies:
                files.append([])
            else:
                files[-1] += shown(message, call.session.images)
        try:
            _, rendered = await self._renderer.render_messages_async(marked, chat_params)
        except ValueError:
            if not replies:
                raise
            return None
        parts = rendered.get("prompt", "").split(_REPLY)
        if len(parts) != len(replies) + 1:
            return None
        return [self._encoded(*one) for one in zip(parts, files, strict=True)]

    def _encoded(self, text: str, images: Sequence[bytes]) -> tuple[list[int], Sequence[PlacedImage]]:
        tokens = self._renderer.get_tokenizer().encode(text, add_special_tokens=False)
        rules = self._engine.options.images
        if not images or rules is None:
            return tokens, ()
        try:
            tokens = expanded(tokens, images, rules)
        except InvalidInput as error:
            raise ValueError(str(error)) from None
        return tokens, placed(tokens, images, rules)


class Recording:
    """Records one request to an engine: tokens of every reply, with log-probabilities and weight versions."""

    def __init__(self, call: Call, sampling: Any) -> None:
        """`sampling`: vLLM's parameters, changed here so that the engine reports log-probabilities."""
        self._call = call
        self._parts: dict[int, _Part] = {}
        task = call.session.sampling
        reason = untrained_reason(sampling, task)
        self._trained = not reason
        if reason:
            call.session.untrained.add(reason)
        sampling.max_tokens = min(sampling.max_tokens or task.max_tokens, task.max_tokens)
        sampling.min_tokens = min(sampling.min_tokens, sampling.max_tokens)
        if sampling.logprobs is None:
            sampling.logprobs = 0
            sampling.extra_args = {**(getattr(sampling, "extra_args", None) or {}), UNREAD_LOGPROBS: True}
        sampling.flat_logprobs = True
        call.replies = sampling.n

    async def note(self, output: Any, serials: Sequence[int], loads: LoadHistory) -> int:
        """Record an output of the engine. Returns the number of tokens of replies that ended with it."""
        ended = 0
        for choice in output.outputs:
            part = self._parts.setdefault(choice.index, _Part())
            part.add(choice)
            if choice.finish_reason is not None:
                completion = completion_of(part, serials)
                spans = await loads.settle(completion.version_spans)
                made = replace(completion, version_spans=spans)
                self._call.sampled[choice.index] = (made, self._trained)
                ended += len(made.token_ids)
        return ended


@dataclass
class _Sampled:
    """Log-probability and rank of the sampled token at each position."""

    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)


@dataclass
class _Part:
    """A partial reply in the form that completion_of reads."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: _Sampled = field(default_factory=_Sampled)
    finish_reason: str | None = None
    routed_experts: Any = None

    def add(self, choice: Any) -> None:
        self.token_ids += choice.token_ids
        self.finish_reason = choice.finish_reason
        self.routed_experts = getattr(choice, "routed_experts", None)
        found = choice.logprobs
        for start in found.start_indices if found is not None else ():
            self.logprobs.logprobs.append(found.logprobs[start])
            self.logprobs.ranks.append(found.ranks[start])


def untrained_reason(sampling: Any, task: SamplingParams) -> str:
    """The parameter that makes vLLM sample another distribution than the task's, with which the trainer computes. Empty
    if there is none."""
    if max(sampling.top_k, 0) != max(task.top_k, 0):
        return f"top_k is {sampling.top_k}, the task's {task.top_k}"
    for name in ("temperature", "top_p", "repetition_penalty"):
        if getattr(sampling, name) != getattr(task, name):
            return f"{name} is {getattr(sampling, name):g}, the task's {getattr(task, name):g}"
    if getattr(sampling, "structured_outputs", None) is not None:
        return "a constraint: response_format, parallel_tool_calls false, or tool_choice required or of a name"
    return next((f"{name} is set" for name, ok in _NEUTRAL.items() if getattr(sampling, name, ok[0]) not in ok), "")
