"""An environment that shows a picture at each turn, which no two episodes have alike, and can be restored."""

import json
import os
from typing import Any

from support.fakes.data.pictures import picture
from trinity.sdk import Description, Environment, Observation


class Gallery(Environment):
    """Three pictures of a colour each; the row's `shown` replaces them, as hexadecimal files."""

    description = Description("gallery", "Pictures.", 20, step_timeout_seconds=3.0, snapshots=True, images=True)
    isolation = "none"

    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        self.shown, self.at, self.drawn = task.get("shown", []), 0, os.urandom(9).hex()
        return self._seen(0.0)

    def step(self, action: str) -> Observation:
        self.at += 1
        return self._seen(0.5)

    def snapshot(self) -> bytes:
        return json.dumps([self.at, self.shown, self.drawn]).encode()

    def restore(self, state: bytes) -> None:
        self.at, self.shown, self.drawn = json.loads(state)

    def _seen(self, reward: float) -> Observation:
        if self.at == 3:
            return Observation("The end.", reward, done=True)
        colour = tuple(bytes.fromhex(self.drawn)[3 * self.at : 3 * self.at + 3])
        shown = [bytes.fromhex(file) for file in self.shown] or [picture(16, 16, colour=colour)]
        return Observation(f"Picture {self.at}: <image>", reward, images=shown)


class GalleryInProcess(Gallery):
    isolation = "process"
    processes = 1
    episodes_per_process = 20
