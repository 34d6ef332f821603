"""Weight versions, written and published by the trainer."""

from trinity.trainer.weights.shards import CHECKPOINT_SHARD_BYTES, read_version, write_huggingface_index, write_shards

__all__ = ["CHECKPOINT_SHARD_BYTES", "read_version", "write_huggingface_index", "write_shards"]
