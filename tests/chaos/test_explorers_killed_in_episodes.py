"""Explorers are killed with SIGKILL at random turns of episodes of ten turns: only open turns are sampled again."""

import os
import re
from pathlib import Path

import pytest

from chaos.killed_episodes import TURNS, Played, play
from support.fakes.environments.gusts import uninterrupted
from support.servers.nats import NatsServer
from trinity.data.experience import Experience

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
    assert all(times <= killed.deaths[task] for (task, _), times in killed.sampled_again.items())
    # Without the journal the same kills cost whole episodes.
    lost = await play(tmp_path / "lost", nats_server, tasks=TASKS, rollouts=ROLLOUTS, kills=KILLS, durable=False)
    assert lost.problems == []
    assert told(lost) == told(calm)
    assert any(times > lost.deaths[task] for (task, _), times in lost.sampled_again.items())


def told_without_kills(experience: Experience) -> tuple[str, float, str, float]:
    """Name, reward, what was seen and said, and final state of an episode in gusts that has the same name and actions,
    and is played at once."""
    (name,) = re.findall(r"Episode (\w+)\.", experience.prompt_text)
    actions = re.findall(r"<action>(\w+)</action>", experience.response_text)
    _, *answers = uninterrupted(name, actions)
    said = [f"[assistant] <action>{action}</action>" for action in actions]
    seen = [f"[user] {answer.text}" for answer in answers]
    text = "\n".join(line for pair in zip(said, seen, strict=True) for line in pair).removesuffix(f"\n{seen[-1]}")
    return name, sum(answer.reward for answer in answers), text, answers[-1].metrics["at"]


def check_gusts(played: Played) -> None:
    episodes = [e for group in played.groups.values() for e in group.experiences]
    expected = [told_without_kills(e) for e in episodes]
    assert [(e.reward, e.response_text, e.metrics["at"]) for e in episodes] == [told[1:] for told in expected]
    assert len({told[0] for told in expected}) == len(episodes) == TASKS * ROLLOUTS
    assert {e.metrics["end_done"] for e in episodes} == {1.0}


async def test_states_are_restored_where_no_episode_can_be_played_again(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    gusts = {"tasks": TASKS, "rollouts": ROLLOUTS, "kills": KILLS, "workflow": "environment_workflow"}
    killed = await play(tmp_path / "killed", nats_server, environment_kills=2, **gusts)
    assert killed.problems == []
    assert len(killed.kills) >= KILLS // 2, "the run ended before its explorers were killed"
    assert killed.environment_kills > 0, "the run ended before its environment was killed"
    assert killed.moves > 0
    check_gusts(killed)
    interrupted = {task: deaths + killed.environment_kills for task, deaths in killed.deaths.items()}
    assert all(times <= interrupted[task] for (task, _), times in killed.beyond(TURNS).items())
    lost = await play(tmp_path / "lost", nats_server, durable=False, **gusts)
    assert lost.problems == []
    check_gusts(lost)
    # A task at which too many explorers die is a dead letter, and in no group.
    assert any(times > lost.deaths[task] for (task, _), times in lost.beyond(TURNS).items() if task in lost.deaths)


async def test_no_step_that_was_answered_is_done_again(tmp_path: Path, nats_server: NatsServer) -> None:
    """One episode at a time, whose explorer is killed well within a reply: the answer before it is written."""
    one = {"tasks": 2, "rollouts": 1, "explorers": 1, "reply_seconds": 2.0, "kill_at": 0.4}
    killed = await play(tmp_path, nats_server, kills=4, workflow="environment_workflow", **one)
    assert killed.problems == []
    assert len(killed.kills) >= 2, "the run ended before its explorers were killed"
    assert killed.moves > 0
    assert len(killed.acted) == 2 * TURNS
    assert set(killed.acted.values()) == {1}


async def test_at_most_one_part_of_a_killed_reply_is_sampled_again(tmp_path: Path, nats_server: NatsServer) -> None:
    parts = {"tasks": 6, "rollouts": ROLLOUTS, "flush_tokens": 6, "reply_seconds": 0.1}
    calm = await play(tmp_path / "calm", nats_server, **parts)
    assert (calm.kills, calm.sampled_again, calm.problems) == ([], {}, [])
    killed = await play(tmp_path / "killed", nats_server, kills=5, **parts)
    assert killed.problems == []
    assert len(killed.kills) >= 3, "the run ended before its explorers were killed"
    assert told(killed) == told(calm)
    assert any("token" in move for move in killed.places), "no reply continued within it"
    assert all(tokens <= 6 * ROLLOUTS * killed.deaths[task] for task, tokens in killed.tokens_again.items())
