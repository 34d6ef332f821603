"""explorer.environments: who provides what, and names that `trinity check` then knows."""

import pytest

from trinity.config import ConfigError
from trinity.config.load import parse

pytestmark = pytest.mark.core

BASE = """
project: p
name: n
checkpoint_root_dir: /tmp/none
model: {model_path: m/Qwen2.5-0.5B, max_prompt_tokens: 16, max_response_tokens: 16}
algorithm: {algorithm_type: grpo, repeat_times: 4}
buffer:
  batch_size: 8
  explorer_input: {taskset: {name: t, path: d.jsonl, default_reward_fn_type: my_scorer}}
"""


def problems(*overrides: str) -> dict[str, str]:
    """Message by key."""
    with pytest.raises(ConfigError) as refused:
        parse(BASE, overrides=overrides)
    return {problem.path: problem.message for problem in refused.value.problems}


@pytest.mark.parametrize("address", ["10.0.0.7:7010", "localhost:1", "[::1]:7010", "attached"])
def test_a_scorer_with_a_provider_is_known(address: str) -> None:
    config = parse(BASE, overrides=[f"explorer.environments=[{{name: my_scorer, address: '{address}'}}]"])
    assert [(one.name, one.address) for one in config.explorer.environments] == [("my_scorer", address)]


def test_a_scorer_without_a_provider_is_refused() -> None:
    assert "my_scorer" in problems()["buffer.explorer_input.taskset.default_reward_fn_type"]


@pytest.mark.parametrize("address", ["10.0.0.7", "atached", "http://host:80", "host:port", ""])
def test_what_is_no_address_is_refused_in_its_place(address: str) -> None:
    found = problems(f"explorer.environments=[{{name: my_scorer, address: '{address}'}}]")
    assert "explorer.environments.0.address" in found


@pytest.mark.parametrize("key", ["explorer.environment_wait", "explorer.agent_wait"])
def test_the_wait_for_another_side_is_a_positive_number(key: str) -> None:
    assert key in problems(f"{key}=0")


def test_an_image_is_published_at_an_address_of_this_machine() -> None:
    """Docker takes no names, and an image is no option."""
    entry = "explorer.environments=[{{name: my_scorer, address: '{}', image: '{}'}}]"
    config = parse(BASE, overrides=[entry.format("127.0.0.1:7010", "reg.example.com:5000/guess:1.2@sha256:ab")])
    assert config.explorer.environments[0].image.startswith("reg.example.com")
    for address in ("attached", "localhost:7010"):
        found = " ".join(problems(entry.format(address, "guess")).values())
        assert f"address: is '{address}', must be an IP address of this machine and a port" in found
    for image in ("--privileged", "a b", "a" * 501):
        assert "must be the name of an image" in " ".join(problems(entry.format("127.0.0.1:1", image)).values())
