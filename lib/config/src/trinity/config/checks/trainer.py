"""Checks of the trainer section. Each yields its problem as text."""

from collections.abc import Iterator

from trinity.config.errors import Problem
from trinity.config.schema.trainer import TrainerConfig


def check_trainer(trainer: TrainerConfig) -> Iterator[Problem]:
    """Contradictions between sharding, offload, packing and sequence parallelism."""
    sharding, base = trainer.deepspeed, "trainer.deepspeed"
    if sharding.offload_optimizer and sharding.zero_stage == 0:
        yield Problem(f"{base}.offload_optimizer", f"needs {base}.zero_stage 1, 2 or 3, which is 0")
    if sharding.offload_param and sharding.zero_stage != 3:
        yield Problem(f"{base}.offload_param", f"needs {base}.zero_stage 3, which is {sharding.zero_stage}")
    if sharding.offload_param and not sharding.offload_optimizer:
        yield Problem(f"{base}.offload_param", f"needs {base}.offload_optimizer: true")
    size, key = trainer.ulysses_sequence_parallel_size, "trainer.ulysses_sequence_parallel_size"
    if size > 1 and not trainer.use_remove_padding:
        yield Problem(key, f"is {size}; ranks share packed sequences alone: trainer.use_remove_padding: true")
    if trainer.num_ranks and trainer.num_ranks % size:
        yield Problem(key, f"is {size}, which does not divide trainer.num_ranks, {trainer.num_ranks}")
