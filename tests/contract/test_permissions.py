"""Every pair of a role and a gRPC method is allowed or denied as `trinity.runtime.trust.roles` says, on a real server.

The server has all services of all protos. Their handlers answer with an empty message, so that OK means allowed.
"""

import importlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from support.servers.service import ServiceProcess
from trinity.runtime import rpc
from trinity.runtime.trust.gate import Gate
from trinity.runtime.trust.identity import Identity
from trinity.runtime.trust.roles import METHODS, Role
from trinity.runtime.trust.tokens import KnownTokens, make_tokens

pytestmark = pytest.mark.core

OK, DENIED, UNKNOWN = grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED
HEALTH = "/grpc.health.v1.Health/Check"
LIST = "/grpc.health.v1.Health/List"
PAUSE = "/trinity.api.trainer.v1.TrainerService/Pause"
ATTACH = "/trinity.api.environment.v1.EnvironmentService/Attach"
PROTO = Path(__file__).parents[2] / "proto"


def _of_protos() -> dict[str, MethodDescriptor]:
    """Returns every method of every proto of the repository, by its full name."""
    modules = [str(path.relative_to(PROTO).with_suffix("")) for path in sorted(PROTO.glob("trinity/**/*.proto"))]
    files = [importlib.import_module(name.replace("/", ".") + "_pb2").DESCRIPTOR for name in modules]
    return dict(_methods(files))


def _methods(files: list[Any]) -> Iterator[tuple[str, MethodDescriptor]]:
    for file in files:
        for service in file.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}", method


OURS = _of_protos()
OTHERS = dict(_methods([health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR]))
ALL = OURS | OTHERS


