"""The checkpoints of a job in its folder and in buckets: listed, completed, brought to a machine, checked, loaded."""

import contextlib
import fcntl
import hashlib
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from trinity.config import Plan
from trinity.runtime import files
from trinity.runtime.errors import InvalidInput, TrinityError
from trinity.trainer.engine.engine import TrainEngine
from trinity.trainer.process.exchange import Exchange
from trinity.weights.checkpoint_buckets import FIELD, CheckpointBucket
from trinity.weights.checkpoint_manifest import MANIFEST, ManifestWriter, entries_of, has_manifest, names_of, verify
from trinity.weights.checkpoint_slices import FOLDER
from trinity.weights.checkpoints import COMPLETE, checkpoint_folder, complete_steps

log = structlog.get_logger(__name__)

_STATE = "trainer_state.json"
_LOADED = (_STATE, "actor/slices", "critic/slices", "actor/deepspeed", "critic/deepspeed")


@dataclass(frozen=True)
class TrainerState:
    """The state of a resumed trainer without the tensors. `step` is also the position in the ledger.

    rollback: number of the newest rollback applied to the weights; 0: none. ledger_sha256: digest of the step's ledger
    entry, in hexadecimal.
    """

    run: str
    step: int
    tokens_trained: int
    world_size: int
    zero_stage: int
    rollback: int = 0
    ledger_sha256: str = ""


@dataclass(frozen=True)
class Part:
    """A rank's files of a checkpoint: their entries of the manifest, and the buckets that did not take them."""

    files: dict[str, Any]
    failed: list[str]


