"""The tables of foreign.yaml by whole key paths: what `translate` takes out of a document."""

import re
from collections.abc import Iterator
from importlib import resources
from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TABLES: dict[str, Any] = yaml.load(resources.files(__package__).joinpath("foreign.yaml").read_bytes(), _LOADER)
_PLACES: dict[str, list[str]] = {name: paths.split() for name, paths in _TABLES["places"].items()}


def _places(path: str) -> Iterator[dict[str, str]]:
    """Yields each place that the {name} in a path stands for; a single empty mapping without a {name}."""
    found = re.search(r"\{(\w+)\}", path)
    yield from ({found[1]: place} for place in _PLACES[found[1]]) if found else ({},)


def _paths(text: str) -> Iterator[str]:
    """The key paths of lines `section: key key ...`; a line that is indented continues the one above."""
    for line in text.replace("\n  ", " ").splitlines():
        section, _, keys = line.partition(": ")
        for place in _places(section):
            yield from (f"{section}.{key}".format(**place).removeprefix(".") for key in keys.split())


def _by_path(title: str) -> dict[str, str]:
    return {path: reason for reason, text in _TABLES[title].items() for path in _paths(text)}


RENAMED: dict[str, str] = {
    old.format(**place): new.format(**place) for old, new in _TABLES["renamed"].items() for place in _places(old)
}
VALUES: dict[str, dict[str, str]] = {
    path.format(**place): names for path, names in _TABLES["values"].items() for place in _places(path)
}
IGNORED, UNSUPPORTED = _by_path("ignored"), _by_path("unsupported")
SAME: dict[str, tuple[tuple[str, ...], str]] = {
    path: (tuple(names.rstrip(")").split()), reason)
    for path, (reason, _, names) in ((path, text.partition(" (")) for path, text in _by_path("same").items())
}
NOT_HERE: dict[str, str] = {name: use for use, names in _TABLES["not_here"].items() for name in names.split()}

# Values that switch a key of UNSUPPORTED off, where these are others than null, false, empty text, [] and {}.
OFF: dict[str, tuple[object, ...]] = {
    "trainer.trainer_config.actor_rollout_ref.model.lora_rank": (None, 0),
    "buffer.trainer_input.sft_warmup_steps": (None, 0),
    **dict.fromkeys((f"{place}.nnodes" for place in _PLACES["engines"]), (None, 1)),
}

# Sections that the schema does not have.
FOREIGN_SECTIONS = (
    "log", "service", "cod", "trainer.trainer_config", "model.tinker", "model.external_model",
    "buffer.trainer_input.experience_buffer.replay_buffer_kwargs",
)  # fmt: skip
