"""One stage: starts its processes, keeps them running, shows progress, and sums up at the end."""

import asyncio
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from trinity.cli.supervise.checks.disk import folders, least_gib
from trinity.cli.supervise.processes import services
from trinity.cli.supervise.processes.devices import Placement
from trinity.cli.supervise.processes.endpoint import endpoint_settings
from trinity.cli.supervise.stage.disk import DiskWatch
from trinity.cli.supervise.stage.display import Display
from trinity.cli.supervise.stage.progress import starting
from trinity.config import Plan, dump
from trinity.config.run_record import Addresses, RunRecord
from trinity.reading import run_record
from trinity.reading.accounts.budget import Budget
from trinity.reading.accounts.device_log import BEAT_SECONDS, DeviceLog
from trinity.reading.children import Child, stop_all
from trinity.reading.client import Answers, Watcher
from trinity.reading.ending import Ending
from trinity.reading.errors import RunError
from trinity.reading.job import Job, SupervisorRecord
from trinity.reading.nats import NatsAccess
from trinity.reading.wire import every_prompt_is_cut, prompts_cut
from trinity.runtime import files, names
from trinity.runtime.trust.roles import Role
from trinity.weights.checkpoints import checkpoint_folder, complete_steps

log = structlog.get_logger(__name__)

EXIT_SPENT = 3  # the run ended by its budget
_POLL_SECONDS = 0.5
_AT_ONCE = "ended at once, without a checkpoint of the newest steps"
_STOP_SECONDS = 6.0
_SAVE_SECONDS = 600.0
_REWARD_STEPS = 5


