"""ScienceWorld as an environment."""

import difflib
import json
import random
from collections.abc import Sequence
from typing import Any

from trinity.environments.arguments import Arguments
from trinity.environments.extras import needs
from trinity.environments.game import FORMAT_HINT, TextGame, Turn, TurnRules, Unsolvable, replies
from trinity.environments.scienceworld import simulator
from trinity.environments.scienceworld.simulator import Simulator
from trinity.sdk.environment import Description

_UNKNOWN_ACTION = "No known action matches that input"
SOLVED = 100


@needs("scienceworld", "scienceworld", "scienceworld")
class ScienceWorld(TextGame):
    """Reward: max(0, score) / 100, each step being worth what it added, so that an episode's reward is that of its last
    score; success is a score of 100. The score may be above 0 at the start: the first step carries that.

    A row is {"task_name": "boil", "var_num": 3}, or R3L's {"task_desc": "boil-3"} (or the same object as JSON text);
    without a variation the seed draws one of `split` (train, dev, test). `simplifications`: `easy` by default.
    `list_actions: true` lists all valid actions at every step, which is slow.
    """

    description = Description(
        "scienceworld",
        "Do an experiment of elementary school in text.",
        max_parallel_episodes=32,
        step_timeout_seconds=60,
        reset_timeout_seconds=120,
    )
    isolation = "thread"
    defaults = TurnRules(max_steps=30, list_actions=False)
    instructions = (
        "You are in a house with a laboratory and have a scientific task.\n"
        "Commands: look around, inventory, task, look at X, look in X, examine X, read X, open X, close X, activate X, "
        "deactivate X, use X on X, connect X to X, disconnect X, go to ROOM, teleport to ROOM, pick up X, put down X, "
        "move X to X, pour X in X, dunk X in X, mix X, eat X, flush X, focus on X, wait, wait1. Focus only on what the "
        f"task names. If a command is ambiguous, reply with the number of your choice. {FORMAT_HINT}"
    )

    def begin(self, task: Arguments, args: Arguments, seed: int) -> str:
        self.score = self._paid = 0
        simplifications = args.text("simplifications", "easy")
        split = args.choice("split", "train", ["train", "dev", "test"])
        self.simulator = simulator.acquire()
        self.held.callback(simulator.release, self.simulator)
        load(self.simulator, task, simplifications, split, seed)
        text, _, _ = self.simulator.step("look around")
        self.goal = self.simulator.description().removeprefix("Task Description:").strip()
        return f"Task Description: {self.goal}\n\n{text.strip()}"

    def actions(self) -> Sequence[str]:
        return self.simulator.valid_actions() if self.rules.list_actions else ()

    def refusal(self, action: str) -> str:
        """Only the simulator knows."""
        return ""

    def play(self, action: str) -> Turn:
        text, self.score, done = self.simulator.step(action)
        success = self.score == SOLVED
        reward = (max(0, self.score) - self._paid) / 100
        self._paid = max(0, self.score)
        if done or success:
            self.close()  # the machine is free for the next episode, whenever this one is closed
        if text.startswith(_UNKNOWN_ACTION):
            refused = self._refuse("invalid_action", text.strip())
            over = refused.done or done  # a machine that is given back gets no more calls
            return Turn(refused.text, refused.reward + reward, over, metrics={"score": float(self.score)})
        return Turn(text.strip(), reward, done or success, success, {"score": float(self.score)})

    def refused_text(self, problem: str) -> str:
        return problem

    @classmethod
    def oracle(cls, task: dict[str, Any], args: dict[str, Any], seed: int) -> list[str]:
        """The simulator's gold path. It is another one each time, and each leads to a score of 100."""
        machine = simulator.acquire()
        try:
            arguments = Arguments(args)
            split = arguments.choice("split", "train", ["train", "dev", "test"])
            load(machine, Arguments(task, "task"), arguments.text("simplifications", "easy"), split, seed, gold=True)
            actions = machine.gold_actions()
        finally:
            simulator.release(machine)
        if not actions or actions[0].startswith("ERROR"):
            raise Unsolvable("the simulator has no gold path for this task")
        return replies(actions)


def load(machine: Simulator, task: Arguments, simplifications: str, split: str, seed: int, gold: bool = False) -> None:
    """Loads the row's task. Raises InvalidInput that names the problem."""
    task = _described(task)
    name = task.text("task_name")
    if name not in machine.task_names:
        near = difflib.get_close_matches(name, machine.task_names, n=1)
        raise task.wrong("task_name", name, f"one of {', '.join(near or machine.task_names)}")
    if "var_num" not in task:
        known = machine.split(name, split)
        machine.load(name, random.Random(f"{name} {task.integer('seed', seed)}").choice(known), simplifications, gold)
        return
    machine.load(name, task.integer("var_num", 0, low=0, high=machine.variations(name) - 1), simplifications, gold)


def _described(task: Arguments) -> Arguments:
    """Splits task and variation, which rows of R3L hold in one text."""
    if "task_desc" not in task or "task_name" in task:
        return task
    text = task.text("task_desc")
    if text.startswith("{"):
        try:
            values = json.loads(text)
        except ValueError:
            raise task.wrong("task_desc", text, "a JSON object with task_name and var_num") from None
        return Arguments(values, "task.task_desc")
    name, _, variation = text.rpartition("-")  # names hold hyphens themselves
    if not name or not variation.isascii() or not variation.isdigit() or len(variation) > 6:
        raise task.wrong("task_desc", text, "a task's name and a variation, such as find-animal-3")
    return Arguments({"task_name": name, "var_num": int(variation)}, "task.task_desc")
