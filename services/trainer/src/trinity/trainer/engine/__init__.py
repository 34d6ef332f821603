"""The models that train: DeepSpeed around each, and one optimizer step from a batch."""

from trinity.trainer.engine.engine import TrainEngine

__all__ = ["TrainEngine"]
