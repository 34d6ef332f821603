"""Checkpoints in the job folder: complete or absent.

<job>/global_step_<n>/      and the same below s3://bucket/prefix (trinity.weights.checkpoint_buckets)
    actor/slices/           weights and optimizer of every rank (trinity.weights.checkpoint_slices)
    actor/huggingface/      config and tokenizer; model.safetensors by save_hf_checkpoint
    critic/slices/          the same of ppo's critic
    trainer_state.json      step, run, world size, tokens trained
    manifest.json           size and checksum of every file, checked before they are loaded
    .full_checkpoint        written last, before the folder gets its name
<job>/trainer_meta.json     the newest one's trainer_state.json
<job>/latest_checkpointed_iteration.txt
"""

import json
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog

from trinity.config import Plan
from trinity.config.schema.model import ModelConfig
from trinity.data.templates import configured_template
from trinity.runtime import files
from trinity.runtime.errors import InvalidInput, Unavailable
from trinity.trainer.engine.checkpoint_store import CheckpointStore, Part, TrainerState
from trinity.trainer.engine.engine import TrainEngine
from trinity.trainer.engine.weights import read_all
from trinity.trainer.model.lora import write_adapters
from trinity.trainer.process.control import Control
from trinity.trainer.process.exchange import Exchange
from trinity.trainer.process.times import SECONDS, StepTimes
from trinity.trainer.weights import CHECKPOINT_SHARD_BYTES, write_huggingface_index, write_shards
from trinity.weights.checkpoints import copy_all_but_weights

log = structlog.get_logger(__name__)


