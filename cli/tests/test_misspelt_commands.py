"""A misspelt command is answered with the nearest one, also one of a satellite."""

import pytest
from typer.testing import CliRunner

from trinity.cli.main import app

pytestmark = pytest.mark.core


@pytest.mark.parametrize(("typed", "meant"), [("chekc", "check"), ("exprot", "export"), ("import-vrel", "import-verl")])
def test_the_nearest_command_is_named(typed: str, meant: str) -> None:
    done = CliRunner().invoke(app, [typed])
    assert done.exit_code == 2
    assert f"No such command '{typed}'. Did you mean '{meant}'?" in done.output


def test_help_has_the_commands_in_groups() -> None:
    text = CliRunner().invoke(app, ["--help"]).stdout
    places = [text.index(f" {name} ─") for name in ("Run", "Watch", "Explain", "Repair", "Admin")]
    assert places == sorted(places)
    assert text.index(" run ") < places[1] < text.index(" view ") < places[2]
