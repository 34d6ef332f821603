"""`reload` has what the files say now, and nothing of what they said before."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinity import plugins
from trinity.compat_rft.debug.reload import reload

pytestmark = pytest.mark.core

FIRST = """
from trinity.plugins import group_reward_function, reward_function, tool, workflow
from parts_of_again import VALUE

@reward_function("again_reward")
def again_reward(item, args):
    return VALUE

@group_reward_function("again_group")
def again_group(items, args):
    return [VALUE for _ in items]

@tool("again_tool", "Says.", {})
def again_tool():
    return "one"

@workflow("again_workflow")
class Again:
    def run(self): ...
"""
SECOND = """
from trinity.plugins import reward_function
from parts_of_again import VALUE

@reward_function("again_reward")
def of_another_name(item, args):
    return VALUE
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "plugin_again.py").write_text(FIRST)
    (tmp_path / "parts_of_again.py").write_text("VALUE = 1.0\n")
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        path.unlink()
    reload([tmp_path])
    assert "again_reward" not in plugins.REWARD_FUNCTIONS


def test_what_changed_or_went_is_as_the_files_say(folder: Path) -> None:
    plugins.load([folder])
    assert plugins.REWARD_FUNCTIONS["again_reward"](None, {}) == 1.0
    assert "again_workflow" in plugins.WORKFLOWS and "again_tool" in plugins.TOOLS
    (folder / "plugin_again.py").write_text(SECOND)
    (folder / "parts_of_again.py").write_text("VALUE = 22.0\n")
    reload([folder])
    assert plugins.REWARD_FUNCTIONS["again_reward"](None, {}) == 22.0
    assert "again_workflow" not in plugins.WORKFLOWS and "again_tool" not in plugins.TOOLS
    assert "again_group" not in plugins.REWARD_FUNCTIONS and "again_group" not in plugins.GROUP_REWARD_FUNCTIONS


def test_a_file_that_could_not_be_imported_does_not_hold_its_names(folder: Path) -> None:
    plugins.load([folder])
    (folder / "plugin_again.py").write_text(FIRST + "\ndef broken(:\n")
    with pytest.raises(plugins.PluginError, match=r"plugin_again\.py:\d+: SyntaxError"):
        reload([folder])
    (folder / "plugin_again.py").write_text(FIRST + "\nraise ValueError('late')\n")
    with pytest.raises(plugins.PluginError, match="ValueError: late"):
        reload([folder])
    (folder / "plugin_again.py").write_text(SECOND)
    reload([folder])
    assert plugins.REWARD_FUNCTIONS["again_reward"].__name__ == "of_another_name"
