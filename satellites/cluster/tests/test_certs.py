"""`trinity certs`: what it writes serves a server and its callers, and what cannot be is refused in one sentence."""

import base64
import json
import os
import shutil
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest
import yaml
from cryptography import x509
from typer.testing import CliRunner

from trinity.cli.main import app
from trinity.cluster.certs import certs, kubernetes
from trinity.cluster.certs.certs import Form
from trinity.cluster.certs.folder import IdentityFolder
from trinity.commands import use_identity
from trinity.reading.errors import RunError
from trinity.runtime.errors import InvalidInput
from trinity.runtime.names import run_id
from trinity.runtime.trust import ca, revoked
from trinity.runtime.trust.nats_users import read_user
from trinity.runtime.trust.tls import Material, TlsFiles

pytestmark = pytest.mark.core

RUN = "tests-run-012345"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    certs.init(tmp_path / "identity", ["node1"], 90, RUN)
    return tmp_path / "identity"


def load(folder: Path, name: str) -> Material:
    return TlsFiles(folder / name / "tls.crt", folder / name / "tls.key", folder / name / "ca.crt").load()


def certificate(folder: Path, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / name / "tls.crt").read_bytes())


def trusts(folder: Path, name: str, other: str) -> bool:
    """Whether `name` takes the certificate of `other`."""
    roots = x509.load_pem_x509_certificates((folder / name / "ca.crt").read_bytes())
    return certificate(folder, other).issuer in [root.subject for root in roots]


def test_init_makes_an_identity_for_each_service(folder: Path) -> None:
    names = ("buffer", "environment", "explorer", "operator", "reader", "sync", "trainer")
    assert {name: (load(folder, name).role, load(folder, name).name) for name in names} == {n: (n, n) for n in names}
    assert ca.hosts_of(certificate(folder, "sync")) == ["sync", "localhost", "node1", "127.0.0.1"]
    with pytest.raises(InvalidInput, match="has 0 URIs"):
        load(folder, "nats")  # a host's alone: it has no role


def test_secrets_are_for_the_owner_alone(folder: Path) -> None:
    modes = {path: path.stat().st_mode & 0o777 for path in [folder, *folder.rglob("*")]}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {path.name for path, mode in modes.items() if mode == 0o644} == {
        "ca.crt", "tls.crt", "issued.json", "accounts.conf", "account", "revoked",
        *(f"{name}.json" for name in IdentityFolder(folder).names),
    }  # fmt: skip
    secrets = {path.name for path, mode in modes.items() if mode == 0o600}
    assert secrets == {"ca.key", "tls.key", "nats.creds", "account.seed", "operator.seed", "system.seed"}


def test_issue_adds_an_explorer(folder: Path) -> None:
    said = certs.issue("explorer", "gpu-7", folder, ["10.0.0.7", "gpu-7.lan"], 10)
    assert said == f"{folder / 'gpu-7'}: explorer, valid for 10 days"
    assert (load(folder, "gpu-7").role, load(folder, "gpu-7").name) == ("explorer", "gpu-7")
    assert ca.hosts_of(certificate(folder, "gpu-7")) == ["gpu-7.lan", "10.0.0.7"]


def test_what_cannot_be_issued_is_refused(folder: Path) -> None:
    with pytest.raises(RunError, match="which is the folder of nats-server"):
        certs.issue("explorer", "nats", folder)
    with pytest.raises(RunError, match=r"^ROLE: is 'boss', must be one of buffer, "):
        certs.issue("boss", "", folder)
    with pytest.raises(RunError, match=r"^--name: buffer is the name of a buffer already"):
        certs.issue("sync", "buffer", folder)
    with pytest.raises(RunError, match=r"^--name: is 'ca', which is the folder of the authority"):
        certs.issue("sync", "ca", folder)
    with pytest.raises(InvalidInput, match=r"^name: is '../x', must be"):
        certs.issue("sync", "../x", folder)
    with pytest.raises(InvalidInput, match=r"^host: is 'sync:7004', must be"):
        certs.issue("sync", "sync2", folder, ["sync:7004"])
    with pytest.raises(RunError, match="has an authority already"):
        certs.init(folder)
    with pytest.raises(RunError, match="holds no certificate authority; `trinity certs init"):
        certs.show(folder / "buffer")


