"""The record of a run on NATS: addresses of its services, and the numbers and names that other processes take."""

import hashlib
import os
from dataclasses import dataclass

from pydantic import BaseModel

from trinity.config.schema import Config
from trinity.config.schema.buffer import BufferConfig, ExplorerInputConfig, TasksetConfig
from trinity.config.schema.explorer import ExplorerConfig, PolicyEngineConfig, SynchronizerConfig


@dataclass(frozen=True)
class Addresses:
    """Addresses at which the services of a stage listen."""

    buffer: str = ""
    environment: str = ""
    sync: str = ""
    trainer: str = ""


class RunRecord(BaseModel):
    """One stage that runs. `online`: it has explorers; `last`: the job ends with it; `version`: of Trinity.

    `data`: the `data_digests` of its tasksets.
    """

    version: str
    run: str
    stage: str
    online: bool
    last: bool
    addresses: Addresses
    config: Config
    data: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Project and name, for display."""
        return f"{self.config.project}/{self.config.name}"


def announcement(record: RunRecord) -> bytes:
    """A record with the part of its configuration that commands and explorers read: no data, environment or keys."""
    config = record.config
    shown = Config(
        mode=config.mode,
        project=config.project,
        group=config.group,
        name=config.name,
        model=config.model,
        buffer=BufferConfig(explorer_input=workflows(config.buffer.explorer_input)),
        reproducible=config.reproducible,
        explorer=ExplorerConfig(
            environments=config.explorer.environments,
            older_versions=config.explorer.older_versions,
            rollout_model=PolicyEngineConfig(seed=config.explorer.rollout_model.seed),
        ),
        synchronizer=SynchronizerConfig(collective_timeout=config.synchronizer.collective_timeout),
    )
    given = config.buffer.explorer_input
    tasksets = [given.taskset] if given.taskset else given.tasksets
    data = tuple(digest for taskset in tasksets for digest in data_digests(taskset))
    return record.model_copy(update={"config": shown, "data": data}).model_dump_json(exclude_unset=True).encode()


def data_digests(taskset: TasksetConfig) -> tuple[str, str]:
    """Which dataset a taskset reads, without its path: of the path as it is written, and of the absolute one."""
    paths = (taskset.path, os.path.abspath(os.path.expanduser(taskset.path)))
    texts = ("\0".join((path, taskset.subset_name or "", taskset.split)) for path in paths)
    first, second = (hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16] for text in texts)
    return first, second


def workflows(given: ExplorerInputConfig) -> ExplorerInputConfig:
    """Which workflows the tasks ask for, so that a template that does not fit them is found at the start."""

    def named(tasksets: list[TasksetConfig]) -> list[TasksetConfig]:
        return [
            TasksetConfig(
                name=taskset.name,
                path="(read by the buffer)",
                default_workflow_type=taskset.default_workflow_type,
                workflow_args=taskset.workflow_args,
            )
            for taskset in tasksets
        ]

    return ExplorerInputConfig(
        tasksets=named([given.taskset] if given.taskset else given.tasksets),
        eval_tasksets=named(given.eval_tasksets),
        default_workflow_type=given.default_workflow_type,
        default_eval_workflow_type=given.default_eval_workflow_type,
    )
