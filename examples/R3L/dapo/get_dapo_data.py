"""Write maths questions as {question, answer}: train.jsonl from DAPO's, and a file for each test set.

    .venv/bin/python examples/R3L/dapo/get_dapo_data.py
    .venv/bin/python examples/R3L/dapo/get_dapo_data.py --train dapo.parquet --test aime24=aime.jsonl --test gsm8k=gsm8k

A source is a file, a folder, or a dataset's name on the hub; `name:subset/split` chooses a part. Without --test the
script writes all of TESTS, which the YAMLs expect.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trinity.data.datasets import DatasetError, read

TRAIN = "BytedTsinghua-SIA/DAPO-Math-17k"
TESTS = {
    "aime24": "HuggingFaceH4/aime_2024:/train",
    "aime25": "math-ai/aime25:/test",
    "amc23": "math-ai/amc23:/test",
    "gsm8k": "openai/gsm8k:main/test",
    "math500": "HuggingFaceH4/MATH-500:/test",
    "minerva": "math-ai/minervamath:/test",
    "olympiad": "math-ai/olympiadbench:/test",
}


def rows_of(source: str) -> Iterator[dict[str, str]]:
    """Returns {question, answer} of every distinct row. Raises DatasetError."""
    path, _, part = source.partition(":")
    subset, _, split = part.rpartition("/")
    seen = set()
    for number, row in enumerate(read(path, split or "train", subset or None)):
        question, answer = question_of(row), answer_of(row)
        if not question or not answer:
            raise DatasetError(f"row {number} of {source} has no question or no answer; it has {', '.join(row)}")
        if (question, answer) not in seen:
            seen.add((question, answer))
            yield {"question": question, "answer": answer}


def question_of(row: dict[str, Any]) -> str:
    found = next((row[key] for key in ("question", "problem", "prompt") if row.get(key)), "")
    return str(found[-1]["content"] if isinstance(found, list) else found).strip()


def answer_of(row: dict[str, Any]) -> str:
    model = row.get("reward_model")
    found = model.get("ground_truth") if isinstance(model, dict) else row.get("answer", row.get("final_answer", ""))
    return str(found[0] if isinstance(found, list) and found else found).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", default=TRAIN, help="source of the training questions")
    parser.add_argument("--test", action="append", metavar="NAME=SOURCE", help="a test set; several may be given")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder of the files")
    args = parser.parse_args()
    tests = dict(text.partition("=")[::2] for text in args.test) if args.test else TESTS
    args.output.mkdir(parents=True, exist_ok=True)
    for name, source in {"train": args.train, **tests}.items():
        try:
            rows = list(rows_of(source))
        except DatasetError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        (args.output / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{args.output / name}.jsonl: {len(rows)} questions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
