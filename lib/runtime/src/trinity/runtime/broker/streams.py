"""Streams as code: created on start, never deleted, refused if a stream exists with other settings."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import nats.js.errors
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

from trinity.runtime.broker.connection import Broker
from trinity.runtime.errors import Conflict, Full, NotFound

# Changing one of these in place would lose data or change meaning.
_FIXED = ("subjects", "retention", "storage")
# These follow the settings.
_TUNABLE = (
    "max_bytes",
    "max_msgs",
    "discard",
    "duplicate_window",
    "num_replicas",
    "allow_direct",
    "max_msg_size",
    "max_age",
)


@dataclass(frozen=True)
class StreamSpec:
    """The required settings of a stream. Retention by limits, storage in files: no acknowledged message is ever lost.

    `replicas` 0: three where the broker is a cluster, else one. `setting`: what gives max_bytes, for errors.
    """

    name: str
    subjects: tuple[str, ...]
    max_bytes: int = -1
    duplicate_window_seconds: float = 120.0
    replicas: int = 1
    max_messages: int = -1  # a ring: the oldest go. Only for values that are written repeatedly
    max_age_seconds: float = 0.0  # the same by age; 0: messages stay
    setting: str = ""

    def config(self) -> StreamConfig:
        return StreamConfig(
            name=self.name,
            subjects=list(self.subjects),
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            discard=DiscardPolicy.OLD if self.max_messages >= 0 or self.max_age_seconds else DiscardPolicy.NEW,
            max_msgs=self.max_messages,
            max_age=self.max_age_seconds,
            max_bytes=self.max_bytes,
            duplicate_window=self.duplicate_window_seconds,
            num_replicas=self.replicas,
            allow_direct=True,
            max_msg_size=-1,
        )


async def ensure_streams(broker: Broker, specs: list[StreamSpec]) -> None:
    """Creates missing streams and updates tunable settings.

    Raises Conflict, with the differences, for a stream of the same name that is something else; Full if the broker has
    no room for the requested limits.
    """
    replicas = broker.usual_replicas
    for spec in specs:
        wanted = replace(spec, replicas=spec.replicas or replicas).config()
        try:
            info = await broker.request(lambda s=spec: broker.js.stream_info(s.name), f"look for {spec.name}")
        except nats.js.errors.NotFoundError:
            await _write(broker, broker.js.add_stream, wanted, spec)
            continue
        _refuse_other(info.config, wanted)
        if _differences(info.config, wanted, _TUNABLE):
            await _write(broker, broker.js.update_stream, wanted, spec)


async def check_stream(broker: Broker, spec: StreamSpec) -> None:
    """Raises NotFound for a missing stream, and Conflict for a stream with other settings. Changes nothing."""
    try:
        info = await broker.request(lambda: broker.js.stream_info(spec.name), f"look for {spec.name}")
    except nats.js.errors.NotFoundError:
        raise NotFound(f"NATS has no stream {spec.name}") from None
    _refuse_other(info.config, spec.config())


def _refuse_other(have: StreamConfig, wanted: StreamConfig) -> None:
    differences = _differences(have, wanted, _FIXED)
    if differences:
        raise Conflict(
            f"NATS has a stream {wanted.name} of another version of Trinity, or of another program: {differences}. "
            "Use that version, another project or name in the YAML, or another NATS; it was left as it is"
        )


async def _write(
    broker: Broker, write: Callable[[StreamConfig], Awaitable[Any]], wanted: StreamConfig, spec: StreamSpec
) -> None:
    """Make a stream, or change it. Raises Conflict or Full, as `ensure_streams`."""
    size = f" of up to {wanted.max_bytes} bytes" if spec.max_bytes >= 0 else ""
    about = f"stream {spec.name}{size}"
    try:
        await broker.request(lambda: write(wanted), f"write {spec.name}")
    except nats.js.errors.BadRequestError as error:
        raise Conflict(f"NATS refuses {about}: {error.description}") from None
    except nats.js.errors.ServerError as error:
        advice = f"; lower {spec.setting}, or give NATS more storage" if spec.setting else ""
        raise Full(f"NATS has no room for {about}: {error.description}{advice}") from None


def _differences(have: StreamConfig, want: StreamConfig, fields: tuple[str, ...]) -> str:
    def shown(value: Any) -> Any:
        return getattr(value, "value", value)

    pairs = ((name, shown(getattr(have, name)), shown(getattr(want, name))) for name in fields)
    return "; ".join(f"{name} is {h}, should be {w}" for name, h, w in pairs if h != w)
