"""docs/environments_builtin.md names every environment, and its example runs."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from trinity.environments import ENVIRONMENTS
from trinity.environments.game import TurnRules
from trinity.environments.scorers import SCORERS

pytestmark = pytest.mark.core

PAGE = (Path(__file__).parents[3] / "docs/environments_builtin.md").read_text()


def test_every_environment_rule_and_scorer_is_named() -> None:
    assert set(re.findall(r"^\| `(\w+)` \| [^|]*\| [^|]*`?\{?", PAGE, re.MULTILINE)) >= set(ENVIRONMENTS)
    assert not [name for name in (*(rule.name for rule in fields(TurnRules)), *SCORERS) if f"`{name}`" not in PAGE]


def test_the_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "docs/environments_builtin.md", "exec"), {})
