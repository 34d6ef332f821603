"""`trinity check --deep` beyond model, data and machine: prompts, images, environments, rewards and services."""

import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from trinity.cli.supervise.checks.preflight import datasets_of
from trinity.cli.supervise.phases import phase
from trinity.config import ConfigError, Plan, Problem
from trinity.config.schema.buffer import ExperienceBufferConfig, TasksetConfig
from trinity.data import images
from trinity.data.datasets import DatasetError, Row, read_buffer, read_taskset
from trinity.data.task_source import folder_of
from trinity.data.vision import image_rules
from trinity.deep_check.rendered_rows import check_rendering
from trinity.deep_check.services import ask_services

_MOST_SECONDS_OF_IMAGES = 60.0  # of a taskset


def check_deeper(plan: Plan, source: str, job: Path) -> list[str]:
    """Checks prompts by the tokenizer, templates, providers and rewards, which a start leaves to the processes.

    `job`: folder of the run, which may be live. Returns sentences on defects; raises ConfigError if no run is possible.
    """
    read_rows = [(d.key, d.config, read_taskset(d.config))
                 for d in datasets_of(plan) if isinstance(d.config, TasksetConfig)]  # fmt: skip
    buffers = [(d.key, d.config.format, read_buffer(d.config))
               for d in datasets_of(plan) if isinstance(d.config, ExperienceBufferConfig)]  # fmt: skip
    examples = [(key, form, rows) for key, form, rows in buffers if "token_ids" not in rows[0]]
    from trinity.deep_check.tasksets import check_environments  # those and their scorers load sympy

    name, found = plan.config.name, list[Problem | str]()
    with ask_services(plan) as answers:
        with phase(f"{name}: renders prompts with the tokenizer"):
            found += [*check_images(plan, read_rows), *check_rendering(plan, read_rows, examples)]
        if not plan.offline:
            with phase(f"{name}: tries environments and rewards"):
                found += check_environments(plan, read_rows, job)
        with phase(f"{name}: asks explorer and trainer, which import vLLM and torch"):
            found += answers()
    if problems := list(dict.fromkeys(one for one in found if isinstance(one, Problem))):
        raise ConfigError(source, problems)
    return [*(str(one) for one in found), *check_providers(plan)]


def check_images(plan: Plan, tasksets: Sequence[tuple[str, TasksetConfig, Sequence[Row]]]) -> Iterator[Problem | str]:
    """Decodes the images of the rows.

    Yields the first unusable image of each taskset, and how many rows were checked.
    """
    rules = image_rules(plan.config.model.model_path, plan.config.model.images)
    for key, taskset, rows in tasksets:
        column, urls, begin = taskset.format.image_key, taskset.format.image_urls, time.monotonic()
        for number, row in enumerate(rows if column else ()):
            if time.monotonic() - begin > _MOST_SECONDS_OF_IMAGES:
                yield f"{key}: the images of {number} of {len(rows)} rows were decoded in {_MOST_SECONDS_OF_IMAGES:g} s"
                break
            try:
                images.check(row, number, str(column), folder_of(taskset.path), rules, plan.lengths.prompt, urls)
            except DatasetError as error:
                yield error.at(f"{key}.format.image_key")
                break


def check_providers(plan: Plan, seconds: float = 3) -> Iterator[str]:
    """Yields sentences on environments whose address does not answer; a run waits for them."""
    if plan.offline:
        return
    for index, provided in enumerate(plan.config.explorer.environments):
        if provided.address == "attached" or provided.image:  # a run starts it
            continue
        host, _, port = provided.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
        except OSError as error:
            reason = error.strerror or str(error)
            yield f"explorer.environments.{index}.address: {provided.address} does not answer ({reason})"
