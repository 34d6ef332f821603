"""Checks of one environment: whole episodes, messages out of turn, hostile texts, parallel and abandoned episodes."""

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc

from trinity.conformance.result import Noted, Result, Skipped, Verdict, judge, refused
from trinity.sdk.contract import (
    MAX_EPISODE_IMAGES_BYTES,
    MAX_IMAGES_PIXELS,
    MAX_STATE_BYTES,
    MAX_TEXT_BYTES,
    Answer,
    Reset,
    Totals,
    info_problem,
    json_object,
)
from trinity.sdk.environment import Description
from trinity.sdk.provider.client import Broken, Provider, Refused, Stream

T = TypeVar("T")
Seen = tuple[str, tuple[bytes, ...], tuple[float, str, dict[str, float]], bool, dict[str, Any]]

_SILENCE_SECONDS = 0.3
_RELEASE_SECONDS = 10.0
_PARALLEL = 8
_SCRIPT_STEPS = 5
_MOST_AT_ONCE = 256
_REWARD_BOUND = 1e6  # explorer.reward_bound of a run that gives none
_HOSTILE = {
    "nothing": "",
    "control characters": "\x00\x1b[31m\u202e\r\n\t\x7f",
    "other digits": "٤٢ ④② Ⅷ",
    "a power tower": "<answer>9**9**9**9</answer><action>9**9**9</action>",
    "open tags": "<think>" * 10_000 + "<answer>" * 10_000,
    "open parentheses": "(" * 50_000,
    "a megabyte": "x" * MAX_TEXT_BYTES,
}


@dataclass(frozen=True)
class Sample:
    """A sample episode: the task's row and arguments as JSON objects, and the text of every action."""

    task_json: str = "{}"
    args_json: str = ""
    action: str = "look"
    max_steps: int = 20


