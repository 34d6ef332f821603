"""Passes of several tenants are computed as one, and each gets what it would get alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trinity.tinker.commands.log import Command, Kind, Result, canonical
from trinity.tinker.commands.wire import Datum, Forward, read_forward, read_output, write_forward
from trinity.tinker.executor.executor import Executor
from trinity.tinker.executor.model import AdapterShape, SharedModel, Tenant, finished
from trinity.tinker.executor.states import States

pytestmark = pytest.mark.core

RANKS = {"a": 4, "b": 8, "c": 16, "d": 32}
_ADAM = {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.95, "eps": 1e-4, "weight_decay": 0.1, "grad_clip_norm": 1.0}

Made = Callable[[str], Executor]


@pytest.fixture
def executor(quickstart_model: Path, tmp_path: Path) -> Made:
    def made(name: str) -> Executor:
        model = SharedModel(str(quickstart_model), torch.float32, torch.device("cpu"), 40)
        return Executor(model, States(tmp_path / name), shares=True)

    return made


class Script:
    """Commands of the four tenants, in the order in which they are added."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def add(self, model: str, kind: Kind, body: dict[str, Any] | bytes) -> None:
        whole = body if isinstance(body, bytes) else canonical(body)
        position = len(self.commands) + 1
        self.commands.append(Command(kind, model, model, position, whole, 0.0, position))

    def create(self, *, attention: bool = True) -> "Script":
        for model, rank in RANKS.items():
            lora = {"rank": rank, "seed": rank, "train_attn": attention or model != "c", "train_mlp": True}
            self.add(model, Kind.CREATE_MODEL, {"lora_config": lora})
        return self

    def forward(self, model: str, seed: int, *, backward: bool = True, weight: float = 1.0) -> None:
        rng, data = np.random.default_rng([seed, RANKS[model]]), []
        for length in rng.integers(3, 12, 3):
            inputs = {"target_tokens": rng.integers(0, 250, length)}
            for name in ("logprobs", "advantages"):
                inputs[name] = (weight * rng.standard_normal(length)).astype(np.float32)
            data.append(Datum(rng.integers(0, 250, length), inputs))
        whole = Forward(model, 1, tuple(data), "importance_sampling", {}, backward)
        self.add(model, Kind.FORWARD_BACKWARD, write_forward(whole))

    def step(self, model: str) -> None:
        self.add(model, Kind.OPTIM_STEP, {"adam_params": _ADAM})


def _differ(found: Result | None, expected: Result | None) -> float:
    """Returns the largest relative difference of two results of the same kind."""
    assert found is not None
    assert expected is not None
    assert (found.request_id, found.kind, found.position) == (expected.request_id, expected.kind, expected.position)
    if found.kind != Kind.FORWARD_BACKWARD:
        return 0.0
    (rows, sums), (expected_rows, expected_sums) = (read_output(one.body) for one in (found, expected))
    assert sums == pytest.approx(expected_sums, rel=1e-4, abs=1e-4)
    return max(float((np.abs(a - b) / np.abs(b)).max()) for a, b in zip(rows, expected_rows, strict=True))


@pytest.mark.parametrize("attention", [True, False], ids=["the same layers", "one adapts fewer layers"])
def test_four_ranks_at_once_are_four_runs_alone(executor: Made, attention: bool) -> None:
    script = Script().create(attention=attention)
    for turn in range(3):
        for model in RANKS:
            script.forward(model, turn)
            script.forward(model, 10 + turn, backward=False)
        for model in reversed(RANKS):
            script.forward(model, 20 + turn)
            script.step(model)
    alone, together = executor("alone"), executor("together")
    expected = [alone.execute(command) for command in script.commands]
    found = together.execute_all(script.commands)
    assert max(map(_differ, found, expected)) < 1e-6
    assert together.executed == {command.tenant: command.position for command in script.commands}
    for model, tenant in together._tenants.items():
        for name, tensor in tenant.state(gradients=True).items():
            assert torch.allclose(tensor, alone._tenants[model].state(gradients=True)[name], rtol=1e-4, atol=1e-6), name


