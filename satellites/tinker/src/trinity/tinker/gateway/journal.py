"""The gateway's view of the log of commands: owners of sessions and models, and the command of each seq_id.

Everything follows from the log, so a gateway that starts again knows what the one before it accepted. A command is
checked and appended at the place behind the newest one that the gateway has read; if another gateway was faster, its
commands are read first.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from trinity.runtime.broker import SequenceConflict
from trinity.runtime.errors import Conflict, InvalidInput, NotFound
from trinity.tinker.commands.log import (
    SAMPLED,
    Command,
    CommandLog,
    Kind,
    canonical,
    is_of,
    now,
    sampler_id_of,
    sampler_path_of,
    session_of,
    state_path_of,
)
from trinity.tinker.gateway.quotas import Quotas
from trinity.tinker.gateway.saves import Saved, Saves

_DIGEST = 32  # bytes


@dataclass
class Model:
    """A tenant's model. `rank`: of its adapters. `digests`: of its commands, by seq_id; `accepted`: their positions and
    times; `refused`: the reason of each refused seq_id."""

    tenant: str
    rank: int
    digests: list[bytes] = field(default_factory=list)
    accepted: list[tuple[int, float]] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    ended: bool = False  # with its session; its results and states stay


@dataclass(frozen=True)
class Sampler:
    """A sampling session. `path`: of the adapters, empty for the base model. `inflight`: it samples by the newest ones
    that its model saved as such. `position`: of the command that saved the adapters when the session began."""

    tenant: str
    path: str
    inflight: bool = False
    position: int = field(default=0, compare=False)


class Journal:
    """Owners of sessions and models; accepts commands, one at a time."""

    def __init__(self, log: CommandLog, saves: Saves, quotas: Quotas | None = None) -> None:
        """quotas: of commands that wait; None: there are none."""
        self._log, self.saves, self._quotas = log, saves, quotas
        self._lock = asyncio.Lock()
        self._last = 0
        self._sessions: dict[str, str] = {}
        self._ended: set[str] = set()
        self.models: dict[str, Model] = {}
        self._samplers: dict[str, Sampler] = {}
        self._saved: dict[str, Saved] = {}  # by path
        self._deleted: set[tuple[str, str]] = set()  # tenants and paths of saves
        self._inflight: dict[str, list[str]] = {}  # paths by model, oldest first

    async def catch_up(self) -> None:
        """Reads what was appended since. Raises DataLoss for a log with a gap."""
        async for command in self._log.commands(self._last, await self._log.last_command()):
            self._take(command)

    def open_sessions(self) -> dict[str, str]:
        """Returns the tenants of the sessions that have not ended."""
        return {session_id: tenant for session_id, tenant in self._sessions.items() if session_id not in self._ended}

    def check_session(self, tenant: str, session_id: str, *, takes_models: bool = False) -> None:
        """Raises NotFound unless the session is the tenant's; with `takes_models` also if it has ended."""
        if self._sessions.get(session_id) != tenant or (takes_models and session_id in self._ended):
            raise NotFound(f"session {session_id[:200]!r} is not known, or has ended; create one with this key")

    def model(self, tenant: str, model_id: str) -> Model:
        """Raises NotFound unless the model is the tenant's."""
        found = self.models.get(model_id)
        if found is None or found.tenant != tenant:
            raise NotFound(f"model {model_id[:200]!r} is not known; create it with this key")
        return found

    def open_model(self, tenant: str, model_id: str) -> Model:
        """Returns a model that takes commands. Raises NotFound as `model`, and for a model of an ended session."""
        found = self.model(tenant, model_id)
        if found.ended:
            raise NotFound(f"model {model_id[:200]!r} went with its session, which has ended; load a saved state")
        return found

    def count(self, tenant: str) -> int:
        return sum(model.tenant == tenant and not model.ended for model in self.models.values())

    def saved(self, tenant: str, path: str) -> Saved:
        """Returns adapters to sample by. Raises InvalidInput unless the tenant saved them, and for those whose time is
        over."""
        saved = self._saved.get(path)
        if saved is None or saved.tenant != tenant:
            raise InvalidInput(
                "model_path", f"is {path[:200]!r}, which no save_weights_for_sampler returned, or which was deleted"
            )
        if lack := self.saves.lack(saved):
            raise InvalidInput("model_path", f"is {path[:200]!r}, whose {lack}")
        return saved

    def check_new(self, tenant: str, model_id: str, values: dict[str, Any]) -> None:
        """Raises InvalidInput for adapters' name as Saves.check_new, and for a number that is used."""
        if values["path"] is not None:
            self.saves.check_new(tenant, sampler_path_of(model_id, values))
        elif sampler_id_of(session_of(model_id), _number(values)) in self._samplers:
            raise InvalidInput("sampling_session_seq_id", f"is {_number(values)}, which another sampling session has")

    def sampler(self, tenant: str, sampler_id: str) -> Sampler:
        """Raises NotFound unless the sampling session is the tenant's, and once its session has ended."""
        found = self._samplers.get(sampler_id)
        if found is None or found.tenant != tenant or session_of(sampler_id) in self._ended:
            raise NotFound(f"sampling session {sampler_id[:200]!r} is not known, or has ended; create one")
        return found

    def inflight(self, path: str) -> list[Saved]:
        """Returns what the model of a path saved as inflight, newest first."""
        return [self._saved[one] for one in reversed(self._inflight[_model_in(path, SAMPLED)])]

    async def open_sampler(self, sampler_id: str, sampler: Sampler) -> None:
        """Makes a sampling session durable. Raises Conflict if there is another one of that id."""
        async with self._lock:
            while sampler_id not in self._samplers:
                body = canonical({"path": sampler.path})
                try:
                    await self._append(Command(Kind.SAMPLER, sampler.tenant, sampler_id, 0, body, now()))
                except SequenceConflict:
                    await self.catch_up()
        if self._samplers[sampler_id] != sampler:
            raise Conflict(f"sampling_session_seq_id: is of the sampling session {sampler_id}, which is another one")

    async def open_session(self, tenant: str, body: bytes) -> str:
        session_id = secrets.token_hex(16)
        async with self._lock:
            while session_id not in self._sessions:
                try:
                    await self._append(Command(Kind.SESSION, tenant, session_id, 0, body, now()))
                except SequenceConflict:
                    await self.catch_up()
        return session_id

    async def end_session(self, tenant: str, session_id: str) -> None:
        """Removes the session's models once their commands are executed. Raises NotFound as check_session."""
        async with self._lock:
            while True:
                self.check_session(tenant, session_id)
                if session_id in self._ended:
                    return
                try:
                    await self._append(Command(Kind.END, tenant, session_id, 1, b"{}", now()))
                except SequenceConflict:
                    await self.catch_up()

    async def delete(self, tenant: str, path: str) -> None:
        """Removes a named save once the tenant's commands before are executed; a retry does nothing. Raises NotFound as
        Saves.find."""
        async with self._lock:
            while (tenant, path) not in self._deleted:
                position = self.saves.find(tenant, path).position
                try:
                    await self._append(Command(Kind.DELETE, tenant, path, position, b"{}", now()))
                except SequenceConflict:
                    await self.catch_up()

    async def submit(
        self, tenant: str, model_id: str, seq_id: int, kind: Kind, body: bytes, check: Callable[[], None]
    ) -> str:
        """Stores a command once `check` has passed it; returns its request id when it is durable.

        The same command again has the same id, and is stored once. Raises InvalidInput for what `check` refuses: the
        seq_id is used up then, since the client counts it. Raises Conflict for a seq_id that holds another command, or
        that leaves out the next one; NotFound as `model`; Full if too much of the tenant waits.
        """
        digest = Command(kind, tenant, model_id, seq_id, body, 0.0).digest
        async with self._lock:
            while True:
                request_id = self._known(tenant, model_id, seq_id, digest)
                if request_id:
                    return request_id
                if self._quotas is not None:
                    self._quotas.check(tenant, len(body))
                entry = Command(kind, tenant, model_id, seq_id, body, now())
                try:
                    check()
                except InvalidInput as error:
                    if not seq_id:  # there is no model whose seq_ids are counted
                        raise
                    entry = Command(Kind.REFUSED, tenant, model_id, seq_id, digest + str(error).encode(), now())
                try:
                    await self._append(entry)
                except SequenceConflict:
                    await self.catch_up()

    def _known(self, tenant: str, model_id: str, seq_id: int, digest: bytes) -> str:
        """Returns the request id of a command that is in the log, or an empty text for the next one."""
        if not seq_id and model_id not in self.models:
            return ""
        model = self.open_model(tenant, model_id)
        following = len(model.digests)
        if seq_id == following:
            return ""
        if seq_id > following:
            raise Conflict(f"seq_id: is {seq_id}, and the next one of {model_id} is {following}; none may be left out")
        if model.digests[seq_id] != digest:
            raise Conflict(
                f"seq_id: is {seq_id}, which holds another command; the next one of {model_id} is {following}"
            )
        if seq_id in model.refused:
            raise InvalidInput(*model.refused[seq_id].split(": ", 1))
        return f"{model_id}:{seq_id}"

    async def _append(self, command: Command) -> None:
        self._take(replace(command, position=await self._log.append(command, self._last)))

    def _take(self, command: Command) -> None:
        self._last = command.position
        if command.kind is Kind.SESSION:
            self._sessions[command.model] = command.tenant
            return
        if command.kind is Kind.END:
            self._ended.add(command.model)
            for model_id, model in self.models.items():
                model.ended |= is_of(command.model, model_id)
            return
        if command.kind is Kind.SAMPLER:
            path = command.values["path"]
            position = self._saved[path].position if path in self._saved else 0
            self._samplers[command.model] = Sampler(command.tenant, path, position=position)
            return
        if command.kind is Kind.DELETE:
            self.saves.drop(command.tenant, command.model)
            self._saved.pop(command.model, None)
            self._deleted.add((command.tenant, command.model))
            return
        if command.kind in (Kind.SAVE_SAMPLER, Kind.SAVE_WEIGHTS):
            self._take_saved(command)
        digest = command.digest
        if command.model not in self.models:
            self.models[command.model] = Model(command.tenant, self._rank(command))
        model = self.models[command.model]
        if command.kind is Kind.REFUSED:
            digest, reason = command.body[:_DIGEST], command.body[_DIGEST:].decode()
            model.refused[command.seq_id] = reason
        elif self._quotas is not None:
            self._quotas.add(command)
        model.digests.append(digest)
        model.accepted.append((command.position, command.time))

    def _take_saved(self, command: Command) -> None:
        values = command.values
        expires = command.time + values["ttl_seconds"] if values["ttl_seconds"] else 0.0
        saved = Saved(command.tenant, command.request_id, command.position, command.time, expires)
        is_state = command.kind is Kind.SAVE_WEIGHTS
        path = state_path_of(command.model, values["path"]) if is_state else sampler_path_of(command.model, values)
        self._deleted.discard((command.tenant, path))
        if is_state:
            self.saves.take(path, saved)
            return
        self._saved[path] = saved
        if values["path"] is not None:
            self.saves.take(path, saved)
        else:
            inflight = values["kind"] == "inflight"
            sampler_id = sampler_id_of(session_of(command.model), _number(values))
            self._samplers[sampler_id] = Sampler(command.tenant, path, inflight, command.position)
            if inflight:
                self._inflight.setdefault(command.model, []).append(path)

    def _rank(self, command: Command) -> int:
        """Returns the rank of a new model, which it takes from the state that it begins with."""
        if command.kind is Kind.CREATE_MODEL:
            return int(command.values["lora_config"]["rank"])
        source = self.models.get(owner_of(command.values["path"]))
        return source.rank if source is not None else 0


def owner_of(path: str) -> str:
    """Returns the model whose state a path names. Raises InvalidInput for anything but tinker://<model>/weights/<name>."""
    if not (model_id := _model_in(path, "weights")):
        raise InvalidInput(
            "path", f"is {path[:200]!r}; must be tinker://<model id>/weights/<name>, as save_state returns"
        )
    return model_id


def _model_in(path: str, kind: str) -> str:
    parts = path.removeprefix("tinker://").split("/")
    return parts[0] if path.startswith("tinker://") and len(parts) == 3 and parts[1] == kind else ""


def _number(values: dict[str, Any]) -> int:
    return int(values["sampling_session_seq_id"])
