"""The folder that `trinity certs` keeps: the authority, and a folder with the files of each identity.

ca/ca.crt, ca/ca.key            the authority; its key makes any identity, so no service mounts it
ca/nats/                        keys of NATS's operator and account, as secret as ca.key (trust/nats_users.py)
ca/issued.json                  what was issued, so that `rotate` can issue it again
ca/earlier/<name>.json          what its files held before, for `revoke`
ca/revoked                      serial numbers of revoked certificates
<name>/tls.crt, tls.key, ca.crt what one process gets; the names are those of cert-manager's Secrets
<name>/revoked                  a copy of ca/revoked
<name>/nats.creds               its NATS user, with the subjects of its role in one run
nats/accounts.conf              what nats-server includes, to know whose users are its own
nats/account                    public key of the account, for programs that ask nats-server's monitor about it
"""

import datetime
import time
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from pydantic import TypeAdapter, ValidationError

from trinity.reading.errors import RunError
from trinity.runtime import files
from trinity.runtime.errors import InvalidInput
from trinity.runtime.trust import ca, nats_users, revoked
from trinity.runtime.trust.nats_users import ACCOUNTS_FILE
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.subjects import ALL_RUNS

AUTHORITY = "ca"
AUTHORITY_DAYS = 3650.0
NATS_SERVER = "nats"
_SECRET, _PUBLIC = 0o600, 0o644
_SHORTEST_SERIAL = 16  # characters: shorter ones are rather misspelt names

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """The request by which an identity was issued. Without a role it only serves a host: nats-server."""

    role: str
    hosts: tuple[str, ...]
    days: float
    run: str = ""  # id of the run in which it uses NATS; empty: it does not


@dataclass(frozen=True)
class Issued:
    """Former contents of an identity's files."""

    serial: str  # of the certificate, 40 hex digits
    user: str  # public key of its NATS user; empty: it had none
    until: float  # when both expire, Unix time


@dataclass(frozen=True)
class Row:
    """A certificate of the folder, as `trinity certs show` lists it."""

    name: str
    role: str
    hosts: list[str]
    expires_seconds: float  # Unix time
    days_left: float
    state: str  # valid, old CA, expires soon, expired, revoked
    old_ca: bool
    serial: str  # 40 hex digits


_REQUESTS, _EARLIER = TypeAdapter(dict[str, Request]), TypeAdapter(list[Issued])