def test_show_lists_and_warns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certs.issue("explorer", "old", folder, days=-1)
    certs.issue("explorer", "new", folder, days=5)
    rows = {row["name"]: row for row in json.loads(certs.show(folder, as_json=True))}
    assert (rows["old"]["state"], rows["new"]["state"], rows["nats"]["role"]) == ("expired", "valid", "")
    assert capsys.readouterr().err.count("`trinity certs rotate old`") == 1
    assert "explorer  " in certs.show(folder)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("issued", "[1]", "should be an object"),
        ("issued", "{", "EOF"),
        ("issued", '{"sync": {"role": "sync", "days": 1}}', "sync.hosts: Field required"),
        ("issued", '{"sync": {"role": "sync", "days": "x", "hosts": []}}', "sync.days: Input should be a valid number"),
        ("earlier/sync", "[1]", "0: Input should be"),
    ],
)
def test_a_damaged_record_is_one_sentence(folder: Path, name: str, content: str, said: str) -> None:
    (folder / f"ca/{name}.json").write_text(content)
    with pytest.raises(RunError, match=f"^{folder}/ca/{name}.json: .*{said}.*; restore it$"):
        certs.revoke(["sync"], folder)


def test_rotate_issues_the_same_again(folder: Path) -> None:
    before = {name: certificate(folder, name) for name in ("sync", "buffer")}
    keys = {name: (folder / name / "tls.key").read_bytes() for name in before}
    certs.rotate(["sync"], folder)
    sync = certificate(folder, "sync")
    assert certificate(folder, "buffer") == before["buffer"]
    assert sync.serial_number != before["sync"].serial_number
    assert ca.hosts_of(sync) == ca.hosts_of(before["sync"])
    assert (folder / "sync" / "tls.key").read_bytes() != keys["sync"]
    assert load(folder, "sync").role == "sync"
    with pytest.raises(RunError, match="unknown was not issued from"):
        certs.rotate(["unknown"], folder)


def test_a_new_authority_comes_in_three_steps(folder: Path) -> None:
    certs.rotate(None, folder, new_authority=True)
    with pytest.raises(RunError, match=r"^buffer, .*certificates of an old CA; `trinity certs rotate` first"):
        certs.rotate(None, folder, drop_old=True)
    certs.rotate(["sync"], folder)
    assert trusts(folder, "buffer", "sync") and trusts(folder, "sync", "buffer"), "both are trusted meanwhile"
    certs.rotate(None, folder)
    certs.rotate(None, folder, drop_old=True)
    assert len(x509.load_pem_x509_certificates((folder / "buffer" / "ca.crt").read_bytes())) == 1
    assert trusts(folder, "buffer", "sync")
    assert len(IdentityFolder(folder).names) == 8
    with pytest.raises(RunError, match="one of them at a time"):
        certs.rotate(["sync"], folder, new_authority=True)
    with pytest.raises(RunError, match="one of them at a time"):
        certs.rotate(None, folder, ["node2"], drop_old=True)


def test_rotate_may_name_other_hosts_which_stay(folder: Path) -> None:
    certs.issue("explorer", "gpu-7", folder, ["10.0.0.7"], 30)
    certs.rotate(["gpu-7", "sync"], folder, ["10.0.0.8", "node8"])
    certs.rotate(["gpu-7"], folder)
    assert (
        {*ca.hosts_of(certificate(folder, "gpu-7"))}
        == {*ca.hosts_of(certificate(folder, "sync"))}
        == {"10.0.0.8", "node8"}
    )
    assert "node1" in ca.hosts_of(certificate(folder, "buffer"))


def test_revoke_names_all_that_a_name_was_issued(folder: Path) -> None:
    certs.issue("explorer", "gpu-7", folder, run=RUN)
    first = certificate(folder, "gpu-7").serial_number
    certs.rotate(["gpu-7"], folder)
    second = certificate(folder, "gpu-7").serial_number
    accounts = (folder / "nats/accounts.conf").read_bytes()
    said = certs.revoke(["gpu-7"], folder)
    assert f"{first:040x} of gpu-7, {second:040x} of gpu-7; copy `revoked`" in said
    lists = {path.parent.name: revoked.parse(path.read_text()) for path in folder.glob("*/revoked")}
    assert lists == {name: {first, second} for name in ["ca", *IdentityFolder(folder).names]}
    assert (folder / "nats/accounts.conf").read_bytes() == (folder / "ca/nats/accounts.conf").read_bytes() != accounts
    rows = {row["name"]: row for row in json.loads(certs.show(folder, as_json=True))}
    assert (rows["gpu-7"]["state"], rows["gpu-7"]["serial"]) == ("revoked", f"{second:040x}")
    certs.rotate(None, folder)
    assert certificate(folder, "gpu-7").serial_number == second, "a lost identity is not issued again among all"
    certs.rotate(["gpu-7"], folder)
    rows = {row["name"]: row for row in json.loads(certs.show(folder, as_json=True))}
    assert rows["gpu-7"]["state"] == "valid", "but by its name"
    assert first in revoked.parse((folder / "gpu-7/revoked").read_text())


