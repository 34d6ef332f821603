"""Accounts and users of NATS as signed JWTs (NATS's operator mode): a user is added without telling the server.

The folder that `init_accounts` makes is secret: account.seed signs any user. Only accounts.conf goes to the server; it
holds no secret. Format: https://docs.nats.io/running-a-nats-service/configuration/securing_nats/jwt
"""

import base64
import binascii
import hashlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nkeys

from trinity.runtime import files
from trinity.runtime.errors import InvalidInput
from trinity.runtime.names import token
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.subjects import ALL_RUNS, Grants, grants

ACCOUNTS_FILE = "accounts.conf"
_ACCOUNT = "account.seed"
_SECRET = 0o600
_KINDS = "subs data payload imports exports conn leaf mem_storage disk_storage streams consumer"
_UNLIMITED = dict.fromkeys(_KINDS.split(), -1)
# Permissions travel inside the user's JWT, in the first line that a client sends; the server's default is 4 KiB.
_LONGEST_LINE = 64 * 1024


def init_accounts(folder: Path) -> None:
    """Make operator, system account and the account of a deployment, unless the folder has them. Files are 0600."""
    if (folder / _ACCOUNT).exists():
        return
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    operator, system, account = (_new_key(p) for p in ("OPERATOR", "ACCOUNT", "ACCOUNT"))
    operator_jwt = _sign(operator, operator, "trinity", {"type": "operator", "system_account": _public(system)})
    # Named by their keys: KEDA's scaler asks the monitor for an account by its key, and then compares its name.
    accounts = {
        _public(key): _sign(operator, key, _public(key), {"type": "account", "limits": {**limits, "wildcards": True}})
        for key, limits in ((system, {**_UNLIMITED, "mem_storage": 0, "disk_storage": 0}), (account, _UNLIMITED))
    }
    preload = "\n".join(f"  {public}: {jwt}" for public, jwt in accounts.items())
    config = (
        f"max_control_line: {_LONGEST_LINE}\noperator: {operator_jwt}\nsystem_account: {_public(system)}\n"
        f"resolver: MEMORY\nresolver_preload {{\n{preload}\n}}\n"
    )
    files.write_atomic(folder / "operator.seed", operator.seed, mode=_SECRET)
    files.write_atomic(folder / "system.seed", system.seed, mode=_SECRET)
    files.write_atomic(folder / ACCOUNTS_FILE, config.encode(), mode=0o644)
    files.write_atomic(folder / _ACCOUNT, account.seed, mode=_SECRET)  # the last: what says that all are there


def account_id(folder: Path) -> str:
    """Public key of the account, by which the server names the folder of its streams."""
    return _public(_account(folder))


def revoke_users(folder: Path, users: Iterable[str]) -> None:
    """Write accounts.conf again, so that the server refuses what these users were issued until now.

    `users`: public keys. A server that reads the file again (SIGHUP) ends their connections too.
    """
    path, account = folder / ACCOUNTS_FILE, account_id(folder)
    config = path.read_text()
    jwt = config.split(f"  {account}: ")[1].split()[0]
    nats = _claims(jwt)["nats"]
    revoked = nats.get("revocations", {}) | dict.fromkeys(users, int(time.time()))
    signed = _sign(_key(folder / "operator.seed"), _account(folder), account, {**nats, "revocations": revoked})
    files.write_atomic(path, config.replace(jwt, signed).encode(), mode=0o644)


def user_key(credentials: str) -> str:
    """Public key of the user of a .creds file's text; "" for a text that holds no credentials."""
    try:
        return str(_claims(_jwt_of(credentials))["sub"])
    except (IndexError, KeyError, ValueError):
        return ""


def issue_user(folder: Path, role: Role, name: str, run: str, days: float | None = None) -> str:
    """Credentials of a user with the subjects of its role, as the text of a .creds file. `days`: until they expire.

    Raises InvalidInput for a role without NATS, a missing run, or a folder without accounts.
    """
    return issue(folder, f"{role}/{name}", grants(role, run, name), days)


def issue(folder: Path, name: str, allowed: Grants, days: float | None = None) -> str:
    """Credentials of a user with any subjects."""
    user = _new_key("USER")
    body = {
        "type": "user",
        "pub": {"allow": list(allowed.publish)},
        "sub": {"allow": list(allowed.subscribe)},
        "subs": -1,
        "data": -1,
        "payload": -1,
    }
    expires = None if days is None else time.time() + days * 86_400
    jwt = _sign(_account(folder), user, name, body, expires)
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )


