"""Word problems in the GSM8K form, of the templates of reasoning-gym's gsm_symbolic: train, same and new .jsonl.

    python benchmarks/gpu/word_problems.py FOLDER       needs `pip install reasoning-gym`; no GPU

Twenty templates are not in train.jsonl. same.jsonl has other numbers and names in the templates of train.jsonl,
new.jsonl only the twenty others. No problem is in two files, and only the seed determines the content.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NEW_TEMPLATES = 20
Row = dict[str, Any]


def make(folder: Path, train: int, test: int, seed: int = 0) -> Path:
    """Write the three files; rows are {question, answer, template}."""
    from reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic import tasks_ok

    shuffled = random.Random(seed).sample(tasks_ok, len(tasks_ok))
    new, known = shuffled[:NEW_TEMPLATES], shuffled[NEW_TEMPLATES:]
    seen: set[str] = set()
    folder.mkdir(parents=True, exist_ok=True)
    for name, templates, size in (("same", known, test), ("new", new, test), ("train", known, train)):
        rows = distinct(templates, size, random.Random(f"{seed} {name}"), seen)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def distinct(templates: list[int], size: int, rng: random.Random, seen: set[str]) -> list[Row]:
    """`size` problems that are not in `seen`, from templates in turn. Adds them to `seen`."""
    rows: list[Row] = []
    for row in problems(templates, 4 * size, rng):  # some templates repeat themselves
        if row["question"] not in seen and len(rows) < size:
            seen.add(row["question"])
            rows.append(row)
    if len(rows) < size:
        raise RuntimeError(f"{len(templates)} templates gave {len(rows)} different problems, not {size}")
    return rows


def problems(templates: list[int], size: int, rng: random.Random) -> Iterator[Row]:
    from reasoning_gym import create_dataset

    generators = create_dataset("gsm_symbolic", seed=0, size=1).generators
    for index in range(size):
        template = templates[index % len(templates)]
        made = generators[template](rng, 1.0)
        yield {"question": made["question"], "answer": made["answer"], "template": template}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=6400, help="problems to train on")
    parser.add_argument("--test", type=int, default=512, help="problems in each of the other two files")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make(args.folder, args.train, args.test, args.seed)


if __name__ == "__main__":
    main()