def _handler(method: MethodDescriptor) -> grpc.RpcMethodHandler:
    async def one(request: Any, context: Any) -> bytes:
        return b""

    async def many(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield b""

    streams_in, streams_out = method.client_streaming, method.server_streaming
    kind = f"{'stream' if streams_in else 'unary'}_{'stream' if streams_out else 'unary'}"
    return getattr(grpc, f"{kind}_rpc_method_handler")(many if streams_out else one, _plain, _plain)


def _plain(data: bytes) -> bytes:
    return data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokens(tmp_path / "identity")
    return tmp_path / "identity"


@pytest.fixture
async def address(folder: Path) -> AsyncIterator[str]:
    """Serves all services in one server that requires identities."""
    server = grpc.aio.server(interceptors=[rpc.Edge(Gate(KnownTokens(folder)))], options=rpc.SERVER_OPTIONS)
    for service in {path.split("/")[1] for path in OURS}:
        handlers = {m.name: _handler(m) for path, m in OURS.items() if path.split("/")[1] == service}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    await checks.set("", health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection([reflection.SERVICE_NAME], server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(grace=0)


async def _answer(channel: grpc.aio.Channel, path: str) -> tuple[grpc.StatusCode, str]:
    """Returns the code and text that answer an empty message; OK after the first message of a stream.

    Asks again where grpc.aio lost the server's status: it was writing while the server refused the call.
    """
    code, reason = await _answered(channel, path)
    while (code, reason) == (grpc.StatusCode.INTERNAL, "Internal error from Core"):
        code, reason = await _answered(channel, path)
    return code, reason


async def _answered(channel: grpc.aio.Channel, path: str) -> tuple[grpc.StatusCode, str]:
    method = ALL[path]
    streams_in, streams_out = method.client_streaming, method.server_streaming
    kind = f"{'stream' if streams_in else 'unary'}_{'stream' if streams_out else 'unary'}"
    call = getattr(channel, kind)(path, _plain, _plain)(iter([b""]) if streams_in else b"", timeout=20)
    try:
        await (call.read() if streams_out else call)
    except grpc.aio.AioRpcError as error:
        return error.code(), str(error.details())
    finally:
        call.cancel()
    return OK, ""


async def _shown(address: str, path: str, token: str) -> tuple[grpc.StatusCode, str]:
    """Returns the code and text that answer a call with this token."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(path, _plain, _plain)(b"", metadata=[("authorization", token)], timeout=20)
        return await call.code(), str(await call.details())


def test_the_table_has_every_method_of_every_proto_and_no_other() -> None:
    assert len(OURS) > 30
    assert METHODS.keys() == ALL.keys()
    assert all(roles for roles in METHODS.values())


@pytest.mark.parametrize("role", Role)
async def test_a_role_may_call_what_the_table_says_and_nothing_else(address: str, folder: Path, role: Role) -> None:
    async with rpc.channel(address, identity=Identity(role, folder)) as channel:
        answers = {path: await _answer(channel, path) for path in ALL}
    assert answers.pop(LIST)[0] is grpc.StatusCode.UNIMPLEMENTED, "all roles may call it, and gRPC does not have it"
    assert {path for path, (code, _) in answers.items() if code is OK} == {p for p in answers if role in METHODS[p]}
    denied = {path: said for path, said in answers.items() if said[0] is not OK}
    for path, (code, reason) in denied.items():
        assert code is DENIED, f"{path}: {reason}"
        assert f"role {role} may not call {path[1:]}" in reason, "it names role and method"


async def test_no_method_answers_a_caller_without_identity(address: str) -> None:
    async with rpc.channel(address, identity=None) as channel:
        answers = {path: (await _answer(channel, path))[0] for path in ALL}
    assert answers.pop(ATTACH) is OK  # the service itself checks the offer's token
    assert set(answers.values()) == {UNKNOWN}


@pytest.mark.parametrize("token", ["Bearer wrong", "Bearer ", "", "wrong", "Bearer " + "x" * 5000])
async def test_a_token_of_another_run_is_none(address: str, token: str) -> None:
    code, reason = await _shown(address, HEALTH, token)
    assert code is UNKNOWN
    assert token not in reason or not token.removeprefix("Bearer ")


async def test_a_wrong_token_does_not_pass_where_none_is_demanded(address: str, folder: Path) -> None:
    assert (await _shown(address, ATTACH, "Bearer wrong"))[0] is UNKNOWN
    assert (await _shown(address, ATTACH, _bearer(folder, Role.OPERATOR)))[0] is DENIED


async def test_a_revoked_token_is_none_and_a_replaced_one_is_read_again(address: str, folder: Path) -> None:
    old, other = _bearer(folder, Role.OPERATOR), _bearer(folder, Role.READER)
    async with rpc.channel(address, identity=Identity(Role.OPERATOR, folder)) as channel:
        assert (await _answer(channel, PAUSE))[0] is OK
        (folder / "tokens/operator").unlink()
        assert (await _shown(address, PAUSE, old))[0] is UNKNOWN
        assert (await _answer(channel, PAUSE))[0] is UNKNOWN
        assert (await _shown(address, HEALTH, other))[0] is OK, "the others stay"
        (folder / "tokens/new").write_text("another-token")
        (folder / "tokens/new").rename(folder / "tokens/operator")
        assert (await _shown(address, PAUSE, old))[0] is UNKNOWN
        assert (await _answer(channel, PAUSE))[0] is OK


async def test_a_health_check_of_an_unknown_service_keeps_its_own_answer(address: str, folder: Path) -> None:
    async with rpc.channel(address, identity=Identity(Role.READER, folder)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            request = health_pb2.HealthCheckRequest(service="none")
            await health_pb2_grpc.HealthStub(channel).Check(request, timeout=20)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_tokens_are_secret_differ_and_stay(folder: Path) -> None:
    tokens = {role: (folder / "tokens" / role).read_text() for role in Role}
    assert len(set(tokens.values())) == len(Role)
    assert min(map(len, tokens.values())) >= 43, "256 bits"
    modes = {path.stat().st_mode & 0o777 for path in (folder / "tokens").iterdir()}
    assert (modes, (folder / "tokens").stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == ({0o600}, 0o700, 0o700)
    make_tokens(folder)
    assert tokens == {role: (folder / "tokens" / role).read_text() for role in Role}


def test_a_service_with_identities_answers_those_who_have_one(folder: Path, tmp_path: Path) -> None:
    service = ServiceProcess("environment", tmp_path, IDENTITY_FOLDER=str(folder), ATTACH_TOKEN="secret").start()
    try:
        with rpc.blocking_channel(service.address, identity=None) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(HEALTH, _plain, _plain)(b"", timeout=20)
            assert refused.value.code() is UNKNOWN
            with pytest.raises(grpc.RpcError) as refused:
                list(channel.stream_stream(ATTACH, _plain, _plain)(iter([b"\x0a\x02\x08\x01"]), timeout=20))
            assert (refused.value.code(), "offer" in refused.value.details()) == (UNKNOWN, True)
        with rpc.blocking_channel(service.address, identity=Identity(Role.EXPLORER, folder)) as channel:
            describe = "/trinity.api.environment.v1.EnvironmentService/Describe"
            assert channel.unary_unary(describe, _plain, _plain)(b"", timeout=20)
    finally:
        service.stop()
    text = service.log_file.read_text() + service.log_file.with_suffix(".out").read_text()
    assert not [role for role in Role if (folder / "tokens" / role).read_text() in text], "a token is in the log"


def test_a_service_without_its_own_token_names_the_file(folder: Path, tmp_path: Path) -> None:
    (folder / "tokens/environment").unlink()
    service = ServiceProcess("environment", tmp_path, IDENTITY_FOLDER=str(folder)).start(wait_seconds=0)
    try:
        assert service.wait(60) == 2
        assert f"TRINITY_ENVIRONMENT_IDENTITY_FOLDER: {folder} has no tokens/environment" in service.tail()
    finally:
        service.kill()


@pytest.mark.parametrize(("settings", "ends"), [({}, True), ({"INSECURE": "1"}, False)])
def test_without_identities_a_service_is_for_this_machine_alone(
    tmp_path: Path, settings: dict[str, str], ends: bool
) -> None:
    service = ServiceProcess("environment", tmp_path, **settings)
    service.address = service.address.replace("127.0.0.1", "0.0.0.0")
    service._environment["TRINITY_ENVIRONMENT_LISTEN"] = service.address
    service.start(wait_seconds=0)
    try:
        if ends:
            assert service.wait(60) == 2
            assert "listen: is 0.0.0.0" in service.tail()
        else:
            service.wait_serving(60)
            assert "service.open" in service.tail()
    finally:
        service.kill()


def _bearer(folder: Path, role: Role) -> str:
    return f"Bearer {(folder / 'tokens' / role).read_text()}"
