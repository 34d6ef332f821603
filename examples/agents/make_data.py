"""Make an agent's data: the quickstart's sums, and for SFT conversations that call a tool and repeat its result.

    python examples/agents/make_data.py [FOLDER] [--from build/quickstart/data] [--tool add|bash] [--system]

`add` is the tool of all agents except mini_agent, whose tool is `bash`. `--system` puts an empty system message first,
as scope_agent and mini_agent do. One call in four has a wrong number, so that reinforcement learning can improve on it.
"""

import argparse
import json
import random
from pathlib import Path


def called(name: str, **arguments: object) -> dict:
    call = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": f"<tool_call>{json.dumps(call)}</tool_call>"}


def conversations(question: str, rng: random.Random, tool: str, system: bool, limit: int) -> list[list[dict]]:
    """Returns conversations whose last message SFT trains. Wrong numbers are below `limit`."""
    a, b = map(int, question.split("+"))
    a = a if rng.random() < 0.75 else rng.randrange(limit)
    head = [{"role": "system", "content": ""}] if system or tool == "bash" else []
    if tool == "add":
        first = [*head, {"role": "user", "content": question}, called("add", a=a, b=b)]
        last = {"role": "assistant", "content": f"#### {a + b}"}
        return [first, [*first, {"role": "tool", "content": str(a + b)}, last]]
    told = [*head, {"role": "user", "content": f"$ {question}"}]  # the form of mini.yaml
    first = [*told, called("bash", command=f"echo $(({a}+{b}))")]
    last = called("bash", command=f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {a + b}")
    return [first, [*first, {"role": "tool", "content": f"{a + b}\n"}, last]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="build/agents/data", type=Path)
    parser.add_argument("--from", dest="source", default="build/quickstart/data", type=Path)
    parser.add_argument("--tool", default="add", choices=["add", "bash"])
    parser.add_argument("--system", action="store_true")
    args = parser.parse_args()
    rng = random.Random(0)
    args.folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = [json.loads(line) for line in (args.source / f"{split}.jsonl").read_text().splitlines()]
        (args.folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if split == "train":
            limit = 1 + max(int(row["question"].split("+")[0]) for row in rows)
            made = [conversations(row["question"], rng, args.tool, args.system, limit) for row in rows]
            told = [{"messages": one} for pair in made for one in pair]
            (args.folder / "calls").mkdir(exist_ok=True)
            (args.folder / "calls" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))


if __name__ == "__main__":
    main()
