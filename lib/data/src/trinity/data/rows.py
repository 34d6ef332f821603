"""A row of a dataset, and what is raised where one cannot be read."""

from typing import Any

from trinity.config.errors import Problem

Row = dict[str, Any]


class DatasetError(ValueError):
    """The dataset cannot be read; the message names file, line and cause."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def at(self, key: str) -> Problem:
        return Problem(key, self.message)