class CheckpointStore:
    """All checkpoints of one job, in its folder and in buckets; the folder is also a cache of the buckets'.

    in_folder: a checkpoint stays in the folder with its slices; otherwise only buckets have these.
    """

    def __init__(self, job_dir: Path, buckets: Sequence[CheckpointBucket] = (), in_folder: bool = True) -> None:
        self.job_dir = job_dir
        self.buckets = buckets
        self.in_folder = in_folder
        self._apart: list[int] | None = None

    @classmethod
    def of(cls, plan: Plan, run: str) -> "CheckpointStore":
        """Opens the checkpoints of a run."""
        storage = plan.config.trainer.checkpoint_storage
        buckets = [CheckpointBucket(entry, run) for entry in storage if entry != "folder"]
        return cls(plan.job_dir, buckets, "folder" in storage)

    def path(self, step: int) -> Path:
        return checkpoint_folder(self.job_dir, step)

    def temporary(self, step: int) -> Path:
        """The folder into which all ranks write before `finish`."""
        return self.job_dir / f".global_step_{step}.partial"

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        return complete_steps(self.job_dir)

    def apart(self, exchange: Exchange) -> list[int]:
        """Returns the ranks that do not see rank 0's job folder, since their machine has its own. A collective.

        Raises InvalidInput if no bucket joins them.
        """
        if exchange.world_size == 1:
            return []
        if self._apart is None:
            probe = self.job_dir / f".seen_by_ranks_{uuid.uuid4().hex}"
            if exchange.is_first:
                self.job_dir.mkdir(parents=True, exist_ok=True)
                probe.touch()
            sees = (self.job_dir / exchange.share(probe.name)).exists()
            self._apart = [rank for rank, sees in enumerate(exchange.collect(sees)) if not sees]
            if exchange.is_first:
                probe.unlink()
        if self._apart and not self.buckets:
            problem = f"has no bucket, and ranks {self._apart} do not see the folder {self.job_dir} of rank 0: "
            raise InvalidInput(FIELD, f"{problem}add s3://bucket/prefix, or share checkpoint_root_dir")
        return self._apart

    def newest(self) -> TrainerState | None:
        """State of the newest complete checkpoint."""
        states = (self.state(step) for step in reversed(self.steps()))
        state = next((state for state in states if state is not None), None)
        stored = max((step for bucket in self.buckets for step in bucket.steps()), default=0)
        if stored > (state.step if state else 0):
            self.bring(stored)
            state = self.state(stored)
        return state

    def bring(self, step: int) -> None:
        """Downloads the files of a checkpoint that this machine lacks, if a bucket has it."""
        if not self.buckets:
            return
        folder, begin = self.path(step), time.monotonic()
        self.job_dir.mkdir(parents=True, exist_ok=True)
        with (self.job_dir / ".fetch.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ranks of a machine take turns
            complete = (folder / COMPLETE).exists()
            if complete and has_manifest(folder) and all((folder / name).is_file() for name in entries_of(folder)):
                return
            bucket = next((bucket for bucket in self.buckets if bucket.has(step)), None)
            if bucket is None:
                return
            target = folder if complete else folder.with_name(f".{folder.name}.fetched")
            if not complete:
                shutil.rmtree(target, ignore_errors=True)
            bucket.fetch(step, target)
            if not complete:
                _give_name(target, folder)
        seconds = round(time.monotonic() - begin, 3)
        log.info("trainer.checkpoint.fetched", step=step, path=str(folder), source=bucket.where, seconds=seconds)

    def state(self, step: int) -> TrainerState | None:
        """State of one checkpoint."""
        state = files.read_json(self.path(step) / _STATE)
        return TrainerState(**state) if isinstance(state, dict) else None

    def load(self, step: int, engine: TrainEngine, exchange: Exchange, *, unverified: bool) -> None:
        """Loads a checkpoint into the engine. A collective.

        Ranks of any number and ZeRO stage may have saved it. Unless `unverified`, rank 0 compares the files with the
        manifest first, and every rank raises InvalidInput if a file differs.
        """
        problem = self._prepare(step, engine, exchange, unverified) if exchange.is_first else []
        if problem := exchange.share(problem):
            raise InvalidInput(*problem)
        if self.apart(exchange):
            same = exchange.share(self._content(step)) == self._content(step)
            if not same:
                _remove(self.path(step))  # of another machine, which has an older one or none
            found = exchange.collect_when_done(
                lambda: [] if same else self._prepare(step, engine, exchange, unverified)
            )
            if problem := next((one for one in found if one), []):
                raise InvalidInput(*problem)
        engine.load(self.path(step) / "actor")

    def _prepare(self, step: int, engine: TrainEngine, exchange: Exchange, unverified: bool) -> list[str]:
        """Brings a checkpoint to this machine and checks it; returns field and text of a problem."""
        try:
            self.bring(step)
            self.check_shards(step, engine.zero_stage, exchange.world_size)
            if not unverified:
                verify(self.path(step), _LOADED)
        except InvalidInput as error:
            return [error.field, str(error).removeprefix(f"{error.field}: ")]
        return []

    def _content(self, step: int) -> str:
        """Identifies the files of a complete checkpoint in the folder."""
        folder = self.path(step)
        content = (folder / MANIFEST).read_bytes() if (folder / COMPLETE).exists() and has_manifest(folder) else b""
        return hashlib.sha256(content).hexdigest()

    def check_shards(self, step: int, zero_stage: int, ranks: int) -> None:
        """Raises InvalidInput if DeepSpeed wrote the shards, as former versions let it, on other ranks than these.

        Its shards of ZeRO 1 and 2 are alike; ZeRO 0 has one for any number of ranks. Slices fit any ranks.
        """
        state = self.state(step)
        if state is None or (self.path(step) / "actor" / FOLDER).is_dir():  # `verify` reports a missing file
            return
        way = "or begin a new run with the model that `trinity convert` makes of it"
        saved, now = state.zero_stage, zero_stage
        if saved != now and {saved, now} != {1, 2}:
            problem = f"is {now}, but the checkpoint of step {step} is of ZeRO {saved}; set it to {saved}, {way}"
            raise InvalidInput("trainer.deepspeed.zero_stage", problem)
        if now and state.world_size != ranks:
            saved = state.world_size
            problem = f"is {ranks}, but {saved} rank(s) saved the checkpoint of step {step}; set it to {saved}, {way}"
            raise InvalidInput("trainer.num_ranks", problem)

    def begin(self, step: int) -> Path:
        """Creates an empty folder to write into, and removes remains of a crash."""
        for left in self.job_dir.glob(".global_step_*"):
            shutil.rmtree(left, ignore_errors=True)
        folder = self.temporary(step)
        (folder / "actor").mkdir(parents=True, exist_ok=True)
        return folder

    def put(self, step: int, attempt: str, written: Collection[Path], seen: bool) -> Part:
        """Uploads files that this rank wrote for a checkpoint.

        seen: rank 0 sees the files; otherwise they are removed once buckets have them.
        """
        folder = self.temporary(step)
        manifest = ManifestWriter(folder, [path.relative_to(folder).as_posix() for path in written])
        failed = [
            bucket.where
            for bucket in self.buckets
            if not self._uploaded(bucket, step, seen, partial(bucket.upload, step, attempt, folder, manifest.names))
        ]
        part = Part(manifest.entries(), failed)
        if not seen:
            for path in written:
                path.unlink()
        return part

    def finish(self, state: TrainerState, keep: int | None, parts: Sequence[Part] = (), attempt: str = "") -> int:
        """Makes the written folder the step's durable checkpoint; returns the oldest step that is kept.

        parts: what the ranks wrote, and uploaded for this attempt.
        """
        folder, final, step = self.temporary(state.step), self.path(state.step), state.step
        sliced = {name: entry for part in parts for name, entry in part.files.items()}
        files.write_json(folder / _STATE, asdict(state))
        others = names_of(folder) - sliced.keys()
        manifest = ManifestWriter(folder, others)
        files.sync_tree(folder)  # waits for the disk, while threads compute the checksums
        manifest.write(sliced)
        whole = all((folder / name).is_file() for name in sliced)

        def complete(bucket: CheckpointBucket) -> None:
            bucket.upload(step, attempt, folder, others)
            bucket.finish(step, attempt, folder)

        failed = {where for part in parts for where in part.failed}
        stored = [
            bucket
            for bucket in self.buckets
            if bucket.where not in failed and self._uploaded(bucket, step, whole, partial(complete, bucket))
        ]
        if not self.in_folder:
            for name in sliced:
                (folder / name).unlink(missing_ok=True)
        (folder / COMPLETE).touch()
        files.sync_folder(folder)
        _give_name(folder, final)
        files.write_json(self.job_dir / "trainer_meta.json", {"latest_iteration": state.step, **asdict(state)})
        files.write_atomic(self.job_dir / "latest_checkpointed_iteration.txt", str(state.step).encode())
        for old in self.steps()[: -keep if keep else 0]:
            _remove(self.path(old))
        for bucket in stored:
            self._uploaded(bucket, step, True, partial(bucket.keep, keep))
        return self.steps()[0]

    def _uploaded(self, bucket: CheckpointBucket, step: int, whole: bool, work: Callable[[], object]) -> bool:
        """Returns False, and logs the reason, if the bucket fails. Raises if the folder keeps no whole checkpoint."""
        try:
            work()
        except TrinityError as error:
            if not self.in_folder or not whole:
                raise
            log.warning("trainer.checkpoint.not_uploaded", step=step, bucket=bucket.where, reason=str(error))
            return False
        return True


def _give_name(folder: Path, final: Path) -> None:
    """Renames the folder. A checkpoint of this name from before a rollback stays until then: it may be the only one."""
    before = final.with_name(f".{final.name}.replaced")
    with contextlib.suppress(FileNotFoundError):
        final.rename(before)
    folder.rename(final)
    shutil.rmtree(before, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Removes a checkpoint. It first stops counting as complete, so a kill leaves no checkpoint that lacks files."""
    (folder / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
