"""Advice on a valid algorithm: keys with less effect than their name suggests, missing corrections."""

from collections.abc import Iterator

from trinity.config.algorithm_parts import RATIO_LOSSES
from trinity.config.algorithms import resolvable, resolve
from trinity.config.plan import learns_from_disk
from trinity.config.schema import Config


def algorithm_advice(config: Config) -> Iterator[str]:
    """Sentences of the form `key: what about it`. The config need not have been checked."""
    if not resolvable(config.algorithm) or config.mode not in ("both", "train"):
        return
    plan = resolve(config.algorithm)
    if plan.of_pairs and config.algorithm.loss_agg_mode is not None:
        yield "algorithm.loss_agg_mode: is of the KL and entropy terms alone; dpo itself is a mean over pairs"
    correction, name = plan.correction, plan.policy_loss.name
    weighed = correction.token_cap is not None or correction.sequence_cap is not None or correction.decoupled is False
    if name in RATIO_LOSSES and not weighed and _asynchronous(config) and _several_updates(config):
        yield (
            f"algorithm.rollout_correction.token_cap: is null; with several updates of a batch {name} compares with "
            "the weights as the step began, and nothing weighs tokens that older weights sampled: "
            "{decoupled: true, token_cap: 2} would (arXiv:2110.00641, equation 5)"
        )


def _asynchronous(config: Config) -> bool:
    """Whether experience may be of older weights than those that a step begins with."""
    sync = config.synchronizer
    ahead = sync.sync_offset > 0 or sync.sync_interval > 1 or sync.sync_style != "fixed"
    return ahead or learns_from_disk(config)


def _several_updates(config: Config) -> bool:
    """Whether a batch makes more than one update of the weights, if each rollout is one experience."""
    trainer, buffer = config.trainer, config.buffer
    size = buffer.train_batch_size or buffer.batch_size * config.algorithm.repeat_times
    return trainer.epochs_per_batch > 1 or (trainer.mini_batch_size or size) < size
