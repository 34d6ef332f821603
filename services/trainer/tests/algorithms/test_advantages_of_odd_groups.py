"""Groups of one, equal rewards, empty masks, responses without tokens; groups left out, drawn again or balanced."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from support.fakes.data.experience import make_group, make_task
from trinity.config.algorithms import resolve
from trinity.config.schema.algorithm import AlgorithmConfig
from trinity.plugins.declarations import ADVANTAGES as NAMES
from trinity.runtime.errors import InvalidInput
from trinity.trainer.algorithms.advantages import Advantages, Rollouts, compute
from trinity.trainer.data import batch
from trinity.trainer.data.bad_steps import NotFinite
from trinity.trainer.data.batch import TrainSequence, with_advantages

pytestmark = pytest.mark.core

TEACHER = ("on_policy_distill", "jsd")


def rollouts_of(rewards: list[float], groups: list[int], length: int = 3, **more: Any) -> Rollouts:
    masks = [torch.ones(length, dtype=torch.bool) for _ in rewards]
    logprobs = [torch.full((length,), -1.0, dtype=torch.float64) for _ in rewards]
    rewards_N = torch.tensor(rewards, dtype=torch.float64)
    return Rollouts(rewards_N, torch.tensor(groups), masks, logprobs, **{"teachers": logprobs, **more})


def of(name: str, rollouts: Rollouts, **args: Any) -> Advantages:
    return compute(name, {**NAMES[name].defaults, **args}, rollouts)


# What a group of one gets for its reward of 2, where it is not the reward itself.
ALONE = {"gigpo": 2 / (1 + 1e-6), "ppo": 0.0, "reinforceplusplus": 0.0, "tree": 0.0, "grpo_reweight_adv": 1.0}
ALONE |= {"opmd_reweight_adv": 1.0, **dict.fromkeys(TEACHER, 0.0)}
ALONE |= dict.fromkeys(("grpo", "grpo_verl", "step_wise_grpo"), 2 / (1 + 1e-6))


@pytest.mark.parametrize("name", NAMES)
def test_a_group_of_one(name: str) -> None:
    found = of(name, rollouts_of([2.0], [0], length=1))
    assert float(found.tokens[0][0]) == pytest.approx(ALONE.get(name, 2.0), abs=1e-12)
    assert found.copies_N.tolist() == [1]


# What equal rewards of 0.1 get, where it is not exactly 0.
EQUAL = {"reinforce": 0.1, "remax": 0.1, "asymre": 0.1, "asymre_verl": 0.1}


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards(name: str) -> None:
    found = of(name, rollouts_of([0.1, 0.1, 0.1], [0, 0, 0]))
    for tokens in found.tokens:
        expected = [EQUAL.get(name, 0.0)] * 3
        assert tokens.tolist() == (pytest.approx(expected) if name in EQUAL else pytest.approx(expected, abs=1e-9))
        assert name in (*EQUAL, "ppo", "reinforceplusplus") or not tokens.any(), "exactly"


@pytest.mark.parametrize(("name", "wanted"), [("grpo_reweight_adv", 1.0), ("opmd_reweight_adv", 1.0), ("rloo", 0.0)])
def test_equal_rewards_of_1_count_where_r3l_says_so(name: str, wanted: float) -> None:
    assert of(name, rollouts_of([1.0, 1.0], [0, 0])).scores_N.tolist() == [wanted, wanted]


@pytest.mark.parametrize("name", NAMES)
def test_empty_masks_and_responses_without_tokens(name: str) -> None:
    rollouts = rollouts_of([1.0, 0.0, 5.0, 1.0], [0, 0, 0, 1])
    masks = [rollouts.masks[0], torch.zeros(3, dtype=torch.bool), torch.zeros(0, dtype=torch.bool), rollouts.masks[3]]
    logprobs = [*rollouts.logprobs[:2], torch.zeros(0, dtype=torch.float64), rollouts.logprobs[3]]
    odd = Rollouts(rollouts.rewards_N, rollouts.groups_N, masks, logprobs, teachers=logprobs)
    found = of(name, odd)
    assert [len(tokens) for tokens in found.tokens] == [3, 3, 0, 3]
    assert not found.tokens[1].any()
    assert all(bool(torch.isfinite(tokens).all()) for tokens in found.tokens)
    assert bool(torch.isfinite(found.scores_N).all())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_at_all(name: str) -> None:
    found = of(name, Rollouts(torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.long), [], []))
    assert (len(found.tokens), len(found.scores_N)) == (0, 0)


@pytest.mark.parametrize("name", ["grpo", "step_wise_grpo"])
def test_groups_without_spread_are_left_out_of_the_batch(name: str) -> None:
    found = of(name, rollouts_of([1, 1, 0, 1, 5], [0, 0, 1, 1, 2]), std_threshold=0.0)
    assert found.copies_N.tolist() == [0, 0, 1, 1, 0]
    assert found.scores_N[:2].tolist() == [0, 0]
    assert found.scores_N[3] > 0
    assert of(name, rollouts_of([1, 1, 0, 1, 5], [0, 0, 1, 1, 2])).copies_N.tolist() == [1] * 5


def test_others_are_trained_again_in_their_place_the_same_for_the_same_step() -> None:
    def copies(seed: int) -> list[int]:
        rollouts = rollouts_of([1, 1, 2, 2, 3, 3, 0, 1, 0, 2], [0, 0, 1, 1, 2, 2, 3, 3, 4, 4], seed=seed)
        return of("grpo", rollouts, std_threshold=0.0, duplicate_experiences=True).copies_N.tolist()  # type: ignore[no-any-return]

    for seed in range(5):
        found = copies(seed)
        assert found[:6] == [0] * 6
        assert (found[6], found[8]) == (found[7], found[9]), "whole groups"
        assert found[6] + found[8] == 5, "as many groups as there were"
        assert found == copies(seed)
    assert len({tuple(copies(seed)) for seed in range(10)}) > 1
    nothing = of("grpo", rollouts_of([1, 1], [0, 0]), std_threshold=0.0, duplicate_experiences=True)
    assert nothing.copies_N.tolist() == [0, 0]


@pytest.mark.parametrize("reward", ["x", [1], {}, float("nan"), 10**400])
def test_a_step_reward_that_is_no_number_is_seen_in_the_advantage_of_its_group(reward: Any) -> None:
    facts = [{"step_reward": 1.0}, {"step_reward": reward}, {"step_reward": 1.0}, {"step_reward": None}]
    found = of("gigpo", rollouts_of([1.0, 2.0, 3.0, 4.0], [0, 0, 1, 1], facts=facts))
    assert found.scores_N[:2].isnan().all()
    assert found.scores_N[2:].isfinite().all()


@pytest.mark.parametrize(
    ("fact", "problem"),
    [
        ({"parent": 1, "branch_turn": 1}, "info.parent: is 1, must be a rollout before 1"),
        ({"parent": "0", "branch_turn": 1}, "info.parent: is '0', must be a rollout"),
        ({"parent": 0}, "info.branch_turn: is None, must be an integer >= 1"),
        ({"turns": [[0, 4]]}, r"info.turns: is \[\[0, 4\]\], must be \[begin, end\] pairs up to 3"),
        ({"turns": []}, "info.turns: is "),
    ],
)
def test_an_origin_that_is_none_is_refused(fact: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        of("tree", rollouts_of([1.0, 0.0], [0, 0], facts=[{}, fact], trajectories_N=torch.tensor([0, 1])))


def test_info_counts_before_a_metric_of_the_same_name() -> None:
    made = make_group(make_task(repeat_times=1)).experiences[0]
    made = replace(made, info_json='{"turns": [[0, 1]]}', metrics={"turns": 1.0, "won": 2.0})
    one = TrainSequence(np.zeros(3, np.int32), 1, np.zeros(2, np.float32), np.ones(2, bool), 0, experience=made)
    facts = batch._rollouts([one], 0, None, None).facts
    assert facts is not None and facts[0] == {"turns": [[0, 1]], "won": 2.0}


def test_metrics_with_the_names_of_branches_change_no_tree() -> None:
    numbers, named = torch.tensor([0, 1]), {"turns": 3.0, "parent": 0.0, "branch_turn": 1.0}
    plain, found = (
        of("tree", rollouts_of([1.0, 0.0], [0, 0], facts=[fact] * 2, trajectories_N=numbers)) for fact in ({}, named)
    )
    assert [one.tolist() for one in found.tokens] == [one.tolist() for one in plain.tokens] == [[0.5] * 3, [-0.5] * 3]


def test_turns_of_one_sequence_have_their_nodes_advantages() -> None:
    turns = {"turns": [[0, 1], [1, 2], [2, 3]]}
    facts = [turns, {**turns, "parent": 0, "branch_turn": 2}, {**turns, "parent": 7, "branch_turn": 1}, turns]
    rewards, numbers = [1.0, 0.0, 1.0, 0.0], torch.tensor([0, 1, 8, 9])
    found = of("tree", rollouts_of(rewards, [0] * 4, facts=facts, trajectories_N=numbers))
    assert found.tokens[0].tolist() == [0.25, 0.25, 0.5], "0.5 of two, against a root of 0; 1 against 0"
    assert found.tokens[1].tolist() == [0.0, 0.0, -0.5]
    assert found.tokens[2].tolist() == [0.0, 0.0, 0.0], "of a parent that was left out, without siblings"
    assert found.tokens[3].tolist() == [-0.25] * 3


def test_the_greedy_rollout_is_a_baseline_and_not_trained() -> None:
    facts = [{}, {"greedy": 1.0}, {}, {"greedy": 0.0}]
    found = of("remax", rollouts_of([1.0, 0.25, 0.0, 2.0], [0, 0, 0, 1], facts=facts))
    assert found.scores_N.tolist() == [0.75, 0.0, -0.25, 2.0]
    assert found.copies_N.tolist() == [1, 0, 1, 1]


def test_failures_that_outnumber_successes_are_dropped_at_random() -> None:
    rewards = [1.0, 0.0, 0.125, 0.0, 0.0]
    for seed in range(10):
        found = of("rec", rollouts_of(rewards, [0] * 5, seed=seed), drop="balance").scores_N
        dropped = [i for i, score in enumerate(found) if score == 0]
        kept = [i for i in range(5) if i not in dropped]
        assert len(dropped) == 3
        assert 0 in kept
        mean = sum(rewards[i] for i in kept) / 2
        assert [float(found[i]) for i in kept] == pytest.approx([rewards[i] - mean for i in kept])
    balanced = of("rec", rollouts_of([1.0, 0.0], [0, 0]), drop="balance").scores_N
    assert balanced.tolist() == [0.5, -0.5]


def test_a_trajectory_without_step_rewards_has_its_reward_at_the_last_step() -> None:
    steps = {"trajectories_N": torch.tensor([0, 0, 1]), "steps_N": torch.tensor([0, 1, 0])}
    found = of("gigpo", rollouts_of([7.0, 1.0, 0.0], [0, 0, 0], facts=[{}, {}, {}], **steps), gamma=0.5)
    assert found.scores_N.tolist() == pytest.approx([0.5, 0.5, -0.5], abs=1e-5), "the 7 is of no last step"


@pytest.mark.parametrize("teachers", [None, [None], [torch.full((1,), -1.0)]])
def test_without_a_teacher_there_is_nothing_to_distill(teachers: Any) -> None:
    with pytest.raises(InvalidInput, match=r"teacher_logprobs: .*group 4"):
        of("jsd", rollouts_of([1.0], [4], teachers=teachers))


def sequence(group: int, reward: float, expert: bool = False) -> TrainSequence:
    tokens, mask = np.zeros(5, np.int32), np.array([True, False, True])
    return TrainSequence(tokens, 2, np.full(3, -1, np.float32), mask, group=group, reward=reward, expert=expert)


def plan_with(**args: Any) -> Any:
    return resolve(AlgorithmConfig.model_validate({"algorithm_type": "grpo", "advantage_fn_args": args}))


def test_sequences_get_their_tokens_advantages_and_expert_rows_none() -> None:
    sequences = [sequence(0, 1.0), sequence(0, 0.0), sequence(1, 1.0), sequence(1, 1.0), sequence(9, 0.0, expert=True)]
    found = with_advantages(sequences, plan_with(std_cal_level="none"), step=1)
    assert [s.advantages.tolist() for s in found] == [[0.5, 0, 0.5], [-0.5, 0, -0.5], *[[0, 0, 0]] * 3]
    assert [s.advantage for s in found] == [0.5, -0.5, 0, 0, 0]
    assert all(s.mask.sum() == 2 for s in found)


def test_sequences_that_are_left_out_train_no_token_and_copies_are_appended() -> None:
    sequences = [sequence(0, 1.0), sequence(0, 0.0), sequence(1, 1.0), sequence(1, 1.0), sequence(9, 0.0, expert=True)]
    args = {"std_cal_level": "none", "std_threshold": 0.0, "duplicate_experiences": True}
    found = with_advantages(sequences, plan_with(**args), step=1)
    assert [int(s.mask.sum()) for s in found] == [2, 2, 0, 0, 2, 2, 2]
    assert [s.advantage for s in found] == [0.5, -0.5, 0, 0, 0.5, -0.5, 0]
    assert found[-1].expert


def test_an_advantage_that_is_not_finite_names_its_group() -> None:
    with pytest.raises(NotFinite, match=r"step 1: the reward is not finite; groups 3 of the batch"):
        with_advantages([sequence(3, float("nan")), sequence(3, 1.0)], plan_with(), step=1)