class EpisodeChecks:
    def __init__(self, provider: Provider, described: Description, sample: Sample) -> None:
        self._provider = provider
        self._described = described
        self._sample = sample

    async def run(self) -> AsyncIterator[Result]:
        """Yields the result of each check; stops if a reset fails."""
        name = self._described.name
        yield (first := await judge(name, "a reset is answered", self._a_reset()))
        if first.verdict is not Verdict.OK:
            return
        checks: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("an episode is played, one sound answer per action", self._an_episode),
            ("info has what workflows read, in its kind", self._info),
            ("nothing comes that was not asked for", self._silence),
            ("a second reset is INVALID_ARGUMENT", self._a_second_reset),
            ("an action with another turn is INVALID_ARGUMENT", self._another_turn),
            ("a task that is no JSON is INVALID_ARGUMENT", self._no_json),
            ("a text over 1 MiB is INVALID_ARGUMENT", self._too_long),
            *((f"hostile text: {kind}", partial(self._hostile, text)) for kind, text in _HOSTILE.items()),
            ("episodes side by side do not mix", self._side_by_side),
            ("closing the client's side ends with OK", self._half_close),
            ("cancelled episodes free their slots", self._cancelled),
            ("the announced limit is kept", self._the_limit),
            ("the same seed gives the same episode", self._same_seed),
        ]
        if self._described.images:
            checks += [
                ("images can be decoded", self._images),
                ("a reset without `images` is INVALID_ARGUMENT", self._images_unasked),
            ]
        if self._described.snapshots:
            checks += [
                ("a restored state continues as the episode did", self._restored),
                ("states come where they are asked for alone", self._states_that_are_asked_for),
                ("a state that is damaged or too large is INVALID_ARGUMENT", self._damaged_states),
            ]
        for check, work in checks:
            yield await judge(name, check, self._expected(work))

    async def _expected(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await self._when_there_is_room(work)
        except Refused as refusal:
            raise Broken(f"it was refused: {refusal}") from None

    async def _when_there_is_room(self, work: Callable[[], Awaitable[T]]) -> T:
        """Retries for a while: earlier episodes may need time to be released."""
        deadline = asyncio.get_running_loop().time() + _RELEASE_SECONDS
        while True:
            try:
                return await work()
            except Refused as refusal:
                late = asyncio.get_running_loop().time() > deadline
                if refusal.code is not grpc.StatusCode.RESOURCE_EXHAUSTED or late:
                    raise
            await asyncio.sleep(0.05)

    def _stream(self) -> Stream:
        return Stream(self._provider, self._described)

    def _reset(self, seed: int = 1, **changes: Any) -> Reset:
        sample, described = self._sample, self._described
        given = {"task_json": sample.task_json, "args_json": sample.args_json, "images": described.images}
        return Reset(environment=described.name, seed=seed, **{**given, **changes})

    async def _a_reset(self) -> None:
        async with self._stream() as stream:
            try:
                await stream.reset(self._reset())
            except Refused as refusal:
                if refusal.code is grpc.StatusCode.INVALID_ARGUMENT:
                    raise Skipped(f"the task is refused, give one of its own: {refusal.details}") from None
                raise Broken(f"it was refused: {refusal}") from None

    async def _an_episode(self) -> None:
        async with self._stream() as stream:
            answer, turn, totals = await stream.reset(self._reset()), 0, Totals(_REWARD_BOUND)
            if answer.reward:
                raise Broken(f"the reward of the reset is {answer.reward}, must be 0")
            while not (problem := totals.problem(answer)) and not answer.done and turn < self._sample.max_steps:
                turn += 1
                answer = await stream.act(self._sample.action, turn)
            if problem:
                raise Broken(f"the answer of turn {answer.turn} would fail an episode of a run: {problem}")
            if answer.done:
                await refused(stream.act(self._sample.action, turn + 1), grpc.StatusCode.FAILED_PRECONDITION)

    async def _info(self) -> None:
        async with self._stream() as stream:
            answer = await stream.reset(self._reset())
            for turn in range(1, min(self._sample.max_steps, 5) + 1):
                if problem := info_problem(json_object(answer.info_json)):
                    raise Broken(f"the answer of turn {answer.turn} breaks the contract: {problem}")
                if answer.done:
                    break
                answer = await stream.act(self._sample.action, turn)

    async def _images(self) -> None:
        seen = 0
        async with self._stream() as stream:
            answer = await stream.reset(self._reset())
            for turn in range(1, self._sample.max_steps + 1):
                seen += sum(map(len, answer.images))
                if seen > MAX_EPISODE_IMAGES_BYTES:
                    raise Broken(
                        f"images have {seen} bytes up to turn {answer.turn}, at most {MAX_EPISODE_IMAGES_BYTES}"
                    )
                _decode(answer.images, answer.turn)
                if answer.done:
                    break
                answer = await stream.act(self._sample.action, turn)
        if not seen:
            raise Noted("no answer of an episode had any, and images are announced")

    async def _images_unasked(self) -> None:
        async with self._stream() as stream:
            await refused(stream.reset(self._reset(images=False)), grpc.StatusCode.INVALID_ARGUMENT)

    async def _silence(self) -> None:
        async with self._stream() as stream:
            answer = await stream.reset(self._reset())
            if not answer.done:
                await stream.act(self._sample.action, 1)
            await stream.silent(_SILENCE_SECONDS)

    async def _a_second_reset(self) -> None:
        async with self._stream() as stream:
            await stream.reset(self._reset())
            await refused(stream.reset(self._reset()), grpc.StatusCode.INVALID_ARGUMENT)

    async def _another_turn(self) -> None:
        async with self._stream() as stream:
            await stream.reset(self._reset())
            await refused(stream.act(self._sample.action, 2), grpc.StatusCode.INVALID_ARGUMENT)

    async def _no_json(self) -> None:
        for text in ("{", "[1]"):
            async with self._stream() as stream:
                reset = Reset(environment=self._described.name, task_json=text)
                await refused(stream.reset(reset), grpc.StatusCode.INVALID_ARGUMENT)

    async def _too_long(self) -> None:
        async with self._stream() as stream:
            await stream.reset(self._reset())
            # A server with a lower message limit refuses with its own status.
            codes = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
            await refused(stream.act("x" * (MAX_TEXT_BYTES + 1), 1), *codes)

    async def _hostile(self, text: str) -> None:
        async with self._stream() as stream:
            await stream.reset(self._reset())
            try:
                await stream.act(text, 1)
            except Refused as refusal:
                if refusal.code is not grpc.StatusCode.INVALID_ARGUMENT:
                    raise

    async def _side_by_side(self) -> None:
        limit = self._described.max_parallel_episodes
        count = min(_PARALLEL, limit) if limit else _PARALLEL

        await self._released(count)
        alone = [await self._script(seed) for seed in range(count)]
        together = await asyncio.gather(*(self._script(seed) for seed in range(count)))
        if alone != list(together) and alone == [await self._script(seed) for seed in range(count)]:
            raise Broken("episodes side by side differ from the same ones played alone")

    async def _half_close(self) -> None:
        async with self._stream() as stream:
            await stream.reset(self._reset())
            await stream.finish(_RELEASE_SECONDS)

    async def _cancelled(self) -> None:
        limit = self._described.max_parallel_episodes
        await self._released(min(limit, _PARALLEL) if limit else _PARALLEL)

    async def _released(self, count: int) -> None:
        """Raises Broken unless `count` episodes can be open, twice. Earlier ones may need time to be released."""
        for _ in range(2):
            deadline = asyncio.get_running_loop().time() + _RELEASE_SECONDS
            while not await self._open(count):
                if asyncio.get_running_loop().time() > deadline:
                    raise Broken(f"{count} slots are not free {_RELEASE_SECONDS:g} s after their clients left")
                await asyncio.sleep(0.1)

    async def _open(self, count: int) -> bool:
        """Returns True if `count` episodes can be open at once. Cancels them afterwards."""
        streams = [self._stream() for _ in range(count)]
        try:
            results = await asyncio.gather(*(stream.reset(self._reset()) for stream in streams), return_exceptions=True)
        finally:
            for stream in streams:
                await stream.__aexit__(None, None, None)
        for result in results:
            full = isinstance(result, Refused) and result.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            if isinstance(result, BaseException) and not full:
                raise result
        return not any(isinstance(result, Refused) for result in results)

    async def _the_limit(self) -> None:
        limit = self._described.max_parallel_episodes
        if not limit or limit > _MOST_AT_ONCE:
            raise Skipped("none is announced" if not limit else f"{limit} is more than is tried")
        await self._released(limit)
        if await self._open(limit + 1):
            raise Broken(f"{limit + 1} episodes were open at once; {limit} are announced")

    async def _same_seed(self) -> None:
        steps = self._sample.max_steps if self._described.deterministic else _SCRIPT_STEPS
        first, second = await self._script(7, steps), await self._script(7, steps)
        if first == second:
            return
        if self._described.deterministic:
            raise Broken("it does not, and deterministic is announced: what follows an interrupted turn would differ")
        raise Noted("it does not; where an episode is played again, what follows may differ")

    async def _restored(self) -> None:
        """Restores each state of an episode and plays on to its end."""
        async with self._stream() as stream:
            answers = [await stream.reset(self._reset(keep_states=True))]
            while not answers[-1].done and len(answers) <= self._sample.max_steps:
                answers.append(await stream.act(self._sample.action, len(answers)))
        stateful = [answer for answer in answers if answer.state]
        if not stateful:
            raise Broken("no answer had a state, and snapshots are announced")
        for answer in stateful:
            again = await self._when_there_is_room(partial(self._from_state, answer, len(answers)))
            then = [_seen(later) for later in answers[answer.turn + 1 :]]
            differs = next((n for n, both in enumerate(zip(then, again, strict=True), 1) if both[0] != both[1]), 0)
            if differs:
                raise Broken(
                    f"from the state of turn {answer.turn} on, turn {answer.turn + differs} is answered otherwise"
                )

    async def _from_state(self, answer: Answer, turns: int) -> list[Seen]:
        async with self._stream() as stream:
            await stream.restore(self._reset(keep_states=True, state=answer.state, turn=answer.turn))
            return [_seen(await stream.act(self._sample.action, turn)) for turn in range(answer.turn + 1, turns)]

    async def _states_that_are_asked_for(self) -> None:
        async with self._stream() as stream:
            answer = await stream.reset(self._reset())
            if not answer.done:
                answer = await stream.act(self._sample.action, 1)
            if answer.state:
                raise Broken("an answer had a state, and the reset did not ask for states")

    async def _damaged_states(self) -> None:
        async with self._stream() as stream:
            whole = await stream.reset(self._reset(keep_states=True))
        if not whole.state:
            raise Skipped("the answer to a reset has no state")
        state = whole.state
        flipped = state[:-1] + bytes([state[-1] ^ 1])
        for damaged in (state[: len(state) // 2], state + b"\0", flipped, b"\0", state + bytes(MAX_STATE_BYTES)):
            answer = Answer(state=damaged)
            restoring = self._when_there_is_room(partial(self._from_state, answer, 1))
            await refused(restoring, grpc.StatusCode.INVALID_ARGUMENT)

    async def _script(self, seed: int, steps: int = _SCRIPT_STEPS) -> list[Seen]:
        return await self._when_there_is_room(partial(self._played, seed, steps))

    async def _played(self, seed: int, steps: int) -> list[Seen]:
        async with self._stream() as stream:
            answer = await stream.reset(self._reset(seed))
            seen = [_seen(answer)]
            for turn in range(1, min(self._sample.max_steps, steps) + 1):
                if answer.done:
                    break
                answer = await stream.act(self._sample.action, turn)
                seen.append(_seen(answer))
            return seen


def _seen(answer: Answer) -> Seen:
    rewards = (answer.reward, answer.player, dict(answer.rewards))
    return answer.observation, tuple(answer.images), rewards, answer.done, json_object(answer.info_json)


def _decode(images: Sequence[bytes], turn: int) -> None:
    """Raises Broken for images of an answer that no client can show, and Skipped without Pillow."""
    try:
        from PIL import Image
    except ImportError:
        raise Skipped("needs Pillow; `pip install pillow`") from None
    pixels = 0
    for index, file in enumerate(images):
        try:
            with Image.open(io.BytesIO(file)) as found:
                pixels += found.width * found.height
                if pixels > MAX_IMAGES_PIXELS:
                    raise Broken(f"images of turn {turn} have {pixels} pixels together, at most {MAX_IMAGES_PIXELS}")
                found.load()
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise Broken(f"images[{index}] of turn {turn} cannot be decoded: {error}") from None
