"""A loss that is not finite: the run stops or continues without the batch, which is stored and can be trained again."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.programs.forked_run import ForkedService, trinity
from support.programs.run import write_config
from support.servers.certificates import tls_settings
from support.servers.nats import ComposedNats
from trinity.cluster.certs import certs
from trinity.runtime.process import environment

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(400)]

DIVISOR = "algorithm.policy_loss_fn_args.divisor"
LOSS = '''
from trinity.plugins import NonNegative, policy_loss

@policy_loss("divided", traits=["sequences", "pairs"])
def divided(x, share, *, divisor: NonNegative = 0.0):
    """The log-probability of the rejected minus that of the chosen, over the divisor; the mean over pairs."""
    from trinity.trainer.algorithms.inputs import sequence_sum

    loss = -x.pairs_B * sequence_sum(x.logprobs, x.mask) / divisor
    return loss.sum() / max(share.totals.pairs, 1), {}
'''


@dataclass
class Runs:
    """`trinity` on one job, in forked processes (support/programs/forked_run.py)."""

    config: Path
    job: Path
    environment: dict[str, str]

    def trinity(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return trinity([*arguments, "--config", str(self.config)], self.environment, self.config.parent)


@pytest.fixture(scope="module")
def runs(repository: Path, quickstart_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("bad")
    for script in (["quickstart/make_data.py", str(folder / "data")],
                   ["algorithms/make.py", "--data", str(folder / "data")]):  # fmt: skip
        command = [sys.executable, str(repository / "examples" / script[0]), *script[1:]]
        subprocess.run(command, check=True, timeout=60, capture_output=True)
    (folder / "plugins").mkdir()
    (folder / "plugins/losses.py").write_text(LOSS)
    changes = {"algorithm": {"policy_loss_fn": "divided"}, "buffer": {"total_steps": 2, "train_batch_size": 8}}
    config = write_config(repository / "examples/algorithms/dpo.yaml", folder / "dpo.yaml", changes)
    environment = {
        **os.environ,
        "TRINITY_CHECKPOINT_ROOT_DIR": str(folder / "jobs"),
        "TRINITY_MODEL_PATH": str(quickstart_model),
        "TRINITY_TASKSET_PATH": str(folder / "data"),
        "TRINITY_PLUGIN_DIRS": str(folder / "plugins"),
        "OMP_NUM_THREADS": "1",  # for a model of this size more of them only wait for each other
    }
    return Runs(config, folder / "jobs/algorithms/dpo", environment)


def test_a_loss_that_is_not_finite_stops_the_run_and_the_batch_is_kept(runs: Runs) -> None:
    done = runs.trinity("run")
    assert done.returncode != 0
    assert "the loss is not finite" in done.stdout + done.stderr
    report = json.loads((runs.job / "bad_steps/step_1/report.json").read_text())
    assert (report["step"], report["policy"], report["problem"]) == (1, "stop", "the loss is not finite")
    assert [group["group"] for group in report["blamed"]] == list(range(8))
    assert all(group["row"] >= 0 and not group["finite"] for group in report["groups"])


def test_the_kept_batch_is_trained_again_as_it_was_and_mended(runs: Runs) -> None:
    again = runs.trinity("replay-step", "1")
    assert again.returncode == 1, again.stdout + again.stderr
    assert "problem: the loss is not finite" in again.stdout
    mended = runs.trinity("replay-step", "1", f"{DIVISOR}=10", "--json")
    assert mended.returncode == 0, mended.stdout + mended.stderr
    report = json.loads(mended.stdout)
    assert report["metrics"]["updates"] == 1.0
    assert all(group["finite"] and group["sequences"] == 2 for group in report["groups"])
    assert (runs.job / "replay/step_1").is_dir()
    assert (runs.job / "replay/step_1_2").is_dir(), "each in a folder of its own"
    refused = runs.trinity("replay-step", "7")
    assert refused.returncode == 2
    assert "kept are 1" in refused.stderr


def test_the_same_run_goes_on_without_bad_batches_if_it_is_told_to(runs: Runs) -> None:
    done = runs.trinity("run", "trainer.on_bad_step=skip")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (runs.job / "monitor/trainer.jsonl").read_text().splitlines()]
    assert [step["actor/bad_step"] for step in steps] == [1.0, 1.0]
    assert (runs.job / "bad_steps/step_2/batch.bin").is_file()
    assert (runs.job / "global_step_2/actor/huggingface/model.safetensors").is_file()


def test_the_batch_of_a_run_elsewhere_is_trained_again_with_the_identity_of_an_operator(
    runs: Runs, repository: Path, tmp_path: Path
) -> None:
    """Buffer and trainer as compose starts them; the command has an identity, the YAML and a copy of the job folder."""
    identities, elsewhere = tmp_path / "identity", tmp_path / "elsewhere"
    with environment(runs.environment):
        certs.init(identities, config=runs.config)
    nats = ComposedNats(repository, tmp_path / "nats", identities)

    def service(name: str, **settings: str) -> ForkedService:
        own = identities / name
        of_nats = {"NATS_URL": nats.url, "NATS_CREDS": str(own / "nats.creds"), "NATS_CA": str(own / "ca.crt")}
        given = {"CONFIG_FILE": str(runs.config), **of_nats, **tls_settings(identities, name), **settings}
        with environment({**runs.environment, "TRINITY_CHECKPOINT_ROOT_DIR": str(elsewhere)}):
            return ForkedService(name, tmp_path, **given)

    plugins = {"PLUGIN_DIRS": runs.environment["TRINITY_PLUGIN_DIRS"]}
    buffer = service("buffer", LOG_GIB="0.5", LOG_KEEP_GIB="0", **plugins)
    trainer = service("trainer", BUFFER_ADDRESS=buffer.address, SYNC_ADDRESS="127.0.0.1:1", **plugins)
    nats.start()
    try:
        buffer.start()
        trainer.start(wait_seconds=0)
        assert trainer.wait(180) == 2, trainer.tail()
        shutil.copytree(elsewhere / "algorithms/dpo", tmp_path / "copied/algorithms/dpo")
        given = {**runs.environment, "TRINITY_IDENTITY": str(identities / "operator")}
        place = ("--nats", nats.url, "--run", "dpo", "--config", str(runs.config))
        where = ("--job", str(tmp_path / "copied/algorithms/dpo"))
        mended = trinity(["replay-step", "1", f"{DIVISOR}=10", "--json", *place, *where], given, tmp_path)
        assert mended.returncode == 0, mended.stdout + mended.stderr
        report = json.loads(mended.stdout)
        assert (report["problem"], len(report["groups"])) == ("", 8)
    finally:
        for one in (trainer, buffer, nats):
            one.kill()
