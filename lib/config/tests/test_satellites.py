"""Without a satellite the core runs its own YAMLs, and says which distribution has what it was given."""

from pathlib import Path
from typing import Any

import pytest

from trinity import plugins
from trinity.config import ConfigError, load
from trinity.config.load import parse
from trinity.plugins import satellites

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[3]
YAMLS = [
    path
    for path in sorted((ROOT / "examples").rglob("*.yaml"))
    if path.name != "template.yaml" and "buffer:" in path.read_text()
]
RUN = "model: {model_path: m}\nbuffer: {batch_size: 8, explorer_input: {taskset: {path: d.jsonl}}}\n"


@pytest.fixture
def _without_satellites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(satellites, "find", lambda hook: None)


def test_every_hook_of_an_installed_satellite_is_found() -> None:
    assert all(satellites.find(hook) is not None for hook in satellites.DISTRIBUTIONS)
    assert satellites.find("of_nobody") is None


@pytest.mark.parametrize("path", YAMLS, ids=[str(path.relative_to(ROOT)) for path in YAMLS])
def test_examples_are_the_same_without_satellites(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL_PATH", "DATA_PATH"):
        monkeypatch.setenv(name, "/somewhere")
    plain = load(path, plugins_loaded=False)
    monkeypatch.setattr(satellites, "find", lambda hook: None)
    assert load(path, plugins_loaded=False) == plain


@pytest.mark.usefixtures("_without_satellites")
@pytest.mark.parametrize(
    "document",
    [f"{RUN}explorer: {{runner_num: 4}}\n", f"{RUN}trainer: {{trainer_config: {{trainer: {{critic_warmup: 1}}}}}}\n"],
)
def test_a_key_of_trinity_rft_is_refused_by_the_name_of_its_distribution(document: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(document)
    (problem,) = caught.value.problems
    assert problem.message.startswith("unknown key; ")
    assert problem.message.endswith("keys of Trinity-RFT need trinity-compat-rft, which is not installed")


@pytest.mark.usefixtures("_without_satellites")
@pytest.mark.parametrize("name", ["R3L_workflow", "async_math_ruler_workflow", "rubric_judge_workflow"])
def test_a_workflow_of_trinity_rft_is_refused_by_the_name_of_its_distribution(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(RUN, overrides=[f"buffer.explorer_input.default_workflow_type={name}"])
    problem = caught.value.problems[0]
    assert problem.path == "buffer.explorer_input.default_workflow_type"
    assert problem.message == f"is '{name}', which is in trinity-compat-rft, which is not installed"


@pytest.mark.parametrize(
    ("found", "command"), [(None, "; the command is in trinity-tinker, which is not installed"), (object(), "")]
)
def test_a_yaml_of_tinker_is_none_of_a_run(found: Any, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(satellites, "find", lambda hook: found if hook == "tenants" else None)
    with pytest.raises(ConfigError) as caught:
        load(ROOT / "examples/tinker/quickstart.yaml")
    (problem,) = caught.value.problems
    assert str(problem) == f"line 9: tenants: is a key of `trinity tinker`'s YAML, not of a run's{command}"


@pytest.mark.usefixtures("_without_satellites")
def test_a_plugin_of_trinity_rft_is_refused_by_the_name_of_its_distribution(tmp_path: Path) -> None:
    (tmp_path / "plugin_of_another.py").write_text("import json\nfrom trinity.common.of_nobody import WORKFLOWS\n")
    with pytest.raises(plugins.PluginError) as caught:
        plugins.load([tmp_path])
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'plugin_of_another.py'}:2: ModuleNotFoundError: ")
    assert message.endswith("names of Trinity-RFT are in trinity-compat-rft, which is not installed")


def test_the_first_of_several_distributions_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        def __init__(self, found: Any) -> None:
            self.load = lambda: found

    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: (Entry("one"), Entry("two")))
    assert satellites.find.__wrapped__("any") == "one"
