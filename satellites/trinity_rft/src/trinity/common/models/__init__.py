"""The model that a workflow asks."""

from trinity.common.models.model import ModelWrapper

__all__ = ["ModelWrapper"]
