"""`trinity env status` lists what can be played here."""

import json

import pytest

from trinity.environments import ENVIRONMENTS
from trinity.inspect.env import status

pytestmark = pytest.mark.core


def test_every_built_in_environment_has_a_line() -> None:
    lines = status().splitlines()
    assert {line.split()[0] for line in lines} >= set(ENVIRONMENTS)
    assert {one["name"] for one in json.loads(status(as_json=True))} >= set(ENVIRONMENTS)
