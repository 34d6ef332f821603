"""Record the verdicts of public graders on our replies: satellites/environments/tests/graded_replies.jsonl.

    python benchmarks/graders.py --verl FOLDER --lm-eval FOLDER --antlr FOLDER

The folders hold unpacked sources: veRL's and EleutherAI's lm-evaluation-harness, and for the latter's Minerva task
antlr4-python3-runtime 4.11 (`pip install --no-deps --target`). None of them is installed here. math-verify is ours.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPLIES = Path(__file__).parents[1] / "satellites/environments/tests/graded_replies.jsonl"
Grader = Callable[[str, str], bool]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--verl", "--lm-eval", "--antlr"):
        parser.add_argument(name, required=True, type=Path)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    graders = {
        **verl(args.verl / "verl/utils/reward_score"),
        "math_verify": math_verify(),
        "minerva": minerva(args.lm_eval / "lm_eval/tasks/minerva_math/utils.py", args.antlr),
    }
    rows = [json.loads(line) for line in REPLIES.read_text().splitlines()]
    for row in rows:
        row["verdicts"] = {name: verdict(grade, row) for name, grade in graders.items()}
    REPLIES.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    for name in graders:
        print(name, sum(row["verdicts"][name] == row["right"] for row in rows), "of", len(rows))


def verdict(grade: Grader, row: dict[str, Any]) -> bool:
    """A grader that raises has not found the answer right."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return bool(grade(row["response"], row["truth"]))
    except Exception:
        return False


def verl(folder: Path) -> dict[str, Grader]:
    gsm8k, boxed, dapo = (module(folder / f"{name}.py") for name in ("gsm8k", "math_reward", "math_dapo"))
    return {
        "verl_gsm8k": lambda reply, truth: gsm8k.compute_score(reply, truth) == 1,
        "verl_math": lambda reply, truth: boxed.compute_score(reply, truth) == 1,
        "verl_math_dapo": lambda reply, truth: dapo.compute_score(reply, truth)["acc"],
    }


def math_verify() -> Grader:
    from math_verify import parse, verify

    return lambda reply, truth: verify(parse(f"${truth}$"), parse(reply))


def minerva(file: Path, antlr: Path) -> Grader:
    """Reads Minerva's sentence, else the box, as the harness reads boxes of references."""
    sys.path.insert(0, str(antlr))
    datasets = types.ModuleType("datasets")
    datasets.Dataset = None  # type: ignore[attr-defined]
    sys.modules["datasets"] = datasets  # only its annotations name it
    harness = module(file)

    def grade(reply: str, truth: str) -> bool:
        found = harness.get_unnormalized_answer(reply)
        box = harness.last_boxed_only_string(reply)
        if found == "[invalidanswer]" and box:
            found = harness.remove_boxed(box)
        return bool(harness.is_equiv(harness.normalize_final_answer(found), harness.normalize_final_answer(truth)))

    return grade


def module(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"peer_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


if __name__ == "__main__":
    main()
