"""Trinity-RFT's loggers: Python's own, whose lines are in the log of the service that runs the plugin."""

import logging


def get_logger(name: str | None = None, level: int | None = None, in_ray_actor: bool = False) -> logging.Logger:
    """`in_ray_actor` has no effect."""
    logger = logging.getLogger(name or "trinity.plugins")
    if level is not None:
        logger.setLevel(level)
    return logger
