"""List ScienceWorld's tasks: train.jsonl and test.jsonl, by the simulator's own split of each task's variations.

    pip install 'trinity-environment[scienceworld]'       # needs a Java, or trinity-environment[java]
    python examples/R3L/scienceworld/get_scienceworld_data.py --train 50 --test 5

--train and --test: at most so many variations of each of the 30 tasks.
"""

import argparse
import json
import random
from pathlib import Path


def variations(train: int, test: int, seed: int) -> dict[str, list[dict[str, object]]]:
    """Rows of both splits. Starts the simulator."""
    from scienceworld import ScienceWorldEnv

    environment = ScienceWorldEnv("", envStepLimit=100)
    rows: dict[str, list[dict[str, object]]] = {"train": [], "test": []}
    chosen = random.Random(seed)
    try:
        for task in sorted(environment.get_task_names()):
            environment.load(task, 0, "easy")
            for split, found, limit in (
                ("train", environment.get_variations_train(), train),
                ("test", environment.get_variations_test(), test),
            ):
                numbers = sorted(chosen.sample(list(found), min(limit, len(found))))
                rows[split] += [{"task_name": task, "var_num": number, "target": ""} for number in numbers]
    finally:
        environment.close()
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