def test_revoke_takes_serial_numbers(folder: Path) -> None:
    serial = certificate(folder, "sync").serial_number
    colons = ":".join(f"{serial:040X}"[i : i + 2] for i in range(0, 40, 2))
    certs.revoke([colons, "00" * 8 + "ab"], folder)  # the second is of an issuer such as cert-manager
    assert revoked.parse((folder / "buffer/revoked").read_text()) == {serial, 0xAB}
    with pytest.raises(RunError, match=r"^cafe is no identity of .* and no serial number"):
        certs.revoke(["cafe"], folder)
    with pytest.raises(RunError, match=r"^unknown is no identity"):
        certs.revoke(["sync", "unknown"], folder)


def test_a_folder_from_before_revoke_can_revoke(folder: Path) -> None:
    for path in folder.glob("*/revoked"):
        path.unlink()
    shutil.rmtree(folder / "ca/earlier")
    certs.revoke(["buffer"], folder)
    assert revoked.parse((folder / "sync/revoked").read_text()) == {certificate(folder, "buffer").serial_number}


def test_a_new_authority_does_not_wait_for_the_revoked(folder: Path) -> None:
    certs.revoke(["explorer"], folder)
    certs.rotate(None, folder, new_authority=True)
    certs.rotate(None, folder)
    certs.rotate(None, folder, drop_old=True)
    assert not trusts(folder, "sync", "explorer")


def test_kubernetes_secrets_hold_the_same_files(folder: Path) -> None:
    documents = list(yaml.safe_load_all(certs.issue("explorer", "gpu_7", folder, kubernetes_form=Form.SECRETS)))
    assert [(one["kind"], one["metadata"]["name"]) for one in documents] == [("Secret", "trinity-gpu-7")]
    found = {name: base64.b64decode(value) for name, value in documents[0]["data"].items()}
    assert found == {path.name: path.read_bytes() for path in (folder / "gpu_7").iterdir()}


def test_cert_manager_is_told_role_and_hosts(tmp_path: Path) -> None:
    text = certs.init(tmp_path / "identity", ["10.0.0.1"], 30, RUN, kubernetes_form=Form.CERT_MANAGER)
    documents = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text)}
    authority = documents["Secret", "trinity-ca"]["data"]
    assert base64.b64decode(authority["tls.key"]) == (tmp_path / "identity/ca/ca.key").read_bytes()
    assert documents["Issuer", "trinity-ca"]["spec"] == {"ca": {"secretName": "trinity-ca"}}
    spec = documents["Certificate", "trinity-sync"]["spec"]
    assert spec["uris"] == ["trinity://sync/sync"]
    assert (spec["dnsNames"], spec["ipAddresses"]) == (["sync", "localhost"], ["127.0.0.1", "10.0.0.1"])
    assert (spec["duration"], spec["renewBefore"]) == ("720h", "240h")
    assert "uris" not in documents["Certificate", "trinity-nats"]["spec"]
    assert list(documents["Secret", "trinity-sync-nats"]["data"]) == ["nats.creds", "revoked"]
    assert list(documents["Secret", "trinity-nats-nats"]["data"]) == ["account", "accounts.conf", "revoked"]
    found = IdentityFolder(tmp_path / "identity")
    users = [one for (kind, name), one in documents.items() if kind == "Secret" and name != "trinity-ca"]
    assert list(yaml.safe_load_all(kubernetes.nats_secrets(found, found.names))) == users


def test_credentials_of_nats_are_of_a_role_in_a_run(folder: Path) -> None:
    users = {path.parent.name: read_user(path) for path in folder.glob("*/nats.creds")}
    assert sorted(users) == ["buffer", "environment", "explorer", "operator", "reader", "sync", "trainer"]
    assert (users["explorer"].name, users["explorer"].has_expired) == ("explorer/explorer", False)
    assert abs(users["sync"].expires - time.time() - 90 * 86_400) < 3600
    assert (folder / "nats/accounts.conf").read_bytes() == (folder / "ca/nats/accounts.conf").read_bytes()
    assert f"{(folder / 'nats/account').read_text()}: " in (folder / "nats/accounts.conf").read_text()
    before = (folder / "buffer/nats.creds").read_bytes()
    certs.rotate(["buffer"], folder)
    assert (folder / "buffer/nats.creds").read_bytes() != before
    certs.issue("explorer", "outside", folder)
    assert not (folder / "outside/nats.creds").exists(), "no run was named"


def test_the_run_is_that_of_the_yaml(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "project: p\nname: n\nmodel: {model_path: none}\nbuffer: {batch_size: 2, total_steps: 1, explorer_input: "
        "{taskset: {name: t, path: nowhere, format: {prompt_key: q}}}}\n"
    )
    certs.issue("explorer", "gpu-7", folder, config=tmp_path / "run.yaml")
    assert IdentityFolder(folder).request("gpu-7").run == run_id("p", "n")
    with pytest.raises(RunError, match="give --run or --config, not both"):
        certs.issue("explorer", "gpu-8", folder, run=RUN, config=tmp_path / "run.yaml")


