"""A trainer on several machines learns as one would, through accidents, and refuses machines that do not fit."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.programs.trainer_site import (
    ACCIDENTS,
    START,
    STEPS,
    Accident,
    Site,
    alone,
    assert_equal,
    assert_groups_once,
    assert_undisturbed,
    long_sft,
    rft,
    sft,
    with_accident,
    with_explorer,
)
from support.servers import containers
from support.servers.machines import Machines
from trinity.runtime.trust import ca

FEW = 8  # steps

pytestmark = [
    pytest.mark.extended,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(containers.missing()), reason=containers.missing() or "-"),
]


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    with Machines(request.param) as machines:
        yield Site(machines, tmp_path, tmp_path / "run.yaml")


@pytest.mark.parametrize("site", [2], indirect=True)
def test_two_machines_train_as_one_would_in_any_order_and_others_are_refused(
    site: Site, quickstart_model: Path, quickstart_data: Path
) -> None:
    values = sft(quickstart_model, quickstart_data)
    site.config.write_text(yaml.safe_dump(values))
    site.prepare()
    node = site.further(2)
    node.until("looking for the run", 60)
    other = site.further(2, "cluster.node_name=other", "trainer.grad_clip=0.5")
    first = site.first()
    refused = "its YAML differs from the first node's in trainer.grad_clip; use the same YAML on all nodes"
    assert other.finish(START) == 1
    assert refused in " ".join(other.text.split())
    assert first.finish(START) == 0, site.said(first, node)
    assert node.finish(60) == 0, site.said(first, node)
    assert {line["ranks"] for line in site.batches()} == {2}
    log = (site.job / "log/trainer.log").read_text()
    assert refused in log
    assert "TrainerService/Status" not in log, "a further machine may ask for the step, and shows it"
    assert re.search(r"step \d+/12", node.text), node.text
    together = site.weights(12)
    assert_equal(together, alone(site.folder / "alone", {**values, "cluster": {}}, 12))


@pytest.fixture(scope="module")
def undisturbed(quickstart_model: Path, quickstart_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Weights of one machine's run."""
    return alone(tmp_path_factory.mktemp("alone"), long_sft(quickstart_model, quickstart_data, {}), STEPS)


@pytest.mark.parametrize("site", [2], indirect=True)
@pytest.mark.parametrize("accident", ACCIDENTS, ids=lambda accident: accident.__name__)
def test_an_accident_costs_time_and_changes_no_weight(
    accident: Accident, site: Site, undisturbed: dict[str, Any], quickstart_model: Path, quickstart_data: Path
) -> None:
    cost = with_accident(accident, site, quickstart_model, quickstart_data)
    print(cost)
    assert_undisturbed(site, undisturbed)
    assert "ETTR" in cost


@pytest.mark.parametrize("site", [3], indirect=True)
def test_two_of_three_machines_train_each_group_once(site: Site, quickstart_model: Path, quickstart_data: Path) -> None:
    with_explorer(site, quickstart_model, quickstart_data)
    assert_groups_once(site)


@pytest.mark.parametrize("site", [6], indirect=True)
def test_two_machines_train_and_four_explore_by_three_commands(
    site: Site, quickstart_model: Path, quickstart_data: Path
) -> None:
    """As docs/modes.md has them. Training begins with the second machine, so that all explorers are there."""
    values = rft(quickstart_model, quickstart_data, FEW, 2)
    values["cluster"] = {"node_num": 2, "node_timeout": 20}
    values["explorer"]["runner_per_model"] = 1  # each gets some of the tasks
    site.config.write_text(yaml.safe_dump(values))
    site.prepare(trainers=2)
    first = site.first()
    explorers = {f"gpu-{number}": site.explores(number) for number in range(3, 7)}
    for name, explorer in explorers.items():
        explorer.until(f"{name} waits for the trainer's first weights", START)
    two = site.further(2)
    assert first.finish(START) == 0, site.said(first, two, *explorers.values())
    assert two.finish(60) == 0, site.said(first, two)
    for name, explorer in explorers.items():
        assert explorer.finish(60) == 0, site.said(explorer)
        lines = (site.job / f"log/{name}.log").read_text()
        assert "explorer.group.stored" in lines, lines[-3000:]
    assert_groups_once(site, FEW)


@pytest.mark.parametrize("site", [2], indirect=True)
def test_machines_that_do_not_fit_are_refused_in_a_sentence(
    site: Site, quickstart_model: Path, quickstart_data: Path
) -> None:
    """The first machine waits for another one meanwhile, and goes on with it."""
    site.config.write_text(yaml.safe_dump(sft(quickstart_model, quickstart_data)))
    site.prepare()
    first = site.first()
    first.until("1 of 2 nodes are here", START)
    old = site.folder / "packages/transformers-0.0.1.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 0.0.1\n")
    expired, stranger = site.identity / "expired", site.folder / "stranger"
    shutil.copytree(site.identity / "gpu-2", expired)
    authority = ca.Pair((site.identity / "ca/ca.crt").read_bytes(), (site.identity / "ca/ca.key").read_bytes())
    pair = ca.issue(authority, "gpu-2", role="trainer", hosts=[site.machines.hosts[1]], days=-1)
    (expired / "tls.crt").write_bytes(pair.certificate)
    (expired / "tls.key").write_bytes(pair.key)
    own, site.folder = site.folder, stranger
    stranger.mkdir()
    site._certs("init", "--host", site.machines.hosts[0])
    site.folder = own
    elsewhere = {"TRINITY_IDENTITY": str(site.identity), "TRINITY_CHECKPOINT_ROOT_DIR": str(own / "elsewhere")}
    other_run = [*site._typed("train_node", "gpu-2"), "name=other", "synchronizer.sync_timeout=5"]
    node = site._typed("train_node", "gpu-2")
    cases: dict[str, tuple[list[str], dict[str, str]]] = {
        "it has transformers 0.0.1, and the first node": (
            node,
            {"PYTHONPATH": f"{own}/packages:{os.environ.get('PYTHONPATH', '')}"},
        ),
        "is in use by a live run": (site._typed("train"), {"TRINITY_IDENTITY": str(site.identity)}),
        "is live elsewhere, with its trainer at": (site._typed("train"), elsewhere),
        "tls.crt expired at": (node, {"TRINITY_IDENTITY": str(expired)}),
        "NATS forbids trainer/gpu-2": (other_run, {}),
        "certificate": (node, {"TRINITY_IDENTITY": str(stranger / "identity/trainer")}),
    }
    unexpected: list[str] = []
    for number, (sentence, (arguments, variables)) in enumerate(cases.items()):
        environment = {**site._environment("identity/gpu-2", 1), **variables}
        command = site.machines.start(1, arguments, environment, own / f"refused_{number}.out")
        code, said = command.finish(150), " ".join(command.text.split())
        print(f"{sentence}: {code}\n{command.text[-1500:]}")
        unexpected += [] if code and sentence in said else [f"{sentence}: {code}, {said[-1500:]}"]
    assert not unexpected, "\n".join(unexpected)
    assert "it has transformers 0.0.1" in (site.job / "log/trainer.log").read_text()
    two = site.further(2)
    assert first.finish(START) == 0, site.said(first, two)
    assert {line["ranks"] for line in site.batches()} == {2}
