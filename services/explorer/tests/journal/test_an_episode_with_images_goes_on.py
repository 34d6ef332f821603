"""Pictures of an interrupted episode: those of known answers, or the same ones again; else it begins again."""

from typing import Any

import pytest

from support.fakes.data.pictures import picture
from support.fakes.environments.gallery import Gallery
from support.fakes.explorers.dying_explorer import Explorer, info, only, the_task
from support.fakes.explorers.toolbox import IMAGE
from trinity.data.experience import Limits
from trinity.data.vision import ImageRules
from trinity.explorer.environments.client import EnvironmentClient
from trinity.runtime.broker import Broker
from trinity.runtime.names import owner_of
from trinity.sdk import serving
from trinity.sdk.contract import Answer

pytestmark = pytest.mark.core

RULES = ImageRules(token=IMAGE, patch=4, merge=2, least_pixels=64, most_pixels=128 * 128)
COLOURS = ("red", "green", "blue")


async def test_from_a_state_with_the_pictures_of_the_answers_before_it(broker: Broker) -> None:
    task = the_task(args={"environment": "gallery"})
    async with serving(Gallery) as address:
        client = EnvironmentClient("127.0.0.1:1", addressed=[("gallery", address)], images=RULES)
        dying = Explorer(broker, "a", dies_at=3, client=client)
        await dying.explore_and_die(task, 1)
        next_one = Explorer(broker, "next", client=client)
        made = only(await next_one.explore(task, 2))
        await client.close()
    assert (next_one.asked, info(made)["moved"]) == (1, [{"turn": 2, "from": owner_of("a"), "to": owner_of("next")}])
    made.check("made", Limits(images=RULES))
    assert len({image.file for image in made.images}) == 3, "no two pictures are alike"
    assert made.images[:2] == dying.shown[-1][:2]
    assert made.images == next_one.shown[-1]


@pytest.mark.parametrize("same", [True, False])
async def test_a_replay_that_shows_other_pictures_begins_again(broker: Broker, same: bool) -> None:
    class Shown:
        deterministic, snapshots = True, False
        episodes = 0

        def __init__(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> None:
            self.turn, self.episode = 0, Shown.episodes
            Shown.episodes += 1

        async def __aenter__(self) -> "Shown":
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def reset(self, keep_states: bool = False) -> Answer:
            return self._step()

        async def step(self, action: str) -> Answer:
            self.turn += 1
            return self._step()

        def _step(self) -> Answer:
            colour = COLOURS[self.turn if same else (self.turn + self.episode) % 3] if self.turn < 3 else ""
            shown = (picture(16, 16, colour=colour),) if colour else ()
            return Answer("?", 0.5, self.turn == 3, images=shown)

    await Explorer(broker, "a", dies_at=3, environment=Shown).explore_and_die(the_task(), 1)
    next_one = Explorer(broker, "next", environment=Shown)
    made = only(await next_one.explore(the_task(), 2))
    assert len(made.images) == 3
    assert next_one.asked == (1 if same else 3)