class IdentityFolder:
    """Reads and writes the folder."""

    def __init__(self, path: Path) -> None:
        """RunError unless `trinity certs init` made the folder."""
        self.path = path
        record = path / AUTHORITY / "issued.json"
        if not record.is_file() or not (path / AUTHORITY / "ca.key").is_file():
            raise RunError(f"{path} holds no certificate authority; `trinity certs init --folder {path}` makes one", 2)
        self._issued = _parsed(record, _REQUESTS)

    @classmethod
    def create(cls, path: Path, days: float = AUTHORITY_DAYS) -> "IdentityFolder":
        """A new folder with a new authority. RunError if there is one. Replaces what a killed command left."""
        if (path / AUTHORITY / "issued.json").exists():
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
        """Returns the files for the process of an identity, by name."""
        self.request(name)
        return {path.name: path.read_bytes() for path in sorted((self.path / name).iterdir()) if path.is_file()}

    def issue(self, name: str, request: Request) -> None:
        """Write an identity's files. RunError if the name has another role already; InvalidInput for bad values."""
        if name == AUTHORITY or (name == NATS_SERVER and request.role):
            of = "the authority" if name == AUTHORITY else "nats-server"
            raise RunError(f"--name: is {name!r}, which is the folder of {of}; choose another", 2)
        known = self._issued.get(name)
        if known is not None and known.role != request.role:
            raise RunError(f"--name: {name} is the name of a {known.role or 'host'} already; choose another", 2)
        accounts = self.path / AUTHORITY / "nats"
        pair = ca.issue(self.authority(), name, role=request.role, hosts=request.hosts, days=request.days)
        user = self._user(name, request)
        folder = self.path / name
        earlier, now = self._ever(name), time.time()
        self._earlier(name).parent.mkdir(mode=0o700, exist_ok=True)
        files.write_json(self._earlier(name), [asdict(one) for one in earlier if one.until > now])
        folder.mkdir(mode=0o700, exist_ok=True)
        files.write_atomic(folder / "ca.crt", self._bundle(), mode=_PUBLIC)
        files.write_atomic(folder / revoked.FILE, self._revoked().encode(), mode=_PUBLIC)
        files.write_atomic(folder / "tls.key", pair.key, mode=_SECRET)
        files.write_atomic(folder / "tls.crt", pair.certificate, mode=_PUBLIC)
        if not request.role:
            files.write_atomic(folder / ACCOUNTS_FILE, (accounts / ACCOUNTS_FILE).read_bytes(), mode=_PUBLIC)
            files.write_atomic(folder / "account", nats_users.account_id(accounts).encode(), mode=_PUBLIC)
        elif user:
            files.write_atomic(folder / "nats.creds", user.encode(), mode=_SECRET)
        self._issued[name] = request
        files.write_json(self.path / AUTHORITY / "issued.json", {one: asdict(self._issued[one]) for one in self.names})

    def renew_accounts(self) -> None:
        """Make the NATS accounts that a folder of an older version lacks. The users issued before are refused."""
        nats_users.init_accounts(self.path / AUTHORITY / "nats")

    def _user(self, name: str, request: Request) -> str:
        """Its credentials of NATS; empty if it uses none."""
        if not request.run or request.role in ("", Role.PROVIDER):
            return ""
        run = ALL_RUNS if request.role == Role.SYNC else request.run
        return nats_users.issue_user(self.path / AUTHORITY / "nats", Role(request.role), name, run, request.days)

    def revoke(self, targets: Sequence[str]) -> list[str]:
        """Refuse certificates before they expire: all that a name was ever issued, or the one with a serial number.

        Their NATS users too, as far as the folder knows them. Returns what was revoked, one sentence for each.
        RunError for a target that is neither.
        """
        found = [one for target in targets for one in self._sought(target)]
        numbers = [(int(one.serial, 16), f"{name}, until {_date(one.until)}") for name, one in found]
        text = revoked.add(self._revoked(), numbers)
        files.write_atomic(self.path / AUTHORITY / revoked.FILE, text.encode(), mode=_PUBLIC)
        for name in self.names:
            files.write_atomic(self.path / name / revoked.FILE, text.encode(), mode=_PUBLIC)
        if users := [one.user for _, one in found if one.user]:
            self._revoke_users(users)
        return [f"{one.serial} of {name}" for name, one in found]

    def _revoke_users(self, users: Sequence[str]) -> None:
        accounts = self.path / AUTHORITY / "nats"
        nats_users.revoke_users(accounts, users)
        for name, request in self._issued.items():
            if not request.role:
                content = (accounts / ACCOUNTS_FILE).read_bytes()
                files.write_atomic(self.path / name / ACCOUNTS_FILE, content, mode=_PUBLIC)

    def _sought(self, target: str) -> list[tuple[str, Issued]]:
        """Returns the issued files that a target of `revoke` stands for, each with its identity's name."""
        if target in self._issued:
            return [(target, one) for one in self._ever(target)]
        try:
            serial = f"{revoked.parse_serial(target):040x}"
        except InvalidInput:
            serial = ""
        if len(target) < _SHORTEST_SERIAL or not serial:
            problem = f"is no identity of {self.path} ({', '.join(self.names)}) and no serial number of a certificate"
            raise RunError(f"{target} {problem}; `trinity certs show --json` has them", 2)
        known = [(name, one) for name in self.names for one in self._ever(name) if one.serial == serial]
        return known or [("a certificate issued elsewhere", Issued(serial, "", 0.0))]

    def _ever(self, name: str) -> list[Issued]:
        """Returns everything that was issued to a name; the current files come last."""
        folder = self.path / name
        if not (folder / "tls.crt").is_file():
            return []
        certificate = _certificates(folder / "tls.crt")[0]
        credentials = folder / "nats.creds"
        user = nats_users.user_key(credentials.read_text(errors="replace")) if credentials.is_file() else ""
        now = Issued(f"{certificate.serial_number:040x}", user, certificate.not_valid_after_utc.timestamp())
        earlier = _parsed(self._earlier(name), _EARLIER) if self._earlier(name).is_file() else []
        return [*(one for one in earlier if one != now), now]

    def _earlier(self, name: str) -> Path:
        """A file of each name: jobs of one run may issue different ones at the same time."""
        return self.path / AUTHORITY / "earlier" / f"{name}.json"

    def _revoked(self) -> str:
        path = self.path / AUTHORITY / revoked.FILE
        try:
            return path.read_text() if path.exists() else revoked.add("", ())
        except UnicodeDecodeError:
            raise RunError(f"{path}: is no text; restore it", 2) from None

    def authority(self) -> ca.Pair:
        """The newest authority: the first of the bundle."""
        newest = _certificates(self._bundle_file)[0]
        return ca.Pair(ca.pem(newest), (self.path / AUTHORITY / "ca.key").read_bytes())

    def add_authority(self, days: float = AUTHORITY_DAYS) -> None:
        """Makes a new authority, which issues from now on. Identities trust old and new ones, and change nothing
        else: the bundle must be everywhere before certificates of the new authority come."""
        _write_authority(self.path, ca.make_authority(days), self._bundle())
        self._spread_bundle()

    def drop_old_authorities(self) -> None:
        """Trusts only the newest authority. Raises RunError while an identity in use is of an older one."""
        old = [row.name for row in self.rows() if row.old_ca and row.state != "revoked"]
        if old:
            raise RunError(f"{', '.join(old)}: certificates of an old CA; `trinity certs rotate` first", 2)
        files.write_atomic(self.path / AUTHORITY / "ca.crt", self.authority().certificate, mode=_PUBLIC)
        self._spread_bundle()

    def rows(self) -> list[Row]:
        """The authority, then all identities by name."""
        newest, refused = _certificates(self._bundle_file)[0], revoked.parse(self._revoked())
        found = [_row(AUTHORITY, "", newest, newest, refused)]
        for name in self.names:
            certificate = _certificates(self.path / name / "tls.crt")[0]
            found.append(_row(name, self._issued[name].role, certificate, newest, refused))
        return found

    @property
    def _bundle_file(self) -> Path:
        return self.path / AUTHORITY / "ca.crt"

    def _bundle(self) -> bytes:
        return self._bundle_file.read_bytes()

    def _spread_bundle(self) -> None:
        for name in self.names:
            files.write_atomic(self.path / name / "ca.crt", self._bundle(), mode=_PUBLIC)


