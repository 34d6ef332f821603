"""The client's side of an episode. Every answer has a deadline and is checked against the contract."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, NoReturn

import grpc.aio

from trinity.data.images import rgb, size
from trinity.data.vision import ImageRules
from trinity.explorer.environments.providers import Backoff, Provider, Providers
from trinity.explorer.environments.slots import EpisodeSlots
from trinity.explorer.environments.types import EnvironmentCause, EnvironmentFailed, StateRefused
from trinity.explorer.environments.wire import action_request, reset_request
from trinity.runtime.errors import InvalidInput
from trinity.sdk.contract import (
    MAX_EPISODE_IMAGES_BYTES,
    MAX_IMAGES_PIXELS,
    Answer,
    Reset,
    Totals,
    answer_problem,
    sendable,
)
from trinity.sdk.environment import Description
from trinity.sdk.wire import answer_from_proto

_HALF_CLOSE_SECONDS = 5.0


def image_problem(images: Sequence[bytes], rules: ImageRules, of_episode: int) -> str:
    """The reason why the model cannot read the images, as a sentence; empty if it can. Decodes them, so call it in a
    thread. `of_episode`: bytes of all images of the episode, these included.
    """
    if of_episode > MAX_EPISODE_IMAGES_BYTES:
        return f"the images of its episode have {of_episode} bytes, at most {MAX_EPISODE_IMAGES_BYTES}"
    pixels = 0
    for index, image in enumerate(images):
        try:
            width, height = size(image)
            pixels += width * height
            if pixels > MAX_IMAGES_PIXELS:
                return f"its images have {pixels} pixels together, at most {MAX_IMAGES_PIXELS}"
            rules.grid(width, height)
            rgb(image)
        except InvalidInput as error:
            return f"its images[{index}] {str(error).partition(': ')[2]}"
    return ""


class Episode:
    """reset or restore once -> step until done. Leaving the `async with` ends the episode at the provider."""

    def __init__(
        self,
        providers: Providers,
        reset: Reset,
        wait_seconds: float,
        closing: "set[asyncio.Task[None]]",
        images: ImageRules | str,
    ) -> None:
        """`images`: the model's rules for images, or the reason to refuse them."""
        self._providers = providers
        self._reset = reset
        self._wait_seconds = wait_seconds
        self._closing = closing
        self._images = images
        self._image_bytes = 0
        self._totals = Totals(reset.reward_bound)
        self._held = contextlib.ExitStack()
        self._slots: EpisodeSlots | None = None
        self._provider: Provider | None = None
        self._description = Description(reset.environment)
        self._call: Any = None
        self._turn = 0
        self._begun = False
        self._done = False
        self._over = False

    async def __aenter__(self) -> "Episode":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._held.close()
        self._release_slot()
        call, self._call = self._call, None
        if call is None:
            return
        if not self._done:
            call.cancel()
            return
        goodbye = asyncio.create_task(_half_close(call))
        self._closing.add(goodbye)
        goodbye.add_done_callback(self._closing.discard)

    @property
    def provider(self) -> str:
        """The provider's address; empty before reset."""
        return self._provider.address if self._provider is not None else ""

    @property
    def deterministic(self) -> bool:
        """True if the provider announces that the same actions give the same episode. False before reset."""
        return self._description.deterministic

    @property
    def snapshots(self) -> bool:
        """True if the provider announces that states can be restored. False before reset."""
        return self._description.snapshots

    @property
    def players(self) -> tuple[str, ...]:
        """Names of the players; empty for a single one, and before reset."""
        return self._description.players

    async def reset(self, keep_states: bool = False) -> Answer:
        """Begin at the provider with the fewest open episodes. Raises EnvironmentFailed.

        Waits for a slot without limit. If a provider is unavailable, tries another or the same one again for
        `wait_seconds`. `keep_states`: answers have states if the provider offers them.
        """
        return await self._open_somewhere(keep_states)

    async def restore(self, answer: Answer, earned: float = 0.0) -> None:
        """Continue from the state of an answer, after its actions, instead of a reset. Further answers have states.
        `earned`: the sum of the rewards so far.

        Waits as reset does. Raises EnvironmentFailed, and StateRefused if the state is not accepted.
        """
        self._reset, self._turn = replace(self._reset, state=answer.state, turn=answer.turn), answer.turn
        self._totals.reward = earned
        await self._open_somewhere(True)

    async def _open_somewhere(self, keep_states: bool) -> Answer:
        if self._over or self._call is not None:
            raise RuntimeError("an episode is reset once, inside its `async with`")
        name, backoff = self._reset.environment, Backoff(self._wait_seconds)
        while True:
            try:
                if self._slots is None:
                    self._slots, waited = await self._providers.acquire_slot(name)
                    if waited:
                        backoff.reset_deadline()
                return await self._open(self._providers.choose(name), keep_states)
            except EnvironmentFailed as failure:
                # While other explorers hold the slots, the episode keeps its place in the queue.
                if failure.cause is not EnvironmentCause.FULL:
                    self._release_slot()
                if failure.cause is EnvironmentCause.AWAY and self._providers.is_awaited(name):
                    raise
                await backoff.wait_or_raise(failure)

    async def step(self, text: str) -> Answer:
        """Send the policy's reply. Raises EnvironmentFailed, after which the episode is over."""
        if self._call is None or self._done or self._over:
            raise RuntimeError("step needs an episode that was reset and is neither done nor failed")
        self._turn += 1
        request, what = action_request(sendable(text), self._turn), f"action {self._turn}"
        return await self._exchange(request, what, self._description.step_timeout_seconds)

    async def _open(self, provider: Provider, keep_states: bool) -> Answer:
        name = self._reset.environment
        self._held.enter_context(provider.busy(name))
        self._provider = provider
        try:
            self._description = await provider.description(name)
            if self._reset.state and not self._description.snapshots:
                raise StateRefused(f"{name} at {provider.address} announces no snapshots", EnvironmentCause.REFUSED)
            if self._description.images and isinstance(self._images, str):
                what = f"{name} at {provider.address} shows images, and {self._images}"
                raise EnvironmentFailed(what, EnvironmentCause.REFUSED)
            keeps = keep_states and self._description.snapshots
            self._reset = replace(self._reset, images=self._description.images, keep_states=keeps)
            self._call = provider.stub.Episode()
        except EnvironmentFailed as failure:
            self._fail(failure)
        step = await self._exchange(reset_request(self._reset), "reset", self._description.reset_timeout_seconds)
        self._over, self._begun = False, True
        return step

    async def _exchange(self, request: Any, what: str, seconds: float) -> Answer:
        assert self._provider is not None
        where = f"{self._reset.environment} at {self._provider.address}"
        try:
            async with asyncio.timeout(seconds):
                await self._call.write(request)
                message = await self._call.read()
        except TimeoutError:
            failure = EnvironmentFailed(f"{where}: no answer to {what} in {seconds:g} s", EnvironmentCause.TIMEOUT)
            self._fail(failure)
        except grpc.aio.AioRpcError as error:
            self._fail(await self._provider.failure(self._reset.environment, error))
        except asyncio.InvalidStateError:  # the call ended before the message was written
            await self._fail_by_status(where, what)
        if message is grpc.aio.EOF:
            await self._fail_by_status(where, what)
        answer = answer_from_proto(message)
        problem = answer_problem(answer, self._turn, self._description) or self._totals.problem(answer)
        if answer.images and not problem:
            assert not isinstance(self._images, str)  # else the reset was refused
            self._image_bytes += sum(map(len, answer.images))
            problem = await asyncio.to_thread(image_problem, answer.images, self._images, self._image_bytes)
        if problem:
            self._fail(
                EnvironmentFailed(
                    f"{where}: the answer to {what} breaks the contract: {problem}", EnvironmentCause.CONTRACT_VIOLATION
                )
            )
        self._done = answer.done
        if answer.done:
            self._provider.record_success(self._reset.environment)
        return answer

    def _release_slot(self) -> None:
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.release()

    async def _fail_by_status(self, where: str, what: str) -> NoReturn:
        """Raise the failure of a stream that the provider ended, with or without an error status."""
        assert self._provider is not None
        code, details = await self._call.code(), await self._call.details()
        if code is grpc.StatusCode.OK:
            self._fail(EnvironmentFailed(f"{where}: the stream ended instead of an answer to {what}"))
        error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
        self._fail(await self._provider.failure(self._reset.environment, error))

    def _fail(self, failure: EnvironmentFailed) -> NoReturn:
        """End the episode on both sides and raise the failure."""
        assert self._provider is not None
        self._provider.record_failure(self._reset.environment, failure)
        self._held.close()
        if self._call is not None:
            self._call.cancel()
            self._call = None
        # Only a reset may be retried: after its first observation an episode cannot move to another provider.
        if self._begun:
            self._over = failure.begun = True
            failure.passing = False
        elif self._reset.state and failure.cause is EnvironmentCause.REFUSED and not failure.passing:
            raise StateRefused(str(failure), failure.cause) from None
        raise failure from None


async def _half_close(call: Any) -> None:
    """Half-close, so that the provider ends the episode by itself; cancel it if that takes too long."""
    try:
        async with asyncio.timeout(_HALF_CLOSE_SECONDS):
            await call.done_writing()
            await call.code()
    except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
    finally:
        call.cancel()
