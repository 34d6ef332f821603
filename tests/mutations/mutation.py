"""A line of product code that a test guards, and its replacement that makes the test fail."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """`old` occurs once in the file `path`, and is replaced by `new`. `test`: the node id that must fail then."""

    path: str
    old: str
    new: str
    test: str

    @property
    def name(self) -> str:
        """A name for tables and for -k."""
        return f"{self.test}: {self.path}: {' '.join(self.old.split())} -> {' '.join(self.new.split()) or 'nothing'}"
