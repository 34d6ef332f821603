"""A whole run learns from plain calls of users, whose rewards come later: also later than the death of the explorer.

Every trained token is one that a client was sent: the task names the response, and the ledger the task.
"""

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from support.programs.run import TrinityRun, kill_process, write_config
from trinity.archive.reader import read_experiences
from trinity.runtime.process import free_port
from trinity.sdk import CallRefused, delete_call, reward_call

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, CALLS = 4, 16
KEY = "key-of-the-users"


class Users:
    """Ask 20 times a second, and reward each answer up to three seconds later, as often as it takes to be heard."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"
        self.answered: dict[str, tuple[list[int], list[int], float]] = {}  # by id: prompt, reply, when
        self.rewarded: dict[str, tuple[float, float]] = {}  # by id: reward, when
        self.deleted: set[str] = set()
        self._random, self._stop = random.Random(1), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        calls: set[asyncio.Task[None]] = set()
        async with openai.AsyncOpenAI(base_url=self.url, api_key=KEY, max_retries=0, timeout=30) as client:
            while not self._stop.is_set():
                calls.add(call := asyncio.create_task(self._ask(client)))
                call.add_done_callback(calls.discard)
                await asyncio.sleep(0.05)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _ask(self, client: openai.AsyncOpenAI) -> None:
        asked: list[Any] = [{"role": "user", "content": f"{self._random.randrange(50)}+{self._random.randrange(50)}"}]
        try:
            done: Any = await client.chat.completions.create(
                model="policy", messages=asked, extra_body={"return_token_ids": True}
            )
        except openai.OpenAIError:  # the explorer starts, or is dead
            return
        (choice,) = done.choices
        self.answered[done.id] = (done.prompt_token_ids, choice.token_ids, time.monotonic())
        await asyncio.sleep(self._random.uniform(0, 3))
        if len(self.answered) % 10 == 0:
            await asyncio.to_thread(self._delete, done.id)
            return
        reward = float(len(choice.token_ids) % 2)
        while not self._stop.is_set():
            try:
                await asyncio.to_thread(reward_call, self.url, KEY, done.id, reward)
                self.rewarded[done.id] = (reward, time.monotonic())
                return
            except CallRefused as refused:
                if refused.reason == "already_rewarded":  # the answer was lost
                    self.rewarded[done.id] = (reward, time.monotonic())
                if refused.status != 503:
                    return
            except OSError:
                await asyncio.sleep(0.2)

    def _delete(self, name: str) -> None:
        try:
            delete_call(self.url, KEY, name)
            self.deleted.add(name)
        except (CallRefused, OSError):
            pass


@pytest.fixture
def users() -> Iterator[Users]:
    made = Users(free_port())
    yield made
    made.stop()


@pytest.fixture
def run(repository: Path, quickstart_model: Path, tmp_path: Path, users: Users) -> Iterator[TrinityRun]:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    port = int(users.url.removesuffix("/v1").rpartition(":")[2])
    changes: dict[str, Any] = {
        "model": {"model_path": str(quickstart_model)},
        "buffer": {
            "batch_size": CALLS,
            "total_steps": STEPS,
            "explorer_input": {"eval_tasksets": []},
            "trainer_input": {"experience_buffer": {"path": str(tmp_path / "trained.jsonl"), "storage_type": "file"}},
        },
        "explorer": {"proxy_port": port, "api_keys_file": str(tmp_path / "keys")},
        "stages": [],
    }
    started = TrinityRun(
        write_config(repository / "examples/traffic/sums.yaml", tmp_path / "sums.yaml", changes), tmp_path
    )
    yield started
    started.end()


def until(holds: Any, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)


def test_every_trained_token_is_traced_to_a_call(run: TrinityRun, users: Users, tmp_path: Path) -> None:
    run.start()
    users.start()
    until(lambda: len(users.answered) > len(users.rewarded) + 5 and users.rewarded, 400, "answers without a reward")
    killed = time.monotonic()
    kill_process(run.poll_status() or {}, "explorer")
    assert run.finish(500) == 0, run.tail()
    users.stop()
    groups = list(read_experiences(str(tmp_path / "trained.jsonl"), "experience_buffer"))
    assert len(groups) == STEPS * CALLS
    names = [group.task.task_id.removeprefix("traffic/") for group in groups]
    assert len(set(names)) == len(names), "no call is trained twice"
    for name, group in zip(names, groups, strict=True):
        (made,), (prompt, reply, _) = group.experiences, users.answered[name]
        assert made.token_ids.tolist() == [*prompt, *reply] and made.prompt_length == len(prompt)
        assert made.action_mask.all() and made.reward == users.rewarded[name][0]
        assert all(0 <= span.version < STEPS for span in made.version_spans)
        assert made.version_spans[-1].end == len(reply)
    assert not users.deleted & set(names) and users.deleted
    over = [n for n in names if users.answered[n][2] < killed < users.rewarded[n][1]]
    assert over, "rewards that came after the death of the explorer that had answered"
    shown = [sys.executable, "-m", "trinity.cli.main", "batch", "show", "1", "--job", str(run.job), "--json"]
    told = subprocess.run(shown, env=run.environment, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0, told.stderr
    ledger = {one["task_id"].removeprefix("traffic/"): one["versions"] for one in json.loads(told.stdout)["groups"]}
    assert ledger == {name: [0, 0] for name in names[:CALLS]}
