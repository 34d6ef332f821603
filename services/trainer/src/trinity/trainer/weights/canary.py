"""The probe of a run: token sequences whose log-probabilities whoever loads a version must reproduce.

Version 0's is made of pseudo-random tokens. From the first batch on it is the run's own: the beginnings of the first
batch's sequences. It stays what it is for the whole run, so that versions can be compared with each other.
"""

import math
import random
from collections.abc import Sequence

from trinity.config import Plan
from trinity.runtime.errors import TrinityError
from trinity.trainer.data.batch import TrainBatch
from trinity.weights import Canary, Manifest, Probe

SEQUENCES, TOKENS = 4, 64

# Mean and largest absolute difference, in nats, between the trainer and a sound engine. Float32 differs by rounding
# alone; with 8 bits of mantissa a logit of 16 to 32 is rounded to 1/8, on each side, and rare tokens show it in full.
_FLOAT32 = (1e-3, 1e-2)
_HALF = (0.05, 0.5)
_LARGEST_OF_MEAN = 10.0
# Two sound models in half precision differ by 3 to 6 times what rounding the head alone does (2 to 24 layers, logits of
# a standard deviation of 10 to 30); one with a layer that is off by 5 % differs by 10 times that and more.
_OF_HEAD_ROUNDING = 8.0

Tokens = tuple[tuple[int, ...], ...]


def pseudo_random_probe(vocabulary: int) -> Tokens:
    """The same for the same size of vocabulary."""
    source = random.Random(0)
    return tuple(tuple(source.randrange(vocabulary) for _ in range(TOKENS)) for _ in range(SEQUENCES))


def probe_of_batch(batch: TrainBatch) -> Tokens:
    """The first different beginnings of a batch, in its order; empty if it has none of two tokens."""
    found: dict[tuple[int, ...], None] = {}
    for sequence in batch.sequences:
        tokens = tuple(int(token) for token in sequence.token_ids[:TOKENS])
        if len(tokens) >= 2:
            found[tokens] = None
        if len(found) == SEQUENCES:
            break
    return tuple(found)


def probe_of_versions(manifests: Sequence[Manifest]) -> Tokens:
    """The run's own probe, from its newest version that has one; empty if there is none yet. Newest first."""
    known = (m.canary for m in manifests if m.version > 0 and m.canary is not None)
    newest = next(known, None)
    return tuple(probe.token_ids for probe in newest.probes) if newest is not None else ()


def rounding_counts(plan: Plan, trains_in_float32: bool, on_gpu: bool) -> bool:
    """Whether trainer or engines compute in half precision, and the YAML leaves the tolerances to what that does."""
    engines = plan.config.explorer.rollout_model.dtype
    engines_in_float32 = engines == "float32" or (engines == "auto" and not on_gpu)
    return plan.config.synchronizer.canary_tolerance is None and not (trains_in_float32 and engines_in_float32)


def tolerances(plan: Plan, trains_in_float32: bool, on_gpu: bool) -> tuple[float, float]:
    """Largest mean and largest single difference, in nats, by what trainer and engines compute in."""
    given = plan.config.synchronizer.canary_tolerance
    if given is not None:
        return given, given * _LARGEST_OF_MEAN
    return _HALF if rounding_counts(plan, trains_in_float32, on_gpu) else _FLOAT32


def widened(
    allowed: tuple[float, float], logprobs: Sequence[Sequence[float]], of_other_head: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Tolerances for weights whose head rounds more than usual, because their logits are large.

    The log-probabilities are those of the same probe, with the head in float32 and in bfloat16.
    """
    pairs = [pair for rows in zip(logprobs, of_other_head, strict=True) for pair in zip(*rows, strict=True)]
    spread = sum(abs(one - other) for one, other in pairs) / len(pairs)
    mean = max(allowed[0], _OF_HEAD_ROUNDING * spread)
    return mean, max(allowed[1], mean * _LARGEST_OF_MEAN)


def make_canary(probe: Tokens, logprobs: Sequence[Sequence[float]], allowed: tuple[float, float], step: int) -> Canary:
    """Raises TrinityError if the weights give no numbers: no explorer could do better."""
    if not all(math.isfinite(value) for values in logprobs for value in values):
        raise TrinityError(
            f"the weights of step {step} give log-probabilities that are not finite: training has diverged. Go on from "
            "an older version (`trinity weights rollback`), with a lower algorithm.optimizer.lr or trainer.grad_clip"
        )
    probes = tuple(Probe(tokens, tuple(values)) for tokens, values in zip(probe, logprobs, strict=True))
    return Canary(probes, *allowed)
