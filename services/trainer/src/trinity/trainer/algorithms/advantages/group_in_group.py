"""GiGPO: trajectories relative to others of the same task, and steps relative to others in the same state."""

from collections.abc import Hashable
from typing import Literal

import torch

from trinity.plugins import Fraction, Positive, advantage, algorithm
from trinity.trainer.algorithms.advantages.rollouts import Advantages, Rollouts, mean_and_std, spread


@advantage("gigpo", source="arXiv:2505.10978, 4")
def gigpo(
    rollouts: Rollouts,
    *,
    omega: float = 1.0,
    gamma: Fraction = 1.0,
    fnorm: Literal["none", "std"] = "none",
    epsilon: Positive = 1e-6,
    step_reward_key: str = "step_reward",
    env_state_hash_key: str = "env_state_hash",
    state_scope: Literal["task", "batch"] = "task",
) -> Advantages:
    """A_E + omega A_S at each token of a step: of its trajectory, and of its return in its state.

    A_E: sum of a trajectory's step rewards, relative to the trajectories of its task. A_S: the step's discounted return
    sum_k gamma^k r_(t+k), relative to steps with the same state hash, of the same task (the paper) or of the whole
    `batch`; 0 in a state of a single step, or without a hash. Relative: minus the mean, over (F + epsilon),
    where F is the standard deviation if fnorm is std, else 1. A task with one trajectory has mean 0 and F 1.

    Step rewards and hashes are in the experience's info or metrics, under these keys. A trajectory without any step
    reward has its reward at the last step.
    """
    trajectories = rollouts.trajectories()
    to_go = torch.zeros_like(rollouts.rewards_N)
    of_task: dict[int, list[int]] = {}
    totals = []
    for number, steps in enumerate(trajectories):
        rewards = _step_rewards(rollouts, steps, step_reward_key)
        totals.append(sum(rewards))
        of_task.setdefault(int(rollouts.groups_N[steps[0]]), []).append(number)
        running = 0.0
        for index, reward in zip(reversed(steps), reversed(rewards), strict=True):
            running = reward + gamma * running
            to_go[index] = running
    episode = torch.zeros_like(rollouts.rewards_N)
    for numbers in of_task.values():
        relative = _relative(torch.tensor([totals[n] for n in numbers], dtype=torch.float64), fnorm, epsilon)
        for number, score in zip(numbers, relative, strict=True):
            episode[trajectories[number]] = score
    step = torch.zeros_like(rollouts.rewards_N)
    for members in _same_state(rollouts, env_state_hash_key, state_scope):
        if len(members) > 1:
            step[members] = _relative(to_go[members], fnorm, epsilon)
    return spread(rollouts, episode + omega * step)


def _step_rewards(rollouts: Rollouts, steps: list[int], key: str) -> list[float]:
    """Step rewards minus the KL penalties of each step's tokens."""
    found = [rollouts.number(index, key) for index in steps]
    if any(reward is not None for reward in found):
        rewards = [reward or 0.0 for reward in found]
    else:
        rewards = [0.0] * (len(steps) - 1) + [float(rollouts.rewards_N[steps[-1]])]
    taken = rollouts.rewards_N - rollouts.returns_N
    return [reward - float(taken[index]) for reward, index in zip(rewards, steps, strict=True)]


def _same_state(rollouts: Rollouts, key: str, scope: str) -> list[list[int]]:
    found: dict[tuple[Hashable, ...], list[int]] = {}
    for index in range(len(rollouts)):
        state = rollouts.fact(index, key)
        if state is not None:
            task = int(rollouts.groups_N[index]) if scope == "task" else None
            found.setdefault((task, str(state)), []).append(index)
    return list(found.values())


def _relative(values: torch.Tensor, fnorm: str, epsilon: float) -> torch.Tensor:
    mean, std = mean_and_std(values)
    return (values - mean) / ((std if fnorm == "std" else 1.0) + epsilon)


algorithm(
    "gigpo",
    policy_loss="ppo",
    advantage="gigpo",
    kl_loss="k2",
    entropy_loss="default",
    repeat_times=8,
    note="Meant for episodes of several steps.",
)
