"""Tenants whose commands interleave get what each would get alone, also across kills of executor, gateway and NATS."""

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


def test_two_ranks_interleaved_equal_two_runs_alone(stack: TinkerStack) -> None:
    alice, bob = HttpTenant(stack, "alice"), HttpTenant(stack, "bob")
    together = _train([(alice, alice.create(4)), (bob, bob.create(16))], 4)
    alone = [_train([(alice, alice.create(4, 1))], 4)[0], _train([(bob, bob.create(16, 1))], 4)[0]]
    assert max(_largest_difference(a, b) for a, b in zip(together, alone, strict=True)) <= 1e-6
    assert _largest_difference(together[0], together[1]) > 1e-3  # both trained, each on its own


def test_kills_change_no_bit_and_lose_no_command(stack: TinkerStack, nats_server: NatsServer) -> None:
    alice, bob = HttpTenant(stack, "alice"), HttpTenant(stack, "bob")
    undisturbed = _train([(alice, alice.create(4)), (bob, bob.create(16))], 6)

    def restart(name: str) -> None:
        stack.kill(name)
        stack.start(name)

    kills = {
        0: [lambda: restart("tenants")],
        1: [lambda: restart("tinker")],
        2: [nats_server.kill, nats_server.start],
        3: [lambda: stack.kill("tenants"), lambda: restart("tinker"), lambda: stack.start("tenants")],
        4: [lambda: restart("tenants")],
    }
    killed = _train([(alice, alice.create(4, 1)), (bob, bob.create(16, 1))], 6, kills)
    for one, other in zip(undisturbed, killed, strict=True):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))
