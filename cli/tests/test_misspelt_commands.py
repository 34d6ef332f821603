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
