"""Maths questions in several attempts, as R3L plays DAPO's."""

from typing import Any

from trinity.environments.arguments import Arguments
from trinity.environments.attempts import AttemptsGame
from trinity.environments.game import Unsolvable, replies
from trinity.environments.replies import Reply, ReplyFormat, thought
from trinity.environments.scorers.answers import reference_answer, same_answer
from trinity.environments.scorers.extraction import final_answer, given_answer
from trinity.sdk.environment import Description


class Maths(AttemptsGame):
    """Reward 1 at the first right answer, 0 if none of `max_attempts` (3) is.

    A row is {"question", "answer"}, {"problem", "answer"}, or DAPO's {"prompt": [{"content"}], "reward_model":
    {"ground_truth"}}. The reference may be GSM8K's, with the answer after ####. An answer stands in <answer>, in
    \\boxed{} or after `Answer:`; a lenient episode (the default) takes the last number too.
    """

    description = Description(
        "math", "Answer a question; a wrong answer may be corrected.", step_timeout_seconds=120, deterministic=True
    )
    isolation = "thread"

    def ask(self, task: Arguments, args: Arguments) -> str:
        question, self._truth = question_and_truth(task)
        return f"{question}\n\nReply with <think>...</think><answer>the answer</answer>."

    def read(self, reply: str) -> Reply:
        if self.rules.reply_format == ReplyFormat.STRICT or len(reply) > self.rules.max_reply_characters:
            return super().read(reply)
        rest = reply.rpartition("</think>")[2]
        answer = final_answer(rest) or given_answer(rest)
        if not answer:
            return Reply(problem="there is no <answer>...</answer> in the reply")
        return Reply(answer[:1000], thought(reply))

    def judge(self, answer: str) -> str:
        return "" if same_answer(answer, reference_answer(self._truth)) else "the answer is wrong"

    @classmethod
    def oracle(cls, task: dict[str, Any], args: dict[str, Any], seed: int) -> list[str]:
        answer = reference_answer(question_and_truth(Arguments(task, "task"))[1])
        if not answer:
            raise Unsolvable("the row has no answer")
        return replies([answer], cls.tag)


def question_and_truth(task: Arguments) -> tuple[str, str]:
    """Reads a row in any of the known forms. Raises InvalidInput that names the missing field."""
    question = next((task.values[name] for name in ("question", "problem") if task.values.get(name)), None)
    prompt = task.values.get("prompt")
    if question is None and isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        question = prompt[-1].get("content")
    if question is None and isinstance(prompt, str):
        question = prompt
    if not isinstance(question, str) or not question.strip():
        raise task.wrong("question", question, "a text (or `problem`, or `prompt` with messages)")
    model = task.values.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, dict) else task.values.get("answer")
    if isinstance(truth, int | float) and not isinstance(truth, bool):
        truth = str(truth)
    if not isinstance(truth, str) or not truth.strip():
        raise task.wrong("answer", truth, "a text or a number (or reward_model.ground_truth)")
    return question, truth
