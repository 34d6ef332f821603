"""The official client learns sums by RL: sample, reward, importance sampling, AdamW, new weights for the sampler."""

import random

import numpy as np
import pytest

from support.servers.tinker_stack import BASE, TinkerStack

tinker = pytest.importorskip("tinker")

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

_SUMS = [(a, b) for a in range(5) for b in range(5)]
_GROUP = 8
_ADAM = tinker.AdamParams(learning_rate=3e-3)


def _tokens(text: str) -> list[int]:
    return list(text.encode())


def _prompt(a: int, b: int) -> list[int]:
    return _tokens(f"{a}+{b}=")


def _answer(a: int, b: int, *, right: bool) -> list[int]:
    return _tokens(f"{a + b if right else (a + b + 3) % 9}\n")


def _imitate(client, steps: int, rng: random.Random) -> None:
    """Answers of which half are wrong."""
    for _ in range(steps):
        data = []
        for a, b in _SUMS:
            prompt, answer = _prompt(a, b), _answer(a, b, right=rng.random() < 0.5)
            tokens = prompt + answer
            weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
            inputs = {"target_tokens": tokens[1:], "weights": weights}
            data.append(tinker.Datum(tinker.ModelInput.from_ints(tokens[:-1]), inputs))
        client.forward_backward(data, "cross_entropy")
        client.optim_step(_ADAM)


def _rollouts(client) -> tuple[list, float]:
    """Samples all sums by the newest weights. Returns the data of a step, and the mean reward."""
    sampler = client.save_weights_and_get_sampling_client().result()
    settings = tinker.SamplingParams(max_tokens=3, stop=_tokens("\n"))
    futures = [sampler.sample(tinker.ModelInput.from_ints(_prompt(a, b)), _GROUP, settings) for a, b in _SUMS]
    data, rewards = [], []
    for (a, b), future in zip(_SUMS, futures, strict=True):
        sequences = future.result(timeout=120).sequences
        group = [float(one.tokens == _answer(a, b, right=True)) for one in sequences]
        rewards += group
        prompt = _prompt(a, b)
        for one, reward in zip(sequences, group, strict=True):
            if (advantage := reward - float(np.mean(group))) == 0:
                continue
            before = len(prompt) - 1
            inputs = {
                "target_tokens": prompt[1:] + one.tokens,
                "logprobs": [0.0] * before + one.logprobs,
                "advantages": [0.0] * before + [advantage] * len(one.tokens),
            }
            data.append(tinker.Datum(tinker.ModelInput.from_ints(prompt + one.tokens[:-1]), inputs))
    return data, float(np.mean(rewards))


def test_the_reward_rises(sampling_stack: TinkerStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    service = tinker.ServiceClient(base_url=sampling_stack.url, api_key=sampling_stack.keys["alice"])
    client = service.create_lora_training_client(base_model=BASE, rank=32, seed=1).result()
    _imitate(client, 80, random.Random(0))
    rewards = []
    for _ in range(16):
        data, reward = _rollouts(client)
        rewards.append(reward)
        client.forward_backward(data, "importance_sampling")
        client.optim_step(_ADAM)
    assert 0.15 < rewards[0] < 0.75, "half of the answers that it imitates are wrong"
    assert np.mean(rewards[-3:]) > rewards[0] + 0.15, rewards
