"""The probe of a run: token sequences whose log-probabilities an engine must reproduce after it loads a version.

Version 0's probe has pseudo-random tokens. All later versions have prefixes of the first batch's sequences, so that
they can be compared with each other. For a model that reads images the probe also has a sequence with a picture, the
same in all runs.
"""

import io
import math
import random
from collections.abc import Sequence

import numpy as np

from trinity.config import Plan
from trinity.config.memory import has_delta_networks
from trinity.data.images import expanded
from trinity.data.vision import ImageRules
from trinity.runtime.errors import TrinityError
from trinity.trainer.data.batch import TrainBatch
from trinity.weights.manifest import Canary, Manifest, Probe

SEQUENCES, TOKENS = 4, 64
_PICTURE_TEXT_TOKENS = 16

# Allowed mean and largest absolute difference, in nats, between the trainer and a sound engine. Float32 differs only by
# rounding. With 8 bits of mantissa both sides round a logit of 16 to 32 to 1/8; for rare tokens that is the difference.
# Its tail is long: of a pretrained model of 0.5 B the mean differed by 0.05, one token of probability 1e-5 by 1.37,
# while KL of the tokens that it sampled was 2e-4.
_FLOAT32 = (1e-3, 1e-2)
_HALF = (0.05, 1.5)
_LARGEST_OF_MEAN = 30.0
# Two sound models in half precision differ by 3 to 6 times the effect of rounding only the head (2 to 24 layers, logits
# of a standard deviation of 10 to 30); a model with a layer that is off by 5 % differs by at least 10 times that.
_OF_HEAD_ROUNDING = 8.0

# Engines with weights or a cache in 8 bits may differ this much more than engines in half precision: FP8 has 3 bits of
# mantissa, bfloat16 has 7. Weights in FP8 differed by 4.3 times the tolerance of half precision in a pretrained model
# of 0.5 B, and by 13 times in a random one of 7 B.
_QUANTIZED = 16.0

Tokens = tuple[tuple[int, ...], ...]


def pseudo_random_probe(vocabulary: int) -> Tokens:
    """Returns token sequences that depend only on the vocabulary size."""
    source = random.Random(0)
    return tuple(tuple(source.randrange(vocabulary) for _ in range(TOKENS)) for _ in range(SEQUENCES))


def picture_probe(vocabulary: int, rules: ImageRules) -> tuple[tuple[int, ...], bytes]:
    """Returns tokens with a picture after the first token, and the picture: coloured noise of few pixels, as PNG."""
    from PIL import Image

    source = random.Random(1)
    text = [(rules.token + 1 + source.randrange(vocabulary - 1)) % vocabulary for _ in range(_PICTURE_TEXT_TOKENS)]
    side, file = 2 * rules.patch * rules.merge, io.BytesIO()
    noise = np.frombuffer(source.randbytes(3 * side**2), np.uint8).reshape(side, side, 3)
    Image.fromarray(noise).save(file, "png")
    picture = file.getvalue()
    return tuple(expanded([text[0], rules.token, *text[1:]], [picture], rules)), picture


def probe_of_batch(batch: TrainBatch) -> Tokens:
    """Returns the first distinct prefixes of a batch; empty if no sequence has two tokens."""
    found: dict[tuple[int, ...], None] = {}
    for sequence in batch.sequences:
        tokens = tuple(int(token) for token in sequence.token_ids[:TOKENS])
        if len(tokens) >= 2:
            found[tokens] = None
        if len(found) == SEQUENCES:
            break
    return tuple(found)


def probe_of_versions(manifests: Sequence[Manifest]) -> Tokens:
    """Returns the probe of the newest version after version 0 that has one; empty if none has. Newest first."""
    known = (m.canary for m in manifests if m.version > 0 and m.canary is not None)
    newest = next(known, None)
    return tuple(probe.token_ids for probe in newest.probes if not probe.images) if newest is not None else ()


def rounding_counts(plan: Plan, trains_in_float32: bool, on_gpu: bool) -> bool:
    """Returns True if tolerances follow measured rounding: none in the YAML, and half precision on either side."""
    engines = plan.config.explorer.rollout_model.dtype
    auto_is_float32 = not on_gpu and not has_delta_networks(plan.config.model.model_path)
    engines_in_float32 = engines == "float32" or (engines == "auto" and auto_is_float32)
    return plan.config.synchronizer.canary_tolerance is None and not (trains_in_float32 and engines_in_float32)


def tolerances(plan: Plan, trains_in_float32: bool, on_gpu: bool) -> tuple[float, float]:
    """Returns the allowed mean and largest difference, in nats, for the dtypes of trainer and engines."""
    given = plan.config.synchronizer.canary_tolerance
    if given is not None:
        return given, given * _LARGEST_OF_MEAN
    return _HALF if rounding_counts(plan, trains_in_float32, on_gpu) else _FLOAT32


def widened(
    allowed: tuple[float, float], logprobs: Sequence[Sequence[float]], of_other_head: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Widens the tolerances for weights whose head rounds more than usual, because their logits are large.

    Both log-probabilities are of the same probe, with the head in float32 and in bfloat16.
    """
    pairs = [pair for rows in zip(logprobs, of_other_head, strict=True) for pair in zip(*rows, strict=True)]
    spread = sum(abs(one - other) for one, other in pairs) / len(pairs)
    mean = max(allowed[0], _OF_HEAD_ROUNDING * spread)
    return mean, max(allowed[1], mean * _LARGEST_OF_MEAN)


def quantized_factor(plan: Plan, allowed: tuple[float, float]) -> float:
    """Returns how many times larger the tolerances of engines that quantize are; 1 where the YAML has a tolerance."""
    if plan.config.synchronizer.canary_tolerance is not None:
        return 1.0
    return _QUANTIZED * max(1.0, _HALF[0] / allowed[0])


def make_canary(
    probe: Tokens,
    logprobs: Sequence[Sequence[float]],
    allowed: tuple[float, float],
    step: int,
    images: Sequence[tuple[bytes, ...]] = (),
) -> Canary:
    """Makes a canary. images: images of the first sequences; the others have none.

    Raises TrinityError if the log-probabilities are not finite: no explorer could verify them.
    """
    if not all(math.isfinite(value) for values in logprobs for value in values):
        raise TrinityError(
            f"the weights of step {step} give log-probabilities that are not finite: training has diverged. Continue "
            "from an older version (`trinity weights rollback`); lower algorithm.optimizer.lr or trainer.grad_clip"
        )
    shown = [*images, *((),) * (len(probe) - len(images))]
    probes = tuple(Probe(tokens, tuple(values), of) for tokens, values, of in zip(probe, logprobs, shown, strict=True))
    return Canary(probes, *allowed)
