"""Accounts and users of NATS as signed JWTs (NATS's operator mode): a user is added without telling the server.

The buffer's users are in the account that has the streams. Users of other roles are in an account of their role, which
imports what the role may ask (trinity.runtime.trust.subjects).

The folder that `init_accounts` makes is secret: account.seed signs any user. Only accounts.conf goes to the server; it
holds no secret. Format: https://docs.nats.io/running-a-nats-service/configuration/securing_nats/jwt
"""

import base64
import binascii
import hashlib
import json
import os
import shutil
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
from trinity.runtime.trust.subjects import ALL_RUNS, Grants, grants, imports, outermost, table

ACCOUNTS_FILE = "accounts.conf"
_ACCOUNT = "account.seed"
_SECRET = 0o600
_KINDS = "subs data payload imports exports conn leaf mem_storage disk_storage streams consumer"
_UNLIMITED = dict.fromkeys(_KINDS.split(), -1)
# Permissions travel inside the user's JWT, in the first line that a client sends; the server's default is 4 KiB.
_LONGEST_LINE = 64 * 1024
_VERSION = 2  # of the JWTs
_EVERY_USER = "*"
_OLDER_ACCOUNTS = 2  # the system's, and one for all roles
# Requests with several answers, and the seconds of silence after which the server forgets where they go. They are
# longer than the request stays open; every request until then holds a kilobyte of the server.
_ANSWERED_BY_SEVERAL = {"$JS.API.CONSUMER.MSG.NEXT.": 60.0, "$JS.API.DIRECT.GET.": 10.0}


def init_accounts(folder: Path) -> None:
    """Make operator, system account and the accounts of the roles, unless the folder has them. Files are 0600.

    A folder of an older version, with one account for all roles, keeps it for the streams and the buffer. The users
    issued before are refused from now on.
    """
    if not (folder / _ACCOUNT).exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, kind in (("operator.seed", "OPERATOR"), ("system.seed", "ACCOUNT")):
            files.write_atomic(folder / name, _new_key(kind).seed, mode=_SECRET)
        # The last: with it all are there.
        files.write_atomic(folder / _ACCOUNT, _new_key("ACCOUNT").seed, mode=_SECRET)
    if are_current(folder):
        return
    revoked = _revoked(folder)
    if len(_preloaded(folder)) == _OLDER_ACCOUNTS:
        revoked[_EVERY_USER] = int(time.time()) - 1
        shutil.rmtree(folder / "users", ignore_errors=True)
    _write_accounts(folder, _accounts(folder, revoked))


def are_current(folder: Path) -> bool:
    """Returns True if accounts.conf has the accounts of this version, with the subjects that their roles use."""
    revoked, there = _revoked(folder), _preloaded(folder)
    wanted = _accounts(folder, revoked)
    return {key: _claims(jwt)["nats"] for key, jwt in there.items()} == {
        _public(key): {**body, "version": _VERSION} for key, body in wanted
    }


def account_id(folder: Path) -> str:
    """Public key of the account that has the streams, by which the server names their folder."""
    return _public(_account(folder, Role.BUFFER))


def revoke_users(folder: Path, users: Iterable[str]) -> None:
    """Write accounts.conf again, so that the server refuses what these users were issued until now.

    `users`: public keys. A server that reads the file again (SIGHUP) ends their connections too.
    """
    accounts = _accounts(folder, _revoked(folder) | dict.fromkeys(users, int(time.time())))
    there = _preloaded(folder)  # a folder of an older version stays as it is
    _write_accounts(folder, [(key, body) for key, body in accounts if _public(key) in there])


def _accounts(folder: Path, revoked: dict[str, int]) -> list[tuple[Any, dict[str, Any]]]:
    """Key and claims of every account. Every account refuses a revoked user; only one has issued it."""
    streams = _account(folder, Role.BUFFER)
    without_streams: dict[str, Any] = {**_UNLIMITED, "mem_storage": 0, "disk_storage": 0, "wildcards": True}
    refuses = {"revocations": revoked} if revoked else {}
    roles = {role: imports(role) for role in table() if role is not Role.BUFFER}
    exported = outermost(subject for subjects in roles.values() for subject in subjects)
    exports = [{"name": one, "subject": one, "type": "service", **_answers(one)} for one in exported]
    found: list[tuple[Any, dict[str, Any]]] = [
        (_key(folder / "system.seed"), {"type": "account", "limits": without_streams}),
        (streams, {"type": "account", "limits": {**_UNLIMITED, "wildcards": True}, "exports": exports, **refuses}),
    ]
    for role, subjects in roles.items():
        account = {"account": _public(streams), "type": "service"}
        imported = [{"name": one, "subject": one, "local_subject": one, **account} for one in subjects]
        body = {"type": "account", "limits": without_streams, "imports": imported, **refuses}
        found.append((_account(folder, role), body))
    return found


