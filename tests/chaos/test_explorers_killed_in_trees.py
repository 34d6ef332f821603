"""Every branch of an episode continues after SIGKILL of its explorer and of its environment."""

import json
from collections import Counter
from pathlib import Path

import pytest

from chaos.killed_episodes import TURNS, play
from chaos.test_explorers_killed_in_episodes import told_without_kills
from support.servers.nats import NatsServer

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

TASKS, LEAVES, KILLS, BRANCHES = 6, 4, 5, {"turns": [3, 6], "width": 2}
REPLIES = 3 + 2 * 3 + LEAVES * (TURNS - 6)  # of a tree


async def test_each_branch_continues_at_its_open_turn_and_is_trained_once(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    given = {"tasks": TASKS, "rollouts": LEAVES, "workflow": "environment_workflow", "branches": BRANCHES}
    played = await play(tmp_path / "killed", nats_server, kills=KILLS, environment_kills=1, **given)
    assert played.problems == []
    assert len(played.kills) >= 3, "the run ended before its explorers were killed"
    assert played.moves > 0
    assert len(played.groups) == TASKS
    sampled: Counter[str] = Counter()
    for (task, _, _), times in played.replies.items():
        sampled[task] += times
    for task, group in played.groups.items():
        facts = [json.loads(experience.info_json) for experience in group.experiences]
        assert [fact.get("parent") for fact in facts] == [None, 0, 0, 2], "the ledger keeps the tree"
        told = [told_without_kills(experience) for experience in group.experiences]
        assert len({name for name, *_ in told}) == 1, "branches are of one episode"
        assert [(e.reward, e.response_text, e.metrics["at"]) for e in group.experiences] == [one[1:] for one in told]
        trained = [
            experience.action_mask[begin:end].all()
            for experience, fact in zip(group.experiences, facts, strict=True)
            for begin, end in fact["turns"]
        ]
        assert sum(trained) == REPLIES, "each turn is trained once"
        # Each kill costs at most the open turn of each branch.
        assert sampled[task] <= REPLIES + LEAVES * (played.deaths[task] + played.environment_kills)
