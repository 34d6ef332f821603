"""Questions with several attempts: a wrong answer is answered with what was wrong, a right one ends the episode."""

from abc import abstractmethod
from dataclasses import replace

from trinity.environments.arguments import Arguments
from trinity.environments.game import TextGame, Turn, TurnRules


class AttemptsGame(TextGame):
    """Reward 1 at the first right answer, 0 if none of `max_attempts` (3) is right. `max_steps` is not an argument."""

    tag = "answer"
    defaults = TurnRules(list_actions=False, max_steps=3)

    @abstractmethod
    def ask(self, task: Arguments, args: Arguments) -> str:
        """The question. Raises InvalidInput naming what the row lacks."""

    @abstractmethod
    def judge(self, answer: str) -> str:
        """Says why the answer is wrong; empty if it is right."""

    def begin(self, task: Arguments, args: Arguments, seed: int) -> str:
        attempts = args.integer("max_attempts", self.rules.max_steps, low=1)
        self.rules = replace(self.rules, max_steps=attempts)
        self.goal = self.ask(task, args)
        return self.goal

    def play(self, action: str) -> Turn:
        problem = self.judge(action)
        metrics = {"attempts": float(self.steps)}
        if not problem:
            return Turn("Correct.", 1.0, True, True, metrics)
        return Turn(self._wrong(problem), metrics=metrics)

    def refused_text(self, problem: str) -> str:
        return self._wrong(problem)

    def limit_text(self) -> str:
        return "That was the last attempt."

    def _wrong(self, problem: str) -> str:
        left = self.rules.max_steps - self.steps
        return f"Incorrect: {problem}." + (f" Try again; {left} left." if left > 0 else "")
