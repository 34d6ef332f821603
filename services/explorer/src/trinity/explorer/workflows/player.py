"""Plays episodes: the policy replies to an environment until the environment is done or a limit is reached."""

import asyncio
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from trinity.config.workflows import ActionForm, EpisodeRules, Policy
from trinity.data.experience import SamplingParams, Task
from trinity.data.images import MOST_IMAGES, observed
from trinity.explorer.chat import Message
from trinity.explorer.environments.client import EnvironmentFailed
from trinity.explorer.environments.types import StateRefused
from trinity.explorer.journal.journal import Continued, EpisodeJournal
from trinity.explorer.journal.turns import OPEN, digest
from trinity.explorer.types import Completion
from trinity.explorer.workflows.base import Toolbox
from trinity.explorer.workflows.conversation import Conversation
from trinity.explorer.workflows.episode import End, Episode, Turn
from trinity.runtime.errors import InvalidInput
from trinity.runtime.metrics import Counter, Histogram

EPISODES = Counter("trinity_explorer_episodes_total", "Episodes by how they ended", ["environment", "end"])
TURNS = Histogram(
    "trinity_explorer_episode_turns",
    "Turns of an episode, by how it ended",
    ["end"],
    buckets=(0, 1, 2, 5, 10, 15, 25, 50, 100),
)
TOKENS = Histogram(
    "trinity_explorer_episode_tokens",
    "Tokens of an episode's conversation, by how it ended",
    ["end"],
    buckets=(256, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
)

MAX_TEMPERATURE = 100.0
_MAX_ACTION = 2_000  # characters


def seed_of(task: Task) -> int:
    """Seed of a task's environment, the same for all rollouts of the group and for every epoch."""
    given = task.raw.get("seed")
    return given if type(given) is int and given >= 0 else zlib.crc32(f"{task.taskset}/{task.row}".encode())


class Player:
    """Plays episodes of one task."""

    def __init__(self, task: Task, tools: Toolbox, rules: EpisodeRules) -> None:
        self._task = task
        self._tools = tools
        self.rules = rules
        self.text_only = False  # for workflows that show parts of an episode again, without its images
        self._turn_tokens = min(rules.max_response_tokens or task.sampling.max_tokens, task.sampling.max_tokens)
        self._context = min(rules.max_context_tokens or tools.max_model_tokens, tools.max_model_tokens)
        self._rewritten = tools.history_problem
        if self._rewritten and not rules.step_wise:
            raise InvalidInput(
                "model.custom_chat_template",
                f"{self._rewritten}, so several turns make no single sequence; set workflow_args.step_wise: true, or "
                "give a chat template that leaves former turns as they were",
            )

    async def play(self) -> Episode:
        """Play an episode. Raises EnvironmentFailed and the engine's errors; a failure is never a reward of zero."""
        journal = self.journal()
        with self.counting() as counted:
            if journal is not None:
                return await self._play_durably(journal, counted)
            async with self.episode() as remote:
                episode = counted.episode = self.begin(await remote.reset())
                await self.play_until_done(episode, remote)
        return episode

    async def _play_durably(self, journal: EpisodeJournal, counted: "Counted") -> Episode:
        """Play from the end of the journal, if the environment can continue there."""
        while True:
            try:
                async with self.episode() as remote:
                    continued = Continued(remote, journal)
                    episode = counted.episode = self.begin(await continued.reset())
                    episode.journal = journal if continued.durable else None
                    await self.play_until_done(episode, continued)
                return episode
            except StateRefused as refusal:  # at most once, since the journal is empty then
                journal.forget(str(refusal))

    def journal(self) -> EpisodeJournal | None:
        """The journal of the next episode; None if none is kept."""
        journal: EpisodeJournal | None = self._tools.journal()
        whole = self.rules.max_turns == 1
        if journal is not None and whole and not 0 < journal.flush_tokens < self._turn_tokens:
            return None
        return journal

    def episode(self, environment_args: dict[str, Any] | None = None) -> Any:
        """The episode at its provider, as an asynchronous context."""
        args = {**self.rules.environment_args, **(environment_args or {})}
        return self._tools.episode(self.rules.environment, self._task.raw, args, seed_of(self._task))

    @contextmanager
    def counting(self) -> Iterator["Counted"]:
        """Count an episode by its end, a failure too, and observe its length."""
        counted = Counted()
        end = "failed"
        try:
            yield counted
            end = str(counted.episode.end) if counted.episode else "not_begun"
        except asyncio.CancelledError:
            end = "cancelled"  # with its group, or at the time limit
            raise
        except Exception as error:
            end = f"failed_{error.cause if isinstance(error, EnvironmentFailed) else type(error).__name__}"
            raise
        finally:
            EPISODES.labels(self.rules.environment, end).inc()
            TURNS.labels(end).observe(len(counted.episode.turns) if counted.episode else 0)
            TOKENS.labels(end).observe(len(counted.episode.conversation.tokens) if counted.episode else 0)

    def begin(self, first: Any, guidance: str = "") -> Episode:
        """The conversation up to the first reply. `first`: the answer to reset; `guidance` ends the system prompt."""
        if first.player:
            what = f"{self._task.workflow} plays one player, and {self.rules.environment} names {first.player}"
            raise InvalidInput("task.workflow", f"{what}; use players_workflow")
        text, instructions = first.observation, str(first.info.get("instructions") or "")
        if instructions and text.startswith(instructions):
            text = text[len(instructions) :].lstrip("\n")
        form, rules = self._task.format, self.rules
        key = form.get("system_prompt_key")
        given = self._task.raw.get(key) if key else form.get("system_prompt")
        system = next((str(p) for p in (given, rules.system_prompt) if p is not None), instructions)
        system = "\n\n".join(part for part in (system, guidance) if part)
        head: list[Message] = [{"role": "system", "content": system}] if system else []
        shown = self._shown(first)
        messages: list[Message] = [*head, self.message(text, shown)]
        prompt = self._tools.prompt(messages, images=shown)
        if len(prompt) + self._turn_tokens > self._context:
            raise InvalidInput(
                "model.max_model_len",
                f"the first observation takes {len(prompt)} tokens; with {self._turn_tokens} for a reply that is more "
                f"than the {self._context} of a conversation",
            )
        conversation = Conversation(tuple(prompt), images=self._tools.placed(prompt, shown))
        episode = Episode(rules, conversation, messages, text, images=shown, shown=[*shown])
        episode.metrics, episode.info = dict(first.metrics), dict(first.info)
        if first.done:
            episode.end = End.DONE
        return episode

    async def play_until_done(self, episode: Episode, remote: Any) -> None:
        """Play until the episode is over."""
        while episode.end is None:
            await self.turn(episode, remote)
            if episode.end is None:
                self.tell(episode)

    async def turn(self, episode: Episode, remote: Any) -> None:
        """Play one turn. With a journal, a recorded reply is taken, and a new one is recorded while the episode
        continues."""
        journal, number = episode.journal, len(episode.turns) - episode.shared_turns
        if journal is None:
            await self.act(episode, await self.reply(episode), remote)
            return
        conversation = episode.conversation
        seen = digest(conversation.tokens, [turn.reward for turn in episode.turns], conversation.images)
        completion = journal.recorded(number, seen)
        if completion is None or completion.finish_reason == OPEN:
            completion = await self._kept_reply(episode, journal, seen, completion)
        await self.act(episode, completion, remote)

    async def _kept_reply(
        self, episode: Episode, journal: EpisodeJournal, seen: bytes, made: Completion | None
    ) -> Completion:
        """Sample a reply, in parts that the journal writes. `made`: its first tokens, if they are recorded."""
        sampling, number = self.sampling(episode), len(episode.turns) - episode.shared_turns
        # A stop text may cross the end of a part.
        at_once = journal.flush_tokens if not sampling.stop else 0
        if made is not None and len(made.token_ids) >= sampling.max_tokens:
            made = None
        while made is None or made.finish_reason == OPEN:
            known = made.token_ids.tolist() if made is not None else []
            left = sampling.max_tokens - len(known)
            tokens = min(at_once or left, left)
            least = min(max(sampling.min_tokens - len(known), 0), tokens)
            asked = replace(sampling, max_tokens=tokens, min_tokens=least)
            conversation = episode.conversation
            (part,) = await self._tools.generate([*conversation.tokens, *known], asked, conversation.images)
            if part.finish_reason == "length" and tokens < left:
                part = replace(part, finish_reason=OPEN)
            made = await journal.keep(number, seen, part, len(known))
        return made

    async def reply(self, episode: Episode) -> Completion:
        conversation = episode.conversation
        (completion,) = await self._tools.generate(conversation.tokens, self.sampling(episode), conversation.images)
        return completion

    def sampling(self, episode: Episode) -> SamplingParams:
        """The sampling of the next reply."""
        sampling = replace(self._task.sampling, n=1, max_tokens=self._turn_tokens)
        sampling = requested(sampling, episode.info.get("sampling"))
        return replace(sampling, min_tokens=min(sampling.min_tokens, sampling.max_tokens))

    async def act(self, episode: Episode, completion: Completion, remote: Any) -> None:
        """Pass the action of a reply to the environment, unless the reply breaks a rule."""
        rules = self.rules
        same = (
            requested(self._task.sampling, episode.info.get("sampling")).temperature == self._task.sampling.temperature
        )
        episode.conversation = episode.conversation.replied(completion, trained=same)
        if rules.step_wise:
            episode.steps.append(episode.conversation)
        reply = self._tools.reply(completion.token_ids)
        episode.messages.append({"role": "assistant", "content": reply})
        seen, shown = episode.observation, episode.images
        parsed = parse_action(reply, rules.action_form, rules.require_thinking)
        problem, policy, why = "", Policy.PASS, ""
        if completion.finish_reason == "length" and rules.on_long_reply is not Policy.PASS:
            problem, policy, why = End.LONG_REPLY, rules.on_long_reply, "your reply is too long"
        elif parsed.problem and rules.on_bad_format is not Policy.PASS:
            problem, policy, why = End.BAD_FORMAT, rules.on_bad_format, parsed.problem
        action = parsed.action or reply
        if problem:
            taken = rules.penalty if policy is Policy.PENALTY else 0.0
            episode.turns.append(Turn(seen, reply, "", problem, -taken, shown))
            episode.observation = f"Nothing happens: {why}.\n{episode.answered}"
            if policy is Policy.END:
                episode.end = End(problem)
        elif self._repeats(episode, action):
            episode.turns.append(Turn(seen, reply, "", End.REPEATED, images=shown))
            episode.end = End.REPEATED
        else:
            await self.step(episode, reply, action, remote)

    async def step(self, episode: Episode, reply: str, action: str, remote: Any) -> None:
        """One step of the environment."""
        seen, shown = episode.observation, episode.images
        result = await remote.step(action)
        episode.turns.append(Turn(seen, reply, action, "", result.reward, shown))
        episode.metrics, episode.info = {**episode.metrics, **result.metrics}, dict(result.info)
        episode.observation = episode.answered = result.observation
        episode.images = self._shown(result)
        if result.done:
            episode.end = End.DONE

    def tell(self, episode: Episode, messages: Sequence[Message] = ()) -> None:
        """Append the observation, or these text messages, to the conversation, or end the episode at a limit."""
        if len(episode.turns) >= self.rules.max_turns:
            episode.end = End.TURN_LIMIT
            return
        shown = () if messages else episode.images
        news = list(messages) or [self.message(episode.observation, shown)]
        begins = starts_conversation(episode.info)
        if begins:
            self._begin_again(episode)
        if begins or self._rewritten:
            seen = (*episode.shown, *shown)
            prompt = self._tools.prompt([*episode.messages, *news], images=seen)
            told = Conversation(tuple(prompt), images=self._tools.placed(prompt, seen))
        else:
            tokens = self._tools.next_turn(news, shown)
            told = episode.conversation.told(tokens, self._tools.placed(tokens, shown))
        if len(told.tokens) + self._turn_tokens > self._context or len(told.images) > MOST_IMAGES:
            episode.end = End.CONTEXT_LIMIT
            return
        episode.messages += news
        episode.shown += shown
        episode.conversation = told

    def _begin_again(self, episode: Episode) -> None:
        """Drop the conversation, because the environment began another one or rewrote it."""
        if not self.rules.step_wise:
            raise InvalidInput(
                "workflow_args.step_wise",
                f"is false, but {self.rules.environment} began a new conversation in its episode, so its turns make no "
                "single sequence; set it to true",
            )
        system = episode.info.get("instructions") or ""
        episode.messages = [{"role": "system", "content": str(system)}] if system else []
        episode.shown = []

    def _shown(self, answer: Any) -> tuple[bytes, ...]:
        if answer.images and self.text_only:
            what = f"{self._task.workflow} only reads text, and {self.rules.environment} shows images"
            raise InvalidInput("task.workflow", f"{what}; train it with another workflow")
        return tuple(answer.images)

    def message(self, text: str, images: Sequence[bytes]) -> Message:
        """An observation in the form that the policy sees."""
        cut = self.cut(self._tools.observed(text))
        return {"role": "user", "content": observed(cut, len(images)) if images else cut}

    def cut(self, text: str) -> str:
        limit = self.rules.max_observation_characters
        return text if len(text) <= limit else f"{text[:limit]} [... {len(text) - limit} characters left out]"

    def _repeats(self, episode: Episode, action: str) -> bool:
        limit = self.rules.max_repeats
        if limit < 2 or len(episode.turns) < limit - 1:
            return False
        return all(turn.action == action for turn in episode.turns[-(limit - 1) :])


def starts_conversation(info: dict[str, Any]) -> bool:
    """True if the observation begins a new conversation (info.conversation)."""
    return info.get("conversation") == "new"


def requested(sampling: SamplingParams, asked: Any) -> SamplingParams:
    """Sampling of the next reply with the environment's requests (info.sampling), within the task's limit of tokens."""
    if asked is None:
        return sampling
    if not isinstance(asked, dict):
        raise InvalidInput("info.sampling", f"is {asked!r:.100}, must be an object")
    temperature, tokens = asked.get("temperature", sampling.temperature), asked.get("max_tokens", sampling.max_tokens)
    stop = asked.get("stop", [])
    if type(temperature) not in (int, float) or not 0 <= temperature <= MAX_TEMPERATURE:
        raise InvalidInput("info.sampling.temperature", f"is {temperature!r:.100}, must be from 0 to {MAX_TEMPERATURE}")
    if type(tokens) is not int or tokens < 1:
        raise InvalidInput("info.sampling.max_tokens", f"is {tokens!r:.100}, must be an integer >= 1")
    if not isinstance(stop, list) or not all(isinstance(one, str) and one for one in stop):
        raise InvalidInput("info.sampling.stop", f"is {stop!r:.100}, must be a list of texts")
    return replace(
        sampling,
        temperature=float(temperature),
        max_tokens=min(tokens, sampling.max_tokens),
        min_tokens=min(sampling.min_tokens, tokens),
        stop=(*sampling.stop, *stop),
    )


@dataclass
class Counted:
    """The episode to count, None until it has begun."""

    episode: Episode | None = None


@dataclass(frozen=True)
class Parsed:
    """The action for the environment, or the `problem` that the policy reads instead."""

    action: str = ""
    problem: str = ""


def parse_action(reply: str, form: ActionForm, thinking: bool) -> Parsed:
    """Parse the action of a reply, in time linear in its length.

    With `thinking`, a reply must have exactly one <think>...</think> followed by exactly one action. Without, the last
    action counts.
    """
    if form is ActionForm.REPLY:
        return Parsed(reply)
    if thinking:
        problem = _thinking_problem(reply, form)
        if problem:
            return Parsed(problem=problem)
    found = _last_fenced(reply) if form is ActionForm.FENCE else _last_between(reply, f"<{form}>", f"</{form}>")
    if found is None or not found.strip():
        return Parsed(problem=f"there is no {_example(form)} in your reply")
    if len(found) > _MAX_ACTION:
        return Parsed(problem=f"the action has {len(found)} characters, at most {_MAX_ACTION} are allowed")
    return Parsed(found.strip())


def _thinking_problem(reply: str, form: ActionForm) -> str:
    tags = ["think"] if form is ActionForm.FENCE else ["think", str(form)]
    for tag in tags:
        opened, closed = reply.count(f"<{tag}>"), reply.count(f"</{tag}>")
        if (opened, closed) != (1, 1) or reply.find(f"<{tag}>") > reply.find(f"</{tag}>"):
            return f"there must be exactly one <{tag}>...</{tag}> in your reply"
    if len(tags) == 2 and reply.find("</think>") > reply.find(f"<{form}>"):
        return f"<{form}> must stand behind </think>"
    return ""


def _last_between(reply: str, opening: str, closing: str) -> str | None:
    close = reply.rfind(closing)
    begin = reply.rfind(opening, 0, max(close, 0))
    return reply[begin + len(opening) : close] if begin != -1 else None


def _last_fenced(reply: str) -> str | None:
    parts = reply.rsplit("```", 2)
    return parts[1] if len(parts) == 3 else None


def _example(form: ActionForm) -> str:
    return "block between triple backticks" if form is ActionForm.FENCE else f"<{form}>...</{form}>"
