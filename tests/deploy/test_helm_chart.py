"""deploy/helm/trinity: what helm renders is what Kubernetes and the operators' resources take, for every example."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.cert_manager import v1 as cert_manager
from cloudcoil.models.keda import v1alpha1 as keda
from cloudcoil.models.prometheus_operator import v1 as prometheus

from support.servers.helm import CHART, EXAMPLES, Refused, lint, of_kind, pods, render
from trinity.runtime.names import TASKS_CONSUMER, RunNames, run_id

pytestmark = [pytest.mark.core, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/quickstart/arithmetic.yaml"
# The oldest that Chart.yaml takes, and the newest that the package knows.
KUBERNETES = ("1.29", "1.37")
# Resources that are not Kubernetes' own.
CUSTOM: dict[str, Any] = {
    "ScaledObject": keda.ScaledObject,
    "TriggerAuthentication": keda.TriggerAuthentication,
    "Certificate": cert_manager.Certificate,
    "ServiceMonitor": prometheus.ServiceMonitor,
    "PrometheusRule": prometheus.PrometheusRule,
}


@pytest.fixture(scope="module", params=list(EXAMPLES))
def manifests(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return render(CONFIG, example=request.param, stage="rft")


def closed(schema: Any) -> Any:
    """A schema whose objects have no fields beside those that it names."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if "properties" in found and found.get("type") == "object":
        found.setdefault("additionalProperties", False)
    return found


def schema_of(kind: str) -> Any:
    return closed(CUSTOM[kind].model_json_schema(by_alias=True))


def problems_of(manifest: dict[str, Any], version: str = KUBERNETES[-1]) -> list[str]:
    """What does not hold of a manifest, as text."""
    if manifest["kind"] in CUSTOM:
        validator = jsonschema.Draft202012Validator(schema_of(manifest["kind"]))
        return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'.'.join(map(str, error.path))}: {error.message}"]
    return []


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_manifest_is_valid(manifests: list[dict[str, Any]], version: str) -> None:
    assert len(manifests) > 25
    found = {f"{one['kind']} {one['metadata']['name']}": problems_of(one, version) for one in manifests}
    assert {name: problems for name, problems in found.items() if problems} == {}


@pytest.mark.parametrize(
    ("kind", "name", "path"),
    [("Deployment", "buffer", ("spec", "template", "spec")), ("ScaledObject", "explorer", ("spec", "scaleTargetRef"))],
)
def test_a_field_that_there_is_not_is_found(kind: str, name: str, path: tuple[str, ...]) -> None:
    manifest = of_kind(render(CONFIG, example="fleet", stage="rft"), kind)[name]
    place = manifest
    for key in path:
        place = place[key]
    place["colour"] = "red"
    assert any("colour" in problem for problem in problems_of(manifest))


