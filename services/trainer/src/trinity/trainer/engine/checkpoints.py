"""Checkpoints in the job folder: complete or absent.

<job>/global_step_<n>/
    actor/deepspeed/        model and optimizer shards of every rank
    actor/huggingface/      config and tokenizer; model.safetensors by save_hf_checkpoint
    critic/deepspeed/       the same of ppo's critic
    trainer_state.json      step, run, world size, tokens trained
    manifest.json           size and SHA-256 of every file, checked before they are loaded
    .full_checkpoint        written last, before the folder gets its name
<job>/trainer_meta.json     the newest one's trainer_state.json
<job>/latest_checkpointed_iteration.txt
"""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog

from trinity.config import Plan
from trinity.config.schema.model import ModelConfig
from trinity.runtime import files
from trinity.runtime.errors import InvalidInput
from trinity.trainer.engine.engine import TrainEngine
from trinity.trainer.engine.weights import read_all
from trinity.trainer.model.lora import write_adapters
from trinity.trainer.process.control import Control
from trinity.trainer.process.exchange import Exchange
from trinity.trainer.process.times import SECONDS, StepTimes
from trinity.trainer.weights import CHECKPOINT_SHARD_BYTES, write_huggingface_index, write_shards
from trinity.weights.checkpoint_manifest import ManifestWriter, verify
from trinity.weights.checkpoints import COMPLETE, checkpoint_folder, complete_steps, copy_all_but_weights

log = structlog.get_logger(__name__)

_STATE = "trainer_state.json"
_LOADED = (_STATE, "actor/deepspeed", "critic/deepspeed")


@dataclass(frozen=True)
class TrainerState:
    """The state of a resumed trainer without the tensors. `step` is also the position in the ledger.

    rollback: number of the newest rollback applied to the weights; 0: none.
    """

    run: str
    step: int
    tokens_trained: int
    world_size: int
    zero_stage: int
    rollback: int = 0


class CheckpointStore:
    """All checkpoints of one job."""

    def __init__(self, job_dir: Path) -> None:
        self.job_dir = job_dir

    def path(self, step: int) -> Path:
        return checkpoint_folder(self.job_dir, step)

    def temporary(self, step: int) -> Path:
        """The folder into which all ranks write before `finish`."""
        return self.job_dir / f".global_step_{step}.partial"

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        return complete_steps(self.job_dir)

    def newest(self) -> TrainerState | None:
        """State of the newest complete checkpoint."""
        states = (self.state(step) for step in reversed(self.steps()))
        return next((state for state in states if state is not None), None)

    def state(self, step: int) -> TrainerState | None:
        """State of one checkpoint."""
        state = files.read_json(self.path(step) / _STATE)
        return TrainerState(**state) if isinstance(state, dict) else None

    def load(self, step: int, engine: TrainEngine, exchange: Exchange, *, unverified: bool) -> None:
        """Loads a checkpoint into the engine. A collective.

        Every rank raises InvalidInput if another number of ranks or ZeRO stage, whose shards differ, saved it. Unless
        `unverified`, rank 0 compares the files with the manifest first, and every rank raises InvalidInput if a file
        differs.
        """
        problem: list[str] = []
        if exchange.is_first:
            try:
                self.check_shards(step, engine.zero_stage, exchange.world_size)
                if not unverified:
                    verify(self.path(step), _LOADED)
            except InvalidInput as error:
                problem = [error.field, str(error).removeprefix(f"{error.field}: ")]
        if problem := exchange.share(problem):
            raise InvalidInput(*problem)
        engine.load(self.path(step) / "actor")

    def check_shards(self, step: int, zero_stage: int, ranks: int) -> None:
        """Raises InvalidInput if the shards are not those of these ranks.

        Shards of ZeRO 1 and 2 are alike; ZeRO 0 has one for any number of ranks.
        """
        state = self.state(step)
        if state is None:  # `verify` reports the missing file
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
        (folder / "actor").mkdir(parents=True)
        return folder

    def finish(self, state: TrainerState, keep: int | None) -> int:
        """Makes the written folder the step's durable checkpoint; returns the oldest step that is kept."""
        folder, final = self.temporary(state.step), self.path(state.step)
        files.write_json(folder / _STATE, asdict(state))
        manifest = ManifestWriter(folder)
        files.sync_tree(folder)  # waits for the disk, while threads compute the checksums
        manifest.write()
        (folder / COMPLETE).touch()
        files.sync_folder(folder)
        _give_name(folder, final)
        files.write_json(self.job_dir / "trainer_meta.json", {"latest_iteration": state.step, **asdict(state)})
        files.write_atomic(self.job_dir / "latest_checkpointed_iteration.txt", str(state.step).encode())
        steps = self.steps()
        for step in steps[: -keep if keep else 0]:
            _remove(self.path(step))
        return self.steps()[0]


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


