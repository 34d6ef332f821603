"""Wall time of a step by part, as metrics of the monitor (docs/trainer.md).

A wait for a batch has two parts: until its last group is complete the trainer waits for explorers; then the experience
passes through log, ledger and stream, which is the buffer's time.
"""

from collections import defaultdict

from trinity.runtime.metrics import Histogram

SECONDS = Histogram(
    "trinity_trainer_step_seconds", "Parts of a step, in seconds", ["part"], buckets=(0.01, 0.1, 0.5, 1, 5, 30, 120)
)


class StepTimes:
    """waited -> metrics for each step, with calls of `spent` between. Seconds, and Unix times in seconds."""

    def __init__(self) -> None:
        self._earlier = 0.0  # waits that ended without a batch
        self._began = self._ended = 0.0
        self._spent: defaultdict[str, float] = defaultdict(float)

    def waited(self, began: float, ended: float) -> None:
        """Records a wait. The newest wait ended with the batch."""
        SECONDS.labels("wait").observe(ended - began)
        self._earlier += self._ended - self._began
        self._began, self._ended = began, ended

    def spent(self, part: str, seconds: float) -> None:
        """Adds time after a step, which the next step reports."""
        SECONDS.labels(part).observe(seconds)
        self._spent[part] += seconds

    def metrics(self, made_at_seconds: float) -> dict[str, float]:
        """Returns time/wait, time/buffer, and the parts spent since the step before.

        made_at_seconds: time when the newest group of the batch was complete, by its explorer's clock; 0 for a batch
        without rollouts. A clock that differs shifts time between the two, within the wait.
        """
        whole = min(max(self._began, made_at_seconds), self._ended)
        spent = {"buffer": 0.0, "publish": 0.0, "save": 0.0, **self._spent}
        spent["wait"] = self._earlier + whole - self._began
        spent["buffer"] += self._ended - whole
        self._earlier = self._began = self._ended = 0.0
        self._spent.clear()
        return {f"time/{part}": seconds for part, seconds in spent.items()}
