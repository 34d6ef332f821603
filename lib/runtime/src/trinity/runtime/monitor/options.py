"""Options of a monitor, and the removal of secrets from its output."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trinity.runtime.logs import without_credentials

_SECRET_NAME = re.compile(
    r"^env_vars$|secret|password|passwd|passphrase|credential|authorization|cookie|token$|_key$|(api|access|private)key$",
    re.I,
)
# Keys of the YAML that hold the name of a column or a metric.
_NO_SECRET_NAME = re.compile(
    r"(prompt|system_prompt|response|messages|chosen|rejected|image|workflow|reward_fn|rubric|metric|stats)_key"
)
_HIDDEN = "***"


class Backend(Protocol):
    """One place for metrics. Its methods may raise and, if it is called in the background, take their time."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class MonitorOptions:
    """A run of one role. `args` are the kind's own: its keys are in `trinity.config.names.MONITOR_ARGS`."""

    kind: str
    args: Mapping[str, Any] = field(repr=False)
    project: str
    group: str
    name: str  # of the run, with its role: "gsm8k_explorer"
    role: str  # "explorer" or "trainer"
    folder: Path  # <job>/monitor
    config: Mapping[str, Any] = field(repr=False)
    most_bytes: int | None = None  # of the role's lines, and of its event files; then the oldest go

    @property
    def digest(self) -> str:
        """Returns 40 hexadecimal characters that only this run has, equal after every restart."""
        return hashlib.sha1("\n".join((self.project, self.group, self.name)).encode()).hexdigest()

    def hide(self, text: str) -> str:
        """Returns the text without this run's keys and passwords, for a log."""
        for name, value in self.args.items():
            if value and _is_secret(name):
                text = text.replace(str(value), _HIDDEN)
        return without_credentials(text)

    def public_config(self) -> dict[str, Any]:
        """Returns the configuration as plain JSON values, with *** in place of secrets."""
        return {str(name): self._public(str(name), value) for name, value in self.config.items()}

    def flat_config(self) -> dict[str, str]:
        """Returns the public configuration as `a.b.0.c: text`."""
        return dict(_flat("", self.public_config()))

    def _public(self, name: str, value: Any, secret: bool = False) -> Any:
        """`secret`: a name above it is one of secrets."""
        secret = secret or _is_secret(name)
        if isinstance(value, Mapping):
            return {str(key): self._public(str(key), item, secret) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._public(name, item, secret) for item in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        return _HIDDEN if value and secret else self.hide(str(value))


def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None and _NO_SECRET_NAME.fullmatch(name) is None


def _flat(place: str, value: Any) -> Iterator[tuple[str, str]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if not children:
        yield place, str(value)
        return
    for key, item in children:
        yield from _flat(f"{place}.{key}" if place else str(key), item)
