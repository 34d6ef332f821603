"""List ScienceWorld's tasks: train.jsonl and test.jsonl, by the simulator's own split of each task's variations.

    .venv/bin/pip install -e '.[scienceworld,java]'
    .venv/bin/python examples/R3L/scienceworld/get_scienceworld_data.py --train 50 --test 5

--train and --test limit the variations of each of the 30 tasks. Without the extra `java` the script uses the system's
Java.
"""

import argparse
import json
import random
from pathlib import Path

from trinity.environments.scienceworld.simulator import Simulator


def variations(train: int, test: int, seed: int) -> dict[str, list[dict[str, object]]]:
    """Starts the simulator and returns the rows of both splits."""
    simulator = Simulator()
    rows: dict[str, list[dict[str, object]]] = {"train": [], "test": []}
    chosen = random.Random(seed)
    try:
        for task in sorted(simulator.task_names):
            for split, limit in (("train", train), ("test", test)):
                found = simulator.split(task, split)
                numbers = sorted(chosen.sample(found, min(limit, len(found))))
                rows[split] += [{"task_name": task, "var_num": number, "target": ""} for number in numbers]
    finally:
        simulator.end()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=50, help="variations of a task to train on")
    parser.add_argument("--test", type=int, default=5, help="variations of a task to test on")
    parser.add_argument("--seed", type=int, default=0, help="of the choice")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent, help="folder of train.jsonl and test.jsonl"
    )
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for name, rows in variations(args.train, args.test, args.seed).items():
        (args.output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{args.output / name}.jsonl: {len(rows)} tasks")


if __name__ == "__main__":
    main()
