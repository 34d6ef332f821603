"""Files of the user's own: imported whole, refused with their name where they would hide something, seen by `check`."""

import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trinity import plugins

pytestmark = pytest.mark.core

RUN = """
project: p
name: n
model: {model_path: m, max_model_len: 64}
algorithm: {algorithm_type: grpo, repeat_times: 4}
buffer:
  batch_size: 8
  total_steps: 2
  explorer_input:
    taskset: {name: t, path: d.jsonl, default_reward_fn_type: short_reward, default_workflow_type: two_turns}
"""
REWARDS = """
from helpers import LIMIT
from trinity.plugins import reward_function, workflow

@reward_function("short_reward")
def short_reward(item, args):
    return float(len(item.response) < LIMIT)

@workflow("two_turns")
class TwoTurns:
    async def run(self): ...
"""


def python(code: str, *arguments: Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """sys.path and the registries are a process's own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd)


def refusal(*folders: Path) -> str:
    code = (
        "import sys\nfrom trinity import plugins\n"
        "try:\n    plugins.load(sys.argv[1:])\nexcept plugins.PluginError as error:\n    print(error)\n"
        "else:\n    sys.exit('taken')"
    )
    done = python(code, *folders)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def check(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "run.yaml").write_text(RUN)
    given = {key: value for key, value in os.environ.items() if key != "TRINITY_PLUGIN_DIRS"}
    command = [sys.executable, "-m", "trinity.cli.main", "check", str(tmp_path / "run.yaml"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**given, **environment})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three modules and a package that import each other."""
    place = tmp_path / "plugins"
    (place / "extras").mkdir(parents=True)
    (place / "helpers.py").write_text("from extras.limits import LIMIT\n")
    (place / "extras/__init__.py").write_text("")
    (place / "extras/limits.py").write_text("LIMIT = 5\n")
    (place / "a_rewards.py").write_text(REWARDS)
    (place / "_draft.py").write_text("raise RuntimeError('not to be imported')\n")
    (place / "notes-1.py").write_text("raise RuntimeError('no module name')\n")
    (place / "README.md").write_text("text")
    return place


def test_files_that_import_each_other_register_what_they_decorate(folder: Path) -> None:
    code = (
        "import sys\nfrom trinity import plugins\nplugins.load(sys.argv[1:])\n"
        "assert list(plugins.REWARD_FUNCTIONS) == ['short_reward'], plugins.REWARD_FUNCTIONS\n"
        "assert plugins.WORKFLOWS['two_turns'].__name__ == 'TwoTurns'\n"
        "from types import SimpleNamespace as Item\n"
        "assert plugins.REWARD_FUNCTIONS['short_reward'](Item(response='four'), {}) == 1.0\n"
    )
    done = python(code, folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("again", ["plugins", "plugins/../plugins", "link"])
def test_loading_a_folder_twice_is_harmless(folder: Path, again: str) -> None:
    (folder.parent / "link").symlink_to(folder)
    (folder / "counter.py").write_text("import builtins\nbuiltins.times = getattr(builtins, 'times', 0) + 1\n")
    code = (
        "import builtins, sys\nfrom trinity import plugins\n"
        "plugins.load(sys.argv[1:])\nplugins.load(sys.argv[1:])\n"
        "assert builtins.times == 1\nassert sys.path.count(sys.argv[1]) == 1\n"
    )
    done = python(code, folder, folder.parent / again)
    assert done.returncode == 0, done.stderr


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere") == f"plugin folder {str(tmp_path / 'nowhere')!r} does not exist"


@pytest.mark.parametrize("name", ["random.py", "colorsys.py", "yaml.py", "trinity.py", "grpc/__init__.py"])
def test_a_module_that_would_hide_an_installed_one_is_refused_before_any_is_imported(tmp_path: Path, name: str) -> None:
    (tmp_path / "a_first.py").write_text("raise RuntimeError('imported')")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    stem = name.partition("/")[0].removesuffix(".py")
    said = refusal(tmp_path)
    assert f"another module is named {stem!r} already; rename it" in said
    assert str(tmp_path / name.partition("/")[0]) in said


def test_two_folders_with_modules_of_one_name_are_refused(tmp_path: Path) -> None:
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "rewards.py").write_text("")
    assert str(tmp_path / "two/rewards.py") in refusal(tmp_path / "one", tmp_path / "two")


def test_two_plugins_cannot_register_one_name(folder: Path) -> None:
    text = (
        "from trinity.plugins import reward_function\n\n@reward_function('short_reward')\ndef other(item, args): ...\n"
    )
    (folder / "b_rewards.py").write_text(text)
    said = refusal(folder)
    assert said.startswith(f"{folder / 'b_rewards.py'}:3: ")
    assert "'short_reward' is registered by a_rewards.short_reward already" in said


@pytest.mark.parametrize("decorator", ["reward_function", "advantage"])
def test_one_file_cannot_register_a_name_twice(decorator: str, tmp_path: Path) -> None:
    """A block that was copied and not renamed does so."""
    head = "def score(item, args)" if decorator == "reward_function" else "def score(groups)"
    text = f"from trinity.plugins import {decorator}\n" + 2 * f"\n@{decorator}('mine')\n{head}: ...\n"
    (tmp_path / "twice.py").write_text(text)
    assert "'mine' is" in refusal(tmp_path)


def test_what_a_plugin_prints_is_no_part_of_an_answer(folder: Path, tmp_path: Path) -> None:
    (folder / "talks.py").write_text("print('loading my plugin')\n")
    done = check(tmp_path, "--plugin-dir", str(folder), "--json")
    assert json.loads(done.stdout) and "loading my plugin" in done.stderr


def test_a_mere_folder_of_the_same_name_where_a_process_runs_hides_nothing(tmp_path: Path) -> None:
    """Services run as `python -m` in the user's folder, so its folders are importable as namespaces."""
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins/plugins.py").write_text("import builtins\nbuiltins.found = True\n")
    code = "import builtins\nfrom trinity import plugins\nplugins.load(['plugins'])\nassert builtins.found"
    done = python(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("\n1 / 0", 2, "ZeroDivisionError: division by zero"),
        ("\n\ndef broken(:\n", 3, "SyntaxError"),
        ("import no_such_module_x", 1, "ModuleNotFoundError: No module named 'no_such_module_x'"),
        ("import sys\nsys.exit(0)", 2, "SystemExit: 0"),
        ("import json\n\ndef f():\n    json.loads('{')\n\nf()", 4, "JSONDecodeError"),
    ],
)
def test_a_plugin_that_raises_is_named_with_line_and_error(tmp_path: Path, text: str, line: int, said: str) -> None:
    (tmp_path / "bad_plugin.py").write_text(text)
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path / 'bad_plugin.py'}:{line}: ")
    assert said in message


