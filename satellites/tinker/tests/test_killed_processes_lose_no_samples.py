"""kill -9 of explorer, gateway, executor and NATS while a client saves and samples: all is answered, as undisturbed."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from support.servers.tinker_stack import BASE, TinkerStack

tinker = pytest.importorskip("tinker")

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

_PROMPTS = [[ord(letter) for letter in f"{a}+{b}="] for a in range(3) for b in range(4)]


def _train(client, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 250, 12).tolist()
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 11}
    client.forward_backward([tinker.Datum(tinker.ModelInput.from_ints(tokens[:-1]), inputs)], "cross_entropy")
    client.optim_step(tinker.AdamParams(learning_rate=0.02)).result()


def _loop(service, begun: Callable[[int], None]) -> tuple[list, list]:
    """Trains and samples five times. `begun`: called while samples of the round are under way."""
    client = service.create_lora_training_client(base_model=BASE, rank=8, seed=3).result()
    tokens, logprobs = [], []
    settings = tinker.SamplingParams(max_tokens=24, temperature=0.0)
    for number in range(5):
        _train(client, number)
        sampler = client.save_weights_and_get_sampling_client().result()
        futures = [sampler.sample(tinker.ModelInput.from_ints(one), 1, settings) for one in _PROMPTS]
        begun(number)
        for future in futures:
            one = future.result(timeout=300).sequences[0]
            tokens.append(one.tokens)
            logprobs += one.logprobs
    named = client.save_weights_for_sampler("last").result().path
    again = service.create_sampling_client(model_path=named).result()
    last = again.sample(tinker.ModelInput.from_ints(_PROMPTS[0]), 1, settings).result(timeout=300)
    return [*tokens, last.sequences[0].tokens], logprobs


def test_samples_under_way_are_answered(sampling_stack: TinkerStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    stack = sampling_stack
    service = tinker.ServiceClient(base_url=stack.url, api_key=stack.keys["alice"])
    undisturbed, expected = _loop(service, lambda number: None)

    def nats() -> None:
        stack.nats.kill()
        stack.nats.start()

    kills = [
        lambda: stack.restart("sampler"),
        lambda: stack.restart("tinker"),
        lambda: stack.restart("tenants"),
        nats,
        lambda: [stack.restart(name) for name in ("tenants", "sampler", "tinker")],
    ]
    killing: list[threading.Thread] = []

    def kill(number: int) -> None:
        killing.append(threading.Timer(0.05, kills[number]))
        killing[-1].start()

    killed, found = _loop(service, kill)
    for thread in killing:
        thread.join()
    assert killed == undisturbed
    assert np.abs(np.asarray(found) - np.asarray(expected)).max() < 1e-3
