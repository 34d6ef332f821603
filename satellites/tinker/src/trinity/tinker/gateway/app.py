"""The HTTP interface of the `tinker` client (0.38): checks keys and bodies, stores commands, hands out results.

The client raises refusals as its errors and does not repeat them: 400 for a body that is no such
message, 401 for a key, 404 for what the tenant does not have, 422 for everything else. 429 and 503 are repeated.
"""

import json
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from trinity.runtime.errors import Conflict, Full, InvalidInput, NotFound, TrinityError, Unauthenticated, Unavailable
from trinity.runtime.metrics import Counter
from trinity.tinker.commands.checks import Base, check_forward
from trinity.tinker.commands.log import CommandLog, Kind, Result, canonical, model_id_of, state_path_of
from trinity.tinker.commands.wire import address_of, read_forward
from trinity.tinker.gateway import shapes
from trinity.tinker.gateway.client import SamplerClient
from trinity.tinker.gateway.journal import Journal, owner_of
from trinity.tinker.gateway.results import Results
from trinity.tinker.gateway.sampling import Failed, Gone, Sampling
from trinity.tinker.gateway.saves import about
from trinity.tinker.gateway.sessions import Signs
from trinity.tinker.gateway.settings import TinkerSettings
from trinity.tinker.gateway.tenants import TenantKeys

log = structlog.get_logger(__name__)

REQUESTS = Counter("trinity_tinker_requests", "Requests by their status", ["status"])

_PROTOBUF = "application/x-protobuf"
_NUMBER = re.compile("[0-9]{1,10}")
_WAIT_SECONDS = 20.0
_STATUSES: dict[type[TrinityError], int] = {
    Unauthenticated: 401, NotFound: 404, InvalidInput: 422, Conflict: 422, Full: 429, Unavailable: 503,
}  # fmt: skip
_AWAY = "the explorer starts, or starts again"
_UNEMBED = "the output projection is not adapted: train_unembed has no effect here"
_NO_SAMPLING = "is not served: this server trains adapters and does not sample; set sampled_adapters in its YAML"
_OF_SAMPLING = ("save_weights_for_sampler", "create_sampling_session", "asample", "cancel_future")
_REFUSED = {
    "create_custom_loss": "is not served: losses of clients run in the client, by forward_backward_custom",
    "join_sampling_session": "is not served: copies of a sampling client choose their own numbers",
    "save_weights_external": "is not served: save_state keeps states in the folder of the server",
    "copy_weights": "is not served: a state belongs to the tenant that saved it",
}


_Call = Callable[[str, Request], Awaitable[Response]]


class BadBody(TrinityError):
    """The body is no JSON object, or no protobuf message."""


