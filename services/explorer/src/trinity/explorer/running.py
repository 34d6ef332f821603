"""The parts of a running explorer, and what it does now."""

from dataclasses import dataclass, field

import structlog

from trinity.data.experience import Limits
from trinity.explorer.chat import ChatTokenizer
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.rollout.loop import Progress, RolloutLoop
from trinity.explorer.rollout.toolbox import ExplorerTools
from trinity.explorer.sessions.offers import OutsideSessions
from trinity.explorer.weights.follower import WeightFollower
from trinity.weights.wire import ExplorerState

log = structlog.get_logger(__name__)


@dataclass
class Running:
    """Each part is None until it is started. `only_serves`: the endpoint does not record, so it takes no tasks."""

    explorer_id: str
    run_id: str
    limits: Limits
    only_serves: bool = False
    progress: Progress = field(default_factory=Progress)
    pool: EnginePool | None = None
    tokenizer: ChatTokenizer | None = None
    follower: WeightFollower | None = None
    tools: ExplorerTools | None = None
    loop: RolloutLoop | None = None

    def state(self) -> ExplorerState:
        progress, follower = self.progress, self.follower
        if self.pool is None or (follower is not None and follower.version < 0):
            return ExplorerState.STARTING
        if progress.draining:
            return ExplorerState.DRAINING
        if self.only_serves:
            return ExplorerState.SERVING
        if progress.waits_for_log:
            return ExplorerState.WAITING_FOR_LOG
        if follower is not None and follower.updating:
            return ExplorerState.UPDATING
        if progress.evaluations:
            return ExplorerState.EVALUATING
        if progress.running_tasks:
            return ExplorerState.RUNNING
        return ExplorerState.WAITING_FOR_PROVIDER if progress.waiting_tasks else ExplorerState.WAITING

    @property
    def outside(self) -> OutsideSessions | None:
        """Sessions of outside agents; None before this explorer works on tasks."""
        gateway = self.tools.gateway if self.tools is not None else None
        return gateway.outside if gateway is not None else None

    async def drain(self, grace_seconds: float) -> tuple[int, int]:
        """Stop leasing, wait for running tasks, return the others and leave the run. Returns (finished, returned)."""
        self.progress.draining = True
        finished, returned = await self.loop.drain(grace_seconds) if self.loop is not None else (0, 0)
        log.info("explorer.drained", finished=finished, returned=returned)
        if self.follower is not None:
            await self.follower.leave()
        return finished, returned
