"""Checks of the synchronizer section, stores and transports: problems and advice as text."""

import re
from collections.abc import Iterator

from trinity.config.errors import Problem, did_you_mean
from trinity.config.schema import Config

FOLDER, JETSTREAM, S3 = "folder", "jetstream", "s3://"
# A store on JetStream takes no version above this.
JETSTREAM_LIMIT_MIB = 256
_LARGEST_BUCKET_MIB = 16 * 1024
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_KINDS = f"{FOLDER}, {JETSTREAM}, an absolute path, or {S3}bucket/prefix"


def check_synchronizer(config: Config, model_parameters: float | None) -> Iterator[Problem]:
    """Finds contradictions of stores and sizes. `model_parameters`: None where the size of the model is not known."""
    sync = config.synchronizer
    if not sync.storage:
        yield Problem("synchronizer.storage", f"is empty; explorers that join need a store: {_KINDS}")
    yield from _entries("synchronizer.storage", sync.storage)
    # bfloat16, the smallest that is published.
    mib = 2 * model_parameters / 2**20 if model_parameters and config.model.lora is None else 0
    if JETSTREAM in sync.storage and mib > JETSTREAM_LIMIT_MIB:
        yield Problem(
            "synchronizer.storage",
            f"has {JETSTREAM}, which takes versions of at most {JETSTREAM_LIMIT_MIB} MiB; the model has {mib:.0f} MiB "
            f"or more. Use {FOLDER} or {S3}bucket/prefix",
        )
    if sync.bucket_mib > _LARGEST_BUCKET_MIB:
        problem = f"is {sync.bucket_mib}; a bucket is held in memory on both sides, at most {_LARGEST_BUCKET_MIB}"
        yield Problem("synchronizer.bucket_mib", problem)


def check_checkpoint_storage(config: Config) -> Iterator[Problem]:
    """Finds entries that are no storage of checkpoints."""
    key, storage = "trainer.checkpoint_storage", config.trainer.checkpoint_storage
    kinds = f"{FOLDER} or {S3}bucket/prefix"
    if not storage:
        yield Problem(key, f"is empty; a run needs checkpoints: {kinds}")
    wrong = {index: entry for index, entry in enumerate(storage) if entry == JETSTREAM or entry.startswith("/")}
    for index, entry in wrong.items():
        other = "checkpoint_root_dir names the folder" if entry != JETSTREAM else "checkpoints are too large for it"
        yield Problem(f"{key}.{index}", f"is {entry!r}, must be {kinds}; {other}")
    if not wrong:
        yield from _entries(key, storage)


def _entries(key: str, storage: list[str]) -> Iterator[Problem]:
    for index, entry in enumerate(storage):
        if problem := _entry_problem(entry):
            yield Problem(f"{key}.{index}", f"is {entry!r}{problem}")
        elif entry in storage[:index]:
            yield Problem(f"{key}.{index}", f"is {entry!r}, which the list has already")


def _entry_problem(entry: str) -> str:
    """Says why an entry of the list is no store, as the end of a sentence; empty if it is one."""
    if entry in (FOLDER, JETSTREAM):
        return ""
    if entry.startswith(S3):
        bucket = entry.removeprefix(S3).partition("/")[0]
        return "" if _BUCKET_NAME.fullmatch(bucket) else f"; {bucket!r} is no name of a bucket: {S3}bucket/prefix"
    if "://" in entry:
        return f"; other storage than {S3} is not known. An endpoint that speaks S3 is AWS_ENDPOINT_URL"
    if entry.startswith("/"):
        return ""
    near = did_you_mean(entry.lower(), (FOLDER, JETSTREAM), "")
    return f"; {near}" if near else f", must be {_KINDS}"


def weights_advice(config: Config) -> Iterator[str]:
    """Yields sentences of the form `key: remark`."""
    sync = config.synchronizer
    given = sync.model_fields_set
    if not sync.canary:
        yield "synchronizer.canary: is false; a version is served as soon as its files are whole, right or wrong"
    if sync.versions_to_keep == 1 and "versions_to_keep" in given:
        yield "synchronizer.versions_to_keep: is 1; `trinity weights rollback` can only return to pinned versions"
    if "full_interval" in given and config.model.lora is not None:
        yield "synchronizer.full_interval: has no effect: a version is adapters, and never a difference to another"
    elif "full_interval" in given and not _has_differences(config):
        yield "synchronizer.full_interval: has no effect: versions in folders are always whole"
    if sync.sync_method == "checkpoint" and "collective_timeout" in given:
        yield "synchronizer.collective_timeout: has no effect with sync_method checkpoint"
    if sync.sync_method == "nccl" and "sync_method" in given and config.model.lora and not config.model.lora.merged:
        yield "synchronizer.sync_method: nccl has no effect: adapters with merged: false travel by storage"
    strategy = config.algorithm.sample_strategy
    if sync.on_rejected == "continue" and strategy == "staleness_control":
        yield "synchronizer.on_rejected: continue with staleness_control; while the newest version is rejected the " \
              "one before it is not too old"  # fmt: skip


def _has_differences(config: Config) -> bool:
    """Tells if a version may travel as a difference to another one."""
    elsewhere = any(entry == JETSTREAM or entry.startswith(S3) for entry in config.synchronizer.storage)
    return elsewhere and config.model.lora is None


def transports(config: Config) -> str:
    """Describes the way of a version to explorers."""
    sync = config.synchronizer
    first = {
        "nccl": "by a collective group (NCCL on GPUs, gloo without), and to others by storage",
        "checkpoint": "by storage",
        "memory": "by storage in the memory of the trainer's machine",
    }[sync.sync_method]
    lora = config.model.lora
    if lora is not None and not lora.merged:
        return f"a version (adapters, held unmerged by the engines) every {sync.sync_interval} step(s), by storage"
    what = "a version" if lora is None else "a version (adapters, merged by the explorers)"
    return f"{what} every {sync.sync_interval} step(s), {first}"


def stores(config: Config) -> str:
    """Describes the stores of versions."""
    sync = config.synchronizer
    named = {FOLDER: "the job folder's weights", JETSTREAM: "JetStream"}
    places = ", ".join(named.get(entry, entry) for entry in sync.storage)
    kept = f"the newest {sync.versions_to_keep} kept"
    if sync.full_interval > 1 and _has_differences(config):
        kept += f"; on S3 and JetStream whole at every {sync.full_interval}th, differences between"
    return f"{places}: {kept}"


def canary(config: Config) -> str:
    """Describes the check of a version before it is served."""
    sync = config.synchronizer
    if not sync.canary:
        return "none: a version is served as soon as its files are whole"
    tolerance = f"{sync.canary_tolerance:g} nats" if sync.canary_tolerance else "what the dtypes allow"
    ends = "stops the trainer" if sync.on_rejected == "stop" else "is left out"
    return f"one explorer loads a version first; log-probabilities within {tolerance}, else it {ends}"
