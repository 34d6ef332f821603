"""Who may write the job folder replaces a checkpoint: the trainer runs none of it, and resumes from the true one.

A real trainer beside a real sync service; its batches and its explorer are stand-ins.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch

from support.fakes.evil import Evil
from support.programs.forked_run import ForkedService
from support.programs.trainer.releases import JudgingExplorer, Trainer
from support.programs.trainer.training import make_model
from trinity.weights.checkpoint_manifest import MANIFEST, ManifestWriter

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(800)]


def test_a_replaced_checkpoint_runs_nothing_and_the_true_one_is_resumed(tmp_path: Path, nats_url: str) -> None:
    sync = ForkedService("sync", tmp_path, NATS_URL=nats_url, CLAIM_SECONDS="3", LEASE_SECONDS="5").start()
    settings = {"save_interval": 1}
    trainer = Trainer(
        tmp_path / "run", make_model(tmp_path / "model"), sync.address, nats_url, steps=3, trainer=settings
    )
    made, checkpoint, original = tmp_path / "made", trainer.job / "global_step_1", tmp_path / "original"
    try:
        with JudgingExplorer(sync.address, trainer.run):
            trainer.start()
            trainer.allow(1)
            trainer.until(lambda: checkpoint.exists(), "the checkpoint of step 1")
            trainer.kill()
            shutil.copytree(checkpoint, original)
            shard = next((checkpoint / "actor/slices").glob("*.safetensors"))
            torch.save({"module": {}, "more": Evil(made)}, shard)
            assert f"{shard.name}: has " in trainer.start().wait(200)["error"], (
                "the manifest's size or checksum differs"
            )
            ManifestWriter(checkpoint).write()  # who may replace a file may replace the manifest
            assert f"{shard.name}: is no whole safetensors file" in trainer.start().wait(200)["error"]
            former = checkpoint / "actor/deepspeed/mp_rank_00_model_states.pt"  # as former versions wrote it
            former.parent.mkdir()
            shard.rename(former)
            shutil.rmtree(shard.parent)
            (checkpoint / MANIFEST).unlink()  # a writer keeps the entries that a manifest has
            ManifestWriter(checkpoint).write()
            assert f"{former.name}: asks for {os.system.__module__}.system" in trainer.start().wait(200)["error"]
            shutil.rmtree(checkpoint)
            original.rename(checkpoint)
            trainer.allow(3)
            assert trainer.start().wait(200)["error"] == ""
    finally:
        trainer.kill()
        sync.kill()
    assert not made.exists()
    assert [event["step"] for event in trainer.events("trainer.resumed")] == [1]
