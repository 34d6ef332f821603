"""What the synchronizer section says of stores, transports and canaries: refused, advised, and put into words."""

from pathlib import Path

import pytest

from trinity.config import ConfigError
from trinity.config.checks import weights
from trinity.config.load import parse

pytestmark = pytest.mark.core

BASE = """
project: p
name: n
checkpoint_root_dir: /tmp/none
model: {model_path: m/Qwen2.5-0.5B, max_prompt_tokens: 16, max_response_tokens: 16}
algorithm: {algorithm_type: grpo, repeat_times: 4}
buffer: {batch_size: 8, explorer_input: {taskset: {name: t, path: d.jsonl}}}
"""
SYNC = "synchronizer"


def problems(*overrides: str, text: str = BASE) -> dict[str, str]:
    """Message by key."""
    with pytest.raises(ConfigError) as refused:
        parse(text, overrides=overrides)
    return {problem.path: problem.message for problem in refused.value.problems}


def advised(*overrides: str) -> dict[str, str]:
    notices = (notice.partition(": ") for notice in parse(BASE, overrides=overrides).notices)
    return {key: said for key, _, said in notices}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("jetsteam", "is 'jetsteam'; did you mean 'jetstream'?"),
        ("Folder", "is 'Folder'; did you mean 'folder'?"),
        ("weights/here", "must be folder, jetstream, an absolute path, or s3://bucket/prefix"),
        ("~/weights", "must be folder, jetstream, an absolute path, or s3://bucket/prefix"),
        ("s3://", "'' is no name of a bucket"),
        ("s3:///prefix", "'' is no name of a bucket"),
        ("s3://My_Bucket/p", "'My_Bucket' is no name of a bucket"),
        ("gs://bucket/prefix", "other storage than s3:// is not known. An endpoint that speaks S3 is AWS_ENDPOINT_URL"),
    ],
)
def test_a_store_that_is_none_is_refused_with_what_it_may_be(entry: str, said: str) -> None:
    found = problems(f"{SYNC}.storage=[folder, '{entry}']")
    assert list(found) == [f"{SYNC}.storage.1"]
    assert said in found[f"{SYNC}.storage.1"]


def test_stores_are_given_once_and_there_is_one() -> None:
    assert "explorers that join need a store" in problems(f"{SYNC}.storage=[]")[f"{SYNC}.storage"]
    assert problems(f"{SYNC}.storage=[/a, folder, /a]") == {f"{SYNC}.storage.2": "is '/a', which the list has already"}


def test_every_kind_of_store_is_taken() -> None:
    config = parse(BASE, overrides=[f"{SYNC}.storage=[folder, /mnt/w, s3://my-bucket/a/b, s3://my.bucket]"])
    assert weights.stores(config) == (
        "the job folder's weights, /mnt/w, s3://my-bucket/a/b, s3://my.bucket: the newest 3 kept; on S3 and JetStream "
        "whole at every 10th, differences between"
    )


def test_jetstream_is_refused_for_a_model_that_is_known_to_be_too_large(tmp_path: Path) -> None:
    said = problems(f"{SYNC}.storage=[jetstream]")[f"{SYNC}.storage"]
    assert said.startswith("has jetstream, which takes versions of at most 256 MiB; the model has 954 MiB or more")
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "config.json").write_text("{}")
    assert parse(BASE, overrides=[f"{SYNC}.storage=[jetstream]", f"model.model_path={tmp_path}"])
    assert parse(BASE, overrides=[f"{SYNC}.storage=[jetstream]", "model.model_path=owner/unknown"])


def test_a_bucket_that_no_memory_holds_is_refused() -> None:
    assert list(problems(f"{SYNC}.bucket_mib=20000")) == [f"{SYNC}.bucket_mib"]
    assert list(problems(f"{SYNC}.bucket_mib=0")) == [f"{SYNC}.bucket_mib"]


def test_an_explorer_that_joins_takes_the_run_s_stores() -> None:
    assert parse(BASE, overrides=[f"{SYNC}.storage=[nonsense]", "mode=explore"])


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (f"{SYNC}.canary=false", f"{SYNC}.canary"),
        (f"{SYNC}.versions_to_keep=1", f"{SYNC}.versions_to_keep"),
        (f"{SYNC}.full_interval=5", f"{SYNC}.full_interval"),
    ],
)
def test_what_does_less_than_it_says_is_advised(override: str, key: str) -> None:
    assert key in advised(override)
    assert key not in advised()


def test_advice_that_depends_on_other_keys() -> None:
    timeout = f"{SYNC}.collective_timeout=5"
    assert f"{SYNC}.collective_timeout" in advised(timeout, f"{SYNC}.sync_method=checkpoint")
    assert f"{SYNC}.collective_timeout" not in advised(timeout)
    assert f"{SYNC}.full_interval" not in advised(f"{SYNC}.full_interval=5", f"{SYNC}.storage=['s3://bucket/p']")
    control = "algorithm.sample_strategy=staleness_control"
    assert f"{SYNC}.on_rejected" in advised(control, f"{SYNC}.on_rejected=continue")
    assert f"{SYNC}.on_rejected" not in advised(f"{SYNC}.on_rejected=continue")


def test_no_method_is_said_to_do_less_than_it_does() -> None:
    for method in ("nccl", "checkpoint", "memory"):
        assert f"{SYNC}.sync_method" not in advised(f"{SYNC}.sync_method={method}")


def test_the_plan_says_how_weights_travel() -> None:
    config = parse(BASE, overrides=[f"{SYNC}.sync_interval=2"])
    assert weights.transports(config) == (
        "a version every 2 step(s), by a collective group (NCCL on GPUs, gloo without), and to others by storage"
    )
    for method, said in (("checkpoint", "by storage"), ("memory", "memory of the trainer's machine")):
        assert said in weights.transports(parse(BASE, overrides=[f"{SYNC}.sync_method={method}"]))
    assert "what the dtypes allow, else it stops the trainer" in weights.canary(config)
    tolerant = parse(BASE, overrides=[f"{SYNC}.canary_tolerance=0.02", f"{SYNC}.on_rejected=continue"])
    assert "within 0.02 nats, else it is left out" in weights.canary(tolerant)
    assert weights.canary(parse(BASE, overrides=[f"{SYNC}.canary=false"])).startswith("none")


def test_verl_s_bucket_size_reaches_ours() -> None:
    rollout = "trainer: {trainer_config: {actor_rollout_ref: {rollout: {update_weights_bucket_megabytes: 256}}}}"
    assert parse(BASE + rollout).synchronizer.bucket_mib == 256
    engine = "{checkpoint_engine: {backend: nccl, update_weights_bucket_megabytes: 128}}"
    nested = f"trainer: {{trainer_config: {{actor_rollout_ref: {{nccl_timeout: 600, rollout: {engine}}}}}}}"
    config = parse(BASE + nested)
    assert (config.synchronizer.bucket_mib, config.synchronizer.collective_timeout) == (128, 30)
    assert any("nccl_timeout: has no effect: synchronizer.collective_timeout" in notice for notice in config.notices)
