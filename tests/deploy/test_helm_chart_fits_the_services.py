"""What deploy/helm/trinity says of the services is what they read, ask for and allow."""

import importlib
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import typer
import yaml

from support.servers.helm import EXAMPLES, of_kind, pods, render
from trinity.cluster.certs import certs
from trinity.cluster.certs.certs import Form
from trinity.runtime.errors import EXIT_AGAIN, EXIT_FOR_GOOD
from trinity.runtime.names import run_id
from trinity.runtime.settings import ServiceSettings
from trinity.runtime.trust.roles import METHODS
from trinity.runtime.trust.subjects import table
from trinity.ui.main import app as ui

pytestmark = [pytest.mark.core, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/quickstart/arithmetic.yaml"
SERVICES = ("buffer", "environment", "explorer", "sync", "trainer")
# Files of an identity, by the setting that names them.
FILES = {
    "TLS_CERT": "tls.crt",
    "TLS_KEY": "tls.key",
    "TLS_CA": "ca.crt",
    "NATS_CREDS": "nats.creds",
    "NATS_CA": "ca.crt",
}
Manifests = list[dict[str, Any]]


@pytest.fixture(scope="module", params=list(EXAMPLES))
def manifests(request: pytest.FixtureRequest) -> Manifests:
    return render(CONFIG, example=request.param, stage="rft")


def settings_of(service: str) -> type[ServiceSettings]:
    module = importlib.import_module(f"trinity.{service}.settings")
    return getattr(module, f"{service.capitalize()}Settings")


def variables(manifests: Manifests, service: str) -> dict[str, str]:
    """Of a service's pod, without their prefix."""
    prefix = f"TRINITY_{service.upper()}_"
    env = pods(manifests)[service]["containers"][0]["env"]
    found = {one["name"]: one["value"] for one in env if one["name"].startswith("TRINITY_")}
    assert all(name.startswith(prefix) for name in found), found
    return {name.removeprefix(prefix): value for name, value in found.items()}


@pytest.mark.parametrize("service", SERVICES)
def test_every_variable_is_a_setting_with_a_value_that_it_takes(manifests: Manifests, service: str) -> None:
    given = {name.lower(): value for name, value in variables(manifests, service).items()}
    kind = settings_of(service)
    assert not given.keys() - kind.model_fields.keys()
    kind.model_validate(given)


def test_variables_of_the_operator_are_those_of_the_command_line(manifests: Manifests) -> None:
    env = {one["name"] for one in pods(manifests)["operator"]["containers"][0]["env"]}
    known = (ROOT / "docs/security.md").read_text() + (ROOT / "docs/modes.md").read_text()
    assert {name for name in env if name.startswith("TRINITY_") and f"{name}" not in known} == set()


def test_the_pages_have_a_reader_and_a_port_of_their_pod_alone() -> None:
    assert "observe" not in pods(render(CONFIG, stage="rft"))
    manifests = render(CONFIG, stage="rft", observe={"enabled": True})
    pod, service = pods(manifests)["observe"], of_kind(manifests, "Service")
    (container,) = pod["containers"]
    assert "observe" not in service and "ports" not in container
    (identity,) = [one["projected"]["sources"] for one in pod["volumes"] if one["name"] == "identity"]
    assert identity == [{"secret": {"name": "trinity-reader"}}]
    assert {one["name"] for one in pod["volumes"]} == {"identity", "tmp"}, "it has neither the YAML nor the data"
    command = container["command"]
    context = typer.main.get_command(ui).make_context("ui", list(command[2:]))
    assert command[:2] == ["trinity-ui", "ui"]
    run = run_id("quickstart", "arithmetic/rft")
    assert (context.params["nats"], context.params["run"], context.params["port"]) == ("nats://nats:4222", run, 7006)
    policy = of_kind(manifests, "NetworkPolicy")["observe"]["spec"]
    assert not policy["ingress"]


def test_user_and_image_of_nats_are_those_of_the_images_and_of_compose(manifests: Manifests) -> None:
    composed = yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text())["services"]
    assert {one["image"] for one in pods(manifests)["nats"]["containers"]} == {composed["nats"]["image"]}
    files = [
        ROOT / "scripts/docker/Dockerfile",
        *ROOT.glob("services/*/Dockerfile"),
        *ROOT.glob("satellites/*/Dockerfile"),
    ]
    images = {found for file in files for found in re.findall(r"^USER (.*)$", file.read_text(), re.MULTILINE)}
    security = [one["securityContext"] for one in pods(manifests).values()]
    assert {f"{one['runAsUser']}:{one['runAsGroup']}" for one in security} == images


