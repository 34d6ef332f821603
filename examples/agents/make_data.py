"""Make the agent's data: the quickstart's sums, and for SFT conversations that call `add` and repeat its result.

    python examples/agents/make_data.py [FOLDER] [--from build/quickstart/data]

One call in four has a wrong number, so that reinforcement learning has something to find out.
"""

import argparse
import json
import random
from pathlib import Path


def conversations(question: str, rng: random.Random) -> list[list[dict]]:
    """SFT trains the last message of each."""
    a, b = map(int, question.split("+"))
    called = a if rng.random() < 0.75 else rng.randrange(50)
    arguments = {"name": "add", "arguments": {"a": called, "b": b}}
    call = {"role": "assistant", "content": f"<tool_call>{json.dumps(arguments)}</tool_call>"}
    result = {"role": "tool", "content": str(called + b)}
    first = [{"role": "user", "content": question}, call]
    return [first, [*first, result, {"role": "assistant", "content": f"#### {called + b}"}]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="build/agents/data", type=Path)
    parser.add_argument("--from", dest="source", default="build/quickstart/data", type=Path)
    args = parser.parse_args()
    rng = random.Random(0)
    args.folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        rows = [json.loads(line) for line in (args.source / f"{split}.jsonl").read_text().splitlines()]
        (args.folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if split == "train":
            told = [{"messages": one} for row in rows for one in conversations(row["question"], rng)]
            (args.folder / "calls").mkdir(exist_ok=True)
            (args.folder / "calls" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))


if __name__ == "__main__":
    main()
