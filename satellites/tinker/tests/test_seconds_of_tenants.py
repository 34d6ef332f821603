"""`trinity cost` on a service for tinker clients sums what its tenants used."""

import json
from pathlib import Path

import pytest

from trinity.config import Config
from trinity.inspect.cost import cost, find_account
from trinity.plugins import satellites
from trinity.reading.errors import RunError
from trinity.reading.reader import JobStage
from trinity.tinker.commands.account import SAMPLE, Account, path_of

pytestmark = pytest.mark.core


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    path = tmp_path / "tinker.yaml"
    path.write_text(f"model_path: m\ntenants: [alice, bob]\nname: hub\ncheckpoint_root_dir: {tmp_path}\n")
    return path


def _use(folder: Path) -> None:
    trained, sampled = Account(), Account()
    for tenant, seconds in (("alice", 1.0), ("bob", 4.0), ("bob", 2.0)):
        trained.add(tenant, "forward_backward", seconds)
    trained.add("bob", "optim_step", 0.5)
    sampled.add("alice", SAMPLE, 2.5)
    for process, account in (("tenants", trained), ("sampler", sampled)):
        path = path_of(folder / "tenants", process)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(vars(account)))


def test_seconds_of_all_tenants_and_of_one(tmp_path: Path, yaml: Path) -> None:
    place = find_account(config=yaml)
    with pytest.raises(RunError, match="no tenant has used a device yet"):
        cost(place)
    _use(tmp_path / "tinker/hub")
    assert find_account(job=tmp_path / "tinker/hub") == place
    rows = [line.split() for line in cost(place).splitlines()]
    assert rows == [
        ["seconds", "of", "devices", "commands", "samples", "all", "share"],
        ["bob", "6.5", "0.0", "6.5", "65.0%"],
        ["alice", "1.0", "2.5", "3.5", "35.0%"],
    ]
    rows = [line.split() for line in cost(place, "bob").splitlines()]
    assert rows[1:] == [["forward_backward", "2", "6.0", "92.3%"], ["optim_step", "1", "0.5", "7.7%"]]
    found = json.loads(cost(place, as_json=True))
    assert (found["service"], found["device_seconds"]) == ("hub", 10.0)
    assert found["tenants"]["alice"]["uses"][SAMPLE] == {"requests": 1, "seconds": 2.5}
    with pytest.raises(RunError, match="--tenant carol: used no device; alice, bob did"):
        cost(place, "carol")


def test_a_run_has_no_tenants() -> None:
    stage = JobStage("", Config.model_construct(project="p", name="run"), None)
    with pytest.raises(RunError, match="--tenant bob: p/run is a run, without tenants"):
        cost(stage, "bob")


def test_without_the_satellite_a_folder_of_tenants_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(tmp_path / "tinker/hub")
    monkeypatch.setattr(satellites, "find", lambda hook: None)
    with pytest.raises(RunError, match="tinker/hub"):
        find_account(job=tmp_path / "tinker/hub")
