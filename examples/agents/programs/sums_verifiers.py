"""A rollout of a verifiers environment with a tool, by verifiers' loop, without a line about training.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/agents/programs/sums_verifiers.py 35+8 43
"""

import asyncio
import json
import sys

import verifiers
from datasets import Dataset
from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient


def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


def right(completion: list, answer: str) -> float:
    """Returns 1 if the last message ends with the answer."""
    said = completion[-1]["content"] if completion else ""
    return float(str(said or "").split("####")[-1].strip() == answer)


async def rewarded(question: str, answer: str, turns: int = 3) -> float:
    """Returns the reward of the environment's rubric."""
    rows = Dataset.from_list([{"question": question, "answer": answer}])
    sums = verifiers.ToolEnv(tools=[add], max_turns=turns, eval_dataset=rows, rubric=verifiers.Rubric(funcs=[right]))
    done = await sums.evaluate(OpenAIChatCompletionsClient(AsyncOpenAI()), "policy", num_examples=1, save_results=False)
    return float(done["outputs"][0]["reward"])


if __name__ == "__main__":
    print(json.dumps(asyncio.run(rewarded(*sys.argv[1:3]))))
