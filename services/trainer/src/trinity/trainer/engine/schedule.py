"""Learning rate as a pure function of the step, so that a resumed run has no scheduler state to lose."""

import math

from trinity.config.schema.algorithm import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, last_step: int) -> float:
    """Rate of step `step` (from 1) of `last_step`: linear warm-up, then constant, or falling to min_lr_ratio."""
    warmup = config.lr_warmup_steps if config.lr_warmup_steps >= 0 else int(config.lr_warmup_steps_ratio * last_step)
    if step <= warmup:
        return config.lr * step / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, last_step - warmup))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if config.lr_scheduler_type == "cosine" else 1 - progress
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)
