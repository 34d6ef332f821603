"""R3L's reflection: the policy reads its own episode, names the mistake and the step to retry from."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from trinity.explorer.chat import Message
from trinity.explorer.workflows.episode import Turn

_SYSTEM = """You review an agent's attempt at a task and prepare a better one. You are given the task, every numbered \
step with what the agent saw and did, and how it ended.

Reply with one JSON object and nothing else:
{
  "trajectory_summary": "what the agent did, in a sentence or two",
  "root_cause_analysis": "the decision that mattered most, and why it was wrong or slow",
  "trajectory_outcome": "success", "success_but_inefficient" or "failure",
  "improvement_suggestion": "what to do instead, as advice to the agent; do not give away facts it could not know",
  "retry_from_step": the number of the step to begin again from: the first that should be done otherwise
}"""
_MAX_TEXT = 4_000
_MAX_GUIDANCE = 2_000
_FIELDS = ("trajectory_summary", "root_cause_analysis", "improvement_suggestion")


class Outcome(StrEnum):
    SUCCESS = "success"
    SLOW = "success_but_inefficient"
    FAILURE = "failure"


@dataclass(frozen=True)
class Report:
    """A valid reflection. 0 <= retry_from_step < steps of the episode."""

    outcome: Outcome
    retry_from_step: int
    summary: str
    cause: str
    suggestion: str

    @property
    def guidance(self) -> str:
        """The text that is added to the second attempt, and left out of the distilled one."""
        advice = f"What went wrong: {self.cause}\nWhat to do: {self.suggestion}"
        return f"An earlier attempt at this task was reviewed. Use the review without mentioning it.\n{advice}"


def ask(task: str, turns: Sequence[Turn], reward: float, success: bool) -> list[Message]:
    """The prompt of a reflection."""
    shown = [f"Task:\n{task[:_MAX_TEXT]}"]
    for number, turn in enumerate(turns):
        shown.append(f"Step {number}\nSaw: {turn.observation[:_MAX_TEXT]}\nDid: {turn.reply[:_MAX_TEXT]}")
    shown.append(
        f"The attempt {'succeeded' if success else 'failed'} after {len(turns)} steps, with reward {reward:g}."
    )
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": "\n\n".join(shown)}]


def read(reply: str, steps: int) -> Report | None:
    """The report in a reply, from its first `{` to its last `}`; None if it is not valid."""
    begin, end = reply.find("{"), reply.rfind("}")
    try:
        found = json.loads(reply[begin : end + 1]) if 0 <= begin < end else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    outcome, step = found.get("trajectory_outcome"), found.get("retry_from_step")
    texts = [found.get(name) for name in _FIELDS]
    if outcome not in list(Outcome) or type(step) is not int or not 0 <= step < steps:
        return None
    if not all(isinstance(text, str) and text.strip() for text in texts):
        return None
    summary, cause, suggestion = (str(text).strip()[:_MAX_GUIDANCE] for text in texts)
    return Report(Outcome(outcome), step, summary, cause, suggestion)
