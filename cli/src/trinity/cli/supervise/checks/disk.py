"""Checks a run's disks: refuses a start without room for one checkpoint, and warns if the run may fill a disk."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from trinity.cli.supervise.processes.services import log_limit_gib
from trinity.config import Plan, Problem
from trinity.config.checks.weights import FOLDER
from trinity.config.memory import checkpoint_gib, parameters_of, version_gib

# For queues, the ledger and the log of the first steps, and for the processes' log files.
_BESIDE_GIB = 0.02
_SHOWN_CHECKPOINTS = 5  # of a run that keeps all


def folders(plan: Plan) -> dict[str, Path]:
    """Returns the folders on this machine that a stage fills, by their keys in the YAML; they may not exist yet."""
    found = {"checkpoint_root_dir": plan.job_dir}
    for index, entry in enumerate(plan.config.synchronizer.storage if not plan.offline else []):
        if entry.startswith(("/", "~")):
            found[f"synchronizer.storage.{index}"] = Path(entry).expanduser()
    return found


def least_gib(plan: Plan) -> float:
    """Returns what a stage needs before its second checkpoint: one checkpoint, two versions, the first of the log."""
    checkpoint, version = _sizes(plan)
    return checkpoint + 2 * version + _BESIDE_GIB


def disk_problems(plan: Plan) -> Iterator[Problem]:
    """Yields the folders whose disk cannot take one checkpoint and two versions."""
    for key, needs in _needs(plan, 1, 2, _BESIDE_GIB).items():
        folder, free = folders(plan)[key], free_gib(folders(plan)[key])
        if free < needs:
            yield Problem(
                key,
                f"the disk of {folder} has {_text(free)} free, and {_contents(plan, key)} take {_text(needs)}; "
                f"free {_text(needs - free)}, or name a folder on another disk",
            )


def disk_advice(plan: Plan) -> Iterator[str]:
    """Yields sentences on disks that a run fills before its end, as far as its sizes are known."""
    saves, kept = plan.config.trainer.save_interval > 0, plan.config.trainer.max_checkpoints_to_keep
    checkpoints = (_SHOWN_CHECKPOINTS if kept is None else kept + 1) if saves else 1  # the old one goes last
    versions = plan.config.synchronizer.versions_to_keep + 2
    log_gib = 0.0
    with contextlib.suppress(ValueError):  # the buffer refuses other texts
        log_gib = float(log_limit_gib(plan))
    for key, needs in _needs(plan, checkpoints, versions, log_gib).items():
        folder, free = folders(plan)[key], free_gib(folders(plan)[key])
        if free < needs:
            fewer = "trainer.max_checkpoints_to_keep" if checkpoints > 1 else "TRINITY_BUFFER_LOG_GIB"
            yield (
                f"{key}: the disk of {folder} has {_text(free)} free; {checkpoints} checkpoints, {versions} versions "
                f"of the weights and the log may take {_text(needs)}: free {_text(needs - free)}, or lower {fewer}"
            )


def _needs(plan: Plan, checkpoints: int, versions: int, log_gib: float) -> dict[str, float]:
    """Returns GiB by key; keys on the disk of an earlier key count there."""
    checkpoint, version = _sizes(plan)
    places, needs, on = folders(plan), dict[str, float](), dict[int, str]()
    for key, folder in places.items():
        here = on.setdefault(os.stat(_existing(folder)).st_dev, key)
        own = checkpoints * checkpoint + log_gib if key == "checkpoint_root_dir" else 0.0
        keeps = FOLDER in plan.config.synchronizer.storage if key == "checkpoint_root_dir" else True
        needs[here] = needs.get(here, 0.0) + own + (versions * version if keeps else 0.0)
    return needs


def _sizes(plan: Plan) -> tuple[float, float]:
    """Returns the GiB of a checkpoint and of a version; zeros for a model of unknown size."""
    known = parameters_of(plan.config.model.model_path)
    if known is None or plan.config.mode not in ("both", "train"):
        return 0.0, 0.0
    return checkpoint_gib(plan, known[0]), 0.0 if plan.offline else version_gib(plan, known[0])


def _contents(plan: Plan, key: str) -> str:
    checkpoint, version = _sizes(plan)
    parts = [f"a checkpoint ({_text(checkpoint)})"] if checkpoint and key == "checkpoint_root_dir" else []
    parts += [f"two versions of the weights ({_text(version)} each)"] if version else []
    return " and ".join([", ".join(parts), "the first steps of the log"] if parts else ["the first steps of the log"])


def free_gib(folder: Path) -> float:
    """Returns the free space for this user on the disk that has a folder, or will have it."""
    stat = os.statvfs(_existing(folder))
    return stat.f_bavail * stat.f_frsize / 2**30


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.exists())


def _text(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 1 else f"{gib * 1024:.1f} MiB"
