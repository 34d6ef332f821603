"""The puzzles of reasoning-gym.

Some of their scorers evaluate the answer as Python: they get only harmless answers and the dataset's. Scorers run in
worker processes, which are killed when a call takes too long or too much memory.
"""

import functools
import inspect
import sys
from typing import Any

from trinity.environments.arguments import Arguments
from trinity.environments.attempts import AttemptsGame
from trinity.environments.bridges.harmless import harmless
from trinity.environments.extras import needs, require
from trinity.environments.game import Turn, TurnRules, Unsolvable, replies
from trinity.environments.replies import Reply, ReplyFormat, between
from trinity.sdk.environment import Description

# Many datasets give a little for any attempt: only a full score is a right answer.
RIGHT_SCORE = 0.99
MAX_INDEX = 1_000_000


@needs("reasoning_gym", "reasoning-gym", "reasoning-gym")
class ReasoningGym(AttemptsGame):
    """One puzzle. Reward 1 for a right answer, else 0; with `partial_credit` the best attempt's score.

    A row is {"dataset", "seed", "index", "config"}; `dataset` and `config` may be arguments instead.
    """

    description = Description("reasoning_gym", "A puzzle of reasoning-gym.", step_timeout_seconds=30)
    isolation = "process"
    episodes_per_process = 16
    memory_limit_mib = 2048
    defaults = TurnRules(list_actions=False, max_steps=1)

    def ask(self, task: Arguments, args: Arguments) -> str:
        self._partial, self._paid = args.boolean("partial_credit", False), 0.0
        self._dataset, self._puzzle = puzzle(task, args, self._seed)
        return f"{self._puzzle['question']}\n\nReply with <think>...</think><answer>the answer</answer>."

    def begin(self, task: Arguments, args: Arguments, seed: int) -> str:
        self._seed = seed
        return super().begin(task, args, seed)

    def read(self, reply: str) -> Reply:
        """Returns the reply unchanged: in some answers lines and spaces matter."""
        found = super().read(reply)
        tagged = between(reply, "<answer>", "</answer>")
        if tagged is None or len(reply) > self.rules.max_reply_characters or not tagged.strip():
            return found
        if found.problem and self.rules.reply_format == ReplyFormat.STRICT and "longer" not in found.problem:
            return found
        return Reply(tagged.strip(), found.thought)

    def play(self, action: str) -> Turn:
        self.score = self._score(action)
        turn = super().play(action)
        metrics = {**turn.metrics, "score": self.score}
        reward = max(0.0, self.score - self._paid) if self._partial else turn.reward
        self._paid = max(self._paid, self.score)
        return Turn(turn.text, reward, turn.done, turn.success, metrics)

    def _score(self, answer: str) -> float:
        own = answer == str(self._puzzle["answer"]).strip()
        if evaluates(type(self._dataset).__module__) and not (own or harmless(answer)):
            return 0.0
        try:
            return float(self._dataset.score_answer(answer, self._puzzle))
        except Exception:  # of an answer that the scorer did not think of
            return 0.0

    def judge(self, answer: str) -> str:
        return "" if self.score >= RIGHT_SCORE else "the answer is wrong"

    @classmethod
    def oracle(cls, task: dict[str, Any], args: dict[str, Any], seed: int) -> list[str]:
        _, found = puzzle(Arguments(task, "task"), Arguments(args), seed)
        if found["answer"] is None:
            raise Unsolvable("the dataset gives no answers")
        return replies([str(found["answer"])], cls.tag)


@functools.cache
def evaluates(module: str) -> bool:
    """Tells if a dataset's module, which scores its answers, may evaluate them."""
    source = inspect.getsource(sys.modules[module])
    return "eval(" in source or "sympy" in source or "parse_expr" in source


def puzzle(task: Arguments, args: Arguments, seed: int) -> tuple[Any, dict[str, Any]]:
    """The dataset and its item. Raises InvalidInput."""
    library = require("reasoning_gym", "reasoning-gym")
    name = task.text("dataset") if "dataset" in task else args.text("dataset")
    known = sorted(library.factory.DATASETS)
    if name not in known:
        raise task.wrong("dataset", name, f"one of {', '.join(known)}")
    config = {**args.mapping("config"), **task.mapping("config")}
    index = task.integer("index", 0, low=0, high=MAX_INDEX)
    try:
        dataset = library.create_dataset(name, size=index + 1, seed=task.integer("seed", seed) % 2**31, **config)
    except (TypeError, AssertionError, ValueError) as error:
        raise task.wrong("config", config, f"what {name} takes ({error})") from None
    return dataset, dataset[index]
