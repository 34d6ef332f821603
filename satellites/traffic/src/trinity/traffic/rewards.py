"""Tasks of a run that learns from live traffic: one for each reward of a recorded call, in the order of the rewards.

The newest task of the queue says which rewards were fed, by the sequence of the last one. A reward whose call is too
old for the next batch, or was deleted, is passed over: it is counted, and never trained.
"""

import asyncio
import contextlib
import json
import time
from collections import deque
from dataclasses import dataclass

import structlog

from trinity.buffer.state.context import LiveVersions, RunContext
from trinity.config.schema.buffer import GenerationConfig
from trinity.data.experience import Task, TaskKind
from trinity.data.task_source import sampling_of
from trinity.data.traffic import TASKSET, WORKFLOW, CallReward
from trinity.data.wire import decode_reward
from trinity.runtime.broker import on_subject
from trinity.runtime.errors import InvalidInput, NotFound, TrinityError, Unavailable
from trinity.runtime.metrics import Counter, Gauge
from trinity.traffic.guard import Alarm, Guard
from trinity.weights.client import SyncClient, roll_back

log = structlog.get_logger(__name__)

PASSED = Counter("trinity_buffer_rewards_passed_total", "Rewards of recorded calls that made no task", ["reason"])
WITHDRAWN = Counter("trinity_buffer_versions_withdrawn_total", "Rollbacks by the guard of live traffic")
WAITING = Gauge("trinity_buffer_rewards_waiting", "Rewards of recorded calls that wait for their batch")

_MOST_WAITING = 16_384  # beyond it the guard does not read on; while a version is tried, few rewards are fed
_READ_AHEAD = 256
_LOOK_SECONDS, _ASK_SECONDS = 0.25, 10.0


@dataclass(frozen=True)
class Rewarded:
    """A reward and its sequence in the stream of traffic."""

    sequence: int
    reward: CallReward


class RewardedCalls:
    """`through`: sequence of the newest reward that was fed; set it before `follow`."""

    def __init__(self, context: RunContext, versions: LiveVersions, sync_address: str) -> None:
        """`sync_address`: of the service that the guard asks for rollbacks."""
        self._context, self._versions, self._sync_address = context, versions, sync_address
        self.through = 0
        self._waiting: deque[Rewarded] = deque()
        traffic = context.plan.config.explorer.traffic
        given = traffic.guard if traffic is not None else None
        self._guard: Guard | None = None
        if traffic is not None and given is not None:
            tries, bounds = traffic.trial is not None, (given.reward_low, given.reward_high)
            self._guard = Guard(given.alpha, given.margin, *bounds, together=tries)
        self._withdrawn: tuple[tuple[int, int], ...] = ()  # as the guard knows them
        self._asks_again = 0.0

    @property
    def waiting(self) -> int:
        """Rewards that are read and not fed."""
        return len(self._waiting)

    async def follow(self) -> None:
        """Read the rewards as clients send them, for ever. The guard begins with the oldest that are kept."""
        context, fed = self._context, self.through
        read = 0 if self._guard is not None else fed
        stream, subject = context.names.traffic_stream, context.names.call_rewards
        while True:
            with contextlib.suppress(Unavailable):  # NATS is away; read later
                async for message in on_subject(context.broker, stream, subject, read + 1, _READ_AHEAD):
                    read = message.sequence
                    try:
                        reward = decode_reward(message.data, context.limits)
                        if message.subject != context.names.call_reward(reward.id):
                            raise InvalidInput("id", f"is {reward.id}, which the subject {message.subject} is not of")
                    except InvalidInput as error:
                        self._pass("invalid", message.subject, str(error))
                        continue
                    await self._judge(reward, acts=read > fed)
                    if read > fed:
                        self._waiting.append(Rewarded(read, reward))
                    if len(self._waiting) >= _MOST_WAITING:
                        break
            WAITING.set(len(self._waiting))
            if self._waiting:
                await context.changed.notify()
            await asyncio.sleep(_LOOK_SECONDS)
            await context.changed.wait_for(lambda: len(self._waiting) < _MOST_WAITING)

    async def _judge(self, reward: CallReward, acts: bool) -> None:
        """Compare the versions' rewards, and roll back a version that the guard finds worse.

        acts: False for rewards that an earlier process judged.
        """
        version, live = reward.newest_version, self._context.live
        if self._guard is None or reward.oldest_version != version or live.is_withdrawn(version):
            return
        if live.withdrawn != self._withdrawn:
            self._withdrawn = live.withdrawn
            self._guard.forget(live.is_withdrawn)
        alarm = self._guard.add(version, reward.reward)
        if alarm is not None and acts and time.monotonic() >= self._asks_again:
            await self._withdraw(alarm)

    async def _withdraw(self, alarm: Alarm) -> None:
        """Ask sync for a rollback. If it fails, a reward of the version asks again, _ASK_SECONDS later."""
        reason = f"clients' rewards of {alarm.rewards} calls are worse than before (e-value {alarm.e_value:.3g})"
        told = {"version": alarm.version, "good": alarm.good, "reason": reason}
        try:
            async with SyncClient(self._sync_address, self._context.run) as sync:
                await sync.ask(roll_back(alarm.good, False, f"version {alarm.version}: {reason}"))
            await self._versions.look()
        except TrinityError as error:
            log.error("buffer.guard.failed", error=str(error), **told)
            self._asks_again = time.monotonic() + _ASK_SECONDS
            return
        WITHDRAWN.inc()
        log.warning("buffer.guard.withdrew", **told)

    async def take(self, gate_step: int) -> Rewarded | None:
        """The next reward whose call a task with this gate may train; None if none waits."""
        names, broker = self._context.names, self._context.broker
        while self._waiting:
            found = self._waiting.popleft()
            reward = found.reward
            if not await self._versions.meets(reward.oldest_version, gate_step):
                problem = f"sampled by version {reward.oldest_version}, the batch takes {gate_step} or newer"
                self._pass("stale", reward.id, problem)
                continue
            try:
                await broker.next(names.traffic_stream, names.call(reward.id, "*"), 1)
            except NotFound:
                self._pass("gone", reward.id, "its recording expired or was deleted")
                continue
            return found
        return None

    def task(self, reward: CallReward, ordinal: int, gate_step: int) -> Task:
        """The task of a rewarded call, whose id names the response."""
        plan = self._context.plan
        explorer = plan.config.explorer
        return Task(
            run=self._context.run,
            task_id=f"{TASKSET}/{reward.id}",
            ordinal=ordinal,
            kind=TaskKind.TRAIN,
            taskset=TASKSET,
            epoch=0,
            row=0,
            row_json=json.dumps({"id": reward.id, "reward": reward.reward}),
            format_json="{}",
            workflow=WORKFLOW,
            workflow_args_json="{}",
            reward_function="",
            reward_args_json="{}",
            repeat_times=1,
            sampling=sampling_of(plan, GenerationConfig(), 1),
            gate_step=gate_step,
            evaluation_step=0,
            timeout_seconds=explorer.max_timeout,
            max_attempts=explorer.max_retry_times + 1,
        )

    def _pass(self, reason: str, call: str, problem: str) -> None:
        PASSED.labels(reason).inc()
        log.info("buffer.reward.passed", call=call, reason=reason, problem=problem)
