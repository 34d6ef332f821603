"""Greedy replies of a model folder by plain vLLM, and their correctness, without any part of a run.

python benchmarks/gpu/real_model_judge.py MODEL DATA OUT.json [--cpu]
"""

import argparse
import json
from pathlib import Path
from typing import Any

SPLITS = ("same", "new")
# The prompt of math_eval_workflow.
SYSTEM = "You solve mathematical problems. Reason step by step, and put your final answer inside \\boxed{}."


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def verdict(reward: str, reply: str, answer: str) -> float:
    """1 for a reply that this reward function accepts, else 0."""
    from trinity.environments.scorers import SCORERS, ScoreItem

    return float(SCORERS[reward](ScoreItem("", reply, answer), {}).metrics["accuracy"])


def judged(row: dict[str, Any], reply: Any) -> dict[str, float]:
    """Correctness with the answer at any place, and `boxed` as in training."""
    return {
        "template": row["template"],
        "right": verdict("accuracy_reward", reply.text, row["answer"]),
        "boxed": verdict("math_boxed_reward", reply.text, row["answer"]),
        "tokens": len(reply.token_ids),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=1024, help="of a reply, at most")
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()

    from vllm import LLM, SamplingParams

    own: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 1024, "gpu_memory_utilization": args.memory}
    if args.cpu:
        own = {"dtype": "float32", "gpu_memory_utilization": 0.1}
    llm = LLM(str(args.model), max_model_len=2048, enforce_eager=True, generation_config="vllm", **own)
    rows = {split: [json.loads(line) for line in (args.data / f"{split}.jsonl").read_text().splitlines()]
            for split in SPLITS}  # fmt: skip
    asked = [messages(row["question"]) for split in SPLITS for row in rows[split]]
    replies = iter(llm.chat(asked, SamplingParams(temperature=0.0, max_tokens=args.tokens), use_tqdm=False))
    found = {split: [judged(row, next(replies).outputs[0]) for row in rows[split]] for split in SPLITS}
    args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
