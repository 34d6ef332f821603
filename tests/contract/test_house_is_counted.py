"""scripts/house.py finds circles and protobuf beyond the edge; the tree has no others than .importlinter lists."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import fingerprint  # noqa: E402
import house  # noqa: E402


def listed(contract: str) -> list[str]:
    """Returns the modules whose imports .importlinter ignores for a contract."""
    section = (ROOT / ".importlinter").read_text().partition(f"[importlinter:contract:{contract}]")[2]
    return [line.split("->")[0].strip() for line in section.partition("\n[")[0].splitlines() if "->" in line]


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}, "e": {"a"}}
    assert house.circles(graph) == [["b", "c"], ["d"]]


def test_the_tree_has_no_circles_but_the_listed() -> None:
    circles = house.circles(house.imports())
    assert [circle for circle in circles if not set(circle) & set(listed("siblings"))] == []


def test_protobuf_is_where_the_list_says() -> None:
    beyond = house.protobuf_beyond_the_edge(house.imports())
    assert set(beyond) <= set(listed("protobuf")), "convert in wire.py, servicer.py or client.py"


def test_core_and_satellites_are_the_whole_product() -> None:
    core, satellites = house.lines(fingerprint.CORE), house.lines(house.SATELLITES)
    assert {"lib/runtime", "services/trainer", "cli"} <= core.keys() and "satellites/ui" in satellites
    assert house.total(core)[0] > house.total(satellites)[0]


def test_the_fingerprint_of_a_change_never_fails(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/fingerprint.py"), "--change", "no-such-branch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "no change to read" in done.stdout, done.stdout + done.stderr