def test_check_knows_the_names_of_a_plugin_dir(folder: Path, tmp_path: Path) -> None:
    done = check(tmp_path, "--plugin-dir", str(folder))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("separator", [os.pathsep, ","])
def test_check_knows_the_names_of_the_environments_plugin_dirs(folder: Path, tmp_path: Path, separator: str) -> None:
    (tmp_path / "more").mkdir()
    done = check(tmp_path, TRINITY_PLUGIN_DIRS=separator.join(["", str(tmp_path / "more"), str(folder)]))
    assert done.returncode == 0, done.stderr


def test_without_the_plugin_its_names_are_unknown(tmp_path: Path) -> None:
    done = check(tmp_path)
    assert done.returncode == 2
    assert "is 'short_reward', which is not registered" in done.stderr
    assert "(one of a plugin needs its folder: --plugin-dir FOLDER)" in done.stderr
    assert "is 'two_turns', which is not registered" in done.stderr


def test_a_misspelt_name_is_answered_with_the_plugins_own(folder: Path, tmp_path: Path) -> None:
    override = "buffer.explorer_input.taskset.default_reward_fn_type=shrt_reward"
    done = check(tmp_path, override, "--plugin-dir", str(folder))
    assert done.returncode == 2
    assert "buffer.explorer_input.taskset.default_reward_fn_type: is 'shrt_reward'" in done.stderr
    assert "did you mean 'short_reward'" in done.stderr


