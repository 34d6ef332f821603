"""Shares of micro-batches add up to the batch's loss for every split; and statistics of the whole batch."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.programs.trainer.training import make_model, run_ranks
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.config.algorithms import AlgorithmPlan, Part, resolve
from trinity.config.schema.algorithm import AlgorithmConfig
from trinity.data.top_tokens import TopTokens
from trinity.plugins.declarations import POLICY_LOSSES as NAMES
from trinity.trainer.algorithms.aggregation import join, means
from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.algorithms.loss import compute_loss
from trinity.trainer.data.batch import TrainBatch, TrainSequence, from_groups
from trinity.trainer.data.microbatch import MicroBatch, collate
from trinity.trainer.engine.whole_batch import needs_policy, with_batch_statistics

pytestmark = pytest.mark.core

CORRECTIONS: list[dict[str, Any]] = [
    {},
    {"decoupled": True, "token_cap": 1.5, "token_range": [0.5, 1.6]},
    {"decoupled": True, "sequence_cap": 1.5, "geometric_range": [0.7, 1.4]},
]
OF_SEQUENCES: dict[str, Any] = {"decoupled": False, "geometric_range": [0.7, 1.4]}


def plan_of(name: str, **changes: Any) -> AlgorithmPlan:
    plan = resolve(AlgorithmConfig.model_validate({"algorithm_type": "grpo", "repeat_times": 4, **changes}))
    args = {key: value for key, value in NAMES[name].defaults.items() if key != "loss_agg_mode"}
    return replace(plan, policy_loss=Part(name, args))


def batch_of(seed: int, proximal: bool) -> tuple[TrainBatch, list[np.ndarray], list[np.ndarray]]:
    """A batch, and the policy's and the reference's log-probabilities of its response tokens."""
    rng = np.random.default_rng(seed)
    sequences, policy = [], []
    count, top = int(rng.integers(2, 9)), np.random.default_rng([seed, 1])
    for index in range(count):
        prompt, response = int(rng.integers(1, 4)), int(rng.integers(0, 6))
        old = -rng.exponential(1.0, response).astype(np.float32)
        policy.append(np.minimum(old + rng.normal(0, 0.3, response), -1e-3).astype(np.float32))
        sequences.append(
            TrainSequence(
                token_ids=rng.integers(0, 50, prompt + response).astype(np.int32),
                prompt_length=prompt,
                old_logprobs=old,
                mask=rng.random(response) < 0.8,
                group=index // 3,
                advantage=float(rng.normal()),
                expert=index == count - 1,
                on_policy_mask=rng.random(response) < 0.5,
                proximal_logprobs=policy[-1] + 0.1 if proximal else None,
                teacher_top=TopTokens(
                    np.tile(np.arange(3, dtype=np.int32), (response, 1)),
                    np.log(top.dirichlet(np.ones(5), response)[:, :3].astype(np.float32)),
                ),
                pair=0 if index // 2 * 2 + 1 >= count else (index // 2 + 1) * (-1) ** index,
            )
        )
    return TrainBatch(1, tuple(sequences)), policy, [p * 0.9 for p in policy]


def inputs_of(micro: MicroBatch, logprobs: torch.Tensor, reference: torch.Tensor) -> LossInputs:
    """As the engine makes them."""
    top = None if micro.teacher_top is None else 0.8 * micro.teacher_top + 0.1 * logprobs[..., None] - 0.5
    same = ({f.name for f in fields(LossInputs)} & set(vars(micro))) - {"reference_logprobs"}
    return LossInputs(
        logprobs=logprobs,
        entropy=-logprobs * 0.5,
        reference_logprobs=reference,
        expert_B=micro.expert,
        pairs_B=micro.pairs,
        peers_B=micro.peers,
        top_logprobs=top,
        step=1,
        **{name: getattr(micro, name) for name in same},
    )


def gradients(
    plan: AlgorithmPlan,
    batch: TrainBatch,
    policy: list[np.ndarray],
    reference: list[np.ndarray],
    parts: list[list[int]],
) -> tuple[float, list[list[float]], dict[str, float]]:
    """Loss, its gradient for each sequence's response tokens, and metrics, from micro-batches of these sequences."""
    total, found, reports = 0.0, [[] for _ in batch.sequences], []  # type: ignore[var-annotated]
    for indices in parts:
        chosen = [batch.sequences[index] for index in indices]
        micro = collate(chosen, 0)
        lp, ref = torch.full_like(micro.mask, -7.0), torch.full_like(micro.mask, -3.0)
        places = []
        for row, index in enumerate(indices):
            sequence = batch.sequences[index]
            places.append(slice(sequence.response_length))
            lp[row, places[-1]] = torch.from_numpy(policy[index])
            ref[row, places[-1]] = torch.from_numpy(reference[index])
        lp.requires_grad_()
        loss, report = compute_loss(plan, inputs_of(micro, lp, ref), batch.totals)
        reports.append(report)
        total += float(loss.detach())
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss, lp)
            for row, index in enumerate(indices):
                found[index] = gradient[row, places[row]].tolist()
    return total, found, means(join(reports))


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 10_000), choice=st.integers(0, 5), proximal=st.booleans())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_split_is_the_whole(name: str, seed: int, choice: int, proximal: bool) -> None:
    rng = np.random.default_rng(seed)
    correction = CORRECTIONS[choice % 3]
    if name in ("opmd_kimi", "opmd_pairwise", "dpo"):
        correction = OF_SEQUENCES if choice % 3 and name != "dpo" else {}
    modes = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
    plan = plan_of(name, rollout_correction=correction, entropy_loss_fn_args={"entropy_coef": 0.1},
                   entropy_loss_fn=["default", "mix"][choice % 2], kl_loss_fn="corrected_k3",
                   kl_loss_fn_args={"kl_coef": 0.2}, loss_agg_mode=modes[choice % 4])  # fmt: skip
    batch, policy, reference = batch_of(seed, proximal)
    if needs_policy(plan):
        batch = with_batch_statistics(plan, batch, policy, reference)
    order = rng.permutation(len(policy)).tolist()
    cut = int(rng.integers(0, len(order) + 1))
    whole = gradients(plan, batch, policy, reference, [order])
    for parts in ([order[:cut], order[cut:]], [[index] for index in order], [[], order, []]):
        split = gradients(plan, batch, policy, reference, parts)
        assert split[0] == pytest.approx(whole[0], abs=1e-4, rel=1e-4)
        for one, other in zip(split[1], whole[1], strict=True):
            assert one == pytest.approx(other, abs=1e-5, rel=1e-4)
        assert split[2].keys() == whole[2].keys()
        assert split[2] == pytest.approx(whole[2], abs=1e-4, rel=1e-3)