class Stage:
    """A stage of a run whose NATS is up. Use `run` once."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        broker: NatsAccess,
        placement: Placement,
        display: Display,
        last_step: int,
        is_last: bool = True,
    ) -> None:
        self._last_step = last_step
        self._is_last = is_last
        self._job = job
        self._plan = plan
        self._broker = broker
        self._placement = placement
        self._display = display
        self.folder = plan.job_dir
        self.name = plan.config.name.rpartition("/")[2]
        self.run_id = names.run_id(plan.config.project, plan.config.name, plan.config.group)
        self.children: list[Child] = []
        self._addresses = Addresses()
        self._changed = asyncio.Event()

    def prepare(self) -> None:
        """Writes the stage's configuration and makes its children; starts nothing."""
        config_file = self.folder / "config.json"
        files.write_json(config_file, dump(self._plan.config), mode=0o600)
        log_dir = self.folder / "log"
        plan, broker = self._plan, self._broker
        self.children, addresses = services.infrastructure(plan, config_file, broker, log_dir, self._job.folder)
        nats = broker.settings(Role.TRAINER, self.run_id)
        trainer = services.trainer(config_file, addresses, log_dir, self._placement, broker=nats)
        self._addresses = Addresses(addresses.buffer, addresses.environment, addresses.sync, trainer.address)
        services.announce(self.children[0], self._addresses)
        if not plan.offline and plan.config.mode == "both":
            args = (plan, config_file, broker, self._addresses, log_dir, self._placement)
            serving = endpoint_settings(plan.config, self._job)
            self.children.append(services.explorer(*args, serving))
            if serving:
                url = f"http://{serving['SERVE_LISTEN']}/v1"
                self._display.say(f"agents open sessions at {url} (API key in {serving['API_KEYS_FILE']})")
        if plan.config.cluster.nodes > 1:
            trainer.stopped_seconds, trainer.keeps_spare = plan.config.cluster.node_timeout, True
        self.children.append(trainer)
        for child in self.children:
            child.log_mib = plan.config.monitor.log_mib
            child.keeps_spare |= bool(child.gpus)

    async def run(self, others: list[Child], stop: Ending) -> dict[str, Any]:
        """Waits until the stage is finished. Returns its part of the summary. Raises RunError if a child failed for
        good.

        `others` outlive the stage and are watched with it. After `stop` all processes of the stage are ended.
        """
        begin = time.monotonic()
        counted = self._count_devices()
        beats = asyncio.create_task(counted.beat())
        for child in [*self.children, *others]:
            child.say, child.continues = self._display.say, partial(self._continues, child.service)
        for child in self.children:
            child.start()
        keepers = {asyncio.create_task(child.keep_running(self._changed)): child for child in [*self.children, *others]}
        watcher = Watcher(self.run_id, self._addresses)
        record = asyncio.create_task(self._keep_record(others))
        nats = next((child for child in others if child.service == "nats"), None)
        places = [self._job.folder, *(folder for folder in folders(self._plan).values() if folder.is_dir())]
        disks = DiskWatch(places, least_gib(self._plan) * 2**30, nats, self._display.say)
        for child in (*self.children, *others):
            child.hold = disks.hold
        watching = asyncio.create_task(disks.run())
        try:
            await self._announce()
            await self._until_finished(keepers, watcher, stop)
            if stop.is_set():
                await self._save(watcher, stop)
                return {}
            return await self._sum_up(watcher, time.monotonic() - begin)
        finally:
            record.cancel()
            beats.cancel()
            watching.cancel()
            for keeper in keepers:
                keeper.cancel()
            await watcher.close()
            await stop_all(self.children, _STOP_SECONDS, stop.at_once)
            counted.end()
            stop.then = f"the same command resumes the run {self._where()}"

    def _continues(self, service: str) -> str:
        """Returns what the run does after the death of a process."""
        if service == "trainer":
            return f"it continues {self._where()}"
        return "its tasks are given out again" if service == "explorer" else "the others wait for it"

    def _where(self) -> str:
        """Returns the step after the newest checkpoint as text."""
        step = max(complete_steps(self.folder), default=0)
        return f"at step {min(step + 1, self._last_step)} of {self._last_step} of stage {self.name}"

    async def _save(self, watcher: Watcher, stop: Ending) -> None:
        """Has the trainer save what it has trained; a second signal, or the trainer's death, ends the wait."""
        trainer = watcher.view.trainer
        if trainer is None or trainer.state in ("starting", "finished", "stopped"):
            return
        if trainer.state == "waiting" and trainer.step == trainer.checkpoint_step:
            return
        self._display.say(
            f"{stop.signal}: the trainer saves a checkpoint after the running step, then the run ends; "
            "Ctrl-C ends it at once"
        )
        if step := await self._checkpoint(watcher, stop):
            self._display.say(f"the checkpoint of step {step} is saved")
        elif stop.at_once.is_set():
            self._display.say(_AT_ONCE)

    async def _checkpoint(self, watcher: Watcher, stop: Ending) -> int | None:
        """Returns the step of the checkpoint that the trainer saves; None without one, and if all is to end at once."""
        saving = asyncio.create_task(watcher.save_checkpoint(_SAVE_SECONDS))
        at_once = asyncio.create_task(stop.at_once.wait())
        await asyncio.wait([saving, at_once], return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        if saving.done():
            return saving.result()
        saving.cancel()
        return None

    def _count_devices(self) -> DeviceLog:
        """Counts devices from now on."""
        counted = DeviceLog(self.folder)
        devices = self._placement.devices_of(self._plan)
        for child in self.children:
            child.on_event = counted.note
            if child.service in devices:
                counted.begin(child.name, child.service, devices[child.service])
        return counted

    async def _until_finished(self, keepers: "dict[asyncio.Task[str], Child]", watcher: Watcher, stop: Ending) -> None:
        title = f"{self._plan.config.project}/{self._plan.config.name}"
        stopping = asyncio.create_task(stop.wait())
        warned, budget_at = False, time.monotonic() + BEAT_SECONDS
        try:
            while not stop.is_set():
                view = await watcher.refresh()
                self._display.show(view, title, self._last_step, starting(self.children))
                if not warned and view.buffer is not None and every_prompt_is_cut(view.buffer):
                    self._display.say(f"warning: {prompts_cut(view.buffer)}")
                    warned = True
                for keeper, child in keepers.items():
                    if keeper.done() and not child.finished:
                        raise RunError(keeper.result())
                if time.monotonic() > budget_at:
                    await self._end_if_spent(watcher, stop)
                    budget_at = time.monotonic() + BEAT_SECONDS
                if view.finished and all(child.finished for child in self.children if child.once):
                    return
                news = [stopping, *(keeper for keeper in keepers if not keeper.done())]
                await asyncio.wait(news, timeout=_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()

    async def _end_if_spent(self, watcher: Watcher, stop: Ending) -> None:
        """Raises RunError if the budget is spent, once the trainer has saved a checkpoint."""
        budget = Budget(self._plan.config.budget.gpu_hours, self._job.folder)
        if not await asyncio.to_thread(budget.is_spent):
            return
        self._display.say("budget.gpu_hours is spent: the trainer saves a checkpoint, then the run ends")
        step = await self._checkpoint(watcher, stop)
        saved = f"a checkpoint of step {step} is saved" if step else "no step was trained"
        if step is None:
            saved = _AT_ONCE if stop.at_once.is_set() else "the trainer saved no checkpoint; the newest one counts"
        raise RunError(f"{budget.text()} ({saved})", EXIT_SPENT)

    async def _keep_record(self, others: list[Child]) -> None:
        """Writes the record of running processes, again at every restart."""
        while True:
            self._changed.clear()
            processes = [child.record() for child in [*others, *self.children]]
            mode, url, users = self._plan.config.mode, self._broker.url, str(self._broker.users or "")
            record = SupervisorRecord(os.getpid(), mode, self.run_id, self.name, url, processes, users)
            try:
                self._job.write_record("main", record)
            except OSError as error:  # a full disk
                log.warning("run.record.failed", reason=str(error))
                await asyncio.sleep(_POLL_SECONDS)
                continue
            await self._changed.wait()

    async def _announce(self) -> None:
        """Publishes the running services and their addresses for explorers that join."""
        about = RunRecord(
            version=run_record.this_version(),
            run=self.run_id,
            stage=self.name,
            online=not self._plan.offline,
            last=self._is_last,
            addresses=self._addresses,
            config=self._plan.config,
        )
        async with await self._broker.connect("trinity-run", self._job.token) as broker:
            await run_record.write(broker, self._job.token, about)

    async def _sum_up(self, watcher: Watcher, seconds: float) -> dict[str, Any]:
        view = await watcher.refresh()
        first, last = await watcher.rewards(view.buffer.last_step if view.buffer else 0, _REWARD_STEPS)
        versions = await watcher.versions()
        return summarise(self.name, view, first, last, versions, seconds, newest_state(self.folder))


def newest_state(folder: Path) -> dict[str, Any]:
    """Returns the state that the trainer stored in its newest checkpoint."""
    steps = complete_steps(folder)
    return dict(files.read_json(checkpoint_folder(folder, steps[-1]) / "trainer_state.json") or {}) if steps else {}


def summarise(
    name: str,
    view: Answers,
    reward_first: float | None,
    reward_last: float | None,
    versions: int,
    seconds: float,
    state: dict[str, Any],
) -> dict[str, Any]:
    """Returns a stage's part of summary.json."""
    stats = view.buffer
    assert stats is not None
    evaluations: list[dict[str, Any]] = [
        {"step": e.step, "taskset": e.taskset, "metrics": dict(e.metrics)} for e in stats.evaluations
    ]
    return {
        "stage": name,
        "steps": stats.last_step,
        "reward_first": reward_first,
        "reward_last": reward_last,
        "eval_before": accuracy(evaluations, 0),
        "eval_after": accuracy(evaluations, max((e["step"] for e in evaluations), default=None)),
        "groups_fed": stats.fed,
        "groups_stored": stats.stored,
        "dead_letters": stats.dead_letters,
        "outstanding": stats.outstanding,
        "cut_tasks": stats.cut_tasks,
        "duplicates_dropped": stats.duplicates_dropped,
        "failed_attempts": stats.failed_attempts,
        "prompts_cut": stats.prompts_cut,
        "versions": versions,
        "tokens_generated": stats.sampled_tokens + stats.evaluation_tokens,
        "tokens_trained": int(state.get("tokens_trained", 0)),
        "wall_seconds": round(seconds, 1),
        "evaluations": evaluations,
    }


def accuracy(evaluations: list[dict[str, Any]], step: int | None) -> float | None:
    """Returns the mean over the tasksets of a step's accuracy (or reward, without accuracy)."""
    values = []
    for evaluation in evaluations:
        if evaluation["step"] == step:
            metrics = evaluation["metrics"]
            key = next((k for prefix in ("accuracy/", "reward/") for k in metrics if k.startswith(prefix)), None)
            if key is not None:
                values.append(metrics[key])
    return sum(values) / len(values) if values else None
