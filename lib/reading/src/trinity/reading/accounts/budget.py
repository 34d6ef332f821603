"""The budget of a run: budget.gpu_hours, counted over all stages and restarts of its job folder."""

from dataclasses import dataclass
from pathlib import Path

from trinity.reading.accounts.lives import spent_seconds

_HOUR = 3600.0


@dataclass(frozen=True)
class Budget:
    """`hours` of devices, None without a limit. `job` is the folder whose accounts count."""

    hours: float | None
    job: Path

    def is_spent(self) -> bool:
        return self.hours is not None and spent_seconds(self.job) >= self.hours * _HOUR

    def text(self) -> str:
        """Says how much is spent and what to do. Requires a limit."""
        spent = f"{spent_seconds(self.job) / _HOUR:.4g} hours of devices are spent, and {self.hours:g} is the limit"
        return f"budget.gpu_hours: {spent}; raise it, and the same command continues the run"
