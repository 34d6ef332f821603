"""When a run fails as a whole: task after task dies of one cause, or operators drop group after group."""

import time
from collections import Counter

import structlog

from trinity.buffer.operators.pipeline import Pipeline
from trinity.buffer.window.window import Window
from trinity.config import Plan
from trinity.data.wire import LONGEST_ERROR
from trinity.runtime.errors import TrinityError

log = structlog.get_logger(__name__)

_SHOWN = 500  # characters of an error
_RECENT_SECONDS = 600.0  # an explorer that stored a group within this time works


class TasksFail(TrinityError):
    """Feeding more tasks would never end."""

    for_good = True


class Failures:
    """Failures since this process began to follow the log, and their limits."""

    def __init__(self, plan: Plan) -> None:
        self._most_dead = plan.config.explorer.max_dead_letters_in_a_row
        self._most_batches = plan.config.data_processor.experience_pipeline.max_dropped_batches
        self._groups_per_step = plan.groups_per_step
        self.since = 0  # log entries up to here were there before: an operator may have mended what failed
        self._dead_in_a_row, self._cause = 0, ""
        self._failing: set[str] = set()  # explorers whose tasks died in this row
        self._stored_at: dict[str, float] = {}  # by explorer
        self._dropped = 0  # by operators since the newest ledger entry
        self.causes: Counter[str] = Counter()
        self.newest = ""

    def note(self, sequence: int, cause: str, error: str) -> None:
        if sequence > self.since:
            self.causes[cause] += 1
            self.newest = error[:LONGEST_ERROR]

    def stored(self, explorer_id: str) -> None:
        self._dead_in_a_row = 0
        now = time.monotonic()
        self._stored_at = {name: at for name, at in self._stored_at.items() if now - at < _RECENT_SECONDS}
        self._stored_at[explorer_id] = now

    def written(self) -> None:
        """The next batch is in the ledger."""
        self._dropped = 0

    def dead(self, sequence: int, cause: str, explorer_id: str, error: str) -> None:
        """A task has died by its explorers' word. Raises TasksFail at the limit, unless another explorer works."""
        if sequence <= self.since or not self._most_dead:
            return
        if cause != self._cause or not self._dead_in_a_row:
            self._dead_in_a_row, self._cause = 0, cause
            self._failing.clear()
        self._dead_in_a_row += 1
        self._failing.add(explorer_id)
        if self._dead_in_a_row < self._most_dead:
            return
        if not (working := self._working()):
            raise TasksFail(
                f"{self._dead_in_a_row} tasks in a row died of {self._cause} and no group was stored between them; the "
                f"newest on explorer {explorer_id}: {error[:_SHOWN]} (`trinity deadletters list` shows "
                "all, explorer.max_dead_letters_in_a_row is the limit)"
            )
        if self._dead_in_a_row % self._most_dead == 0:
            advice = f"stop or revoke them; groups come from {', '.join(working)}"
            log.warning("buffer.explorers.fail", explorers=sorted(self._failing), error=error[:_SHOWN], advice=advice)

    def _working(self) -> list[str]:
        """Other explorers than those of the row that stored a group lately: one broken machine ends no run."""
        since = time.monotonic() - _RECENT_SECONDS
        return sorted(name for name, at in self._stored_at.items() if at > since and name not in self._failing)

    def dropped(self, sequence: int, window: Window, pipeline: Pipeline) -> None:
        """An operator has dropped a group. Raises TasksFail at the limit.

        The limit grows with the groups that wait in the pool: explorers may sample several batches ahead.
        """
        if sequence <= self.since or not self._most_batches:
            return
        self._dropped += 1
        if self._dropped >= self._most_batches * (self._groups_per_step + len(window.unused)):
            raise TasksFail(
                f"operators dropped {self._dropped} groups, and {len(window.unused)} of the {self._groups_per_step} "
                f"for the next batch are there: {about_drops(window, pipeline)} "
                f"(data_processor.experience_pipeline.max_dropped_batches is the limit: {self._most_batches} times "
                "what a batch has)"
            )


def about_drops(window: Window, pipeline: Pipeline) -> str:
    """Describes the dropped groups, as in "dapo dropped 279 of 300 groups: no reward variance"."""
    found = []
    for name, count in sorted(window.dropped.items()):
        if name in pipeline.names:
            why = pipeline.why_drops(name)
            found.append(f"{name} dropped {count} of {window.stored} groups{': ' if why else ''}{why}")
        else:
            found.append(f"{count} of {window.stored} groups are {name}")
    return "; ".join(found)
