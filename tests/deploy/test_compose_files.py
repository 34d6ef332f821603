"""The files of deploy/compose: the schema of compose, and what they promise of GPUs, limits, networks and secrets."""

import json
import re
from pathlib import Path
from typing import Any

import check_jsonschema
import jsonschema
import pytest
import typer
import yaml

from support.servers.compose import Loader, interpolate, over
from trinity.trainer.settings import TrainerSettings
from trinity.ui.main import app as ui

pytestmark = pytest.mark.core

FOLDER = Path(__file__).parents[2] / "deploy/compose"
SCHEMA = json.loads(
    (Path(check_jsonschema.__file__).parent / "builtin_schemas/vendor/compose-spec.json").read_text()
)  # fmt: skip
GIVEN = {
    "TRINITY_CONFIG": "/run.yaml", "TRINITY_DATA": "/data", "TRINITY_EXPLORER": "gpu-7", "TRINITY_RUN_HOST": "h",
    "TRINITY_NODE": "gpu-2",
}  # fmt: skip
ALWAYS = {"nats", "buffer", "environment", "sync", "explorer", "trainer"}
EXPLORERS = {"explorer", "explorer-2", "explorer-3", "explorer-4"}


def read(name: str, **given: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.load(interpolate((FOLDER / name).read_text(), {**GIVEN, **given}), Loader)
    return found


def gpus(service: dict[str, Any]) -> list[str]:
    reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    return [one for device in reserved for ids in device["device_ids"] for one in ids.split(",")]


@pytest.fixture(scope="module")
def composed() -> dict[str, Any]:
    return read("compose.yaml")


@pytest.fixture(scope="module")
def joining() -> dict[str, Any]:
    return read("explorers.yaml")


def test_every_file_is_what_compose_takes(composed: dict[str, Any], joining: dict[str, Any]) -> None:
    first = over(composed, read("trainer-first.yaml", TRINITY_HOST="h"))
    for file in (composed, joining, over(composed, read("cpu.yaml")), first, read("trainer-node.yaml")):
        jsonschema.validate(file, SCHEMA)
    with pytest.raises(jsonschema.ValidationError, match="'restrat' was unexpected"):
        jsonschema.validate({"services": {"a": {"image": "i", "restrat": "no"}}}, SCHEMA)


def test_no_two_processes_have_the_same_gpu(composed: dict[str, Any], joining: dict[str, Any]) -> None:
    for file, holders in ((composed, {*EXPLORERS, "trainer"}), (joining, EXPLORERS)):
        by_service = {name: gpus(service) for name, service in file["services"].items() if gpus(service)}
        taken = [one for ids in by_service.values() for one in ids]
        assert by_service.keys() == holders
        assert len(taken) == len(set(taken)), by_service


def test_each_gpu_has_a_variable_of_its_own(composed: dict[str, Any]) -> None:
    given = {**GIVEN, "TRINITY_TRAINER_GPUS": "4,5", "TRINITY_EXPLORER_GPUS": "6", "TRINITY_EXPLORER_2_GPUS": "7"}
    services = yaml.safe_load(interpolate((FOLDER / "compose.yaml").read_text(), given))["services"]
    assert [gpus(services[name]) for name in ("trainer", "explorer", "explorer-2")] == [["4", "5"], ["6"], ["7"]]
    given = {**GIVEN, "TRINITY_TRAINER_RANKS": "2"}
    services = yaml.safe_load(interpolate((FOLDER / "compose.yaml").read_text(), given))["services"]
    assert services["trainer"]["environment"]["TRINITY_TRAINER_NUM_RANKS"] == 2


def test_without_gpus_none_is_reserved(composed: dict[str, Any]) -> None:
    without = over(composed, read("cpu.yaml"))["services"]
    assert not [name for name, service in without.items() if gpus(service)]
    assert {without[name]["build"]["args"]["DEVICE"] for name in ("trainer", *EXPLORERS)} == {"cpu"}
    assert without["trainer"]["environment"] == composed["services"]["trainer"]["environment"]


def test_profiles_choose_what_is_not_of_every_run(composed: dict[str, Any]) -> None:
    chosen = {name: service.get("profiles", []) for name, service in composed["services"].items()}
    assert {name for name, profiles in chosen.items() if not profiles} == ALWAYS
    assert {name: one for name, (one,) in ((n, p) for n, p in chosen.items() if p)} == {
        "observe": "ui", "explorer-2": "explorer-2", "explorer-3": "explorer-3", "explorer-4": "explorer-4",
        "postgres": "postgres", "seaweedfs": "s3", "prometheus": "watch", "grafana": "watch",
    }  # fmt: skip


def test_the_pages_have_a_reader_and_a_port_of_this_machine_alone(composed: dict[str, Any]) -> None:
    observe = composed["services"]["observe"]
    assert observe["volumes"] == ["../../identity/reader:/identity:ro"]
    assert observe["environment"] == {"TRINITY_IDENTITY": "/identity"}
    assert "ports" not in observe and observe["network_mode"] == "host"
    context = typer.main.get_command(ui).make_context("ui", observe["command"][1:])
    assert (context.params["nats"], context.params["port"]) == ("nats://127.0.0.1:4222", 7006)


def test_every_container_has_bounds_and_few_rights(composed: dict[str, Any], joining: dict[str, Any]) -> None:
    for name, service in [*composed["services"].items(), *joining["services"].items()]:
        assert service["deploy"]["resources"]["limits"]["pids"], name
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name
        assert service["restart"] == "on-failure:10", name
        assert service["healthcheck"]["test"], name
        if name != "nats":
            assert service["cap_drop"] == ["ALL"], name
            assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("read_only") or name in ("nats", "postgres", "seaweedfs"), name
        assert ":" in service["image"] or "build" in service, f"{name}: {service['image']} names no version"


def test_data_is_written_by_those_alone_who_write_it(composed: dict[str, Any], joining: dict[str, Any]) -> None:
    def mounts(services: dict[str, Any]) -> dict[str, str]:
        return {name: "".join(one for one in service.get("volumes", []) if one.startswith("/data:"))
                for name, service in services.items() if "build" in service}  # fmt: skip

    found = mounts(composed["services"])
    assert {name for name, mount in found.items() if mount == "/data:/data"} == {"buffer", "trainer"}
    assert {name for name, mount in found.items() if mount == "/data:/data:ro"} == {"environment", *EXPLORERS}
    assert not found["sync"]
    assert set(mounts(joining["services"]).values()) == {"/data:/data:ro"}


def test_networks_connect_those_who_call_each_other(composed: dict[str, Any]) -> None:
    members: dict[str, set[str]] = {network: set() for network in composed["networks"]}
    for name, service in composed["services"].items():
        assert ("networks" in service) is (name != "observe"), name
        for network in service.get("networks", []):
            members[network].add(name)
    assert members == {
        "run": {*ALWAYS, *EXPLORERS, "prometheus"},
        "database": {"buffer", "postgres"},
        "store": {*EXPLORERS, "trainer", "seaweedfs"},
        "watch": {"prometheus", "grafana"},
    }


def test_passwords_are_in_files_alone(composed: dict[str, Any]) -> None:
    mounted = {secret for service in composed["services"].values() for secret in service.get("secrets", [])}
    assert mounted == composed["secrets"].keys()
    assert {secret["file"].rpartition("/")[0] for secret in composed["secrets"].values()} == {"../../secrets"}
    for name, service in composed["services"].items():
        for key, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|KEY", key):
                assert str(value).startswith(("/run/secrets/", "/identity/")), (name, key)
        assert all(one["required"] is False for one in service.get("env_file", [])), name  # a run without them starts


def test_an_explorer_elsewhere_is_the_one_of_compose(composed: dict[str, Any], joining: dict[str, Any]) -> None:
    here, there = composed["services"]["explorer"], joining["services"]["explorer"]
    assert there["environment"].keys() == here["environment"].keys()
    addresses = {key: value for key, value in there["environment"].items() if "h:" in str(value)}
    assert addresses == {
        "TRINITY_EXPLORER_NATS_URL": "nats://h:4222",
        "TRINITY_EXPLORER_SYNC_ADDRESS": "h:7004",
        "TRINITY_EXPLORER_ENVIRONMENT_ADDRESS": "h:7002",
    }
    assert there["environment"]["TRINITY_EXPLORER_NAME"] == "gpu-7/{host}"
    published = {port.rpartition(":")[2] for s in composed["services"].values() for port in s.get("ports", [])}
    assert {"4222", "7004", "7002"} <= published
    assert (there["image"], there["build"]) == (here["image"], here["build"])
    for name in EXPLORERS - {"explorer"}:
        for file in (composed, joining):
            one, first = dict(file["services"][name]), dict(file["services"]["explorer"])
            assert one.pop("profiles") == [name]
            assert one.pop("deploy") != first.pop("deploy")
            assert one == first


def test_the_first_of_several_machines_reaches_the_others_and_its_services(composed: dict[str, Any]) -> None:
    trainer = over(composed, read("trainer-first.yaml", TRINITY_HOST="h"))["services"]["trainer"]
    assert trainer["network_mode"] == "host"
    assert not {"networks", "ports"} & trainer.keys()
    changed = {key for key, value in trainer["environment"].items()
               if value != composed["services"]["trainer"]["environment"].get(key)}  # fmt: skip
    names = ("NATS_URL", "BUFFER_ADDRESS", "SYNC_ADDRESS", "LISTEN", "METRICS_LISTEN")
    assert changed == {f"TRINITY_TRAINER_{name}" for name in names}
    for name, port in (("NATS_URL", 4222), ("BUFFER_ADDRESS", 7001), ("SYNC_ADDRESS", 7004)):
        assert trainer["environment"][f"TRINITY_TRAINER_{name}"].endswith(f"h:{port}")
        service = {4222: "nats", 7001: "buffer", 7004: "sync"}[port]
        published = read("compose.yaml", TRINITY_HOST="h")["services"][service]["ports"]
        assert published == [f"h:{port}:{port}"]
    with pytest.raises(KeyError, match="TRINITY_HOST"):
        read("trainer-first.yaml")


def test_a_further_machine_of_the_trainer_is_a_trainer_that_joins(composed: dict[str, Any]) -> None:
    here, there = composed["services"]["trainer"], read("trainer-node.yaml")["services"]["trainer-node"]
    own = {"TRINITY_TRAINER_FIRST_ADDRESS", "TRINITY_TRAINER_DRAIN_SECONDS"}
    assert there["environment"].keys() - own == here["environment"].keys() - {"TRINITY_TRAINER_EXIT_CODE_WHEN_STOPPED"}
    assert there["environment"]["TRINITY_TRAINER_FIRST_ADDRESS"] == "h:7005"
    assert there["environment"]["TRINITY_TRAINER_NATS_URL"] == "nats://h:4222"
    assert (there["image"], there["build"]) == (here["image"], here["build"])
    assert [one for one in there["volumes"] if ":/data" in one] == ["/data:/data"]
    assert "../../identity/gpu-2:/identity:ro" in there["volumes"]
    for key in ("cap_drop", "security_opt", "read_only", "tmpfs", "logging", "shm_size", "user", "deploy"):
        assert there[key] == here[key], key
    known = {f"TRINITY_TRAINER_{name.upper()}" for name in TrainerSettings.model_fields}
    assert there["environment"].keys() <= known
    assert int(there["environment"]["TRINITY_TRAINER_DRAIN_SECONDS"]) < 11 * 60  # stop_grace_period
    assert there["stop_grace_period"] == "11m"
