"""The tasksets that a joining explorer brings. They are read here, and the run's buffer mixes them with its own.

A taskset of the explorer's YAML is brought unless the run reads the same data. Any explorer may get its tasks.
"""

import asyncio
import contextlib

from trinity.cli.supervise.stage.display import Display
from trinity.config import Config, ConfigError, Plan, Problem
from trinity.config.run_record import RunRecord, data_digests
from trinity.config.schema.buffer import TasksetConfig
from trinity.data.datasets import DatasetError
from trinity.data.experience import TaskKind
from trinity.data.selectors import DifficultyBased
from trinity.data.task_source import TaskSource
from trinity.modes.client import publish_joined
from trinity.reading.errors import RunError
from trinity.runtime.errors import Unavailable
from trinity.runtime.names import slug

_TASKS = 64  # of one call
_OFFER_SECONDS = 15.0
_AGAIN_SECONDS = 1.0


class OwnTasks:
    """One taskset of an explorer in one stage of a run."""

    def __init__(self, key: str, source: TaskSource, epochs: int) -> None:
        self.key, self._source = key, source
        self.name = source.taskset.name
        self._count = len(source.rows) * epochs
        self._weight = len(source.rows) * source.taskset.weight

    async def offer(self, address: str, display: Display) -> None:
        """Offers all tasks to the run's buffer, for as long as it takes. Raises RunError if it refuses them."""
        position = await self._offered(address, 0, 0)
        known = f", {position} of them fed before" if position else ""
        display.say(f"{self._count} tasks of its own as taskset {self.name!r}{known}")
        while position < self._count:
            position = await self._offered(address, position, min(_TASKS, self._count - position))
        display.say(f"all tasks of {self.name!r} are fed")

    async def _offered(self, address: str, first: int, count: int) -> int:
        makes = [self._source.train_task_later(position, 1, 0) for position in range(first, first + count)]
        tasks = await asyncio.to_thread(lambda: [make() for make in makes])
        while True:
            with contextlib.suppress(Unavailable):
                try:
                    return await publish_joined(
                        address, self._source.run, self.name, self._weight, first, tasks, _OFFER_SECONDS
                    )
                except RunError as error:
                    problem = f"{self.key}: the run refuses it: {error}"
                    raise RunError(f"{problem}; without {self.key} the explorer works on the run's tasks", 2) from None
            await asyncio.sleep(_AGAIN_SECONDS)


def own_tasks(config: Config, plan: Plan, about: RunRecord, source: str) -> list[OwnTasks]:
    """Returns the tasksets that the YAML of an explorer brings to a run. Raises ConfigError if one cannot be read.

    `plan`: of the explorer in the run. A YAML with stages or a task pipeline belongs to the run and brings nothing: the
    run may use other tasksets than it names.
    """
    given = config.buffer.explorer_input
    tasksets = [("taskset", given.taskset)] if given.taskset else []
    tasksets = tasksets or [(f"tasksets.{index}", one) for index, one in enumerate(given.tasksets)]
    if config.stages or config.data_processor.task_pipeline is not None or not about.data:
        return []
    # The workflows and rewards of tasks that name none are those of this YAML.
    buffer = plan.config.buffer.model_copy(update={"explorer_input": given})
    plan = Plan(plan.config.model_copy(update={"buffer": buffer}), plan.algorithm, plan.lengths, plan.staleness)
    return [
        _open(f"buffer.explorer_input.{key}", config, plan, about, taskset, source)
        for key, taskset in tasksets
        if not set(about.data).intersection(data_digests(taskset))
    ]


def _open(key: str, config: Config, plan: Plan, about: RunRecord, taskset: TasksetConfig, source: str) -> OwnTasks:
    name = f"{slug(config.explorer.name)}-{slug(taskset.name or 'taskset')}"
    try:
        opened = TaskSource.open(about.run, plan, taskset.model_copy(update={"name": name}), TaskKind.TRAIN)
    except DatasetError as error:
        raise ConfigError(source, [error.at(key)]) from None
    if isinstance(opened.selector, DifficultyBased):
        problem = "learns from rewards, which only the run's buffer knows; take another one for an explorer's own tasks"
        raise ConfigError(source, [Problem(f"{key}.data_selector.selector_type", problem)])
    return OwnTasks(key, opened, config.buffer.total_epochs)
