"""Explorers are killed with SIGKILL at random turns of episodes of ten turns: only open turns are sampled again."""

import os
from pathlib import Path

import pytest

from support.runs.killed_episodes import Played, play
from support.services.nats import NatsServer

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

# More of them by hand: TRINITY_TEST_KILLED_EPISODES=200
ROLLOUTS = 2
TASKS = int(os.environ.get("TRINITY_TEST_KILLED_EPISODES", "24")) // (2 * ROLLOUTS) * 2  # two steps of whole groups
KILLS = TASKS * 7 // 12


def told(played: Played) -> dict[str, list[tuple[float, str, list[int]]]]:
    """Rewards, what was seen and said up to the final state, and tokens of every episode."""
    return {
        task: [(e.reward, e.response_text, e.token_ids.tolist()) for e in group.experiences]
        for task, group in played.groups.items()
    }


async def test_only_the_open_turn_of_a_killed_episode_is_sampled_again(tmp_path: Path, nats_server: NatsServer) -> None:
    calm = await play(tmp_path / "calm", nats_server, tasks=TASKS, rollouts=ROLLOUTS)
    assert (calm.kills, calm.sampled_again, calm.problems) == ([], {}, [])
    killed = await play(tmp_path / "killed", nats_server, tasks=TASKS, rollouts=ROLLOUTS, kills=KILLS)
    assert killed.problems == []
    assert len(killed.kills) >= KILLS // 2, "the run ended before its explorers were killed"
    assert killed.moves > 0
    assert told(killed) == told(calm)
    deaths = {task: group.attempt - 1 for task, group in killed.groups.items()}
    assert all(times <= deaths[task] for (task, _), times in killed.sampled_again.items())
    # Without the journal the same kills cost whole episodes.
    lost = await play(tmp_path / "lost", nats_server, tasks=TASKS, rollouts=ROLLOUTS, kills=KILLS, durable=False)
    assert lost.problems == []
    assert told(lost) == told(calm)
    deaths = {task: group.attempt - 1 for task, group in lost.groups.items()}
    assert any(times > deaths[task] for (task, _), times in lost.sampled_again.items())


async def test_at_most_one_part_of_a_killed_reply_is_sampled_again(tmp_path: Path, nats_server: NatsServer) -> None:
    parts = {"tasks": 6, "rollouts": ROLLOUTS, "flush_tokens": 6, "reply_seconds": 0.1}
    calm = await play(tmp_path / "calm", nats_server, **parts)
    assert (calm.kills, calm.sampled_again, calm.problems) == ([], {}, [])
    killed = await play(tmp_path / "killed", nats_server, kills=5, **parts)
    assert killed.problems == []
    assert len(killed.kills) >= 3, "the run ended before its explorers were killed"
    assert told(killed) == told(calm)
    assert any("token" in move for move in killed.places), "no reply continued within it"
    deaths = {task: group.attempt - 1 for task, group in killed.groups.items()}
    assert all(tokens <= 6 * ROLLOUTS * deaths[task] for task, tokens in killed.tokens_again.items())
