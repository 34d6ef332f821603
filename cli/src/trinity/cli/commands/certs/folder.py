"""The folder that `trinity certs` keeps: the authority, and a folder with the files of each identity.

ca/ca.crt, ca/ca.key            the authority; its key makes any identity, so no service mounts it
ca/nats/                        keys of NATS's operator and account, as secret as ca.key (trust/nats_users.py)
ca/issued.json                  what was issued, so that `rotate` can issue it again
<name>/tls.crt, tls.key, ca.crt what one process gets; the names are those of cert-manager's Secrets
<name>/nats.creds               its NATS user, with the subjects of its role in one run
nats/accounts.conf              what nats-server includes, to know whose users are its own
nats/account                    public key of the account, for programs that ask nats-server's monitor about it
"""

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cryptography import x509

from trinity.cli.errors import RunError
from trinity.runtime import files
from trinity.runtime.trust import ca, nats_users
from trinity.runtime.trust.nats_users import ACCOUNTS_FILE
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.subjects import ALL_RUNS

AUTHORITY = "ca"
AUTHORITY_DAYS = 3650.0
NATS_SERVER = "nats"
_SECRET, _PUBLIC = 0o600, 0o644


@dataclass(frozen=True)
class Request:
    """What was asked for when an identity was issued. Without a role it is a host's alone: that of nats-server."""

    role: str
    hosts: tuple[str, ...]
    days: float
    run: str = ""  # id of the run in which it uses NATS; empty: it does not


@dataclass(frozen=True)
class Row:
    """A certificate of the folder, as `trinity certs show` lists it."""

    name: str
    role: str
    hosts: list[str]
    expires_seconds: float  # Unix time
    days_left: float
    state: str  # valid, old CA, expires soon, expired
    old_ca: bool


