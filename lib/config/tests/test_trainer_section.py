"""What sharding, offload, packing and sequence parallelism cannot do together is said before anything starts."""

from typing import Any

import pytest

from trinity.config.checks.sections import _check_optimizers, check_trainer
from trinity.config.schema import Config
from trinity.config.schema.trainer import TrainerConfig

pytestmark = pytest.mark.core


def problems(**values: Any) -> list[str]:
    return [f"{problem.path} {problem.message}" for problem in check_trainer(TrainerConfig.model_validate(values))]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"deepspeed": {"zero_stage": 0, "offload_optimizer": True}}, "offload_optimizer needs"),
        (
            {"deepspeed": {"zero_stage": 2, "offload_optimizer": True, "offload_param": True}},
            "zero_stage 3, which is 2",
        ),
        ({"deepspeed": {"zero_stage": 3, "offload_param": True}}, "offload_param needs trainer.deepspeed.offload_opt"),
        ({"ulysses_sequence_parallel_size": 2, "use_remove_padding": False}, "use_remove_padding: true"),
        ({"shared_prompts": True, "use_remove_padding": False}, "needs trainer.use_remove_padding: true"),
        ({"shared_prompts": True, "use_dynamic_bsz": False}, "needs trainer.use_dynamic_bsz: true"),
        ({"gradient_checkpointing": False, "gradient_checkpointing_layers": 2}, "gradient_checkpointing is false"),
        ({"ulysses_sequence_parallel_size": 2, "num_ranks": 3}, "does not divide trainer.num_ranks, 3"),
    ],
)
def test_contradictions_are_named_with_the_other_key(values: dict[str, Any], said: str) -> None:
    found = problems(**values)
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"deepspeed": {"zero_stage": 1, "offload_optimizer": True}},
        {"deepspeed": {"zero_stage": 3, "offload_optimizer": True, "offload_param": True}},
        {"ulysses_sequence_parallel_size": 2, "num_ranks": 4},
        {"use_remove_padding": False, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 4},
    ],
)
def test_what_works_together_passes(values: dict[str, Any]) -> None:
    assert problems(**values) == []


@pytest.mark.parametrize("key", ["algorithm.optimizer", "trainer.critic.optimizer"])
@pytest.mark.parametrize("kind", ["muon", "adamw_8bit", "adamw"])
def test_only_adamw_has_its_states_in_host_memory(key: str, kind: str) -> None:
    config: dict[str, Any] = {"algorithm": {}, "trainer": {"critic": {}}}
    section = config["algorithm"] if key.startswith("algorithm") else config["trainer"]["critic"]
    section["optimizer"] = {"optimizer_type": kind}
    for offloads in (False, True):
        config["trainer"]["deepspeed"] = {"zero_stage": 2, "offload_optimizer": offloads}
        found = [str(problem) for problem in _check_optimizers(Config.model_validate(config))]
        refused = [f"{key}.optimizer_type: is {kind}, whose states stay on the GPU; use adamw"]
        assert [text.partition(", or ")[0] for text in found] == refused * (offloads and kind != "adamw")