def test_expert_rows_count_only_where_a_loss_is_made_for_them() -> None:
    batch, policy, reference = next(
        b for b in (batch_of(seed, False) for seed in range(99)) if _expert_tokens(b[0]) > 1
    )
    without = replace(batch, sequences=batch.sequences[:-1])
    for name in ("ppo", "opmd_kimi", "rec", "mix", "sft"):
        plan = plan_of(name, kl_loss_fn_args={"kl_coef": 0.2})
        parts = [list(range(len(policy)))]
        whole = gradients(plan, batch, policy, reference, parts)[1]
        alone = gradients(plan, without, policy[:-1], reference[:-1], [parts[0][:-1]])[1]
        assert any(whole[-1]) == (name in ("mix", "sft"))
        assert (whole[:-1] == alone) == (name not in ("mix", "sft"))


def _expert_tokens(batch: TrainBatch) -> int:
    return batch.totals.expert.tokens if batch.totals.expert else 0


def test_what_one_sequence_adds_depends_on_others_only_through_the_first_pass() -> None:
    """dpo's pairs, opmd_pairwise's groups, m2po's batch: another sequence's policy changes keep_mask or peers."""
    for name in ("m2po", "dpo", "opmd_pairwise"):
        batch, policy, reference = batch_of(11, False)
        plan = plan_of(name)
        sequences = tuple(replace(s, mask=np.ones_like(s.mask), expert=False) for s in batch.sequences)
        batch = replace(batch, sequences=sequences)
        first = with_batch_statistics(plan, batch, policy, reference)
        moved = with_batch_statistics(plan, batch, [p - 1.0 * (i > 0) for i, p in enumerate(policy)], reference)
        if name == "m2po":
            assert any(
                (one.keep_mask != other.keep_mask).any() for one, other in zip(*_both(first, moved), strict=True)
            )  # type: ignore[union-attr]
        else:
            assert any(one.peers != other.peers for one, other in zip(*_both(first, moved), strict=True))


def test_what_the_whole_batch_decides_is_of_the_ratio_that_the_loss_has() -> None:
    """To the engine in the only update of a batch, to the weights as the step began where it makes several."""
    plan = plan_of("m2po")
    assert plan.correction.decoupled is None
    batch, policy, _ = batch_of(11, False)
    sequences = tuple(
        replace(s, old_logprobs=p - 3, advantage=1.0, expert=False)
        for s, p in zip(batch.sequences, policy, strict=True)
    )
    alone = with_batch_statistics(plan, replace(batch, sequences=sequences), policy, None)
    assert not any(s.keep_mask.any() for s in alone.sequences if s.keep_mask is not None), (
        "e^3 times as likely, all of them"
    )
    sequences = tuple(replace(s, proximal_logprobs=p) for s, p in zip(sequences, policy, strict=True))
    first = with_batch_statistics(plan, replace(batch, sequences=sequences), policy, None)
    assert all((s.keep_mask == s.mask).all() for s in first.sequences)


