"""A misspelt command is answered with the nearest one, also of a satellite; defaults are within their ranges."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from trinity.cli.main import app

pytestmark = pytest.mark.core


@pytest.mark.parametrize(("typed", "meant"), [("chekc", "check"), ("exprot", "export"), ("import-vrel", "import-verl")])
def test_the_nearest_command_is_named(typed: str, meant: str) -> None:
    done = CliRunner().invoke(app, [typed])
    assert done.exit_code == 2
    assert f"No such command '{typed}'. Did you mean '{meant}'?" in done.output


def test_a_mode_as_a_command_names_the_command_that_takes_it() -> None:
    done = CliRunner().invoke(app, ["bench", "run.yaml"])
    assert (done.exit_code, "it is a mode: trinity run FILE mode=bench" in done.output) == (2, True)


def test_serve_records_by_a_run_of_the_yaml(repository: Path) -> None:
    def serve(*arguments: str) -> str:
        command = [sys.executable, "-m", "trinity.cli.main", "serve", "--record", *arguments]
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2, done.stderr
        return done.stderr

    for given in ([], ["--config", "examples/quickstart/arithmetic.yaml"]):
        assert "give --config FILE, a YAML with explorer.traffic, such as examples/traffic/sums.yaml" in serve(*given)
    said = serve("--config", "examples/traffic/sums.yaml", "model.model_path=/nowhere")
    assert "examples/traffic/sums.yaml: model.model_path: '/nowhere' has no config.json" in said


def test_help_has_the_commands_in_groups() -> None:
    text = CliRunner().invoke(app, ["--help"]).stdout
    places = [text.index(f" {name} ─") for name in ("Run", "Watch", "Explain", "Repair", "Admin")]
    assert places == sorted(places)
    assert text.index(" run ") < places[1] < text.index(" view ") < places[2]


def test_each_default_lies_in_the_range_of_its_option() -> None:
    """Typer also refuses a default outside of it: the command would end unless the option is given."""
    root = get_command(app)
    assert isinstance(root, TyperGroup)
    context = root.make_context("trinity", ["check"], resilient_parsing=True)
    names = root.list_commands(context)
    commands = [(name, root.resolve_command(context, [name])[1]) for name in names]
    ranges = set()
    for name, command in commands:
        commands += [(f"{name} {below}", one) for below, one in getattr(command, "commands", {}).items()]
        for option in command.params:
            least, most, default = (getattr(option, key, None) for key in ("min", "max", "default"))
            if (least, most) != (None, None):
                ranges.add(f"{name} {option.name}")
            if isinstance(default, int | float):
                assert least is None or default >= least, f"{name} {option.opts[0]}: {default} is below {least}"
                assert most is None or default <= most, f"{name} {option.opts[0]}: {default} is above {most}"
    assert {"fork at", "provenance at", "certs init days", "weights list limit"} <= ranges, ranges
