"""An environment that shows pictures: how many white squares has each of them?"""

import io
import random

from PIL import Image, ImageDraw

from trinity.plugins import environment
from trinity.sdk import Description, Environment, InvalidInput, Observation

SIDE, SQUARE = 32, 8


@environment("counting")
class Counting(Environment):
    """The row's `counts` are the numbers of squares of each picture. A right answer to one of N gives 1 / N."""

    description = Description("counting", "Count the squares of each picture.", deterministic=True, images=True)

    def reset(self, task, args, seed):
        self.counts = task.get("counts")
        if not isinstance(self.counts, list) or not self.counts or not set(self.counts) <= set(range(1, 10)):
            raise InvalidInput("task.counts", f"is {self.counts!r}, must be a list of numbers from 1 to 9")
        self.random, self.turn, self.right = random.Random(seed), 0, 0
        return Observation("how many?", images=[self.picture()])

    def step(self, action):
        right = action.strip() == str(self.counts[self.turn])
        self.turn, self.right = self.turn + 1, self.right + right
        done, said = self.turn == len(self.counts), "yes." if right else "no."
        metrics = {"right": self.right / len(self.counts), "success": float(self.right == len(self.counts))}
        reward = right / len(self.counts)
        if done:
            return Observation(said, reward, done, metrics=metrics)
        return Observation(f"{said} <image> how many?", reward, metrics=metrics, images=[self.picture()])

    def picture(self):
        """Returns a PNG file: white squares on black, each in its own cell."""
        cells = [(x, y) for x in range(0, SIDE, SQUARE) for y in range(0, SIDE, SQUARE)]
        image, file = Image.new("RGB", (SIDE, SIDE)), io.BytesIO()
        for x, y in self.random.sample(cells, self.counts[self.turn]):
            ImageDraw.Draw(image).rectangle((x + 1, y + 1, x + SQUARE - 2, y + SQUARE - 2), fill="white")
        image.save(file, "png")
        return file.getvalue()
