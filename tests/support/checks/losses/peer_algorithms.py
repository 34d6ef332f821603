"""Losses of veRL, TRL, Trinity-RFT and M2PO's authors, to be compared with ours.

Where their code runs by itself, its results are recorded (recorded.py). The rest are loops in plain floats that we
wrote from it: SFT of TRL 1.16 and of veRL 0.9.1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from support.checks.losses.plain_losses import by_token


@dataclass(frozen=True)
class Peer:
    """`theirs`, with their defaults: a loop of ours, or a key of recorded.py; `settings` of ours that come nearest;
    `why` ours are others."""

    name: str
    whose: str
    theirs: Callable[..., Any] | str
    settings: Mapping[str, Any] = field(default_factory=dict)
    mode: str = "token-mean"
    why: str = ""

    @property
    def source(self) -> str:
        return f"code of {self.whose}" if isinstance(self.theirs, str) else f"{self.whose}, our loop"


LOSSES = (
    Peer("ppo", "veRL", "verl/ppo"),
    Peer(
        "ppo", "TRL", "trl/ppo", {"clip_ratio_c": 1e9}, why="no dual clip there; here no extreme token decides a step"
    ),
    Peer("ppo", "Trinity-RFT", "trinity-rft/ppo"),
    Peer(
        "gspo",
        "veRL",
        "verl/gspo",
        {"clip_range": 0.2, "clip_range_low": None, "clip_range_high": None},
        "seq-mean-token-mean",
        "clips at 0.2 there; the paper's are 0.0003 and 0.0004. Since 0.9 `loss_agg_mode` counts there, `token-mean` "
        "unless given",
    ),
    Peer(
        "gspo",
        "Trinity-RFT",
        "trinity-rft/gspo",
        mode="seq-mean-token-mean",
        why="sequences without trained tokens count in the mean there; measured without them",
    ),
    Peer(
        "gspo",
        "TRL",
        "trl/gspo",
        {"clip_range": 0.2, "clip_range_low": None, "clip_range_high": None},
        "seq-mean-token-mean",
        "clips at 0.2 there. Sequences without trained tokens count in the mean there; measured without them",
    ),
    Peer(
        "cispo",
        "veRL",
        "verl/cispo",
        {"clip_range_low": 0.2, "clip_range_high": 0.2},
        why="clips at 0.2 there; the paper has no lower bound",
    ),
    Peer(
        "cispo",
        "TRL",
        "trl/cispo",
        {"clip_range_high": 4.0},
        why="`epsilon_high` is the bound there, 5.0 as advised",
    ),
    Peer("cispo", "Trinity-RFT", "trinity-rft/cispo"),
    Peer(
        "dppo_tv",
        "veRL",
        "verl/dppo_tv",
        {"clip_ratio_c": 3.0},
        why="its configuration has the bound of PPO's dual clip, 3; the paper advises a large one",
    ),
    Peer("dppo_kl", "veRL", "verl/dppo_kl", {"clip_ratio_c": 3.0}, why="as `dppo_tv`"),
    Peer("sapo", "veRL", "verl/sapo", mode="seq-mean-token-mean"),
    Peer("sapo", "TRL", "trl/sapo", mode="seq-mean-token-mean"),
    Peer(
        "sapo",
        "Trinity-RFT",
        "trinity-rft/sapo",
        why="multiplies lp by the gate, which is no gradient of the paper's objective, and twice as much at r = 1; "
        "`token-mean` there, sequences' means in the paper",
    ),
    Peer(
        "gmpo",
        "veRL",
        "verl/gmpo",
        {"clip_range_low": 0.2, "clip_range_high": 0.2},
        "seq-mean-token-sum",
        "clips at 0.2 there; the paper's are 0.4. Sequences without trained tokens count in the mean there; measured "
        "without them",
    ),
    Peer("gmpo", "TRL", "trl/gmpo", mode="seq-mean-token-sum"),
    Peer(
        "clip_cov",
        "veRL",
        "verl/clip_cov",
        {"clip_cov_ratio": 1.0},
        why="draws other tokens of those in the band there; a ratio of 1 draws all",
    ),
    Peer("kl_cov", "veRL", "verl/kl_cov"),
    *(
        Peer(name, "Trinity-RFT", f"trinity-rft/{name}")
        for name in ("topr", "sppo", "opmd", "importance_sampling", "rec", "sft", "sft_is", "sft_phi")
    ),
    Peer("opmd", "veRL (gpg)", "verl/opmd", {"tau": 0}, why="no regularization there"),
    *(Peer("sft", whose, by_token(lambda lp, sg, lo, a, gap: -lp)) for whose in ("veRL", "TRL")),
    Peer("mix", "Trinity-RFT", "trinity-rft/mix", why="of each micro-batch there, which depends on the split"),
    Peer("mix_chord", "Trinity-RFT", "trinity-rft/mix_chord", why="as `mix`"),
    Peer("dpo", "TRL", "trl/dpo"),
    Peer("dpo", "Trinity-RFT", "trinity-rft/dpo", why="adds the pairs of a micro-batch up in one logit there"),
    Peer(
        "m2po",
        "its authors",
        "m2po/m2po 0.04",
        why="of each micro-batch there, which depends on the split. In single precision, rounding decides there if the "
        "token at the bound is left out, which it is here; measured in double",
    ),
)
