"""Tenants whose commands interleave get what each would get alone, also across kills of executor, gateway and NATS."""

import itertools
import random
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from support.servers.nats import NatsServer
from support.servers.tinker_stack import HttpTenant, TinkerStack, datum, forward

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

_ADAM = {"learning_rate": 0.01, "grad_clip_norm": 1.0, "weight_decay": 0.1}
_LOSSES = [("cross_entropy", {}), ("importance_sampling", {}), ("ppo", {"clip_low_threshold": 0.7}), ("cispo", {})]


def _step(tenant: HttpTenant, model: str, number: int) -> list[str]:
    """Sends two gradients and a step; returns their request ids."""
    first = 3 * number + 1
    loss, config = _LOSSES[number % len(_LOSSES)]
    sent = []
    for part in (0, 1):
        data = [datum(10 * first + part, 9 + part, loss), datum(part, 5, loss)]
        sent.append(tenant.post("forward_backward", forward(model, first + part, data, loss, **config)))
    sent.append(tenant.post("optim_step", {"adam_params": _ADAM, "model_id": model, "seq_id": first + 2}))
    return [one["request_id"] for one in sent]


def _train(tenants: list[tuple[HttpTenant, str]], steps: int, after: dict[int, list] | None = None) -> list[list]:
    """Trains the models in turns; returns each one's log-probabilities. `after`: calls made when a step was sent."""
    ids: list[list[str]] = [[] for _ in tenants]
    for number in range(steps):
        for index, (tenant, model) in enumerate(tenants):
            ids[index] += _step(tenant, model, number)
        for call in (after or {}).get(number, ()):
            call()
    found = []
    for (tenant, _), requests in zip(tenants, ids, strict=True):
        results = [tenant.result(one) for one in requests]
        found.append([row for one in results if isinstance(one, tuple) for row in one[0]])
    return found


def _largest_difference(one: list, other: list) -> float:
    assert len(one) == len(other) > 0
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


def _four(stack: TinkerStack) -> list[tuple[HttpTenant, str]]:
    """Creates models of four ranks. Each has its own session, and each key has two sessions."""
    made = []
    for name, rank in zip(("alice", "bob", "alice", "bob"), (4, 8, 16, 32), strict=True):
        tenant = HttpTenant(stack, name)
        made.append((tenant, tenant.create(rank)))
    return made


def test_four_ranks_interleaved_equal_four_runs_alone(stack: TinkerStack) -> None:
    together = _train(_four(stack), 4)
    alone = [_train([one], 4)[0] for one in _four(stack)]
    assert max(_largest_difference(a, b) for a, b in zip(together, alone, strict=True)) <= 1e-6
    apart = [_largest_difference(a, b) for a, b in itertools.combinations(together, 2)]
    assert min(apart) > 1e-3  # all trained, each on its own


@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_change_no_bit_and_lose_no_command(stack: TinkerStack, nats_server: NatsServer, kills: int) -> None:
    """One of gateway, executor and NATS after each step, or two of them, at any moment of the work on it."""
    rng = random.Random(kills)

    def strike(names: Sequence[str]) -> None:
        time.sleep(rng.uniform(0.0, 0.3))
        for name in names:
            nats_server.kill() if name == "nats" else stack.kill(name)
        for name in names:
            nats_server.start() if name == "nats" else stack.start(name)

    victims = [("tenants",), ("tinker",), ("nats",), ("nats", "tenants"), ("tinker", "tenants")]
    chosen = [victims[number] if number < len(victims) else rng.choice(victims) for number in range(kills)]
    undisturbed = _train(_four(stack), kills + 1)
    killed = _train(_four(stack), kills + 1, {number: [partial(strike, names)] for number, names in enumerate(chosen)})
    for one, other in zip(undisturbed, killed, strict=True):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))