def test_a_plugin_that_cannot_be_loaded_ends_check_in_one_sentence(tmp_path: Path) -> None:
    place = tmp_path / "plugins"
    place.mkdir()
    (place / "broken_one.py").write_text("1 / 0")
    for arguments, environment in ((["--plugin-dir", str(place)], {}), ([], {"TRINITY_PLUGIN_DIRS": str(place)})):
        done = check(tmp_path, *arguments, **environment)
        assert done.returncode == 2
        assert done.stderr == f"trinity: {place / 'broken_one.py'}:1: ZeroDivisionError: division by zero\n"


def test_what_is_no_folder_of_plugins_is_one_sentence(tmp_path: Path) -> None:
    (file := tmp_path / "rewards.py").write_text("")
    (loop := tmp_path / "loop").symlink_to("loop")
    for place, said in (
        (file, "is a file; give the folder that holds it"),
        (tmp_path / "none", "does not exist"),
        (loop, "cannot be read"),
        (Path("~no-such-user/plugins"), "cannot be read"),
        (tmp_path / ("x" * 300), "cannot be read: File name too long"),
    ):
        text = refusal(place)
        assert f"plugin folder {str(place)!r} {said}" in text
        assert "\n" not in text


@pytest.mark.parametrize(
    "decorator", ["reward_function", "group_reward_function", "workflow", "environment", "policy_loss", "advantage"]
)
def test_a_decorator_without_its_name_is_refused(tmp_path: Path, decorator: str) -> None:
    text = f"from trinity.plugins import {decorator}\n\n\n@{decorator}\ndef mine(): ...\n"
    (tmp_path / "no_name.py").write_text(text)
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path / 'no_name.py'}:4: ")
    assert message.endswith('write the YAML\'s name in parentheses: ("mine")')


def of_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> None: ...


def of_trl(completions: list[str], **kwargs: Any) -> None: ...


async def of_a_loop(item: Any, args: Any) -> None: ...


class Without: ...


class Abstract(ABC):
    @abstractmethod
    def run(self) -> None: ...


@pytest.mark.parametrize("kind", [Without, Abstract, of_a_loop])
def test_a_workflow_is_a_class_with_run(kind: Any) -> None:
    with pytest.raises(
        plugins.PluginError, match=r"'mine' is registered for .*, which is no class with run; derive it"
    ):
        plugins.workflow("mine")(kind)
    assert "mine" not in plugins.WORKFLOWS


def test_what_is_not_imported_or_registers_nothing_is_said(folder: Path, tmp_path: Path) -> None:
    (other := tmp_path / "none").mkdir()
    (other / "plain_of_none.py").write_text("def reward(item, args): ...\n")
    code = (
        "import sys\nfrom trinity import plugins\n"
        "for _ in range(2):\n    print(*plugins.load(sys.argv[1:]), sep='\\n', end='\\n--\\n')\n"
    )
    done = python(code, folder, other)
    assert done.returncode == 0, done.stderr
    renamed = f"{folder / 'notes-1.py'} is not imported: rename it, for instance notes_1.py"
    first, again = done.stdout.split("--\n")[:2]
    assert (first.splitlines()[0], again.splitlines()) == (renamed, [renamed])
    assert first.splitlines()[1:] == [
        f"plugin folder {str(other)!r} registers nothing; put a decorator, such as @reward_function(name), before what "
        "the YAML names"
    ]


@pytest.mark.parametrize(
    ("function", "said"),
    [(of_verl, r"takes \(data_source: "), (of_trl, r"takes \(completions: "), (of_a_loop, "is async")],
)
def test_reward_functions_of_another_form_are_refused(function: Callable[..., Any], said: str) -> None:
    for decorator, first in ((plugins.reward_function, "item"), (plugins.group_reward_function, "items")):
        wanted = rf"; wrap it in a plain function of \({first}, args\), see docs/plugins.md"
        with pytest.raises(
            plugins.PluginError, match=rf"'mine' is registered for <function of_\w+.*>, which {said}.*{wanted}"
        ):
            decorator("mine")(function)
    assert "mine" not in plugins.REWARD_FUNCTIONS


@pytest.mark.parametrize("code", ["reward_function(3)(print)", "reward_function('')(print)", "workflow('x')(3)"])
def test_a_name_is_text_and_names_what_can_be_called(tmp_path: Path, code: str) -> None:
    (tmp_path / "odd_names.py").write_text(f"from trinity.plugins import reward_function, workflow\n{code}\n")
    assert "a name is text, and what it names can be called" in refusal(tmp_path)