@pytest.mark.parametrize("service", SERVICES)
def test_addresses_are_services_of_the_namespace(manifests: Manifests, service: str) -> None:
    ports = {name: {port["port"] for port in one["spec"]["ports"]}
             for name, one in of_kind(manifests, "Service").items()}  # fmt: skip
    for name, value in variables(manifests, service).items():
        if name.endswith("_ADDRESS") or name in ("ADVERTISE", "NATS_URL"):
            host, port = value.removeprefix("nats://").split(":")
            assert int(port) in ports[host], name
    listens = {variables(manifests, service)[name].split(":")[1] for name in ("LISTEN", "METRICS_LISTEN")}
    assert {int(port) for port in listens} == ports[service]


def test_paths_are_mounted_and_written_where_that_is_allowed(manifests: Manifests) -> None:
    for service in SERVICES:
        container = pods(manifests)[service]["containers"][0]
        mounts = {one["mountPath"]: one.get("readOnly", False) for one in container["volumeMounts"]}
        for name, value in variables(manifests, service).items():
            if value.startswith("/"):
                parents = {str(path) for path in PurePosixPath(value).parents} | {value}
                (mount,) = parents & mounts.keys()
                assert name == "CACHE_DIR" or mounts[mount], f"{service} {name} could be changed"
        # Who writes checkpoints, weights and the job folder's records.
        assert mounts.get("/data") is {"buffer": False, "trainer": False, "sync": None}.get(service, True)


@pytest.mark.parametrize("form", [Form.SECRETS, Form.CERT_MANAGER])
def test_pods_mount_what_certs_prints(form: Form, tmp_path: Path) -> None:
    printed = yaml.safe_load_all(certs.init(tmp_path / "identity", run="r-1", kubernetes_form=form))
    secrets = {one["metadata"]["name"]: set(one["data"]) for one in printed if one["kind"] == "Secret"}
    if form is Form.CERT_MANAGER:  # it writes these
        secrets |= {f"trinity-{name}": {"tls.crt", "tls.key", "ca.crt"} for name in (*SERVICES, "operator", "nats")}
    manifests = render(CONFIG, stage="rft", identity={"form": form.value}, keda={"enabled": True})
    for name, pod in pods(manifests).items():
        (volume,) = [one["projected"] for one in pod["volumes"] if one["name"] == "identity"]
        assert volume["defaultMode"] == 0o440
        files = set().union(*(secrets[source["secret"]["name"]] for source in volume["sources"]))
        if name in SERVICES:
            for setting, file in FILES.items():
                if setting in variables(manifests, name):
                    assert variables(manifests, name)[setting] == f"/identity/{file}"
                    assert file in files, f"{name}: {file}"
    assert "accounts.conf" in files_of(manifests, "nats", secrets)
    (reference,) = of_kind(manifests, "TriggerAuthentication")["tasks"]["spec"]["secretTargetRef"]
    assert reference["key"] in secrets[reference["name"]]


def files_of(manifests: Manifests, name: str, secrets: dict[str, set[str]]) -> set[str]:
    (volume,) = [one["projected"] for one in pods(manifests)[name]["volumes"] if one["name"] == "identity"]
    return set().union(*(secrets[source["secret"]["name"]] for source in volume["sources"]))


