"""Executes commands: the state of a tenant after a command follows from the tenant's commands up to it."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Any

import structlog
import torch

from trinity.runtime.errors import AlreadyExists, InvalidInput, NotFound
from trinity.runtime.names import token
from trinity.tinker.commands.account import Account
from trinity.tinker.commands.log import (
    Command,
    Kind,
    Result,
    canonical,
    failed,
    is_of,
    sampler_id_of,
    sampler_path_of,
    session_of,
    state_path_of,
)
from trinity.tinker.commands.wire import read_forward, write_output
from trinity.tinker.executor.model import AdapterShape, Parts, SharedModel, Tenant, Value, finished
from trinity.tinker.executor.queue import OF_ONE_MODEL
from trinity.tinker.executor.states import Snapshot, States

log = structlog.get_logger(__name__)

_KEPT_UNNAMED = 16
_NO_ROOM = "; give shorter sequences, or lower micro_tokens or sampler_gpu_gib in the server's YAML"


@dataclass(frozen=True)
class Saved:
    """A saved state, or adapters saved for sampling. `position`: of the command that saved it, which names its file.
    `expires`: 0 for never."""

    position: int
    shape: dict[str, Any]
    steps: int
    expires: float


class Executor:
    """The tenants' models.

    executed: position of the newest command that is in them, by tenant. position: with the snapshot that was restored,
    all commands up to it are in them. commands: how many are. results: sequence of the newest result that was stored.
    account: sums of the seconds in the results up to it. saving: by position, what must end before a command's result
    may be stored.
    """

    def __init__(
        self, model: SharedModel, states: States, *, shares: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """shares: compute passes of several models at once. clock: of the seconds of commands."""
        self.shares, self.clock = shares, clock
        self._model = model
        self._states = states
        self._tenants: dict[str, Tenant] = {}
        self._saved: dict[str, Saved] = {}
        self._lost: dict[int, float] = {}  # seconds of shared passes that failed, by position
        self.executed: dict[str, int] = {}
        self.position = self.commands = self.results = 0
        self.account = Account()
        self.saving: dict[int, Future[None]] = {}

    def restore(self) -> None:
        """Takes over the newest whole snapshot. Without one the executor begins before the first command."""
        snapshot = self._states.newest()
        if snapshot is None:
            return
        for model_id, about in snapshot.models.items():
            tenant = self._model.add(token(model_id), AdapterShape(**about["shape"]))
            tenant.restore(snapshot.tensors(model_id), about["steps"])
            self._tenants[model_id] = tenant
        self._saved = {path: Saved(**about) for path, about in snapshot.saved.items()}
        self.position, self.executed, self.commands = snapshot.position, snapshot.executed, snapshot.commands
        self.results, self.account = snapshot.results, Account(snapshot.account)
        log.info("tenants.snapshot.loaded", position=self.position, models=len(self._tenants))

    def snapshot(self, position: int, time: float) -> int:
        """Writes the state after the newest commands, and removes states that no snapshot knows any more. Returns the
        position after which commands may have to be executed again.

        position, time: as FairQueue.reached. The results of all executed commands must be stored.
        """
        self._saved = {path: saved for path, saved in self._saved.items() if self._state(path, time) is not None}
        models = {
            model_id: ({"shape": asdict(tenant.shape), "steps": tenant.steps}, tenant.state(gradients=True))
            for model_id, tenant in self._tenants.items()
        }
        saved = {path: asdict(saved) for path, saved in self._saved.items()}
        beyond = {tenant: newest for tenant, newest in self.executed.items() if newest > position}
        about = Snapshot(position, beyond, self.commands, {}, saved, self.results, self.account.uses)
        return self._states.write(about, models)

    def execute_all(self, commands: Sequence[Command]) -> list[Result | None]:
        """Executes the next commands, and computes passes of several models at once. Returns their results in order;
        None for the end of a session and for a deletion.

        Each model's commands are executed in their order, so that only rounding differs from `execute` for each.
        """
        return finished(self.work(commands))

    def work(self, commands: Sequence[Command]) -> Parts[list[Result | None]]:
        """Executes commands as `execute_all`. Yields within passes; commands of other tenants may be executed then."""
        results: dict[int, Result | None] = {}
        for independent in _independent(commands):
            waiting: dict[str, deque[Command]] = defaultdict(deque)
            for command in independent:
                waiting[command.model].append(command)
            while waiting:
                for model, queue in list(waiting.items()):
                    while queue and queue[0].kind is not Kind.FORWARD_BACKWARD:
                        command = queue.popleft()
                        results[command.position] = yield from self._result(command)
                    if not queue:
                        del waiting[model]
                passes = [queue.popleft() for queue in waiting.values()]
                results |= yield from self._together(passes)
                for command in passes:
                    if command.position not in results:
                        results[command.position] = yield from self._result(command)
        self.executed |= {command.tenant: command.position for command in commands}
        self.commands += len(commands)
        return [results[command.position] for command in commands]

    def _together(self, commands: list[Command]) -> Parts[dict[int, Result | None]]:
        """Returns the results of passes of several models, by position. Leaves out commands that it cannot join."""
        found: dict[int, Result | None] = {}
        if len(commands) < 2:
            return found
        read = [(command, read_forward(command.body)) for command in commands if command.model in self._tenants]
        for backward in (False, True):
            chosen = [(command, forward) for command, forward in read if forward.backward == backward]
            if len(chosen) < 2:
                continue
            shared = [(self._tenants[one.model], forward) for one, forward in chosen]
            computed, seconds = yield from self._timed(self._model.run_together(shared))
            bodies = [write_output(logprobs, {"loss:sum": loss}) for logprobs, loss in computed or []]
            tokens = [sum(len(datum.tokens) for datum in forward.data) for _, forward in chosen]
            shares = {one.position: seconds * of / sum(tokens) for (one, _), of in zip(chosen, tokens, strict=True)}
            if computed is None:
                self._lost |= shares
            for (one, _), body in zip(chosen, bodies, strict=False):
                found[one.position] = Result(one.request_id, one.kind, body, one.position, shares[one.position])
        return found

    def execute(self, command: Command) -> Result | None:
        """Executes a tenant's next command and returns its result; None for the end of a session.

        A command that cannot be executed has a result that says why, and changes nothing. Each pass ends with a copy
        from the device, so that the seconds are those of the device too.
        """
        return self.execute_all([command])[0]

    def _result(self, command: Command) -> Parts[Result | None]:
        if command.kind is Kind.DELETE:
            self._saved.pop(command.model, None)
            return None
        if command.kind is Kind.END:
            for model_id in [one for one in self._tenants if is_of(command.model, one)]:
                self._model.remove(self._tenants.pop(model_id))
                self._forget_unnamed(model_id, 0)
            return None
        result, seconds = yield from self._timed(self._done(command))
        return replace(result, seconds=seconds + self._lost.pop(command.position, 0.0))

    def _timed(self, parts: Parts[Value]) -> Parts[tuple[Value, float]]:
        """Returns the value of a pass and its seconds, without those between its parts."""
        seconds = 0.0
        while True:
            begin = self.clock()
            try:
                next(parts)
            except StopIteration as ended:
                return ended.value, seconds + self.clock() - begin
            seconds += self.clock() - begin
            yield

    def _done(self, command: Command) -> Parts[Result]:
        try:
            kind, body = yield from self._answer(command)
        except (AlreadyExists, InvalidInput, NotFound) as error:  # any other, such as a lost file, ends the executor
            return failed(command.request_id, str(error), command.position, by_user=True)
        except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
            # Such a command would end every executor that comes to it, and stop the other tenants.
            log.exception("tenants.command.failed", request=command.request_id, kind=command.kind)
            hint = _NO_ROOM if isinstance(error, torch.OutOfMemoryError) else ""
            problem = f"{type(error).__name__}: {error}{hint}"
            return failed(command.request_id, problem, command.position, by_user=False)
        return Result(command.request_id, kind, body, command.position)

    def _answer(self, command: Command) -> Parts[tuple[str, bytes]]:
        if command.kind is Kind.FORWARD_BACKWARD:
            forward = read_forward(command.body)
            logprobs, loss = yield from self._model.run(self._tenant(command.model), forward)
            return command.kind, write_output(logprobs, {"loss:sum": loss})
        values = command.values
        if command.kind is Kind.CREATE_MODEL:
            lora = values["lora_config"]
            shape = AdapterShape(lora["rank"], lora["seed"] or 0, lora["train_attn"], lora["train_mlp"])
            self._tenants[command.model] = self._model.add(token(command.model), shape)
            answer: dict[str, Any] = {"type": "create_model", "model_id": command.model}
        elif command.kind is Kind.OPTIM_STEP:
            adam = values["adam_params"]
            norm = self._tenant(command.model).step(
                adam["learning_rate"], (adam["beta1"], adam["beta2"]), adam["eps"], adam["weight_decay"],
                adam["grad_clip_norm"],
            )  # fmt: skip
            answer = {"metrics": {"grad_norm:mean": norm}}
        elif command.kind is Kind.SAVE_WEIGHTS:
            answer = {"type": "save_weights", "path": self._save(command, values)}
        elif command.kind is Kind.SAVE_SAMPLER:
            answer = {"type": "save_weights_for_sampler", **self._save_for_sampler(command, values)}
        else:
            self._load(command, values)
            answer = {"type": "load_weights", "path": values["path"], "model_id": command.model}
        return command.kind, canonical(answer)

    def _tenant(self, model_id: str) -> Tenant:
        if model_id not in self._tenants:
            raise NotFound(f"model {model_id} was not made: the command that should have made it failed")
        return self._tenants[model_id]

    def _state(self, path: str, now: float) -> Saved | None:
        """Returns a saved state; None for one whose time was over when the command was accepted."""
        saved = self._saved.get(path)
        return saved if saved is not None and (not saved.expires or now <= saved.expires) else None

    def _save(self, command: Command, values: dict[str, Any]) -> str:
        tenant, path = self._tenant(command.model), state_path_of(command.model, values["path"])
        if self._state(path, command.time) is not None and not values["overwrite"]:
            raise AlreadyExists(f"{path} is there already; choose another name, or overwrite=True")
        self._states.save(command.position, tenant.state(gradients=False))
        expires = command.time + values["ttl_seconds"] if values["ttl_seconds"] else 0.0
        self._saved[path] = Saved(command.position, asdict(tenant.shape), tenant.steps, expires)
        return path

    def _save_for_sampler(self, command: Command, values: dict[str, Any]) -> dict[str, str]:
        """Saves adapters. A model keeps its _KEPT_UNNAMED newest ones without a name until its session ends."""
        tenant, path = self._tenant(command.model), sampler_path_of(command.model, values)
        self.saving[command.position] = self._states.save_adapters(command.position, self._model, tenant)
        expires = command.time + values["ttl_seconds"] if values["ttl_seconds"] else 0.0
        self._saved[path] = Saved(command.position, asdict(tenant.shape), tenant.steps, expires)
        if values["path"] is not None:
            return {"path": path}
        self._forget_unnamed(command.model, _KEPT_UNNAMED)
        number = values["sampling_session_seq_id"]
        return {"sampling_session_id": sampler_id_of(session_of(command.model), number)}

    def _forget_unnamed(self, model_id: str, kept: int) -> None:
        """Forgets a model's oldest adapters for sampling without a name, but the `kept` newest."""
        begin = sampler_path_of(model_id, {"path": "@"})
        unnamed = sorted((saved.position, path) for path, saved in self._saved.items() if path.startswith(begin))
        for _, path in unnamed[: max(0, len(unnamed) - kept)]:
            del self._saved[path]

    def _load(self, command: Command, values: dict[str, Any]) -> None:
        saved = self._state(values["path"], command.time)
        if saved is None:
            raise NotFound(f"{values['path']} is not there: no such state was saved, or its time is over")
        shape = AdapterShape(**saved.shape)
        tenant = self._tenants.get(command.model)
        if tenant is not None and (tenant.shape.rank, tenant.shape.attention, tenant.shape.mlp) != (
            shape.rank, shape.attention, shape.mlp,
        ):  # fmt: skip
            problem = (
                f"has adapters of rank {shape.rank}, or of other layers than {command.model}; make a model from it"
            )
            raise InvalidInput(values["path"], problem)
        state = self._states.load(saved.position)
        if tenant is None:
            tenant = self._tenants[command.model] = self._model.add(token(command.model), shape)
        tenant.restore(state, saved.steps, optimizer=values["optimizer"])


def _independent(commands: Sequence[Command]) -> Iterator[list[Command]]:
    """Yields commands in order: a single one, or several of which models do not depend on each other."""
    several: list[Command] = []
    for command in commands:
        if command.kind in OF_ONE_MODEL:
            several.append(command)
            continue
        if several:
            yield several
        several = []
        yield [command]
    if several:
        yield several
