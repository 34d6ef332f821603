"""An older version's weights in the trainer again: the engine alone, then the loop beside a real sync service."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from support.programs.forked_run import ForkedService
from support.programs.trainer.engine_actions import Dump, act
from support.programs.trainer.releases import JudgingExplorer, Sync, Trainer
from support.programs.trainer.training import make_model
from trinity.runtime import files
from trinity.runtime.errors import InvalidInput
from trinity.trainer.replay import refuse_rollbacks

PROBE = [[1, 2, 3, 4, 5, 6, 7], [9, 8], [50, 60, 70, 80, 90, 10, 20, 30, 40, 11, 12]]
# Each starts two trainers. The first two have both numbers of ranks, sharded weights and both dtypes.
CORE = [(1, 3, "bfloat16"), (2, 3, "float32")]
EXTENDED = [(1, 0, "float32"), (2, 0, "bfloat16"), (2, 2, "float32")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start_sync(tmp_path: Path, nats_url: str) -> Iterator[Callable[..., ForkedService]]:
    started: list[ForkedService] = []

    def start(claim_seconds: str = "3") -> ForkedService:
        service = ForkedService("sync", tmp_path, NATS_URL=nats_url, CLAIM_SECONDS=claim_seconds, LEASE_SECONDS="5")
        started.append(service.start())
        return service

    yield start
    for service in started:
        service.kill()


def in_tiers(core: list[Any], extended: list[Any]) -> list[Any]:
    kinds = [(one, pytest.mark.core) for one in core] + [(one, pytest.mark.extended) for one in extended]
    return [pytest.param(one, marks=mark, id="-".join(map(str, one))) for one, mark in kinds]


@pytest.fixture(scope="module", params=in_tiers(CORE, EXTENDED))
def journey(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Dump], dict[str, Any], str]:
    """Forward and back again, with probes on the way."""
    ranks, zero, dtype = request.param
    actions: list[list[Any]] = [
        ["probe", "base", PROBE, "base, other head"],
        ["train", 1], ["dump", "one"], ["probe", "one", PROBE], ["save", "one"],
        ["train", 2], ["dump", "two"],
        ["load", "one"], ["dump", "one by files"], ["probe", "one by files", PROBE],
        ["train", 3], ["dump", "three"], ["load", "one"], ["train", 3], ["dump", "three again"],
        ["resume", "one"], ["dump", "one by checkpoint"], ["train", 2], ["dump", "two again"],
        ["base"], ["dump", "base"],
    ]  # fmt: skip
    folder = tmp_path_factory.mktemp("journey")
    dumps, found = act(folder / "probed", model, actions, ranks=ranks, zero=zero, dtype=dtype)
    without_probes = [a for a in actions[: actions.index(["dump", "two"]) + 1] if a[0] != "probe"]
    bare, _ = act(folder / "bare", model, without_probes, ranks=ranks, zero=zero, dtype=dtype)
    return {**dumps, **{f"{name} without probes": dump for name, dump in bare.items()}}, found, dtype


def same_bits(one: Dump, other: Dump) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


@pytest.mark.slow
@pytest.mark.timeout(400)
class TestTheEngine:
    def test_loaded_weights_are_the_dumped_ones_bit_by_bit(self, journey: Any) -> None:
        dumps, _, _ = journey
        assert not same_bits(dumps["one"], dumps["two"])
        assert same_bits(dumps["one by files"], dumps["one"])

    def test_training_goes_on_from_loaded_weights_with_an_optimizer_that_knows_nothing(self, journey: Any) -> None:
        """Masters or moments of what was trained in between would make the second time different."""
        dumps, _, _ = journey
        assert same_bits(dumps["three"], dumps["three again"])

    def test_a_checkpoint_of_its_own_is_loaded_after_more_training(self, journey: Any) -> None:
        dumps, _, _ = journey
        assert same_bits(dumps["one by checkpoint"], dumps["one"])
        assert same_bits(dumps["two again"], dumps["two"])

    def test_the_base_model_comes_back(self, journey: Any, model: Path) -> None:
        import torch
        from safetensors.torch import load_file

        dumps, _, dtype = journey
        base = load_file(model / "model.safetensors")
        expected = {name: value.to(getattr(torch, dtype)).float().numpy() for name, value in base.items()}
        assert same_bits(dumps["base"], expected)

    def test_a_probe_is_the_plain_forward_pass(self, journey: Any, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        dumps, found, dtype = journey
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        tolerance = 1e-5 if dtype == "float32" else 0.02
        for name in ("base", "one", "one by files"):
            weights = {key: torch.tensor(value) for key, value in dumps[name].items()}
            policy.load_state_dict(weights, strict=False)
            for tokens, logprobs in zip(PROBE, found[name], strict=True):
                ids = torch.tensor(tokens)[None]
                with torch.no_grad():
                    logs = torch.log_softmax(policy(ids).logits[0, :-1].float(), -1)
                np.testing.assert_allclose(logprobs, logs.gather(1, ids[0, 1:, None])[:, 0], atol=tolerance)

    def test_the_other_head_differs_by_its_rounding_alone(self, journey: Any) -> None:
        _, found, _ = journey
        for plain, other in zip(found["base"], found["base, other head"], strict=True):
            assert plain != other
            np.testing.assert_allclose(plain, other, atol=0.02)

    def test_a_probe_changes_no_bit_of_training(self, journey: Any) -> None:
        dumps, _, _ = journey
        assert same_bits(dumps["one"], dumps["one without probes"])
        assert same_bits(dumps["two"], dumps["two without probes"])


def until_live(trainer: Trainer, known: Sync, version: int) -> None:
    trainer.until(lambda: known.states().get(version) == "LIVE", f"version {version} is LIVE")


def same_weights(one: Path, other: Path) -> bool:
    """All safetensors files of two folders taken together."""
    found = [
        {name: value.tobytes() for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
        for folder in (one, other)
    ]
    return bool(found[0]) and found[0] == found[1]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", in_tiers([(1, 0, 1)], [(2, 2, 0), (2, 3, 0), (2, 3, 1)]))
def test_the_trainer_goes_on_from_the_older_version_with_its_step_count(
    kind: tuple[int, int, int], model: Path, start_sync: Any, nats_url: str, tmp_path: Path
) -> None:
    """From the checkpoint of the version's step if there is one, else from the version's files."""
    ranks, zero, save_interval = kind
    sync = start_sync()
    trainer = Trainer(
        tmp_path / "run", model, sync.address, nats_url, steps=4, ranks=ranks, zero=zero,
        trainer={"save_interval": save_interval, "save_hf_checkpoint": "always"},
    )  # fmt: skip
    known = Sync(sync.address, trainer.run)
    with JudgingExplorer(sync.address, trainer.run):
        trainer.start()
        for step in (1, 2, 3):
            trainer.allow(step)
            until_live(trainer, known, step)
        record = known.roll_back(1)
        assert list(record.withdrawn) == [2, 3]
        trainer.until(lambda: trainer.events("trainer.rolled_back"), "the rollback")
        saved = trainer.job / "global_step_3"
        state = saved / "trainer_state.json"
        trainer.until(lambda: (files.read_json(state) or {}).get("rollback") == 1, "the checkpoint")
        event = trainer.events("trainer.rolled_back")[0]
        assert (event["version"], event["has_checkpoint"]) == (1, bool(save_interval))
        assert same_weights(saved / "actor/huggingface", trainer.versions / "v1")
        trainer.allow(4)
        assert trainer.wait() == {"error": "", "state": "finished", "version": 4}
    assert known.states() == {0: "RETIRED", 1: "RETIRED", 2: "REJECTED", 3: "REJECTED", 4: "LIVE"}
    lines = [json.loads(line) for line in (trainer.job / "monitor/batches.jsonl").read_text().splitlines()]
    noted = {line["step"]: line for line in lines}
    assert {step: line["rollback"] for step, line in noted.items()} == {1: 0, 2: 0, 3: 0, 4: 1}
    with pytest.raises(InvalidInput, match="rollback 1 lies between the checkpoint of step 2"):
        refuse_rollbacks(noted, 2, 4, 0)
    refuse_rollbacks(noted, 2, 3, 0)
    refuse_rollbacks(noted, 3, 4, 1)


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_rollback_while_no_trainer_was_there_is_applied_once(
    model: Path, start_sync: Any, nats_url: str, tmp_path: Path
) -> None:
    sync = start_sync()
    trainer = Trainer(
        tmp_path / "run", model, sync.address, nats_url, steps=5,
        trainer={"save_interval": 2, "save_hf_checkpoint": "always"},
    )  # fmt: skip
    known = Sync(sync.address, trainer.run)
    with JudgingExplorer(sync.address, trainer.run):
        trainer.start()
        for step in (1, 2, 3):
            trainer.allow(step)
            until_live(trainer, known, step)
        trainer.until(lambda: (trainer.job / "global_step_2").exists(), "the checkpoint of step 2")
        trainer.kill()
        known.roll_back(1)
        trainer.start()  # from the checkpoint of step 2: version 1's weights, and step 3 comes next
        trainer.until(lambda: trainer.events("trainer.rolled_back"), "the rollback")
        state = trainer.job / "global_step_2/trainer_state.json"
        trainer.until(lambda: (files.read_json(state) or {}).get("rollback") == 1, "the checkpoint")
        assert same_weights(trainer.job / "global_step_2/actor/huggingface", trainer.versions / "v1")
        trainer.allow(4)
        until_live(trainer, known, 4)
        trainer.kill()
        trainer.allow(5)
        assert trainer.start().wait()["error"] == ""
    assert len(trainer.events("trainer.rolled_back")) == 1
    assert known.states() == {0: "RETIRED", 1: "RETIRED", 2: "REJECTED", 3: "REJECTED", 4: "RETIRED", 5: "LIVE"}


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_trainer_behind_the_version_learns_the_steps_up_to_it_again_and_then_goes_back(
    model: Path, start_sync: Any, nats_url: str, tmp_path: Path
) -> None:
    """A crash took it back to step 1. If it loaded version 2 there, it would train the batch of step 2 twice."""
    sync = start_sync()
    trainer = Trainer(
        tmp_path / "run", model, sync.address, nats_url, steps=4,
        trainer={"save_interval": 1, "save_hf_checkpoint": "always"},
    )  # fmt: skip
    known = Sync(sync.address, trainer.run)
    with JudgingExplorer(sync.address, trainer.run):
        trainer.start()
        for step in (1, 2, 3):
            trainer.allow(step)
            until_live(trainer, known, step)
        trainer.until(lambda: (trainer.job / "global_step_3").exists(), "the checkpoint of step 3")
        trainer.kill()
        for step in (2, 3):
            shutil.rmtree(trainer.job / f"global_step_{step}")
        known.roll_back(2)
        trainer.allow(4)
        assert trainer.start().wait()["error"] == ""
    states = [trainer.job / f"global_step_{step}/trainer_state.json" for step in (1, 2, 3)]
    assert [json.loads(state.read_text())["rollback"] for state in states] == [0, 1, 1]
    assert same_weights(trainer.job / "global_step_1/actor/huggingface", trainer.versions / "v1")
    assert same_weights(trainer.job / "global_step_2/actor/huggingface", trainer.versions / "v2")
    assert same_weights(trainer.job / "global_step_3/actor/huggingface", trainer.versions / "v3")
    assert len(trainer.events("trainer.rolled_back")) == 1
    lines = [json.loads(line) for line in (trainer.job / "monitor/batches.jsonl").read_text().splitlines()]
    assert [(line["step"], line["rollback"]) for line in lines[3:]] == [(2, 0), (3, 1), (4, 1)]
    assert known.states() == {0: "RETIRED", 1: "RETIRED", 2: "RETIRED", 3: "REJECTED", 4: "LIVE"}


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_weights_of_a_withdrawn_version_are_never_published(
    model: Path, start_sync: Any, nats_url: str, tmp_path: Path
) -> None:
    """The trainer does not know of the rollback when it has trained one step more. That step's version is the gate of
    the next batch: it has the weights that the trainer continues from."""
    sync = start_sync(claim_seconds="60")
    trainer = Trainer(tmp_path / "run", model, sync.address, nats_url, steps=4)
    known = Sync(sync.address, trainer.run)
    with JudgingExplorer(sync.address, trainer.run):
        trainer.start()
        for step in (1, 2):
            trainer.allow(step)
            until_live(trainer, known, step)
        time.sleep(3)  # the trainer polls for version 2, finds it LIVE, and asks no more
        known.roll_back(1)
        trainer.allow(3)
        trainer.until(lambda: trainer.events("trainer.rolled_back"), "the rollback")
        assert len(trainer.events("trainer.version.withdrawn")) == 1
        until_live(trainer, known, 3)
        assert same_weights(trainer.versions / "v3", trainer.versions / "v1")
        trainer.allow(4)
        assert trainer.wait()["error"] == ""
    assert known.states() == {0: "RETIRED", 1: "RETIRED", 2: "REJECTED", 3: "RETIRED", 4: "LIVE"}


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_base_model_can_be_gone_back_to(model: Path, start_sync: Any, nats_url: str, tmp_path: Path) -> None:
    sync = start_sync()
    trainer = Trainer(
        tmp_path / "run", model, sync.address, nats_url, steps=2, trainer={"save_hf_checkpoint": "always"}
    )
    known = Sync(sync.address, trainer.run)
    with JudgingExplorer(sync.address, trainer.run):
        trainer.start()
        until_live(trainer, known, 0)
        trainer.allow(1)
        until_live(trainer, known, 1)
        known.roll_back(0)
        saved = trainer.job / "global_step_1/trainer_state.json"
        trainer.until(saved.exists, "the checkpoint after the rollback")
        assert same_weights(trainer.job / "global_step_1/actor/huggingface", model)
        trainer.allow(2)
        assert trainer.wait()["error"] == ""
    assert known.states() == {0: "RETIRED", 1: "REJECTED", 2: "LIVE"}


@pytest.mark.core
def test_a_replay_that_would_cross_a_rollback_is_refused() -> None:
    noted = {1: {"rollback": 0}, 2: {}, 3: {"rollback": 2}}
    refuse_rollbacks(noted, 0, 2, 0)
    with pytest.raises(InvalidInput, match=r"rollback 2 lies between the run's base model.* and step 3"):
        refuse_rollbacks(noted, 0, 3, 0)
