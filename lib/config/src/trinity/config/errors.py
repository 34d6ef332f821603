"""Problems of a configuration: all at once, each with its place and the fix."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One problem. `path` is the key path ("buffer.batch_size"), `line` counts from 1 (0: not known)."""

    path: str
    message: str
    line: int = 0

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line else ""
        return f"{place}{self.path}: {self.message}" if self.path else f"{place}{self.message}"


class ConfigError(ValueError):
    """The configuration cannot be used."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.source = source
        self.problems = problems
        super().__init__("\n".join(f"{source}: {problem}" for problem in problems))
