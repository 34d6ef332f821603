"""The model of a workflow in Trinity-RFT's form: this explorer's engines, tokenizer and gateway of agents."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from trinity.common.experience import Experience as Made
from trinity.common.models.auxiliary import AuxiliaryModel
from trinity.common.refusals import NotMapped
from trinity.compat_rft.trajectories import Reply
from trinity.data.experience import Experience, SamplingParams, Task
from trinity.explorer.sessions.agents import http_client
from trinity.explorer.types import Completion
from trinity.explorer.workflows.base import Toolbox, as_text
from trinity.explorer.workflows.conversation import Conversation

Messages = Sequence[dict[str, Any]]
# Trinity-RFT's options of a call that Trinity has not as sampling parameters; logprobs are always there.
_WITHOUT_EFFECT = ("logprobs", "prompt_logprobs", "include_stop_str_in_output", "skip_special_tokens")
_OPTIONS = ("n", "temperature", "top_p", "top_k", "max_tokens", "min_tokens", "repetition_penalty", "stop", "seed")
_OF_THE_TRAINER = ("temperature", "top_p", "repetition_penalty")


class PolicySampler:
    """Samples for one instance of a workflow; `replies` has all its replies. See trinity.common.models.model.Sampler.

    A conversation grows by tokens: a message that is a reply of chat's stands for the tokens of that reply, where the
    chat template leaves history as it was.
    """

    def __init__(self, task: Task, tools: Toolbox, stack: AsyncExitStack) -> None:
        """`stack`: the contexts of the run, which ends the session."""
        self._task, self._tools, self._stack = task, tools, stack
        self.model_path = tools.model_path
        self._replies: list[Reply] = []
        self._history: list[Reply] = []  # of chat and generate, since it was last cleared
        self._conversations: dict[str, Conversation] = {}  # by their messages
        self._agent: Any = None
        self._turns_taken = 0  # of the session's, since the history was last cleared

    @property
    def replies(self) -> list[Reply]:
        return [*self._replies, *self._of_session()]

    def check(self) -> None:
        """Raises the failure of the session, of which the agent saw only the consequence."""
        if self._agent is not None and self._agent.session.failure is not None:
            raise self._agent.session.failure

    async def chat(self, messages: Messages, options: dict[str, Any]) -> list[Made]:
        options = dict(options)
        schemas = options.pop("tools", None)
        before = self._before(messages, schemas)
        prompt, cut = self._fitting(before.tokens, first=not before.turns)
        if cut:
            before = Conversation(tuple(prompt))
        sampling = self._sampling(options, len(prompt), cut)
        made = []
        for completion in await self._tools.generate(prompt, sampling):
            reply = self._recorded(prompt, completion, sampling, cut, self._tools.reply(completion.token_ids))
            grown = [*messages, {"role": "assistant", "content": reply.text}]
            self._conversations[_key(grown, schemas)] = before.replied(completion, reply.trained)
            made.append(self._experience(reply, cut))
        return made

    async def generate(self, prompts: Sequence[str], options: dict[str, Any]) -> list[Made]:
        made = []
        for text in [prompts] if isinstance(prompts, str) else prompts:
            prompt, cut = self._fitting(self._tools.tokens(text), first=True)
            sampling = self._sampling(options, len(prompt), cut)
            completions = await self._tools.generate(prompt, sampling)
            replies = [self._recorded(prompt, c, sampling, cut, self._tools.text(c.token_ids)) for c in completions]
            made += [self._experience(reply, cut) for reply in replies]
        return made

    async def logprobs(self, tokens: Sequence[int]) -> Any:
        import torch

        return torch.from_numpy(await self._tools.policy_logprobs([int(token) for token in tokens]))

    async def converted(self, messages: Messages, schemas: Any = None) -> Made:
        last = max((i for i, message in enumerate(messages) if message.get("role") == "assistant"), default=-1)
        conversation = self._conversations.get(_key(messages[: last + 1], schemas))
        if conversation is None:
            problem = "convert_messages_to_experience: a reply in these messages is no text of self.model.chat's"
            raise NotMapped(f"{problem}, and text is not tokenized again", "conversations")
        asked = sum(message.get("role") == "assistant" for message in messages)
        if conversation.turns < asked:
            why = self._tools.history_problem or "a former reply was no text of self.model.chat's, or was changed"
            raise NotMapped(f"convert_messages_to_experience: {why}", "conversations")
        made = conversation.experience(0, 0.0)
        prompt, response = made.token_ids[: made.prompt_length], made.token_ids[made.prompt_length :]
        return Made(
            tokens=made.token_ids.tolist(),
            prompt_length=made.prompt_length,
            logprobs=made.logprobs.tolist(),
            action_mask=made.action_mask.tolist(),
            prompt_text=self._tools.text(prompt),
            response_text=self._tools.reply(response),
            messages=list(messages),
        )

    async def history(self, clear: bool) -> list[Made]:
        session = self._of_session()
        found = [*self._history, *session[self._turns_taken :]]
        if clear:
            self._history, self._turns_taken = [], len(session)
        return [self._experience(reply, False) for reply in found]

    async def endpoint(self) -> tuple[str, str]:
        if self._agent is None:
            self._agent = await self._stack.enter_async_context(self._tools.openai_client(self._task))
        return self._agent.base_url, self._agent.key

    def recorded(self, reward: float | None, info: dict[str, Any], metrics: dict[str, float]) -> list[Experience]:
        """The session's conversations, one for each branch. Raises SessionFailed without one, or without a reward."""
        if self._agent is None:
            raise NotMapped("nothing was recorded: base_url was not used", "recording")
        self._agent.reward = reward
        info_json = json.dumps(info, default=str) if info else ""
        return [as_text(self._tools, e, metrics, info_json) for e in self._agent.experiences(0)]

    def client(self, endpoint: tuple[str, str], asynchronous: bool) -> Any:
        import openai

        kind: Any = openai.AsyncOpenAI if asynchronous else openai.OpenAI
        http: Any = openai.DefaultAsyncHttpxClient if asynchronous else openai.DefaultHttpxClient
        (base_url, key), seconds = endpoint, self._task.timeout_seconds
        made = kind(base_url=base_url, api_key=key, timeout=seconds, http_client=http_client(http, base_url))
        made.model_path = self.model_path
        return made

    def auxiliary(self, loop: asyncio.AbstractEventLoop, asynchronous: bool) -> list[AuxiliaryModel]:
        """The auxiliary models that write, which `loop` answers."""
        return [AuxiliaryModel(name, partial(self._judge, name), loop, asynchronous) for name in self._tools.judges]

    async def _judge(self, name: str, messages: Messages, options: dict[str, Any]) -> list[str]:
        """Samples at temperature 1 unless the call has another; a reply has at most the task's tokens."""
        task = self._task.sampling
        neutral = SamplingParams(max_tokens=task.max_tokens)
        options = dict(options)
        options.setdefault("max_tokens", options.pop("max_completion_tokens", None))
        return await self._tools.judge(messages, _sampling(options, neutral, neutral.max_tokens), name)

    def _before(self, messages: Messages, schemas: Any) -> Conversation:
        """Returns the conversation to reply to: a conversation of chat with the messages since then, or a new one."""
        for at in range(len(messages) - 1, 0, -1):
            known = self._conversations.get(_key(messages[:at], schemas))
            if known is not None and not self._tools.history_problem:
                return known.told(self._tools.next_turn(messages[at:]))
        *others, last = messages
        if last.get("role") == "assistant":  # the beginning of the reply
            return Conversation(tuple(self._tools.prompt(others, str(last["content"]), schemas)))
        return Conversation(tuple(self._tools.prompt(messages, None, schemas)))

    def _fitting(self, prompt: list[int], first: bool) -> tuple[list[int], bool]:
        """Returns the prompt, cut to its limit, and if it was cut. The first prompt has a limit of the YAML."""
        limit = self._tools.max_prompt_tokens if first else self._tools.max_model_tokens - 1
        return prompt[:limit], len(prompt) > limit

    def _sampling(self, options: dict[str, Any], prompt_length: int, cut: bool) -> SamplingParams:
        """Returns the sampling parameters of a call, and the task's where the call has none."""
        room = 1 if cut else max(self._tools.max_model_tokens - prompt_length, 1)
        return _sampling(options, self._task.sampling, room)

    def _recorded(
        self, prompt: list[int], completion: Completion, sampling: SamplingParams, cut: bool, text: str
    ) -> Reply:
        task = self._task.sampling
        same = all(getattr(sampling, name) == getattr(task, name) for name in _OF_THE_TRAINER)
        trained = same and max(sampling.top_k, 0) == max(task.top_k, 0) and not cut
        reply = Reply(tuple(prompt), completion, text, trained)
        self._replies.append(reply)
        self._history.append(reply)
        return reply

    def _experience(self, reply: Reply, cut: bool) -> Made:
        made = reply.experience(self._tools.text(reply.before))
        made.truncate_status = "prompt_truncated" if cut else made.truncate_status
        return made

    def _of_session(self) -> list[Reply]:
        """Returns the replies to OpenAI clients, in the order of their completion."""
        turns = self._agent.session.tree.turns if self._agent is not None else []
        return [
            Reply(turn.before, turn.completion, self._tools.text(turn.completion.token_ids), turn.trained)
            for turn in turns
        ]


def _sampling(options: dict[str, Any], defaults: SamplingParams, room: int) -> SamplingParams:
    """Returns the sampling parameters of a call, for at most `room` tokens. Raises NotMapped for unknown options."""
    given = {name: value for name, value in options.items() if value is not None and name not in _WITHOUT_EFFECT}
    if unknown := [name for name in given if name not in _OPTIONS]:
        raise NotMapped(f"models take no {unknown[0]!r}; they take {', '.join(_OPTIONS)}", "the-model")
    if "stop" in given:
        given["stop"] = (given["stop"],) if isinstance(given["stop"], str) else tuple(given["stop"])
    most = min(given.pop("max_tokens", defaults.max_tokens), defaults.max_tokens, room)
    least = min(given.pop("min_tokens", defaults.min_tokens), most)
    return replace(defaults, **{"n": 1, **given, "max_tokens": most, "min_tokens": least})


def _key(messages: Messages, schemas: Any = None) -> str:
    """Equal for equal conversations with the same tools, as far as a chat template reads them."""
    read = [{name: value for name, value in message.items() if value is not None} for message in messages]
    return json.dumps([read, schemas or []], sort_keys=True, default=str)
