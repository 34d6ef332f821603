"""Environments of verifiers for the tests: a package as verifiers.load_environment finds it."""

from typing import Any

import verifiers as vf
from datasets import Dataset

SUMS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(1, 4)]
closed: list[str] = []  # answers of the rows whose rollouts were cleaned up


def exact(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"].strip() == answer)


def half_for_short(completion: Any) -> float:
    return float(len(completion[-1]["content"]) < 10)


class Guess(vf.MultiTurnEnv):
    """Guess the answer: told whether it is higher or lower; "crash" breaks what it runs on."""

    async def setup_state(self, state: Any) -> Any:
        state["guesses"] = 0
        return state

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        state["guesses"] += 1
        guess = messages[-1]["content"].strip()
        if guess == "crash":
            raise vf.InfraError("the machine is gone")
        if guess == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return state["final_env_response"]
        hint = "higher" if guess.isascii() and guess.isdigit() and int(guess[:9]) < int(state["answer"]) else "lower"
        return [{"role": "user", "content": f"It is {hint}."}]

    @vf.cleanup
    async def note(self, state: Any) -> None:
        closed.append(state["answer"])


class Rewrites(vf.MultiTurnEnv):
    """Asks for a summary first, and then shows the summary in place of the conversation; its requests say how."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [{"role": "user", "content": "Now answer."}]

    async def get_prompt_messages(self, state: Any) -> Any:
        if not state["trajectory"]:
            return await super().get_prompt_messages(state)
        summary = state["trajectory"][-1]["completion"][-1]["content"]
        return [{"role": "system", "content": "Be short."}, {"role": "user", "content": f"Summary: {summary}. Answer."}]


def right(state: Any) -> float:
    return float(state["final_env_response"] is not None) / state["guesses"] if state["guesses"] else 0.0


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return int(a) + int(b)


def load_environment(kind: str = "sums", max_turns: int = 4, strict: bool = False) -> vf.Environment:
    dataset = Dataset.from_list(SUMS)
    if kind == "guess":
        return Guess(dataset=dataset, rubric=vf.Rubric(funcs=[right]), max_turns=max_turns)
    if kind == "rewrites":
        sampling = {"temperature": 0.25, "max_tokens": 7, "stop": ["END"]}
        rubric = vf.Rubric(funcs=[exact])
        return Rewrites(dataset=dataset, rubric=rubric, max_turns=2, sampling_args=sampling)
    rubric = vf.Rubric(funcs=[exact, half_for_short], weights=[1.0, 0.5])
    if kind == "tools":
        errors = [Exception] if strict else []
        return vf.ToolEnv(dataset=dataset, rubric=rubric, tools=[add], max_turns=max_turns, stop_errors=errors)
    if kind == "texts":  # prompts that are no messages
        texts = Dataset.from_list([{"prompt": row["question"], "answer": row["answer"]} for row in SUMS])
        return vf.SingleTurnEnv(dataset=texts, rubric=rubric)
    few_shot = [{"role": "user", "content": "What is 0 + 0?"}, {"role": "assistant", "content": "0"}]
    shots = few_shot if kind == "shots" else None
    return vf.SingleTurnEnv(dataset=dataset, system_prompt="Answer with a number.", few_shot=shots, rubric=rubric)