def _write_authority(path: Path, pair: ca.Pair, older: bytes) -> None:
    folder = path / AUTHORITY
    folder.mkdir(mode=0o700, exist_ok=True)
    files.write_atomic(folder / "ca.key", pair.key, mode=_SECRET)
    files.write_atomic(folder / "ca.crt", pair.certificate + older, mode=_PUBLIC)


def _parsed(file: Path, content: TypeAdapter[T]) -> T:
    """RunError for a file that holds something else."""
    try:
        return content.validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        at = ".".join(map(str, first["loc"]))
        raise RunError(f"{file}: {at}{': ' if at else ''}{first['msg']}; restore it", 2) from None


def _certificates(file: Path) -> Sequence[x509.Certificate]:
    """RunError for a file that is missing or holds none."""
    try:
        return x509.load_pem_x509_certificates(file.read_bytes())
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else "holds no certificate"
        raise RunError(f"{file}: {problem}; restore it", 2) from None


def _row(name: str, role: str, certificate: x509.Certificate, newest: x509.Certificate, refused: Container[int]) -> Row:
    expires, serial = certificate.not_valid_after_utc, certificate.serial_number
    left = (expires - datetime.datetime.now(datetime.UTC)).total_seconds() / 86_400
    old = certificate.issuer != newest.subject
    state = "expires soon" if ca.expires_soon(certificate) else "old CA" if old else "valid"
    state = "revoked" if serial in refused else state if left > 0 else "expired"
    return Row(name, role, ca.hosts_of(certificate), expires.timestamp(), left, state, old, f"{serial:040x}")


def _date(seconds: float) -> str:
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d}" if seconds else "its end"


def role_or_host(text: str) -> str:
    """The role that a command names; "" for nats-server, which has none. RunError for another word."""
    if text == NATS_SERVER:
        return ""
    if text not in set(Role):
        raise RunError(f"ROLE: is {text!r}, must be one of {', '.join(Role)}, or {NATS_SERVER} for nats-server", 2)
    return text