def test_dr_grpo_divides_by_the_longest_response_of_the_run() -> None:
    batch, policy, reference = batch_of(3, False)
    plan = plan_of("ppo", loss_agg_mode="seq-mean-token-sum-norm", kl_loss_fn="none")
    parts = [list(range(len(policy)))]
    sums = gradients(replace(plan, loss_aggregation="seq-mean-token-sum"), batch, policy, reference, parts)[0]
    found = gradients(replace(plan, max_response_tokens=50), batch, policy, reference, parts)[0]
    assert sums != 0
    assert found == pytest.approx(sums / 50)


def _both(one: TrainBatch, other: TrainBatch) -> tuple[tuple[TrainSequence, ...], tuple[TrainSequence, ...]]:
    return one.sequences, other.sequences


def entry_and_groups(rewards: list[list[float]]) -> tuple[pb.LedgerEntry, list[bytes]]:
    from support.fakes.data.experience import make_group, make_task
    from trinity.data.wire import encode_outcome

    entry = pb.LedgerEntry(step=3)
    outcomes = []
    for number, values in enumerate(rewards):
        group = make_group(make_task(number + 1, repeat_times=len(values)))
        experiences = tuple(replace(e, reward=r) for e, r in zip(group.experiences, values, strict=True))
        outcomes.append(encode_outcome(replace(group, experiences=experiences)))
        entry.groups.add()
    return entry, outcomes


def test_pairs_are_the_best_with_the_worst_of_a_group() -> None:
    entry, groups = entry_and_groups([[0.0, 3.0, 1.0, 2.0], [1.0, 1.0, 1.0, 0.0]])
    plan = resolve(AlgorithmConfig(algorithm_type="dpo", repeat_times=4))
    batch = from_groups(entry, groups, plan)
    assert [s.pair for s in batch.sequences] == [-1, 1, -2, 2, 3, 0, 0, -3]
    assert batch.totals.pairs == 3
    assert [bool(s.mask.any()) for s in batch.sequences] == [True] * 5 + [False, False, True]


def test_a_rollout_without_a_token_to_train_is_in_no_pair() -> None:
    """One that mask_response_truncated masks, say: the worst of its group is another then."""
    entry, groups = entry_and_groups([[0.0, 3.0, 1.0, 2.0]])
    kept = entry.groups[0].experiences
    kept.extend(pb.LedgerExperience(index=index, reward=reward, masked=reward == 0) for index, reward in
                enumerate([0.0, 3.0, 1.0, 2.0]))  # fmt: skip
    batch = from_groups(entry, groups, resolve(AlgorithmConfig(algorithm_type="dpo", repeat_times=4)))
    assert [s.pair for s in batch.sequences] == [0, 1, -1, 0]
    assert [bool(s.mask.any()) for s in batch.sequences] == [False, True, True, False]


@pytest.mark.parametrize(("name", "trained"), [("ppo", False), ("gspo", False), ("mix", True), ("sft", True)])
def test_expert_rows_are_not_in_a_batch_whose_loss_is_not_made_for_them(name: str, trained: bool) -> None:
    """Else a mini-batch of them alone would be an update of nothing but the optimizer's moments and weight decay."""
    expert = TrainSequence(np.zeros(3, np.int32), 1, np.zeros(2, np.float32), np.ones(2, bool), group=1, expert=True)
    entry, groups = entry_and_groups([[0.0, 1.0]])
    batch = from_groups(entry, groups, plan_of(name), [expert])
    assert [s.expert for s in batch.sequences] == [False, False, *[True] * trained]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_engine_looks_at_the_whole_batch_first(tmp_path: Path) -> None:
    """m2po and KL in the reward on one rank and on two, whole and in micro-batches; its coefficients are saved."""
    model = make_model(tmp_path / "model")
    adaptive = {"kl_coef": 0.5, "adaptive": True, "target_kl": 0.01, "horizon": 64}
    algorithm = {"algorithm_type": "m2po", "kl_penalty_fn": "k2", "kl_penalty_fn_args": adaptive, "kl_loss_fn": "k3",
                 "kl_loss_fn_args": adaptive}  # fmt: skip

    def run(name: str, ranks: int, zero: int, budget: int, **job: Any) -> dict[str, Any]:
        trainer = {"max_token_len_per_gpu": budget}
        return run_ranks(tmp_path / name, model, ranks=ranks, zero=zero, trainer=trainer, algorithm=algorithm, **job)

    whole = run("whole", 1, 0, 10_000, steps=3, save_at=2)
    split = run("split", 2, 2, 24, steps=3)
    resumed = run("resumed", 1, 0, 10_000, steps=3, load=str(tmp_path / "whole/saved"))
    assert "reward_kl" in whole["metrics"][0]
    for one, other in zip(whole["metrics"], split["metrics"], strict=True):
        assert one == pytest.approx(other, rel=2e-3, abs=1e-5)
    assert resumed["metrics"] == whole["metrics"][2:]
    for name in set(whole) - {"metrics"}:
        np.testing.assert_allclose(split[name], whole[name], atol=2e-3, err_msg=name)