@dataclass
class Checkpoints:
    """resume -> (save | save_if_due)* -> settle. All methods are collectives.

    Training continues once the files are written: a thread of rank 0 waits for the disk, computes the checksums, names
    the folder and reports it. Until then it is no checkpoint. Every rank waits for the thread in `settle`, since rank 0
    treats the end of another rank before its own as a failure.

    commit(step, oldest kept step) reports a durable checkpoint; None on other ranks and in replays. rollback(): number
    of the newest rollback applied to the weights.
    """

    plan: Plan
    run: str
    exchange: Exchange
    engine: TrainEngine
    control: Control
    store: CheckpointStore
    times: StepTimes
    commit: Callable[[int, int], object] | None
    rollback: Callable[[], int]
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"), init=False)
    _sealing: "Future[None] | None" = field(default=None, init=False)
    _processors: list[Any] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Raises InvalidInput if rank 0 cannot load the tokenizer or image processor for its checkpoints."""
        if self.exchange.is_first and not self._model_folder.is_dir():
            self._processors = _processors_of_hub(self.plan.config.model, self.engine.image_rules is not None)

    def resume(self) -> tuple[int, int]:
        """Loads the newest checkpoint; returns its step and newest rollback, or zeros without a checkpoint."""
        state = self.store.newest() if self.plan.config.continue_from_checkpoint else None
        if state is None:
            return 0, 0
        unverified = self.plan.config.allow_unverified_checkpoint
        self.store.load(state.step, self.engine, self.exchange, unverified=unverified)
        step = state.step
        self.control.update(checkpoint_step=step, saved_step=step, tokens_trained=state.tokens_trained)
        log.info("trainer.resumed", step=state.step, path=str(self.store.path(state.step)))
        return state.step, state.rollback

    def schedule_end(self, step: int) -> int:
        """The end of the learning rate's schedule, as known at this step."""
        return self.control.progress.last_step

    def save_if_due(self, step: int) -> None:
        """Saves after the last step, at the interval, and on request. Raises the error of an earlier checkpoint."""
        if self._sealing is not None and self._sealing.done():
            self._wait_for_seal()
        interval = self.plan.config.trainer.save_interval
        requested = self.exchange.share(self.control.take_checkpoint_request())
        if step == self.control.progress.last_step or requested or (interval and step % interval == 0):
            self.save(step)

    def settle(self) -> None:
        """Waits until the newest saved step is a checkpoint. Rank 0 raises the error of its thread."""
        self._wait_for_seal()
        self.exchange.barrier()

    def _wait_for_seal(self) -> None:
        if self._sealing is None:
            return
        begin, sealing, self._sealing = time.monotonic(), self._sealing, None
        sealing.result()
        self.times.spent("save", time.monotonic() - begin)

    def save(self, step: int) -> None:
        self._wait_for_seal()
        self.control.update(state="saving")
        begin = time.monotonic()
        if self.exchange.is_first:
            self.store.begin(step)
        self.exchange.barrier()
        folder = self.store.temporary(step) / "actor"
        self.engine.save(folder, {"step": step})
        self._save_adapters(folder / "lora_adapter")
        self._save_huggingface(folder / "huggingface", step)
        self.exchange.barrier()
        self.control.update(saved_step=step)
        if self.exchange.is_first:
            seconds = time.monotonic() - begin
            SECONDS.labels("save").observe(seconds)
            self.times.spent("save", seconds)
            state = TrainerState(
                run=self.run,
                step=step,
                tokens_trained=self.control.progress.tokens_trained,
                world_size=self.exchange.world_size,
                zero_stage=self.engine.zero_stage,
                rollback=self.rollback(),
            )
            self._sealing = self._thread.submit(self._seal, state)
        else:
            self.control.update(checkpoint_step=step)

    def _seal(self, state: TrainerState) -> None:
        begin = time.monotonic()
        oldest = self.store.finish(state, self.plan.config.trainer.max_checkpoints_to_keep)
        if self.commit is not None:
            self.commit(state.step, oldest)
        self.control.update(checkpoint_step=state.step)
        log.info(
            "trainer.checkpoint.saved",
            step=state.step, path=str(self.store.path(state.step)), seconds=round(time.monotonic() - begin, 3),
        )  # fmt: skip

    def _save_adapters(self, folder: Path) -> None:
        """Writes LoRA adapters for peft into every checkpoint, since they are small. A collective under ZeRO-3."""
        lora, weights = self.engine.lora, self.engine.weights()
        if lora is None:
            return
        if self.exchange.is_first:
            write_adapters(folder, lora, self.plan.config.model.model_path, weights)
        read_all(weights)

    def _save_huggingface(self, folder: Path, step: int) -> None:
        """Writes config and tokenizer, and the weights if save_hf_checkpoint says so. A collective under ZeRO-3."""
        choice, last_step = self.plan.config.trainer.save_hf_checkpoint, self.control.progress.last_step
        with_weights = choice == "always" or (choice == "last" and step == last_step)
        if self.exchange.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            self._save_model_files(folder)
        if with_weights and self.exchange.is_first:
            layout, weights = self.engine.whole_weights()
            found = write_shards(weights, layout, folder, "model-{:05d}.safetensors", CHECKPOINT_SHARD_BYTES)
            write_huggingface_index(folder, *found)
        elif with_weights:
            read_all(self.engine.weights())

    def _save_model_files(self, target: Path) -> None:
        """Writes the model's config, tokenizer, chat template and image processor."""
        if self._model_folder.is_dir():
            copy_all_but_weights(self._model_folder, target)
            if self.plan.config.model.rope:
                own = self.engine.policy.model.config.rope_parameters
                write_rope(target / "config.json", own)
            return
        for part in (self.engine.policy.model.config, *self._processors):
            part.save_pretrained(target)

    @property
    def _model_folder(self) -> Path:
        """The model's folder; it does not exist for a model of the hub."""
        return Path(self.plan.config.model.model_path).expanduser()


def _processors_of_hub(model: ModelConfig, reads_images: bool) -> list[Any]:
    """Loads tokenizer and image processor from the hub. Raises InvalidInput."""
    from transformers import AutoImageProcessor, AutoTokenizer

    kinds = (AutoTokenizer, AutoImageProcessor) if reads_images else (AutoTokenizer,)
    try:
        return [kind.from_pretrained(model.model_path, trust_remote_code=model.trust_remote_code) for kind in kinds]
    except (OSError, ValueError) as error:
        problem = f"{model.model_path!r}: its tokenizer or image processor cannot be loaded: {error}"
        raise InvalidInput("model.model_path", problem) from None


def write_rope(file: Path, parameters: Mapping[str, Any]) -> None:
    """Replaces the rotary positions in a model's config.json, so that the checkpoint has those of training."""
    config = json.loads(file.read_text())
    config = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}
    files.write_atomic(file, json.dumps({**config, "rope_parameters": dict(parameters)}, indent=2).encode())