def _answers(subject: str) -> dict[str, Any]:
    """How many messages answer a request: one, or several."""
    seconds = next((silence for prefix, silence in _ANSWERED_BY_SEVERAL.items() if subject.startswith(prefix)), 0.0)
    if not seconds:
        return {"response_type": "Singleton"}
    return {"response_type": "Stream", "response_threshold": int(seconds * 1e9)}


def _write_accounts(folder: Path, accounts: list[tuple[Any, dict[str, Any]]]) -> None:
    operator, system = _key(folder / "operator.seed"), _public(_key(folder / "system.seed"))
    there = (folder / ACCOUNTS_FILE).read_text().splitlines() if (folder / ACCOUNTS_FILE).exists() else []
    own = _sign(operator, operator, "trinity", {"type": "operator", "system_account": system})
    # A server that reads the file again takes no other operator, a signature of another time included.
    operator_line = next((line for line in there if line.startswith("operator: ")), f"operator: {own}")
    # Named by their keys: KEDA's scaler asks the monitor for an account by its key, and then compares its name.
    signed = [(_public(key), _sign(operator, key, _public(key), body)) for key, body in accounts]
    preload = "\n".join(f"  {public}: {jwt}" for public, jwt in signed)
    config = (
        f"max_control_line: {_LONGEST_LINE}\n{operator_line}\nsystem_account: {system}\n"
        f"resolver: MEMORY\nresolver_preload {{\n{preload}\n}}\n"
    )
    files.write_atomic(folder / ACCOUNTS_FILE, config.encode(), mode=0o644)


def _preloaded(folder: Path) -> dict[str, str]:
    """The JWT of each account in accounts.conf, by its key; empty without the file."""
    if not (folder / ACCOUNTS_FILE).exists():
        return {}
    lines = (folder / ACCOUNTS_FILE).read_text().partition("resolver_preload {\n")[2].splitlines()
    pairs = (line.strip().partition(": ") for line in lines)
    return {key: jwt for key, colon, jwt in pairs if colon}


def _revoked(folder: Path) -> dict[str, int]:
    """Users that are refused, with the time until which they were issued."""
    streams = _preloaded(folder).get(account_id(folder))
    return dict(_claims(streams)["nats"].get("revocations", {})) if streams else {}


def user_key(credentials: str) -> str:
    """Public key of the user of a .creds file's text; "" for a text that holds no credentials."""
    try:
        return str(_claims(_jwt_of(credentials))["sub"])
    except (IndexError, KeyError, ValueError):
        return ""


def issue_user(folder: Path, role: Role, name: str, run: str, days: float | None = None) -> str:
    """Credentials of a user with the subjects of its role, as the text of a .creds file. `days`: until they expire.

    Raises InvalidInput for a role without NATS, a missing run, or a folder without the accounts of this version.
    """
    if not are_current(folder):
        problem = "has accounts of another version; the next start of the run, or `trinity certs rotate`, renews them"
        raise InvalidInput("folder", f"{folder} {problem}")
    return issue(folder, f"{role}/{name}", grants(role, run, name), days, role)


def issue(folder: Path, name: str, allowed: Grants, days: float | None = None, role: Role = Role.BUFFER) -> str:
    """Credentials of a user with any subjects, in the account of a role."""
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
    jwt = _sign(_account(folder, role), user, name, body, expires)
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


def _account(folder: Path, role: Role) -> Any:
    """The key of a role's account. All but the buffer's are derived from the buffer's, whose file signs any user."""
    streams = _key(folder / _ACCOUNT)
    return streams if role is Role.BUFFER else _seeded("ACCOUNT", hashlib.sha256(streams.seed + role.encode()).digest())


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
    return _seeded(kind, os.urandom(32))


def _seeded(kind: str, seed: bytes) -> Any:
    return nkeys.from_seed(nkeys.encode_seed(seed, getattr(nkeys, f"PREFIX_BYTE_{kind}")))


def _public(key: Any) -> str:
    return str(key.public_key.decode()).rstrip("=")


def _sign(issuer: Any, subject: Any, name: str, body: dict[str, Any], expires: float | None = None) -> str:
    """A JWT of version 2 (github.com/nats-io/jwt): ed25519 over header and claims."""
    claims: dict[str, Any] = {
        "iss": _public(issuer),
        "sub": _public(subject),
        "name": name,
        "iat": int(time.time()),
        "nats": {**body, "version": _VERSION},
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