def test_names_are_unique_and_in_the_namespace(manifests: list[dict[str, Any]]) -> None:
    names = [(one["kind"], one["metadata"]["name"]) for one in manifests]
    assert len(set(names)) == len(names)
    assert {one["metadata"]["namespace"] for one in manifests} == {"run1"}
    for one in manifests:
        labels = one["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "run1"
        assert labels["app.kubernetes.io/part-of"] == "trinity"


def test_selectors_find_the_pods(manifests: list[dict[str, Any]]) -> None:
    labels = [one["spec"]["template"]["metadata"]["labels"] for one in manifests if "template" in one.get("spec", {})]
    for one in manifests:
        spec = one.get("spec", {})
        wanted = spec.get("selector") if one["kind"] == "Service" else (spec.get("selector") or {}).get("matchLabels")
        wanted = wanted or spec.get("podSelector", {}).get("matchLabels")
        if one["kind"] != "ServiceMonitor" and wanted:
            assert any(wanted.items() <= own.items() for own in labels), one["metadata"]["name"]


def test_ports_of_services_are_ports_of_their_pods(manifests: list[dict[str, Any]]) -> None:
    own = {name: {port["name"]: port["containerPort"] for container in pod["containers"]
                  for port in container.get("ports", ())} for name, pod in pods(manifests).items()}  # fmt: skip
    for service in of_kind(manifests, "Service").values():
        ports = own[service["spec"]["selector"]["app.kubernetes.io/name"]]
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"]


def test_no_pod_may_more_than_it_needs(manifests: list[dict[str, Any]]) -> None:
    claimed = {"nats": {"data"}}  # by volumeClaimTemplates
    for name, pod in pods(manifests).items():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False, "the variables of a Service `x` would begin with X_"
        assert pod["terminationGracePeriodSeconds"] > 0
        mounted = {volume["name"] for volume in pod["volumes"]} | claimed.get(name, set())
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert (context["allowPrivilegeEscalation"], context["capabilities"]) == (False, {"drop": ["ALL"]})
            assert container["resources"]["requests"] and container["resources"]["limits"]["memory"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= mounted


def test_rules_and_scrapes_are_those_of_deploy_prometheus() -> None:
    manifests = render(CONFIG, example="fleet", stage="rft")
    rule = of_kind(manifests, "PrometheusRule")["trinity"]
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
    monitor = of_kind(manifests, "ServiceMonitor")["trinity"]["spec"]
    found = {
        one["metadata"]["name"]: one["metadata"]["labels"][monitor["jobLabel"]]
        for one in of_kind(manifests, "Service").values()
        if monitor["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()
        and any(port["name"] == monitor["endpoints"][0]["port"] for port in one["spec"]["ports"])
    }
    assert found == dict.fromkeys(("buffer", "environment", "explorer", "sync", "trainer"), "trinity")
    assert monitor["endpoints"][0]["honorLabels"] is True


def test_gpus_volumes_and_scaling_of_a_fleet() -> None:
    manifests = render(CONFIG, example="fleet", stage="rft")
    found = pods(manifests)
    limits = {name: found[name]["containers"][0]["resources"]["limits"] for name in ("explorer", "trainer", "buffer")}
    assert {name: one.get("nvidia.com/gpu") for name, one in limits.items()} == {
        "explorer": 1, "trainer": 8, "buffer": None
    }  # fmt: skip
    volumes = {one["name"]: one for one in found["explorer"]["volumes"]}
    assert volumes["cache"]["ephemeral"]["volumeClaimTemplate"]["spec"]["storageClassName"] == "local-nvme"
    assert volumes["data"] == {"name": "data", "persistentVolumeClaim": {"claimName": "shared-filesystem"}}
    assert not of_kind(manifests, "PersistentVolumeClaim")
    assert "replicas" not in of_kind(manifests, "Deployment")["explorer"]["spec"], "the autoscaler's alone"
    scaled = of_kind(manifests, "ScaledObject")["explorer"]["spec"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (1, 64)
    names = RunNames(run_id("quickstart", "arithmetic/rft"))
    triggers = [(one["metadata"]["stream"], one["metadata"]["consumer"]) for one in scaled["triggers"]]
    assert triggers == [(names.tasks_stream, TASKS_CONSUMER), (names.evaluation_tasks_stream, TASKS_CONSUMER)]


@pytest.mark.parametrize(
    ("project", "group", "name"),
    [("p", "", "first"), ("Word problems!", "first try", "a/b"), ("x" * 50, "", "__é__"), ("", "", "")],
    ids=["plain", "with a group", "long and foreign", "the defaults"],
)
def test_the_run_is_called_as_trinity_calls_it(project: str, group: str, name: str, tmp_path: Path) -> None:
    given = {"project": project, "group": group, "name": name}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({key: value for key, value in given.items() if value}))
    scaled = of_kind(render(tmp_path / "run.yaml", keda={"enabled": True}), "ScaledObject")["explorer"]["spec"]
    wanted = run_id(project or "Trinity-RFT", name or "rft", group)
    assert scaled["triggers"][0]["metadata"]["stream"] == RunNames(wanted).tasks_stream


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nats": {"replicas": 2}}, "nats.replicas must be one of the following: 1, 3, 5"),
        ({"nats": {"storage": {"size": "20Gi"}}}, "nats.maxStoreGiB: is 100, must be below nats.storage.size, 20Gi"),
        ({"nats": {"replica": 3}}, "Additional property replica is not allowed"),
        ({"explorer": {"gpus": -1}}, "explorer.gpus"),
        ({"explorer": {"resources": {"limits": {"memory": "much"}}}}, "explorer.resources.limits.memory"),
        ({"trainer": {"env": {"not-a-name": "1"}}}, "trainer.env"),
        ({"image": {"registry": "registry.example.com"}}, "image.registry"),
        ({"identity": {"form": "none"}}, "identity.form"),
        ({"data": {"mountPath": "data"}}, "data.mountPath"),
        ({"keda": {"enabled": True, "minReplicas": 0}}, "keda.minReplicas: is 0"),
        ({"keda": {"enabled": True, "minReplicas": 3, "maxReplicas": 2}}, "keda.maxReplicas: is 2"),
        ({"stage": ""}, "stage: is empty"),
        ({"config": "a: [", "runId": ""}, "config: is no YAML"),
        ({"config": "name: ${oc.env:NAME}", "stage": ""}, "runId: is empty"),
        ({"config": "name: 2", "stage": ""}, "config: name is no text to helm"),
        ({"config": "group: n", "stage": ""}, "config: group is no text to helm"),  # false in YAML 1.1
        ({"config": ""}, "config: is empty"),
    ],
)
def test_values_that_cannot_be_are_refused(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(values.pop("config", CONFIG.read_text()))
    with pytest.raises(Refused, match=re.escape(said)):
        render(tmp_path / "run.yaml", **{"stage": "rft", **values})


def test_no_explorer_at_first_needs_versions_that_none_verifies(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: first\nsynchronizer: {canary: false}\n")
    manifests = render(tmp_path / "run.yaml", keda={"enabled": True, "minReplicas": 0})
    assert of_kind(manifests, "ScaledObject")["explorer"]["spec"]["minReplicaCount"] == 0


def test_lint_finds_nothing() -> None:
    assert not re.findall(r"\[(?:WARNING|ERROR)\].*", lint(CONFIG, stage="rft"))


def test_every_value_is_in_the_schema_and_has_a_default() -> None:
    """So that a misspelt name is refused, and values.yaml shows all there are."""
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(paths(schema)) - {"global"} == set(leaves(defaults, schema))


def resolved(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    return root["definitions"][schema["$ref"].split("/")[-1]] if "$ref" in schema else schema


def paths(root: dict[str, Any], schema: dict[str, Any] | None = None, at: str = "") -> Iterator[str]:
    for name, one in (schema or root)["properties"].items():
        found = resolved(one, root)
        if "properties" in found and name != "resources":
            yield from paths(root, found, f"{at}{name}.")
        else:
            yield f"{at}{name}"


def leaves(values: dict[str, Any], root: dict[str, Any], at: str = "") -> Iterator[str]:
    known = set(paths(root))
    for name, value in values.items():
        if isinstance(value, dict) and f"{at}{name}" not in known:
            yield from leaves(value, root, f"{at}{name}.")
        else:
            yield f"{at}{name}"


@pytest.mark.parametrize(
    ("nodes", "given", "wanted"), [(1, {}, 1800), (1, {"startSeconds": 7200}, 7200), (2, {}, 2400),
                                   (2, {"startSeconds": 7200}, 7200)]
)  # fmt: skip
def test_a_trainer_may_load_as_long_as_its_value_says(
    nodes: int, given: dict[str, int], wanted: int, tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"{CONFIG.read_text()}\ncluster: {{node_num: {nodes}}}\n")
    found = pods(render(config, stage="rft", trainer={"nodes": nodes, **given}))
    trainers = [pod["containers"][0]["startupProbe"] for name, pod in found.items() if name.startswith("trainer")]
    assert len(trainers) == nodes
    assert {one["failureThreshold"] * one["periodSeconds"] for one in trainers} == {wanted}


def test_the_chart_has_the_version_of_trinity() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = (ROOT / "VERSION").read_text().strip()
    assert (chart["version"], chart["appVersion"]) == (version, version)


def test_further_machines_of_the_trainer_reach_it_before_it_is_ready(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"{CONFIG.read_text()}\ncluster: {{node_num: 3}}\n")
    with pytest.raises(Refused, match=r"trainer\.nodes: is 1, and cluster\.node_num of the YAML 3"):
        render(config, stage="rft")
    manifests = render(config, stage="rft", trainer={"nodes": 3})
    assert [problem for manifest in manifests for problem in problems_of(manifest)] == []
    further = of_kind(manifests, "StatefulSet")["trainer-node"]["spec"]
    container = further["template"]["spec"]["containers"][0]
    settings = {one["name"]: one.get("value") for one in container["env"]}
    assert (further["replicas"], settings["TRINITY_TRAINER_FIRST_ADDRESS"]) == (2, "trainer:7005")
    (job,) = of_kind(manifests, "Job").values()
    first = job["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == first["command"] == ["trinity-trainer", "serve"]
    changed = {one["name"] for one in container["env"] if one not in first["env"]}
    assert changed == {"TRINITY_TRAINER_FIRST_ADDRESS", "TRINITY_TRAINER_DRAIN_SECONDS"}
    assert {"TRINITY_TRAINER_NATS_CREDS", "TRINITY_TRAINER_TLS_CERT"} <= settings.keys()
    service = of_kind(manifests, "Service")["trainer"]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    policies = of_kind(manifests, "NetworkPolicy")
    for name in ("trainer", "trainer-node"):
        peers = [rule for rule in policies[name]["spec"]["egress"] if "ports" not in rule]
        labels = [one["podSelector"]["matchLabels"]["app.kubernetes.io/name"] for one in peers[0]["to"]]
        assert labels == ["trainer", "trainer-node"]
