"""Distillation of a teacher's likeliest tokens against plain loops, from the log's bytes to the model's gradient."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.checks.losses.loss_cases import MODES, Case, case_of, loss_of
from support.checks.losses.plain_losses import top_k_distill
from support.fakes.data.experience import make_group, make_task
from support.programs.trainer.training import make_model
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.config.algorithms import AlgorithmPlan, resolve
from trinity.config.schema.algorithm import AlgorithmConfig
from trinity.config.schema.model import ModelConfig
from trinity.data.experience import Group
from trinity.data.top_tokens import TopTokens
from trinity.data.wire import encode_outcome
from trinity.trainer.algorithms.inputs import LossInputs
from trinity.trainer.algorithms.loss import compute_loss
from trinity.trainer.data.bad_steps import Undecodable
from trinity.trainer.data.batch import TrainBatch, from_groups
from trinity.trainer.data.microbatch import collate
from trinity.trainer.model.policy import PolicyModel, load_policy

pytestmark = pytest.mark.core

BETAS = [0.0, 0.3, 0.5, 1.0]
K = 5


def gradient(case: Case, beta: float) -> torch.Tensor:
    assert case.x.top_logprobs is not None
    (found,) = torch.autograd.grad(loss_of("top_k_distill", case, {"beta": beta}), case.x.top_logprobs)
    return found


@given(seed=st.integers(0, 10_000), beta=st.sampled_from(BETAS), mode=st.sampled_from(MODES))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_value_and_gradient_are_those_of_a_plain_loop(seed: int, beta: float, mode: str) -> None:
    case = case_of(seed, mode)
    lp = case.rows("logprobs")
    value = float(loss_of("top_k_distill", case, {"beta": beta}).detach())
    assert value == pytest.approx(top_k_distill(case, lp, lp, beta), abs=1e-9, rel=1e-9)
    assert case.x.top_logprobs is not None
    found, step = gradient(case, beta), 1e-6
    for place in case.x.mask.nonzero().tolist()[:3]:
        for column in range(3):
            sides = []
            for sign in (1, -1):
                top = case.x.top_logprobs.detach().clone()
                top[(*place, column)] += sign * step
                sides.append(top_k_distill(case, lp, lp, beta, top))
            slope = (sides[0] - sides[1]) / (2 * step)
            assert float(found[(*place, column)]) == pytest.approx(slope, abs=1e-7, rel=1e-6)
    assert not found[case.x.mask == 0].any()


@pytest.mark.parametrize("beta", BETAS)
def test_the_whole_vocabulary_is_the_whole_divergence_and_fewer_tokens_are_less_of_it(beta: float) -> None:
    """Merging tokens to a bucket never raises a divergence."""
    torch.manual_seed(1)
    p, q = (torch.randn(8, dtype=torch.float64).log_softmax(-1).sort(descending=True).values for _ in range(2))
    m = beta * p.exp() + (1 - beta) * q.exp()
    parts = (p.exp() * (p - m.log())).sum(), (q.exp() * (q - m.log())).sum()
    whole = {0.0: parts[0], 1.0: parts[1]}.get(beta, beta * parts[0] + (1 - beta) * parts[1])
    if beta in (0.0, 1.0):
        whole = (p.exp() * (p - q)).sum() if beta == 0 else (q.exp() * (q - p)).sum()
    one = torch.ones(1, 1, dtype=torch.float64)
    base = case_of(0, "token-mean")
    values = []
    for k in range(1, 9):
        x = LossInputs(-one, one, one, -one, one, top_logprobs=q[:k].view(1, 1, k), teacher_top=p[:k].view(1, 1, k))
        totals = replace(base.totals, tokens=1, sequences=1)
        values.append(float(loss_of("top_k_distill", replace(base, x=x, totals=totals), {"beta": beta})))
    assert values[-1] == pytest.approx(float(whole), abs=1e-9)
    assert all(fewer <= more + 1e-12 for fewer, more in pairwise(values))
    assert values[0] > 0


def test_a_place_where_both_are_certain_has_a_finite_gradient() -> None:
    sure = torch.tensor([[[0.0, -80.0]]])
    for teacher, policy in ((sure, sure), (sure, sure.flip(-1)), (sure, torch.full((1, 1, 2), -0.7))):
        one = torch.ones(1, 1)
        x = LossInputs(-one, one, one, -one, one, top_logprobs=policy.clone().requires_grad_(), teacher_top=teacher)
        case = case_of(0, "token-mean")
        for beta in BETAS:
            given_case = replace(case, x=x, totals=replace(case.totals, tokens=1, sequences=1))
            loss = loss_of("top_k_distill", given_case, {"beta": beta})
            assert torch.isfinite(loss) and torch.isfinite(gradient(given_case, beta)).all()


# From the log to the model.


def plan_of(**args: Any) -> AlgorithmPlan:
    given_args = {"top_k": K, **args}
    return resolve(AlgorithmConfig(algorithm_type="top_k_distill", repeat_times=4, policy_loss_fn_args=given_args))


def taught(seed: int, vocabulary: int, k: int = K) -> Group:
    """Responses of 1 to 4 tokens; the last experience has no token to train, and no teacher."""
    group, rng = make_group(make_task(1, repeat_times=4)), np.random.default_rng(seed)
    made = []
    for index, one in enumerate(group.experiences):
        length = one.prompt_length + index + 1
        ids = rng.integers(0, vocabulary, length).astype(np.int32)
        mask = np.ones(index + 1, bool) if index < 3 else np.zeros(index + 1, bool)
        logs = np.log(rng.dirichlet(np.full(vocabulary, 0.3), index + 1))
        top = np.argsort(-logs, axis=1)[:, :k]
        teacher = TopTokens(top.astype(np.int32), np.take_along_axis(logs, top, 1).astype(np.float32))
        spans = (replace(one.version_spans[0], start=0, end=index + 1),)
        made.append(replace(
            one, token_ids=ids, logprobs=np.full(index + 1, -1, np.float32), action_mask=mask, version_spans=spans,
            teacher_top=teacher if index < 3 else None,
        ))  # fmt: skip
    return replace(group, experiences=tuple(made))


def batch_of(group: Group, plan: AlgorithmPlan) -> TrainBatch:
    entry = pb.LedgerEntry(step=1)
    entry.groups.add()
    return from_groups(entry, [encode_outcome(group)], plan)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("distilled") / "model")


def learnt(policy: PolicyModel, plan: AlgorithmPlan, batch: TrainBatch, parts: list[list[int]]) -> Any:
    """The loss and the gradient of the head from these micro-batches."""
    policy.zero_grad()
    total = 0.0
    for part in parts:
        micro = collate([batch.sequences[index] for index in part], 0, policy.packed)
        logprobs, entropy, *top = policy(micro, micro.top_ids is not None)
        x = LossInputs(
            logprobs, entropy.detach(), micro.mask, micro.old_logprobs, micro.advantages, expert_B=micro.expert,
            top_logprobs=top[0] if top else None, teacher_top=micro.teacher_top,
        )  # fmt: skip
        loss, report = compute_loss(plan, x, batch.totals)
        assert {"distill_loss", "teacher_top_mass"} <= report.keys()
        loss.backward()  # also of a micro-batch without tokens to train: all ranks take part
        total += float(loss.detach())
    weight = policy.head.weight
    assert isinstance(weight, torch.nn.Parameter) and weight.grad is not None
    return total, weight.grad.clone()


@pytest.mark.parametrize("beta", BETAS)
def test_the_model_learns_from_every_split_of_a_batch_what_whole_logits_teach(model: Path, beta: float) -> None:
    policies = [
        load_policy(ModelConfig(model_path=str(model)), torch.float32, 3, packed=packed) for packed in (False, True)
    ]
    policy = policies[0]
    vocabulary = policy.model.config.vocab_size
    plan, group = plan_of(beta=beta), taught(3, vocabulary)
    batch = batch_of(group, plan)
    policy.zero_grad()
    terms = []
    for sequence in batch.sequences[:3]:
        assert sequence.teacher_top is not None
        logits = policy.model.model(input_ids=torch.tensor(sequence.token_ids[None].astype(np.int64)))[0][0]
        logs = (logits @ policy.head.weight.T)[sequence.prompt_length - 1 : -1].log_softmax(-1)
        q = logs.gather(1, torch.tensor(sequence.teacher_top.ids.astype(np.int64)))
        p = torch.tensor(sequence.teacher_top.logprobs)
        p, q = (torch.cat([one, (1 - one.exp().sum(-1, keepdim=True)).log()], -1) for one in (p, q))
        m = (beta * p.exp() + (1 - beta) * q.exp()).log()
        one, other = (p, q) if beta == 0 else (q, p) if beta == 1 else (None, None)
        if one is not None and other is not None:
            terms.append((one.exp() * (one - other)).sum(-1))
        else:
            terms.append((beta * p.exp() * (p - m) + (1 - beta) * q.exp() * (q - m)).sum(-1))
    plain = torch.cat(terms).mean()
    plain.backward()
    expected = policy.head.weight.grad.clone()  # type: ignore[union-attr,operator]
    for parts in ([[0, 1, 2, 3]], [[0, 3], [1, 2]], [[3], [0], [1], [2], []]):
        for one_policy in policies:
            loss, found = learnt(one_policy, plan, batch, parts)
            assert loss == pytest.approx(float(plain.detach()), abs=1e-5, rel=1e-5)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)


def test_a_loss_takes_the_first_of_more_tokens_and_refuses_fewer() -> None:
    group = taught(3, 40)
    first = batch_of(group, plan_of(top_k=2)).sequences[0].teacher_top
    assert first is not None and group.experiences[0].teacher_top is not None
    assert np.array_equal(first.ids, group.experiences[0].teacher_top.ids[:, :2])
    assert all(one.teacher_top is None for one in batch_of(group, resolve(AlgorithmConfig())).sequences)
    with pytest.raises(Undecodable, match="teacher_top: has 5 tokens for each place, the loss reads 6"):
        batch_of(group, plan_of(top_k=6))


def test_exact_steps_reach_the_teacher() -> None:
    torch.manual_seed(0)
    teacher = torch.randn(4, 6, 9).mul(2).log_softmax(-1)
    top, ids = teacher.topk(4)
    for beta in BETAS:
        student = torch.zeros(4, 6, 9, requires_grad=True)
        optimizer = torch.optim.Adam([student], lr=0.05)
        one, plan, case = torch.ones(4, 6), plan_of(beta=beta), case_of(0, "token-mean")
        for _ in range(400):
            logs = student.log_softmax(-1)
            x = LossInputs(logs[..., 0], one, one, -one, one, top_logprobs=logs.gather(-1, ids), teacher_top=top)
            loss, _ = compute_loss(plan, x, replace(case.totals, tokens=24, sequences=4, rolled_out=None))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert float(loss.detach()) < 1e-4
        torch.testing.assert_close(student.log_softmax(-1).gather(-1, ids).exp(), top.exp(), atol=0.02, rtol=0.02)
