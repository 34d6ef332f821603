"""Commands of other distributions: entry points of the group `trinity.commands`, imported when they are called."""

from importlib.metadata import EntryPoint, entry_points
from typing import Any

_GROUP = "trinity.commands"

# Commands of Trinity's satellites: the distribution, and the line in --help. For any other command --help shows the
# summary of its distribution.
_KNOWN = {
    "tinker": (
        "trinity-tinker",
        "Let tinker clients train and sample adapters of several tenants on one model, until Ctrl-C.",
    ),
    "init": ("trinity-own-data", "Write the YAML of a run on your own model and data, and check it."),
    "serve": ("trinity-modes", "Serve the newest weights of a run to OpenAI clients, until Ctrl-C."),
    "cost": ("trinity-inspect", "Show what the seconds of a run's devices went to."),
    "log": ("trinity-inspect", "Show the log of a run, all processes in the order of time."),
    "view": ("trinity-inspect", "Show the experiences that were trained."),
    "explorers": ("trinity-inspect", "List the explorers of a live run."),
    "results": ("trinity-inspect", "Collect the evaluations of many runs in one table."),
    "deadletters": ("trinity-inspect", "Tasks that failed for good."),
    "batch": ("trinity-inspect", "The batch of a step, from the ledger."),
    "weights": ("trinity-inspect", "The weight versions of a live run."),
    "env": ("trinity-inspect", "Providers of environments."),
    "ui": ("trinity-ui", "Show runs on a page: the ledger, groups, samples. Without --writes it only reads."),
    "export": ("trinity-ui", "Write ledger, experiences and metrics of a run as Parquet files."),
    "atif": ("trinity-ui", "Trajectories in ATIF, Harbor's form: archives as files, and files as rows."),
    "fork": ("trinity-lineage", "Create a run that continues from a step of another one, with other keys."),
    "regrade": ("trinity-lineage", "Make a run that trains stored groups again, with other rewards."),
    "replay": ("trinity-lineage", "Train steps again from the ledger, and compare with what the run did."),
    "replay-step": ("trinity-lineage", "Train the kept batch of a bad step again, and show its groups."),
    "bisect": ("trinity-lineage", "Show the first place at which two runs differ."),
    "compare": ("trinity-lineage", "Differences of two runs by step, with paired intervals."),
    "provenance": (
        "trinity-lineage",
        "Write a checkpoint's lineage as a folder that others can check, with a statement.",
    ),
    "verify": ("trinity-lineage", "Check a checkpoint's lineage, from the rows of its tasks to its files."),
    "debug": ("trinity-compat-rft", "Run one task's workflow on one engine, and show its outcome."),
    "convert": ("trinity-convert", "Turn checkpoints (DeepSpeed, FSDP, Megatron) into Hugging Face folders."),
    "import-verl": ("trinity-import-verl", "Write the YAML of what a veRL script runs."),
    "launch": ("trinity-cluster", "Run on a cluster: Slurm's jobs of a run, written and submitted."),
    "certs": ("trinity-cluster", "Certificates and NATS credentials for services on several machines."),
}


class NotInstalled(Exception):
    """The distribution of a command is not installed; the message names it."""


def names() -> set[str]:
    """Commands of the installed distributions."""
    return entry_points(group=_GROUP).names


def help_of(name: str) -> str | None:
    """The command's line in --help; None for an unknown command."""
    if name in _KNOWN:
        return _KNOWN[name][1]
    entry = _entry(name)
    if entry is None:
        return None
    return entry.dist.metadata["Summary"] if entry.dist is not None else ""


def load(name: str) -> Any:
    """The object that the entry point of a known command names. Raises NotInstalled."""
    if (entry := _entry(name)) is not None:
        try:
            return entry.load()
        except ModuleNotFoundError as error:  # the root distribution has the entry point, and the folder is gone
            if not entry.module.startswith(str(error.name)):
                raise
    distribution = _KNOWN[name][0] if name in _KNOWN else name
    raise NotInstalled(f"this command is in {distribution}, which is not installed: pip install {distribution}")


def _entry(name: str) -> EntryPoint | None:
    return next(iter(entry_points(group=_GROUP, name=name)), None)
