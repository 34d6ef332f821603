"""The gates of tasks: a task starts once the engines hold good weights of its gate's optimizer step or newer ones."""

import asyncio
import time

from trinity.explorer.weights.choice import Choice, ExactGates
from trinity.explorer.weights.load_history import Verdict
from trinity.explorer.weights.loader import Loader

# After failing this long to load a LIVE version, return the tasks that need it to other explorers.
_OUT_OF_REACH_SECONDS = 15.0


class Gates:
    """Opens gates as loads turn out good, and gives up on those whose LIVE version cannot be loaded here."""

    def __init__(self, changed: asyncio.Condition, loader: Loader, choice: Choice, exact: ExactGates) -> None:
        """`changed` is notified after every change of the weights."""
        self._changed, self._loader, self._choice, self._exact = changed, loader, choice, exact
        self._met = -1  # highest gate step that the newest good load meets
        self._failing_since: float | None = None  # begin of the first failed try to load the LIVE version
        self._live_unreachable = False
        self._returned = -1  # highest gate step that could not be met here

    async def wait_for_step(self, step: int) -> None:
        """Wait until the engines serve weights that meet the gate of that optimizer step and are known to be good."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._serves(step))

    async def reaches_step(self, step: int) -> bool:
        """Wait until a task with this gate may start. False if the LIVE version meets it but cannot be loaded here."""
        with self._exact.waiting(step):
            async with self._changed:
                self._changed.notify_all()
                await self._changed.wait_for(lambda: self._meets(step) or self._cannot_load(step))
            if self._meets(step):
                return True
        self._returned = max(self._returned, step)
        return False

    @property
    def falls_short(self) -> bool:
        """True if new tasks would be returned to the queue, as an earlier task was."""
        return self._cannot_load(self._returned)

    def update(self) -> None:
        """Open the gates that the newest load meets, if it is known to be good."""
        choice, loads = self._choice, self._loader.loads
        if choice.version < 0 or loads.verdict(loads.newest) is not Verdict.GOOD:
            return
        self._met = choice.step
        if choice.is_live(choice.version):
            self._met = max(choice.step, choice.view.gate_step)
            self._failing_since, self._live_unreachable = None, False

    def note_failure(self, began: float) -> None:
        """Note a failed try to load the LIVE version. `began`: its begin by time.monotonic."""
        self._failing_since = began if self._failing_since is None else self._failing_since
        self._live_unreachable = time.monotonic() - self._failing_since >= _OUT_OF_REACH_SECONDS

    def _meets(self, step: int) -> bool:
        return self._exact.allows(step, self._choice.step, self._loader.updating) and self._serves(step)

    def _serves(self, step: int) -> bool:
        return self._met >= step and not self._loader.loads.corrupt

    def _cannot_load(self, step: int) -> bool:
        return self._live_unreachable and self._choice.view.gate_step >= step and not self._serves(step)