def test_passes_of_all_are_one(executor: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script().create()
    for model in RANKS:
        script.forward(model, 1)
        script.step(model)
    at_once: list[int] = []
    computed = SharedModel.run_together

    def counted(self: SharedModel, passes: Any) -> Any:
        at_once.append(len(passes))
        return (yield from computed(self, passes))

    monkeypatch.setattr(SharedModel, "run_together", counted)
    monkeypatch.setattr(SharedModel, "run", None)  # no pass is computed alone
    found = executor("together").execute_all(script.commands)
    assert all(result is not None and result.kind != Result.FAILED for result in found)
    assert at_once == [len(RANKS)]


@pytest.mark.parametrize("fails", [False, True])
def test_seconds_of_a_shared_pass_are_divided_by_tokens(
    executor: Made, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The parts add up to the whole: 60 seconds of the pass, and one of each step."""
    script = Script().create()
    for model in RANKS:
        script.forward(model, 1)
        script.step(model)
    made, at = executor("together"), [0.0]
    made.clock = lambda: at[0]
    made.execute_all(script.commands[: len(RANKS)])
    computed, stepped = SharedModel.run_together, Tenant.step

    def slow(self: SharedModel, passes: Any) -> Any:
        at[0] += 60
        return None if fails else (yield from computed(self, passes))

    def step(self: Tenant, *settings: Any) -> float:
        at[0] += 1
        return stepped(self, *settings)

    monkeypatch.setattr(SharedModel, "run_together", slow)
    monkeypatch.setattr(Tenant, "step", step)
    rest = script.commands[len(RANKS) :]
    seconds = [result.seconds for result in made.execute_all(rest) if result is not None]
    tokens = [sum(len(one.tokens) for one in read_forward(command.body).data) for command in rest[::2]]
    assert seconds[::2] == pytest.approx([60 * own / sum(tokens) for own in tokens])
    assert seconds[1::2] == [1.0] * len(RANKS)
    assert sum(seconds) == pytest.approx(at[0])


@pytest.mark.parametrize("broken", ["loss", "weights"])
def test_a_tenant_whose_numbers_overflow_changes_no_other(executor: Made, broken: str) -> None:
    script = Script().create()
    for model in RANKS:
        script.forward(model, 1, weight=1e38 if (model, broken) == ("b", "loss") else 1.0)
        script.step(model)
    results = []
    for name in ("alone", "together"):
        made = executor(name)
        made.execute_all(script.commands[: len(RANKS)])
        if broken == "weights":
            next(iter(made._tenants["b"].parameters.values())).data.fill_(float("nan"))
        rest = script.commands[len(RANKS) :]
        results.append([made.execute(one) for one in rest] if name == "alone" else made.execute_all(rest))
    losses = [read_output(one.body)[1]["loss:sum"] for one in results[0] if one and one.kind == Kind.FORWARD_BACKWARD]
    assert [np.isfinite(loss) for loss in losses] == [True, False, True, True]
    others = [index for index, command in enumerate(script.commands[len(RANKS) :]) if command.model != "b"]
    assert [results[1][index] for index in others] == [results[0][index] for index in others]


def test_bfloat16_loses_no_small_update(quickstart_model: Path) -> None:
    model = SharedModel(str(quickstart_model), torch.bfloat16, torch.device("cpu"), 40)
    tenant = model.add("a", AdapterShape(4))
    tokens = np.arange(8)
    inputs = {"target_tokens": tokens, "weights": np.ones(8, np.float32)}
    before = tenant.state(gradients=False)
    for _ in range(2):
        finished(model.run(tenant, Forward("a", 1, (Datum(tokens, inputs),), "cross_entropy", {}, True)))
        tenant.step(1e-6, (0.9, 0.95), 1e-8, 0.0, 0.0)
    changed = [float((tensor != before[name]).float().mean()) for name, tensor in tenant.state(gradients=False).items()
               if name.startswith("weights.")]  # fmt: skip
    assert min(changed) > 0.9


def test_a_state_is_copied_in_parts_of_bounded_size(quickstart_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SharedModel(str(quickstart_model), torch.float32, torch.device("cpu"), 40)
    tenant = made.add("a", AdapterShape(4))
    monkeypatch.setattr("trinity.tinker.executor.model._COPIED", 1000)
    joined: list[int] = []
    plain = torch.cat

    def cat(tensors: list[torch.Tensor]) -> torch.Tensor:
        found = plain(tensors)
        joined.append(found.numel())
        return found

    monkeypatch.setattr(torch, "cat", cat)
    state = tenant.state(gradients=True)
    largest = max(parameter.numel() for parameter in tenant.parameters.values())
    assert len(joined) > 1 and max(joined) < 1000 + largest
    assert state.keys() == {f"weights.{name}" for name in tenant.parameters}
    assert all(torch.equal(state[f"weights.{name}"], parameter) for name, parameter in tenant.parameters.items())
