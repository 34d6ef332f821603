"""`trinity-<service> health` checks that the service with this environment is SERVING, for containers."""

import contextlib

import grpc
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from trinity.runtime import files
from trinity.runtime.errors import InvalidInput
from trinity.runtime.rpc import CLIENT_OPTIONS
from trinity.runtime.settings import ServiceSettings, split_address
from trinity.runtime.trust import ca
from trinity.runtime.trust.identity import Identity

_SECONDS = 5.0
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def problem(settings: ServiceSettings, own: Identity | None) -> str:
    """The reason why the service with these settings is not SERVING; empty if it is. The call shows its identity.

    Raises InvalidInput if the settings name no address.
    """
    address = _address(settings)
    with contextlib.closing(_channel(address, own)) as channel:
        metadata = own.metadata() if own is not None else []
        request = health_pb2.HealthCheckRequest()
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_SECONDS, metadata=metadata)
        except grpc.RpcError as error:
            return f"{address} answers {error.code().name}: {error.details()}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return f"{address} is {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}"


def _channel(address: str, own: Identity | None) -> grpc.Channel:
    if own is None or own.tls is None:
        return grpc.insecure_channel(address, options=CLIENT_OPTIONS)
    material = own.tls.current()
    credentials = grpc.ssl_channel_credentials(material.roots, material.key, material.chain)
    # The server shows this process's own certificate, which need not be for the loopback.
    hosts = ca.hosts_of(x509.load_pem_x509_certificate(material.chain))
    options = [*CLIENT_OPTIONS, *([("grpc.ssl_target_name_override", hosts[0])] if hosts else [])]
    return grpc.secure_channel(address, credentials, options=options)


def _address(settings: ServiceSettings) -> str:
    host, port = split_address(settings.listen, "listen")
    if port:
        host = _ANYWHERE.get(host, host)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    said = files.read_json(settings.announce_file) if settings.announce_file is not None else None
    if isinstance(said, dict) and isinstance(said.get("address"), str):
        return str(said["address"])
    raise InvalidInput("listen", f"is {settings.listen}: give it a port, or name an announce_file")