def test_an_init_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    place = tmp_path / "identity"
    for hosts, run in ((["a b"], RUN), ([], "a.*"), ([], ">")):
        with pytest.raises(InvalidInput, match=r"host: is 'a b'|run: "):
            certs.init(place, hosts, 90, run)
        assert not place.exists()
    certs.init(place, ["node1"], 90, RUN)
    with pytest.raises(InvalidInput, match=r"run: is 'a\.\*'"):
        certs.issue("explorer", "gpu-7", place, run="a.*")
    assert not (place / "gpu-7").exists()


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("ca/ca.crt", "ca.crt: holds no certificate; restore it"),
        ("ca/ca.key", "ca.key: holds no private key; restore it"),
        ("ca/revoked", "revoked: is no text; restore it"),
        ("ca/nats/account.seed", "account.seed holds no seed of NATS; restore it"),
        ("trainer/tls.crt", "tls.crt: holds no certificate; restore it"),
    ],
)
def test_a_damaged_file_is_named(folder: Path, file: str, said: str) -> None:
    (folder / file).write_bytes(b"garbage \xff")
    done = CliRunner().invoke(app, ["certs", "rotate", "--folder", str(folder)])
    assert (done.exit_code != 0, said in done.stderr, done.stderr.count("\n")) == (True, True, 1), done.output


def test_a_damaged_user_of_nats_is_issued_again(folder: Path) -> None:
    (folder / "trainer/nats.creds").write_bytes(b"garbage \xff")
    certs.rotate(["trainer"], folder)
    assert read_user(folder / "trainer/nats.creds") is not None


async def test_a_server_and_a_client_meet_by_the_files(folder: Path) -> None:
    sync, operator = load(folder, "sync"), load(folder, "operator")

    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return b"yes"

    server = grpc.aio.server()
    handler = {"Ask": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Sync", handler)])
    made = grpc.ssl_server_credentials([(sync.key, sync.chain)], sync.roots, require_client_auth=True)
    port = server.add_secure_port("127.0.0.1:0", made)
    await server.start()
    shown = grpc.ssl_channel_credentials(operator.roots, operator.key, operator.chain)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", shown) as channel:
        assert await channel.unary_unary("/test.Sync/Ask")(b"", timeout=20) == b"yes"
    await server.stop(0)


@pytest.fixture
def no_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of an identity is set, and none stays."""
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if "TRINITY_" not in name})


@pytest.mark.usefixtures("no_identity")
def test_one_setting_names_the_identities_of_a_machine(folder: Path) -> None:
    os.environ["TRINITY_SYNC_TLS_CERT"] = "/own.crt"
    use_identity(folder)
    assert os.environ["TRINITY_TLS_CERT"] == str(folder / "operator/tls.crt")
    assert os.environ["TRINITY_NATS_CREDS"] == str(folder / "operator/nats.creds")
    assert os.environ["TRINITY_BUFFER_TLS_KEY"] == str(folder / "buffer/tls.key")
    assert os.environ["TRINITY_EXPLORER_NATS_CREDS"] == str(folder / "explorer/nats.creds")
    assert os.environ["TRINITY_SYNC_TLS_CERT"] == "/own.crt", "what is set stays"
    assert os.environ["TRINITY_ENVIRONMENT_NATS_CREDS"] == str(folder / "environment/nats.creds")
    assert os.environ["TRINITY_NATS_IDENTITY"] == str(folder / "nats"), "for the nats-server that `trinity run` starts"


@pytest.mark.usefixtures("no_identity")
@pytest.mark.parametrize(
    ("role", "prefixes"), [("explorer", ["EXPLORER_"]), ("trainer", ["TRAINER_"]), ("operator", [])]
)
def test_one_setting_names_the_identity_of_one_role(role: str, prefixes: list[str], folder: Path) -> None:
    """A service with the certificate of another role would refuse to start."""
    certs.issue(role, name="gpu-7", folder=folder, run=RUN)
    use_identity(folder / "gpu-7")
    set_now = {name: value for name, value in os.environ.items() if name.endswith("TLS_CERT")}
    assert set_now == {f"TRINITY_{prefix}TLS_CERT": str(folder / "gpu-7/tls.crt") for prefix in ("", *prefixes)}
    assert "TRINITY_NATS_IDENTITY" not in os.environ


def test_an_identity_that_is_none_is_refused(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_IDENTITY", str(tmp_path))
    refused = CliRunner().invoke(app, ["status"])
    assert refused.exit_code == 2
    said = "".join(refused.output.replace("│", "").split())
    assert "holdsneithertls.crtnoroperator/tls.crt" in said
    assert CliRunner().invoke(app, ["certs", "show", "--folder", str(folder)]).exit_code == 0, "it makes such folders"
