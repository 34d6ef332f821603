"""Gradients and advantages that the code of veRL, Trinity-RFT, TRL and M2PO's authors gave on our random batches.

`python benchmarks/peer_formulas.py` writes recorded.json from their sources: veRL 0.9.1, Trinity-RFT 0.6.0, TRL 1.16.0
(wheels of PyPI), Infini-AI-Lab/M2PO of af54a3e8feffb7a66a8258003aebefa37759cec0.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from support.checks.losses.loss_cases import Case, case_of, gradient_of, with_peers
from support.checks.losses.plain_advantages import rollouts_of
from trinity.plugins.declarations import ADVANTAGES
from trinity.trainer.algorithms.advantages import compute

RECORDED: dict[str, dict[str, list[list[list[float]]]]] = json.loads(Path(__file__).with_suffix(".json").read_text())


def of_loss(key: str, name: str, mode: str, settings: Mapping[str, Any]) -> float:
    """Returns the largest difference of our gradient to the recorded one. key: source/name of the record."""
    return largest(key, lambda case: gradient_of(name, with_peers(case, name, dict(settings)), dict(settings))[1], mode)


def largest(key: str, gradient: Callable[[Case], torch.Tensor], mode: str) -> float:
    differences = [0.0]
    for seed, rows in enumerate(_rows(key)):
        case = case_of(seed, mode)
        if key.startswith(("m2po/", "trl/")):  # a sequence has one advantage there, or its first one's sign
            x = case.x
            case = replace(case, x=replace(x, advantages=x.advantages[:, :1].expand_as(x.advantages).clone()))
        for mine, flags, theirs in zip(gradient(case), case.x.mask, rows, strict=True):
            differences += [abs(float(a) - b) for a, b in zip(mine[flags > 0], theirs, strict=True)]
    return max(differences)


def of_advantage(key: str, name: str, settings: Mapping[str, Any]) -> float:
    differences = [0.0]
    for seed, rows in enumerate(_rows(key)):
        rollouts = rollouts_of(seed, values=True)
        found = compute(name, {**ADVANTAGES[name].defaults, **settings}, rollouts)
        for mine, mask, theirs in zip(found.tokens, rollouts.masks, rows, strict=True):
            pairs = zip(mine[mask], theirs, strict=True)
            differences += [abs(float(a) - b) for a, b in pairs if not math.isnan(b)]  # NaN: none there
    return max(differences)


def _rows(key: str) -> list[list[list[float]]]:
    source, _, name = key.partition("/")
    return RECORDED[source][name]
