"""What operators watch of the trainer: its newest step, by rank 0. The monitor has every metric of every step."""

from collections.abc import Mapping

from trinity.runtime.metrics import Counter, Gauge, show

STEP = Gauge("trinity_trainer_step", "Optimizer steps done")
LOSS = Gauge("trinity_trainer_loss", "Losses of the newest step, by their names in the monitor", ["loss"])
REWARD = Gauge("trinity_trainer_reward_mean", "Mean reward of the newest step's rollouts")
GRADIENT = Gauge("trinity_trainer_gradient_norm", "Norm of the newest gradient, before it is clipped")
KL = Gauge(
    "trinity_trainer_kl_nats",
    "KL of the newest step, per token: to the reference, to the engine of the same version (kernel), or of older ones "
    "(stale)",
    ["to"],
)
STALENESS = Gauge("trinity_trainer_staleness_steps", "Mean staleness of the newest step's groups, in steps")
TOKENS = Counter("trinity_trainer_tokens_total", "Tokens of trained sequences, prompts included")
BAD_STEPS = Counter("trinity_trainer_bad_steps_total", "Steps whose batch could not be trained")
GPU_MEMORY = Gauge(
    "trinity_trainer_gpu_memory_bytes",
    "Memory of rank 0's GPU: allocated by torch, reserved for it, and the peak of allocations",
    ["kind"],
)

# By their names in the monitor.
_KL = {"actor/kl_loss": "reference", "actor/mismatch/kernel_kl": "kernel", "actor/mismatch/stale_kl": "stale"}
_PLAIN = {
    "actor/grad_norm": GRADIENT,
    "sample/reward_mean": REWARD,
    "sample/staleness_mean": STALENESS,
}


def show_step(step: int, metrics: Mapping[str, float], tokens: int) -> None:
    """The metrics of a step, by their names in the monitor. A value that a step has not stays away."""
    STEP.set(step)
    TOKENS.inc(tokens)
    BAD_STEPS.inc(metrics.get("actor/bad_step", 0.0))
    show(LOSS, {(name.partition("/")[2],): value for name, value in metrics.items() if name.endswith("_loss")})
    show(KL, {(of,): metrics[name] for name, of in _KL.items() if name in metrics})
    for name, gauge in _PLAIN.items():
        if name in metrics:
            gauge.set(metrics[name])


def show_memory(allocated: int, reserved: int, peak: int) -> None:
    """Bytes."""
    show(GPU_MEMORY, {("allocated",): allocated, ("reserved",): reserved, ("peak",): peak})
