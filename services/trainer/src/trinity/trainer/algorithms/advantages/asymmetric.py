"""AsymRE: a baseline below the mean gives successes more weight."""

from trinity.plugins import advantage, algorithm
from trinity.trainer.algorithms.advantages.rollouts import Advantages, Rollouts, groups, mean_of, spread


@advantage("asymre", also=["asymre_verl"], source="arXiv:2506.20520")
def asymre(rollouts: Rollouts, *, baseline_shift: float = -0.1) -> Advantages:
    """R - (mean of the group + baseline_shift). A group of one: R."""
    scores = rollouts.returns_N.clone()
    for members in groups(rollouts.groups_N):
        if len(members) > 1:
            scores[members] -= mean_of(rollouts.returns_N[members]) + baseline_shift
    return spread(rollouts, scores)


algorithm("asymre", policy_loss="opmd", advantage="asymre")
