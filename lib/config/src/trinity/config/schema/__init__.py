"""The YAML's schema, one module per section. Every class is the documentation of its keys."""

from trinity.config.schema.root import Config, StageConfig

__all__ = ["Config", "StageConfig"]
