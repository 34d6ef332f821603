"""Simulated users of a model: they ask sums at a steady rate, and say after a while whether the answer was right.

    python examples/traffic/users.py --key-file checkpoints/traffic/sums/serve.keys

Ends once the endpoint is gone for a minute. Prints the accuracy of each hundred answers.
"""

import argparse
import asyncio
import json
import random
import re
import time
from collections import deque
from pathlib import Path

import openai

from trinity.sdk import CallRefused, reward_call

_LAST_NUMBER = re.compile(r"-?\d+(?!.*\d)", re.DOTALL)


class Users:
    """`calls_per_second` come evenly; each reward `delay` seconds after its answer at most."""

    def __init__(self, base_url: str, key: str, rows: list[dict[str, str]], delay: float, seed: int = 0) -> None:
        self._url, self._key, self._rows, self._delay = base_url, key, rows, delay
        self._random = random.Random(seed)
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=60)
        self.answered: deque[float] = deque(maxlen=100)
        self.rewarded = self.refused = 0
        self.heard = time.monotonic()

    async def ask(self) -> None:
        """One call, and its reward later. An endpoint that is away is called again by another user."""
        row = self._random.choice(self._rows)
        try:
            messages = [{"role": "user", "content": row["question"]}]
            done = await self._client.chat.completions.create(model="policy", messages=messages)  # type: ignore[call-overload]
        except openai.OpenAIError:
            return
        self.heard = time.monotonic()
        right = float(_last(done.choices[0].message.content) == _last(row["answer"]))
        self.answered.append(right)
        await asyncio.sleep(self._random.uniform(0.0, self._delay))
        try:
            await asyncio.to_thread(reward_call, self._url, self._key, done.id, right)
            self.rewarded += 1
        except (CallRefused, OSError):
            self.refused += 1


def _last(text: str | None) -> str:
    found = _LAST_NUMBER.search(text or "")
    return found[0] if found else ""


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8010/v1")
    parser.add_argument("--key-file", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("build/quickstart/data/train.jsonl"))
    parser.add_argument("--calls-per-second", type=float, default=20.0)
    parser.add_argument("--delay", type=float, default=10.0, help="longest time from answer to reward, in seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the questions and the delays")
    given = parser.parse_args()
    while not given.key_file.exists():  # the run makes it
        await asyncio.sleep(1.0)
    rows = [json.loads(line) for line in given.data.open()]
    users = Users(given.url, given.key_file.read_text().split()[0], rows, given.delay, given.seed)
    calls: set[asyncio.Task[None]] = set()
    begun, said = False, 0
    while not begun or time.monotonic() < users.heard + 60:
        calls.add(call := asyncio.create_task(users.ask()))
        call.add_done_callback(calls.discard)
        begun = begun or bool(users.answered)
        if users.rewarded >= said + 100:
            said = users.rewarded
            accuracy = sum(users.answered) / len(users.answered)
            print(f"{said} rewarded, {users.refused} refused; right of the last 100: {accuracy:.2f}", flush=True)
        await asyncio.sleep(1.0 / given.calls_per_second)


if __name__ == "__main__":
    asyncio.run(main())