@dataclass
class Checkpoints:
    """resume -> (save | save_if_due)* -> settle. All methods are collectives.

    Training continues once each rank has copied its share to host memory: a thread of each rank writes the copy,
    computes checksums and uploads. After the last rank, rank 0's thread writes the manifest, names the folder and
    reports it. Until then it is no checkpoint. Every rank waits for its thread in `settle`, since rank 0 treats the end
    of another rank before its own as a failure.

    aside: of the threads, which exchange while training does. commit(step, oldest kept step) reports a durable
    checkpoint; None on other ranks and in replays. rollback(): number of the newest rollback applied to the weights.
    """

    plan: Plan
    run: str
    exchange: Exchange
    aside: Exchange
    engine: TrainEngine
    control: Control
    store: CheckpointStore
    times: StepTimes
    commit: Callable[[int, int], object] | None
    rollback: Callable[[], int]
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"), init=False)
    _sealing: "Future[None] | None" = field(default=None, init=False)
    _reserving: "Future[None] | None" = field(default=None, init=False)
    _is_seen: bool = field(default=True, init=False)  # False: rank 0's machine has another job folder
    _processors: list[Any] = field(default_factory=list, init=False)
    _template: str | None = field(default=None, init=False)  # the YAML's

    def __post_init__(self) -> None:
        """Raises InvalidInput if rank 0 cannot load the tokenizer, image processor or template for its checkpoints."""
        if self.exchange.is_first:
            self._template = configured_template(self.plan.config.model)
        if self.exchange.is_first and not self._model_folder.is_dir():
            self._processors = _processors_of_hub(self.plan.config.model, self.engine.image_rules is not None)

    def resume(self) -> tuple[int, int]:
        """Loads the newest checkpoint; returns its step and newest rollback, or zeros without a checkpoint."""
        self._is_seen = self.exchange.rank not in self.store.apart(self.exchange)
        found = None
        if self.exchange.is_first and self.plan.config.continue_from_checkpoint:
            newest = self.store.newest()
            found = None if newest is None else asdict(newest)
        found = self.exchange.share(found)
        if found is None:
            return 0, 0
        state = TrainerState(**found)
        unverified = self.plan.config.allow_unverified_checkpoint
        self.store.load(state.step, self.engine, self.exchange, unverified=unverified)
        step = state.step
        self.control.update(checkpoint_step=step, saved_step=step, tokens_trained=state.tokens_trained,
                            ledger_sha256=state.ledger_sha256)  # fmt: skip
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
        elif self._reserving is None and interval:
            self._reserve()

    def _reserve(self) -> None:
        """Allocates the memory for copies while the next steps train: pinning it takes up to two seconds a GB."""
        allocations = self.engine.reserve()

        def allocate() -> None:
            for one in allocations:
                one()

        self._reserving = self._thread.submit(allocate)

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
        if self._reserving is not None:
            self._reserving.result()
        if self.exchange.is_first or not self._is_seen:
            self.store.begin(step)
        self.exchange.barrier()
        attempt = self.exchange.share(uuid.uuid4().hex)
        folder = self.store.temporary(step) / "actor"
        write = self.engine.snapshot(folder, {"step": step})
        self._save_adapters(folder / "lora_adapter")
        self._save_huggingface(folder / "huggingface", step)
        self.control.update(saved_step=step)
        state = TrainerState(
            run=self.run,
            step=step,
            tokens_trained=self.control.progress.tokens_trained,
            world_size=self.exchange.world_size,
            zero_stage=self.engine.zero_stage,
            rollback=self.rollback(),
            ledger_sha256=self.control.progress.ledger_sha256,
        )
        if self.exchange.is_first:
            seconds = time.monotonic() - begin
            SECONDS.labels("save").observe(seconds)
            self.times.spent("save", seconds)
        else:
            self.control.update(checkpoint_step=step)
        self._sealing = self._thread.submit(self._seal, state, write, attempt)

    def _seal(self, state: TrainerState, write: Callable[[], list[Path]], attempt: str) -> None:
        """Runs in the thread of each rank: writes this rank's files; rank 0 then makes the checkpoint."""
        begin = time.monotonic()
        error: Exception | None = None

        def put() -> dict[str, Any]:
            nonlocal error
            try:
                return asdict(self.store.put(state.step, attempt, write(), self._is_seen))
            except Exception as failure:
                error = failure
                return {"problem": f"{type(failure).__name__}: {failure}"}

        ranks = self.aside.collect_when_done(put)
        if error is not None:
            raise error
        for rank, one in enumerate(ranks):
            if "problem" in one:
                what = f"its part of the checkpoint of step {state.step}"
                raise Unavailable(f"rank {rank} did not write {what}: {one['problem']}")
        if not self.exchange.is_first:
            return
        parts, keep = [Part(**one) for one in ranks], self.plan.config.trainer.max_checkpoints_to_keep
        oldest = self.store.finish(state, keep, parts, attempt)
        if self.commit is not None:
            self.commit(state.step, oldest)
        self.control.update(checkpoint_step=state.step)
        log.info(
            "trainer.checkpoint.saved",
            step=state.step, path=str(self.store.path(state.step)), seconds=round(time.monotonic() - begin, 3),
        )  # fmt: skip

    def _save_adapters(self, folder: Path) -> None:
        """Writes LoRA adapters for peft into every checkpoint, since they are small. A collective under ZeRO-3."""
        lora, weights = self.engine.lora, self.engine.weights.read()
        if lora is None:
            return
        if self.exchange.is_first:
            weights = self.control.each("a checkpoint's adapters", weights)
            model = self.plan.config.model
            write_adapters(folder, lora, model.model_path, weights, model.in_four_bits)
        read_all(weights)

    def _save_huggingface(self, folder: Path, step: int) -> None:
        """Writes config and tokenizer, and the weights if save_hf_checkpoint says so. A collective under ZeRO-3."""
        choice, last_step = self.plan.config.trainer.save_hf_checkpoint, self.control.progress.last_step
        with_weights = choice == "always" or (choice == "last" and step == last_step)
        if self.exchange.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            self._save_model_files(folder)
        if with_weights and self.exchange.is_first:
            layout, weights = self.engine.weights.whole()
            weights = self.control.each(f"the checkpoint of step {step}", weights)
            found = write_shards(weights, layout, folder, "model-{:05d}.safetensors", CHECKPOINT_SHARD_BYTES)
            write_huggingface_index(folder, *found)
        elif with_weights:
            read_all(self.engine.weights.read())

    def _save_model_files(self, target: Path) -> None:
        """Writes the model's config, tokenizer, chat template and image processor."""
        model = self.engine.policy.model
        if self._model_folder.is_dir():
            copy_all_but_weights(self._model_folder, target)
            if self.plan.config.model.rope:
                write_rope(target / "config.json", model.config.rope_parameters)
        else:
            for part in (model.config, *self._processors):
                part.save_pretrained(target)
            if generation := getattr(model, "generation_config", None):  # `save_pretrained` refuses what hubs have
                (target / "generation_config.json").write_text(generation.to_json_string())
        if self._template:
            files.write_atomic(target / "chat_template.jinja", self._template.encode())

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
