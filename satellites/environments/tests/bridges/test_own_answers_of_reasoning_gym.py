"""Every puzzle of reasoning-gym takes the answer that its dataset gives."""

from typing import Any

import pytest

from support.fakes.environments.playing import play
from trinity.environments.arguments import Arguments
from trinity.environments.bridges.reasoning_gym import RIGHT_SCORE, ReasoningGym, puzzle

pytestmark = pytest.mark.extended

SEED, PUZZLES = 3, 3  # of each dataset; the third of some has notation that Python has not


def own_answer(found: dict[str, Any]) -> str | None:
    """The dataset's, or its example where many answers are right."""
    examples = [found["metadata"].get(name) for name in ("example_answer", "example_correct_answer")]
    return next((str(one) for one in (found["answer"], *examples) if one is not None), None)


def test_every_datasets_own_answers_win() -> None:
    library = pytest.importorskip("reasoning_gym")
    lost, won = [], 0
    for name in sorted(library.factory.DATASETS.keys() - {"composite"}):  # that one is made of others
        for index in range(PUZZLES):
            task = {"dataset": name, "seed": SEED, "index": index}
            dataset, found = puzzle(Arguments(task, "task"), Arguments({}), 0)
            if (answer := own_answer(found)) is None or dataset.score_answer(answer, found) < RIGHT_SCORE:
                continue
            if play(ReasoningGym(), [f"<think>hm</think><answer>{answer}</answer>"], task).won:
                won += 1
            else:
                lost.append((name, index, answer))
    assert not lost
    assert won > 250


def test_an_integral_that_is_only_written_down_is_no_answer() -> None:
    """Its derivative is the integrand, of every puzzle."""
    pytest.importorskip("reasoning_gym")
    task = {"dataset": "simple_integration", "seed": 1}
    _, found = puzzle(Arguments(task, "task"), Arguments({}), 0)
    written = f"Integral({found['metadata']['integrand']}, {found['metadata']['variable']})"
    assert play(ReasoningGym(), [f"<answer>{written}</answer>"], task).reward == 0