def user_file(folder: Path, role: Role, name: str, run: str) -> Path:
    """A file below a folder of accounts with a user's credentials.

    It is written again only where its user has other subjects or another account: a client reads it twice as it
    connects, and what several processes write at the same time would not fit together.
    """
    path = folder / "users" / ("all" if run == ALL_RUNS else run) / f"{role}-{token(name)}.creds"
    for place in (path.parent.parent, path.parent):  # `parents` would give the upper one the usual mode
        place.mkdir(exist_ok=True, mode=0o700)
    issued = issue_user(folder, role, name, run)
    if not path.exists() or _grant(path.read_bytes().decode(errors="replace")) != _grant(issued):
        files.write_atomic(path, issued.encode(), durable=False, mode=_SECRET)
    return path


def _grant(credentials: str) -> tuple[object, ...]:
    """Which account gave which user what; nothing for a text that holds no credentials."""
    try:
        claims = _claims(_jwt_of(credentials))
        return claims["iss"], claims["name"], claims["nats"], claims.get("exp")
    except (IndexError, KeyError, ValueError):
        return ()


@dataclass(frozen=True)
class User:
    """The user in a file of credentials. `run`: whose log lines it sends; empty: of several runs, or none.

    `expires`: in seconds since 1970; 0: never.
    """

    name: str
    inbox: str = "_INBOX"
    run: str = ""
    expires: float = 0.0

    @property
    def has_expired(self) -> bool:
        return 0 < self.expires < time.time()


def read_user(path: Path) -> User:
    """The user of a .creds file. InvalidInput for a file that is none; its content is not repeated."""
    try:
        claims = _claims(_jwt_of(path.read_text()))
        allowed = claims["nats"].get("sub", {}).get("allow", [])
        own = next((one.removesuffix(".>") for one in allowed if one.startswith("_INBOX_")), User.inbox)
        lines = (one.split(".") for one in claims["nats"].get("pub", {}).get("allow", []))
        run = next((parts[1] for parts in lines if parts[2:3] == ["lines"] and parts[1] != ALL_RUNS), "")
        return User(str(claims.get("name", "")), own, run, float(claims.get("exp", 0)))
    except OSError as error:
        raise InvalidInput("nats_creds", f"{path} cannot be read: {error.strerror}") from None
    except (IndexError, KeyError, AttributeError, ValueError, TypeError, binascii.Error):
        raise InvalidInput("nats_creds", f"{path} holds no credentials of NATS") from None


def _account(folder: Path) -> Any:
    return _key(folder / _ACCOUNT)


def _key(path: Path) -> Any:
    try:
        return nkeys.from_seed(path.read_bytes())
    except OSError:
        raise InvalidInput("folder", f"{path.parent} has no {path.name} of NATS; init_accounts makes it") from None
    except (nkeys.NkeysError, ValueError):
        raise InvalidInput("folder", f"{path} holds no seed of NATS; restore it") from None


def _jwt_of(credentials: str) -> str:
    return credentials.split("-----BEGIN NATS USER JWT-----")[1].split()[0]


def _claims(jwt: str) -> dict[str, Any]:
    body = jwt.split(".")[1]
    claims: dict[str, Any] = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    return claims


def _new_key(kind: str) -> Any:
    return nkeys.from_seed(nkeys.encode_seed(os.urandom(32), getattr(nkeys, f"PREFIX_BYTE_{kind}")))


def _public(key: Any) -> str:
    return str(key.public_key.decode()).rstrip("=")


def _sign(issuer: Any, subject: Any, name: str, body: dict[str, Any], expires: float | None = None) -> str:
    """A JWT of version 2 (github.com/nats-io/jwt): ed25519 over header and claims."""
    claims: dict[str, Any] = {
        "iss": _public(issuer),
        "sub": _public(subject),
        "name": name,
        "iat": int(time.time()),
        "nats": {**body, "version": 2},
    }
    if expires is not None:
        claims["exp"] = int(expires)
    digest = hashlib.new("sha512_256", json.dumps(claims, sort_keys=True).encode()).digest()
    claims["jti"] = base64.b32encode(digest).decode().rstrip("=")
    text = f"{_part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{_part(claims)}"
    return f"{text}.{_encoded(issuer.sign(text.encode()))}"


def _part(value: dict[str, Any]) -> str:
    return _encoded(json.dumps(value, separators=(",", ":")).encode())


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
