"""The identities of a folder as Kubernetes manifests, for `kubectl apply -f -`.

Either a Secret for each identity, with the same files as in the folder; or, for cert-manager, an Issuer with the
folder's authority and a Certificate for each identity: cert-manager writes the Secrets and renews them by itself.
Where the certificates are of another issuer, as those of deploy/helm may be, the Secrets with NATS users remain.
"""

import base64
import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from trinity.cluster.certs.folder import IdentityFolder, Request
from trinity.runtime.trust import ca

_ISSUER = "trinity-ca"
_CERTIFICATE_FILES = frozenset({"tls.crt", "tls.key", "ca.crt"})


def secrets(folder: IdentityFolder, names: Sequence[str]) -> str:
    """A Secret `trinity-<name>` for each identity, to be mounted as a folder with `defaultMode: 0400`."""
    return yaml.safe_dump_all([_secret(_slug(name), folder.files_of(name)) for name in names], sort_keys=False)


def cert_manager(folder: IdentityFolder, names: Sequence[str], *, with_authority: bool) -> str:
    """A Certificate for each identity, whose Secret is `trinity-<name>`; and, once for all, the Issuer."""
    documents: list[Mapping[str, Any]] = []
    if with_authority:
        pair = folder.authority()
        documents.append(_secret(_ISSUER, {"tls.crt": pair.certificate, "tls.key": pair.key}))
        documents.append(_document("cert-manager.io/v1", "Issuer", _ISSUER, spec={"ca": {"secretName": _ISSUER}}))
    for name in names:
        spec = _certificate(name, folder.request(name))
        documents.append(_document("cert-manager.io/v1", "Certificate", _slug(name), spec=spec))
    return yaml.safe_dump_all(documents, sort_keys=False) + "---\n" + nats_secrets(folder, names)


def nats_secrets(folder: IdentityFolder, names: Sequence[str]) -> str:
    """A Secret `trinity-<name>-nats` for each identity, with all of its files but the certificate."""
    documents = []
    for name in names:
        others = {file: content for file, content in folder.files_of(name).items() if file not in _CERTIFICATE_FILES}
        documents.append(_secret(f"{_slug(name)}-nats", others))
    return yaml.safe_dump_all(documents, sort_keys=False)


def _certificate(name: str, request: Request) -> Mapping[str, Any]:
    hours = max(1, round(request.days * 24))
    found: dict[str, Any] = {
        "secretName": _slug(name),
        "commonName": name,
        "duration": f"{hours}h",
        "renewBefore": f"{max(1, hours // 3)}h" if hours > 1 else "30m",
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
        "usages": ["digital signature", "server auth", "client auth"],
        "issuerRef": {"kind": "Issuer", "name": _ISSUER},
    }
    addresses = [host for host in request.hosts if _is_address(host)]
    hosts = [host for host in request.hosts if host not in addresses]
    alternatives = {
        "uris": [ca.identity_uri(request.role, name)] if request.role else [],
        "dnsNames": hosts,
        "ipAddresses": addresses,
    }
    return found | {kind: values for kind, values in alternatives.items() if values}


def _secret(name: str, content: Mapping[str, bytes]) -> Mapping[str, Any]:
    data = {file: base64.b64encode(value).decode() for file, value in content.items()}
    return _document("v1", "Secret", name, type="Opaque", data=data)


def _document(api: str, kind: str, name: str, **fields: Any) -> Mapping[str, Any]:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name}, **fields}


def _slug(name: str) -> str:
    """A name as Kubernetes takes it: lower case, without `_`."""
    return f"trinity-{name.lower().replace('_', '-').strip('-.')}"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