class Gateway:
    """Answers the requests of all tenants."""

    def __init__(
        self,
        settings: TinkerSettings,
        keys: TenantKeys,
        journal: Journal,
        results: Results,
        log: CommandLog,
        sampler: SamplerClient | None,
        most: int,
    ) -> None:
        """sampler: None if there is no explorer. most: bytes of a body."""
        self._settings, self._keys, self._journal, self._results = settings, keys, journal, results
        self._log, self._most = log, most
        self._base = base = Base(settings.base_model, settings.vocabulary, settings.longest)
        waiting = settings.most_samples
        self._sampling = Sampling(journal, results, sampler, base, waiting) if sampler is not None else None
        self._signs = Signs(journal, settings.session_minutes * 60)

    async def end_silent(self) -> None:
        """Ends sessions whose clients are gone, for ever."""
        await self._signs.end_silent(self._ended)

    def _ended(self, session_id: str) -> None:
        if self._sampling is not None:
            self._sampling.end(session_id)

    def app(self) -> Starlette:
        post: dict[str, _Call] = {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": self._end_session,
            "telemetry": self._telemetry,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "load_weights": self._load_weights,
            "retrieve_future": self._retrieve,
            **{name: partial(self._refuse, name, problem) for name, problem in _REFUSED.items()},
        }
        get: dict[str, _Call] = {
            "healthz": self._health,
            "get_server_capabilities": self._capabilities,
            "checkpoints": self._checkpoints,
            "training_runs/{model_id}/checkpoints": self._checkpoints,
        }
        delete: dict[str, _Call] = {"training_runs/{model_id}/checkpoints/{name:path}": self._delete}
        if self._sampling is not None:
            post |= self._sampling_calls(self._sampling)
            get["samplers/{sampler_id}"] = partial(self._about_sampler, self._sampling)
        else:
            post |= {name: partial(self._refuse, name, _NO_SAMPLING) for name in _OF_SAMPLING}
        routes = [
            Route(f"/api/v1/{path}", self._answering(call), methods=[method])
            for method, calls in (("POST", post), ("GET", get), ("DELETE", delete))
            for path, call in calls.items()
        ]
        anything = Route("/{path:path}", self._answering(self._unknown), methods=["GET", "POST", "PUT", "DELETE"])
        return Starlette(routes=[*routes, anything])

    def _sampling_calls(self, sampling: Sampling) -> dict[str, _Call]:
        return {
            "save_weights_for_sampler": self._save_sampler,
            "create_sampling_session": partial(self._create_sampler, sampling),
            "asample": partial(self._sample, sampling),
            "cancel_future": partial(self._cancel, sampling),
        }

    def _answering(self, call: _Call) -> Callable[[Request], Awaitable[Response]]:
        """Checks the key, and turns errors into answers."""

        async def answered(request: Request) -> Response:
            try:
                tenant = self._keys.tenant_of(request.headers.get("x-api-key", ""))
                response = await call(tenant, request)
            except ClientDisconnect:
                response = Response(status_code=400)  # not read: the client has closed the connection
            except BadBody as error:
                response = _error(400, error)
            except TrinityError as error:
                status = next((code for kind, code in _STATUSES.items() if isinstance(error, kind)), 500)
                if status == 500:
                    log.error("tinker.request.failed", path=request.url.path, reason=str(error))
                response = _error(status, error)
            REQUESTS.labels(response.status_code).inc()
            return response

        return answered

    async def _client_config(self, tenant: str, request: Request) -> Response:
        return JSONResponse(
            {
                "pjwt_auth_enabled": False,
                "parallel_fwdbwd_chunks": False,  # commands come in the order of their seq_ids
                "proto_compress_fwdbwd": False,
                "fwdbwd_max_chunk_bytes_count": self._most // 2,
                "use_pyqwest_transport": False,
                "custom_loss_server_side": False,
            }
        )

    async def _dynamic_config(self, tenant: str, request: Request) -> Response:
        return JSONResponse({"sample_cancel_enabled": self._sampling is not None})

    async def _create_session(self, tenant: str, request: Request) -> Response:
        values = shapes.read(shapes.CreateSession, await self._values(request))
        session_id = await self._journal.open_session(tenant, canonical(values.model_dump()))
        self._signs.hear(session_id)
        return JSONResponse({"type": "create_session", "session_id": session_id, "warning_message": _UNEMBED})

    async def _heartbeat(self, tenant: str, request: Request) -> Response:
        session_id = str((await self._values(request)).get("session_id"))
        self._journal.check_session(tenant, session_id)
        if session_id not in self._journal.open_sessions():
            return _error(410, NotFound(f"session {session_id} has ended"))
        self._signs.hear(session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def _end_session(self, tenant: str, request: Request) -> Response:
        session_id = request.path_params["session_id"]
        await self._journal.end_session(tenant, session_id)
        self._ended(session_id)
        return Response(status_code=204)

    async def _telemetry(self, tenant: str, request: Request) -> Response:
        """Drops what the client tells of its use."""
        return JSONResponse({"status": "accepted"})

    async def _health(self, tenant: str, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _capabilities(self, tenant: str, request: Request) -> Response:
        one = {
            "model_name": self._base.name, "max_context_length": self._base.longest, "trainable": True,
            "sampleable": self._sampling is not None,
        }  # fmt: skip
        return JSONResponse({"supported_models": [one]})

    async def _create_model(self, tenant: str, request: Request) -> Response:
        values = shapes.read(shapes.CreateModel, await self._values(request))
        self._base.check(values.base_model)
        lora = values.lora_config
        if lora.rank > self._settings.most_rank:
            raise InvalidInput(
                "lora_config.rank", f"is {lora.rank}; at most {self._settings.most_rank} is allowed here"
            )
        if not (lora.train_attn or lora.train_mlp):
            raise InvalidInput("lora_config", f"has neither train_attn nor train_mlp, and {_UNEMBED}")
        return await self._new_model(tenant, values.session_id, values.model_seq_id, Kind.CREATE_MODEL, values)

    async def _get_info(self, tenant: str, request: Request) -> Response:
        model_id = str((await self._values(request)).get("model_id"))
        model = self._journal.model(tenant, model_id)
        data = {"arch": "", "model_name": self._base.name, "tokenizer_id": self._settings.tokenizer or self._base.name}
        return JSONResponse(
            {
                "type": "get_info", "model_data": data, "model_id": model_id, "is_lora": True,
                "lora_rank": model.rank, "model_name": self._base.name,
            }
        )  # fmt: skip

    async def _forward_backward(self, tenant: str, request: Request) -> Response:
        if request.headers.get("content-encoding"):
            raise InvalidInput("Content-Encoding", "is not read; send the message as it is")
        if request.headers.get("content-type") != _PROTOBUF:
            raise BadBody(f"Content-Type: must be {_PROTOBUF}, as the client of version 0.38 sends it")
        try:
            model_id, seq_id, body = address_of(await self._body(request))
        except InvalidInput as error:
            raise BadBody(str(error)) from None
        return await self._submit(
            tenant, model_id, seq_id, Kind.FORWARD_BACKWARD, body, lambda: check_forward(read_forward(body), self._base)
        )

    async def _optim_step(self, tenant: str, request: Request) -> Response:
        return await self._command(tenant, request, Kind.OPTIM_STEP, shapes.OptimStep)

    async def _save_weights(self, tenant: str, request: Request) -> Response:
        def check(_: str, values: shapes.SaveWeights) -> None:
            path = state_path_of(values.model_id, values.path)
            self._journal.saves.check_new(tenant, path, overwrite=values.overwrite)

        return await self._command(tenant, request, Kind.SAVE_WEIGHTS, shapes.SaveWeights, check=check)

    async def _delete(self, tenant: str, request: Request) -> Response:
        await self._journal.delete(tenant, "tinker://{model_id}/{name}".format(**request.path_params))
        return Response(status_code=204)

    async def _checkpoints(self, tenant: str, request: Request) -> Response:
        """Lists named saves, newest first: a page of all, or those of one model."""
        model_id = request.path_params.get("model_id")
        saves = [about(path, saved) for path, saved in reversed(self._journal.saves.of(tenant).items())]
        if model_id is not None:
            self._journal.model(tenant, model_id)
            of_model = [one for one in saves if one["tinker_path"].startswith(f"tinker://{model_id}/")]
            return JSONResponse({"checkpoints": of_model})
        page = shapes.read(shapes.Page, dict(request.query_params))
        cursor = {"offset": page.offset, "limit": page.limit, "total_count": len(saves)}
        return JSONResponse({"checkpoints": saves[page.offset :][: page.limit], "cursor": cursor})

    async def _load_weights(self, tenant: str, request: Request) -> Response:
        raw = await self._values(request)
        if raw.get("session_id") is None:
            return await self._command(tenant, request, Kind.LOAD_WEIGHTS, shapes.LoadWeights, raw, self._check_load)
        values = shapes.read(shapes.LoadWeights, raw)
        if values.model_seq_id is None or values.model_id is not None:
            raise InvalidInput("model_seq_id", "must be given with session_id, and without model_id")
        if values.base_model is not None:
            self._base.check(values.base_model)
        self._check_load(tenant, values)
        return await self._new_model(tenant, str(values.session_id), values.model_seq_id, Kind.LOAD_WEIGHTS, values)

    def _check_load(self, tenant: str, values: Any) -> None:
        source = self._journal.models.get(owner_of(values.path))
        if source is None or source.tenant != tenant:
            raise InvalidInput("path", f"is {values.path[:200]!r}, a state of no model of this tenant")

    async def _save_sampler(self, tenant: str, request: Request) -> Response:
        def check(_: str, values: shapes.SaveSampler) -> None:
            if (values.path is None) == (values.sampling_session_seq_id is None):
                raise InvalidInput("path", "and sampling_session_seq_id: exactly one of them must be given")
            self._journal.check_new(tenant, values.model_id, values.model_dump())

        return await self._command(tenant, request, Kind.SAVE_SAMPLER, shapes.SaveSampler, check=check)

    async def _create_sampler(self, sampling: Sampling, tenant: str, request: Request) -> Response:
        values = shapes.read(shapes.CreateSampler, await self._values(request))
        sampler_id = await sampling.open(tenant, values)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def _about_sampler(self, sampling: Sampling, tenant: str, request: Request) -> Response:
        return JSONResponse(sampling.about(tenant, request.path_params["sampler_id"]))

    async def _sample(self, sampling: Sampling, tenant: str, request: Request) -> Response:
        promise = sampling.submit(tenant, await self._values(request))
        self._signs.hear(promise["request_id"])
        return JSONResponse(promise)

    async def _cancel(self, sampling: Sampling, tenant: str, request: Request) -> Response:
        sampling.cancel(tenant, str((await self._values(request)).get("request_id")))
        return Response(status_code=204)

    async def _new_model(self, tenant: str, session_id: str, number: int, kind: Kind, values: shapes.Body) -> Response:
        self._journal.check_session(tenant, session_id, takes_models=True)
        model_id = model_id_of(session_id, number)
        if model_id not in self._journal.models and self._journal.count(tenant) >= self._settings.most_models:
            most = self._settings.most_models
            what = f"is another model; this tenant has the {most} that it may have; close a ServiceClient of it"
            raise InvalidInput("model_seq_id", what)
        return await self._submit(tenant, model_id, 0, kind, canonical(values.model_dump()), lambda: None)

    async def _command(
        self,
        tenant: str,
        request: Request,
        kind: Kind,
        shape: type[shapes.Body],
        values: dict[str, Any] | None = None,
        check: Callable[[str, Any], None] | None = None,
    ) -> Response:
        """Stores a command of a model whose body is JSON. A refused command uses its seq_id up."""
        raw = await self._values(request) if values is None else values
        model_id, seq_id = raw.get("model_id"), raw.get("seq_id")
        if not isinstance(model_id, str) or type(seq_id) is not int or seq_id < 1:  # JSON's true is an int, too
            raise InvalidInput(
                "seq_id", f"is {seq_id!r} of model {model_id!r}; must be a number from 1 of a model's id"
            )

        def checked() -> None:
            read = shapes.read(shape, raw)
            if check is not None:
                check(tenant, read)

        try:
            body = canonical(shapes.read(shape, raw).model_dump())
        except InvalidInput:
            body = canonical(raw)
        return await self._submit(tenant, model_id, seq_id, kind, body, checked)

    async def _submit(
        self, tenant: str, model_id: str, seq_id: int, kind: Kind, body: bytes, check: Callable[[], None]
    ) -> Response:
        if kind is Kind.FORWARD_BACKWARD and seq_id < 1:
            raise InvalidInput("seq_id", f"is {seq_id}; must be a number from 1")
        request_id = await self._journal.submit(tenant, model_id, seq_id, kind, body, check)
        self._signs.hear(model_id)
        return JSONResponse({"request_id": request_id, "model_id": model_id})

    async def _retrieve(self, tenant: str, request: Request) -> Response:
        request_id = str((await self._values(request)).get("request_id"))
        if self._sampling is not None and ":sample:" in request_id:
            return await self._retrieve_samples(self._sampling, tenant, request_id)
        model_id, _, number = request_id.rpartition(":")
        model = self._journal.model(tenant, model_id)
        if not _NUMBER.fullmatch(number) or int(number) >= len(model.digests):
            raise NotFound(f"request {request_id[:200]!r} is not known")
        if int(number) in model.refused:
            return JSONResponse({"error": model.refused[int(number)], "category": "user"})
        sequence = await self._results.wait_for(request_id, _WAIT_SECONDS)
        if sequence is None:
            if self._results.is_gone(request_id, tenant, *model.accepted[int(number)]):
                return self._gone(request_id)
            return JSONResponse({"type": "try_again", "request_id": request_id, "queue_state": "active"})
        try:
            result = await self._log.result(sequence)
        except NotFound:
            return self._gone(request_id)
        is_message = result.kind == Kind.FORWARD_BACKWARD and result.kind != Result.FAILED
        return Response(result.body, media_type=_PROTOBUF if is_message else "application/json")

    def _gone(self, request_id: str) -> Response:
        """Answers for good: after 410 the client would send the command again, and get the same request id."""
        problem = f"{request_id}: its result is not kept, after {self._settings.result_hours * 60:g} minutes"
        problem = f"{problem}; continue with the next command, or raise result_hours"
        return JSONResponse({"error": problem, "category": "user"})

    async def _retrieve_samples(self, sampling: Sampling, tenant: str, request_id: str) -> Response:
        try:
            body = await sampling.retrieve(tenant, request_id, _WAIT_SECONDS)
        except Gone as error:
            return _error(410, error)
        except Failed as error:
            return JSONResponse({"error": str(error), "category": "user" if error.by_user else "server"})
        if body is None:
            state, reason = ("paused_capacity", _AWAY) if sampling.pauses else ("active", None)
            told = {"queue_state": state, "queue_state_reason": reason}
            return JSONResponse({"type": "try_again", "request_id": request_id, **told})
        return Response(body, media_type=_PROTOBUF)

    async def _refuse(self, name: str, reason: str, tenant: str, request: Request) -> Response:
        """Refuses by name. A command of a model uses its seq_id up, since the client counts it."""
        raw = await self._values(request)
        problem = InvalidInput(name, reason)
        model_id, seq_id = raw.get("model_id"), raw.get("seq_id")
        if isinstance(model_id, str) and type(seq_id) is int and seq_id > 0:

            def refused() -> None:
                raise problem

            await self._submit(tenant, model_id, seq_id, Kind.REFUSED, canonical(raw), refused)
        raise problem

    async def _unknown(self, tenant: str, request: Request) -> Response:
        raise NotFound(f"{request.method} {request.url.path[:200]} is not served; docs/tinker.md lists what is")

    async def _values(self, request: Request) -> dict[str, Any]:
        try:
            values = json.loads(await self._body(request) or b"{}")
        except (ValueError, RecursionError) as error:
            raise BadBody(f"body: is no JSON: {error}") from None
        if not isinstance(values, dict):
            raise BadBody("body: is no JSON object")
        return values

    async def _body(self, request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > self._most:
                raise InvalidInput("body", f"has more than {self._most} bytes; send fewer sequences at a time")
        return b"".join(parts)


def _error(status: int, error: Exception) -> JSONResponse:
    return JSONResponse({"error": str(error), "detail": str(error)}, status_code=status)