def test_certificates_say_who_is_called(tmp_path: Path) -> None:
    """Those of the chart and those of `trinity certs` are for the same roles, and for the hosts that callers use."""
    manifests = render(CONFIG, example="cert-manager", stage="rft")
    made = of_kind(manifests, "Certificate")
    text = certs.init(tmp_path / "identity", run="r-1", kubernetes_form=Form.CERT_MANAGER)
    printed = of_kind(list(yaml.safe_load_all(text)), "Certificate")
    assert made.keys() == printed.keys()
    for name, certificate in made.items():
        spec, other = certificate["spec"], printed[name]["spec"]
        assert (spec.get("uris"), spec["secretName"]) == (other.get("uris"), other["secretName"])
        assert set(spec.get("dnsNames", ())) >= set(other.get("dnsNames", ())), name
        assert set(spec.get("ipAddresses", ())) >= set(other.get("ipAddresses", ())), name
        assert (spec["privateKey"], spec["usages"]) == (other["privateKey"], other["usages"])
    routes = re.findall(r"nats://(\S+):6222", of_kind(manifests, "ConfigMap")["nats"]["data"]["nats.conf"])
    assert routes == [f"nats-{index}.nats-peers" for index in range(3)]
    assert "*.nats-peers" in made["trinity-nats"]["spec"]["dnsNames"]


def callers_by_roles(names: Iterable[str]) -> dict[str, set[str]]:
    """Who may call each service, and NATS, by the tables of docs/security.md: those of these pods. `observe` reads."""
    there = {"reader" if name == "observe" else name for name in names}
    found: dict[str, set[str]] = {}
    for method, roles in METHODS.items():
        service = re.match(r"/trinity\.api\.(\w+)\.", method)
        if service is not None:
            found.setdefault(service[1], set()).update(map(str, roles & there))
    found["trainer"].discard("trainer")  # its further machines are pods trainer-node
    # Trainers publish weights in JetStream, if the YAML says so.
    found["nats"] = {role for role in map(str, table()) if role in there}
    return {name: {"observe" if role == "reader" else role for role in roles} for name, roles in found.items()}


def test_policies_allow_the_calls_of_the_roles_and_no_others(manifests: Manifests) -> None:
    policies = of_kind(manifests, "NetworkPolicy")
    assert policies.keys() == pods(manifests).keys()
    ports = {name: one["spec"]["ports"][0]["port"] for name, one in of_kind(manifests, "Service").items()}
    wanted = callers_by_roles(pods(manifests))
    inward = {callee: peers(policies[callee]["spec"]["ingress"], "from", ports[callee]) for callee in wanted}
    assert inward == wanted
    for name, policy in policies.items():
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        for callee, callers in wanted.items():
            reached = peers(policy["spec"]["egress"], "to", ports[callee])
            assert (callee in reached) is (name in callers), f"{name} to {callee}"


def peers(rules: list[dict[str, Any]] | None, side: str, port: int) -> set[str]:
    """Components of the chart that a rule for this port names."""
    return {
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"]
        for rule in rules or ()
        if any(one.get("port") == port for one in rule.get("ports", ()))
        for peer in rule.get(side, ())
        if "podSelector" in peer
    }


def test_a_trainer_that_was_stopped_is_started_again_and_one_that_cannot_run_is_not(manifests: Manifests) -> None:
    (job,) = of_kind(manifests, "Job").values()
    actions = {code: rule["action"] for rule in job["spec"]["podFailurePolicy"]["rules"]
               for code in rule.get("onExitCodes", {}).get("values", ())}  # fmt: skip
    assert actions == {
        EXIT_FOR_GOOD: "FailJob",
        EXIT_AGAIN: "Ignore",
        int(variables(manifests, "trainer")["EXIT_CODE_WHEN_STOPPED"]): "Ignore",
    }
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("service", SERVICES)
def test_pods_get_the_time_that_the_service_takes_to_end(manifests: Manifests, service: str) -> None:
    given = {name.lower(): value for name, value in variables(manifests, service).items()}
    drain = settings_of(service).model_validate(given).drain_seconds
    assert pods(manifests)[service]["terminationGracePeriodSeconds"] >= drain + 10


@pytest.mark.parametrize("service", SERVICES)
def test_commands_and_probes_are_those_of_the_service(manifests: Manifests, service: str) -> None:
    container = pods(manifests)[service]["containers"][0]
    commands = {one.name or one.callback.__name__ for one in  # type: ignore[union-attr]
                importlib.import_module(f"trinity.{service}.main").app.registered_commands}  # fmt: skip
    probes = [container[probe] for probe in ("startupProbe", "readinessProbe", "livenessProbe") if probe in container]
    used = [container["command"], *(probe["exec"]["command"] for probe in probes)]
    assert len(probes) >= 2
    assert {command[0] for command in used} == {f"trinity-{service}"}
    assert {command[1] for command in used} <= commands
