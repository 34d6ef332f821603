"""Experience operators written for Trinity-RFT: they keep, leave out, mask and rescore; tokens stay as stored."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from support.fakes.data.operators import KEY, kept, rewarded, run
from support.fakes.trinity_rft.loading import loaded
from trinity import plugins
from trinity.buffer.operators import EXPERIENCE_OPERATORS, ExperienceOperator
from trinity.common import operators
from trinity.plugins import PluginError
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core


@pytest.fixture
def process() -> Iterator[Callable[[Callable[[list[Any]], Any]], str]]:
    """Registers an operator that does this."""

    def register(does: Callable[[list[Any]], Any]) -> str:
        class Mine(ExperienceOperator):
            def process(self, exps: list[Any]) -> tuple[list[Any], dict[str, float]]:
                done = does(exps)
                return (exps if done is None else done), {}

        EXPERIENCE_OPERATORS.register_module("mine", Mine)
        return "mine"

    yield register
    plugins.EXPERIENCE_OPERATORS.pop("mine", None)
    EXPERIENCE_OPERATORS.modules.pop("mine", None)


def test_an_operator_of_a_file_leaves_out_and_rescores() -> None:
    assert EXPERIENCE_OPERATORS is operators.EXPERIENCE_OPERATORS
    with loaded("operators"):
        done = run(rewarded(1.0, 3.0, 2.8), "near_the_best", margin=0.25, shift=1.0)
    assert kept(done) == [1, 2]
    assert [draft.reward for draft in done.drafts] == pytest.approx([4.0, 3.8])
    assert [draft.metrics["behind"] for draft in done.drafts] == pytest.approx([0.0, 0.2])
    assert [draft.dropped_by for draft in done.dropped] == ["near_the_best"]
    assert done.metrics == {f"{KEY}/near_the_best/best": 3.0, f"{KEY}/near_the_best/left_out": 1.0}


def test_a_mask_of_all_tokens_masks_and_stays_for_the_next(process: Any) -> None:
    def first(exps: list[Any]) -> None:
        exps[0].action_mask = np.zeros_like(exps[0].action_mask)

    done = run(rewarded(1.0, 2.0), process(first))
    assert [draft.masked for draft in done.drafts] == [True, False]


def in_part(exps: list[Any]) -> None:
    exps[0].action_mask[0] = False


def tokens(exps: list[Any]) -> None:
    exps[0].tokens = exps[0].tokens[:-1]


def twice(exps: list[Any]) -> list[Any]:
    return [exps[0], exps[0]]


def advantages(exps: list[Any]) -> None:
    exps[0].advantages = exps[0].action_mask


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (in_part, "masks a part of the tokens"),
        (tokens, "sets tokens, which stays as it is stored"),
        (advantages, "sets advantages"),
        (twice, "returns other experiences than it was given, or one twice"),
        (lambda exps: [object()], "returns other experiences"),
        (lambda exps: exps[0].messages, "the experience of an operator has no 'messages'"),
    ],
)
def test_what_an_operator_cannot_do_fails_with_the_page(process: Any, does: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=f"{said}.*docs/from_trinity.md#experience-operators"):
        run(rewarded(1.0, 2.0), process(does))


def test_another_kind_and_a_built_in_name_are_refused() -> None:
    with pytest.raises(PluginError, match="derive it from ExperienceOperator"):
        EXPERIENCE_OPERATORS.register_module("mine", dict)
    with pytest.raises(PluginError, match="is built in"):
        EXPERIENCE_OPERATORS.register_module("reward_filter", type("Other", (ExperienceOperator,), {}))
