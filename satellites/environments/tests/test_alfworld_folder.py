"""Where ALFWorld's games are looked for; the package itself is not needed."""

from pathlib import Path

import pytest

from trinity.environments.alfworld.environment import game_path
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core


def test_without_the_variable_games_are_where_the_download_puts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InvalidInput, match="set ALFWORLD_DATA"):
        game_path("json_2.1.1/game.tw-pddl")
    game = tmp_path / ".cache/alfworld/json_2.1.1/game.tw-pddl"
    game.parent.mkdir(parents=True)
    game.touch()
    assert game_path(str(game)) == game_path("json_2.1.1/game.tw-pddl") == game
    with pytest.raises(InvalidInput, match=r"must be a \.tw-pddl file under"):
        game_path(str(tmp_path / "game.tw-pddl"))