class IdentityFolder:
    """Reads and writes the folder."""

    def __init__(self, path: Path) -> None:
        """RunError unless `trinity certs init` made the folder."""
        self.path = path
        record = files.read_json(path / AUTHORITY / "issued.json")
        if record is None or not (path / AUTHORITY / "ca.key").is_file():
            raise RunError(f"{path} holds no certificate authority; `trinity certs init --folder {path}` makes one", 2)
        self._issued = {name: Request(**{**one, "hosts": tuple(one["hosts"])}) for name, one in record.items()}

    @classmethod
    def create(cls, path: Path, days: float = AUTHORITY_DAYS) -> "IdentityFolder":
        """A new folder with a new authority. RunError if there is one."""
        if (path / AUTHORITY / "ca.key").exists():
            raise RunError(f"{path} has an authority already; `trinity certs issue` adds to it, `rotate` renews it", 2)
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write_authority(path, ca.make_authority(days), b"")
        nats_users.init_accounts(path / AUTHORITY / "nats")
        files.write_json(path / AUTHORITY / "issued.json", {})
        return cls(path)

    @property
    def names(self) -> list[str]:
        return sorted(self._issued)

    def request(self, name: str) -> Request:
        """RunError if no such identity was issued."""
        if name not in self._issued:
            raise RunError(f"{name} was not issued from {self.path}; there are {', '.join(self.names) or 'none'}", 2)
        return self._issued[name]

    def files_of(self, name: str) -> dict[str, bytes]:
        """What an identity's process gets, by file name."""
        self.request(name)
        return {path.name: path.read_bytes() for path in sorted((self.path / name).iterdir()) if path.is_file()}

    def issue(self, name: str, request: Request) -> None:
        """Write an identity's files. RunError if the name has another role already; InvalidInput for bad values."""
        if name == AUTHORITY:
            raise RunError(f"--name: is {name!r}, which is the folder of the authority; choose another", 2)
        known = self._issued.get(name)
        if known is not None and known.role != request.role:
            raise RunError(f"--name: {name} is the name of a {known.role or 'host'} already; choose another", 2)
        accounts = self.path / AUTHORITY / "nats"
        pair = ca.issue(self.authority(), name, role=request.role, hosts=request.hosts, days=request.days)
        folder = self.path / name
        folder.mkdir(mode=0o700, exist_ok=True)
        files.write_atomic(folder / "ca.crt", self._bundle(), mode=_PUBLIC)
        files.write_atomic(folder / "tls.key", pair.key, mode=_SECRET)
        files.write_atomic(folder / "tls.crt", pair.certificate, mode=_PUBLIC)
        if not request.role:
            files.write_atomic(folder / ACCOUNTS_FILE, (accounts / ACCOUNTS_FILE).read_bytes(), mode=_PUBLIC)
            files.write_atomic(folder / "account", nats_users.account_id(accounts).encode(), mode=_PUBLIC)
        elif request.run and request.role != Role.PROVIDER:
            run = ALL_RUNS if request.role == Role.SYNC else request.run
            user = nats_users.issue_user(accounts, Role(request.role), name, run, request.days)
            files.write_atomic(folder / "nats.creds", user.encode(), mode=_SECRET)
        self._issued[name] = request
        issued = {one: asdict(self._issued[one]) for one in self.names}
        files.write_json(self.path / AUTHORITY / "issued.json", issued)

    def authority(self) -> ca.Pair:
        """The newest authority: the first of the bundle."""
        newest = _certificates(self._bundle())[0]
        return ca.Pair(ca.pem(newest), (self.path / AUTHORITY / "ca.key").read_bytes())

    def add_authority(self, days: float = AUTHORITY_DAYS) -> None:
        """A new authority for what is issued from now on. Identities trust it beside the old ones, and change nothing
        else: first the bundle must be everywhere, then certificates of the new authority may come."""
        _write_authority(self.path, ca.make_authority(days), self._bundle())
        self._spread_bundle()

    def drop_old_authorities(self) -> None:
        """Trust the newest authority alone. RunError while an identity has a certificate of an older one."""
        old = [row.name for row in self.rows() if row.old_ca]
        if old:
            raise RunError(f"{', '.join(old)}: certificates of an old CA; `trinity certs rotate` first", 2)
        files.write_atomic(self.path / AUTHORITY / "ca.crt", self.authority().certificate, mode=_PUBLIC)
        self._spread_bundle()

    def rows(self) -> list[Row]:
        """The authority, then all identities by name."""
        newest = _certificates(self._bundle())[0]
        found = [_row(AUTHORITY, "", newest, newest)]
        for name in self.names:
            certificate = _certificates((self.path / name / "tls.crt").read_bytes())[0]
            found.append(_row(name, self._issued[name].role, certificate, newest))
        return found

    def _bundle(self) -> bytes:
        return (self.path / AUTHORITY / "ca.crt").read_bytes()

    def _spread_bundle(self) -> None:
        for name in self.names:
            files.write_atomic(self.path / name / "ca.crt", self._bundle(), mode=_PUBLIC)


def _write_authority(path: Path, pair: ca.Pair, older: bytes) -> None:
    folder = path / AUTHORITY
    folder.mkdir(mode=0o700, exist_ok=True)
    files.write_atomic(folder / "ca.key", pair.key, mode=_SECRET)
    files.write_atomic(folder / "ca.crt", pair.certificate + older, mode=_PUBLIC)


def _certificates(bundle: bytes) -> Sequence[x509.Certificate]:
    return x509.load_pem_x509_certificates(bundle)


def _row(name: str, role: str, certificate: x509.Certificate, newest: x509.Certificate) -> Row:
    expires = certificate.not_valid_after_utc
    left = (expires - datetime.datetime.now(datetime.UTC)).total_seconds() / 86_400
    old = certificate.issuer != newest.subject
    state = "expires soon" if ca.expires_soon(certificate) else "old CA" if old else "valid"
    return Row(name, role, ca.hosts_of(certificate), expires.timestamp(), left, state if left > 0 else "expired", old)


def role_or_host(text: str) -> str:
    """The role that a command names; "" for nats-server, which has none. RunError for another word."""
    if text == NATS_SERVER:
        return ""
    if text not in set(Role):
        raise RunError(f"ROLE: is {text!r}, must be one of {', '.join(Role)}, or {NATS_SERVER} for nats-server", 2)
    return text
