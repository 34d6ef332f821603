"""Options of a monitor, and the removal of secrets from its output."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

_SECRET_NAME = re.compile(
    r"secret|password|passwd|(api_?|access_?|private_?)key$|(^|(access|auth|api|hf|bearer)_?)token$", re.I
)
_SECRET_ARGS = ("api_key", "password")
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
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

    @property
    def digest(self) -> str:
        """40 hexadecimal characters that are the same after every restart, and of no other run."""
        return hashlib.sha1("\n".join((self.project, self.group, self.name)).encode()).hexdigest()

    def hide(self, text: str) -> str:
        """A text without this run's keys and passwords, for a log."""
        for name in _SECRET_ARGS:
            if value := self.args.get(name):
                text = text.replace(str(value), _HIDDEN)
        return _USER_IN_URL.sub(f"{_HIDDEN}@", text)

    def public_config(self) -> dict[str, Any]:
        """The configuration as plain JSON values, what looks like a secret replaced by ***."""
        return {str(name): self._public(str(name), value) for name, value in self.config.items()}

    def flat_config(self) -> dict[str, str]:
        """The same as `a.b.0.c: text`."""
        return dict(_flat("", self.public_config()))

    def _public(self, name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): self._public(str(key), item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._public(name, item) for item in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        return _HIDDEN if value and _SECRET_NAME.search(name) else self.hide(str(value))


def _flat(place: str, value: Any) -> Iterator[tuple[str, str]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if not children:
        yield place, str(value)
        return
    for key, item in children:
        yield from _flat(f"{place}.{key}" if place else str(key), item)
