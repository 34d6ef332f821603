"""Records each step on rank 0: status, monitor and Prometheus, monitor/batches.jsonl, and trained experiences."""

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from trinity.config import Plan
from trinity.config.service import monitor_fields
from trinity.data.images import digest, form
from trinity.runtime import tracing
from trinity.runtime.files import end_last_line, keep_newest_lines, write_atomic
from trinity.runtime.gpu_use import GpuUse
from trinity.runtime.metrics import Counter, Gauge, show
from trinity.runtime.monitor import Monitor, MonitorOptions, open_monitor
from trinity.trainer.data.batch import TrainSequence
from trinity.trainer.engine import TrainEngine
from trinity.trainer.engine.step import StepDone
from trinity.trainer.engine.token_record import TokenValues
from trinity.trainer.process.control import Control
from trinity.trainer.process.ranks import Ranks
from trinity.trainer.process.times import SECONDS, StepTimes

log = structlog.get_logger(__name__)

STEP = Gauge("trinity_trainer_step", "Optimizer steps done")
LOSS = Gauge("trinity_trainer_loss", "Losses of the newest step, by their names in the monitor", ["loss"])
REWARD = Gauge("trinity_trainer_reward_mean", "Mean reward of the newest step's rollouts")
GRADIENT = Gauge("trinity_trainer_gradient_norm", "Norm of the newest gradient, before it is clipped")
KL = Gauge(
    "trinity_trainer_kl_nats",
    "KL of the newest step, per token: to the reference, to the engine of the same version (kernel), or of older ones "
    "(stale)",
    ["to"],
)
STALENESS = Gauge("trinity_trainer_staleness_steps", "Mean staleness of the newest step's groups, in steps")
TOKENS = Counter("trinity_trainer_tokens_total", "Tokens of trained sequences, prompts included")
BAD_STEPS = Counter("trinity_trainer_bad_steps_total", "Steps whose batch could not be trained")
GPU_MEMORY = Gauge(
    "trinity_trainer_gpu_memory_bytes",
    "Memory of rank 0's GPU: allocated by torch, reserved for it, and the peak of allocations",
    ["kind"],
)

# Names in the monitor -> labels or gauges.
_KL = {"actor/kl_loss": "reference", "actor/mismatch/kernel_kl": "kernel", "actor/mismatch/stale_kl": "stale"}
_GAUGES = {
    "actor/grad_norm": GRADIENT,
    "sample/reward_mean": REWARD,
    "sample/staleness_mean": STALENESS,
}


class _Appends:
    """Appends lines to a file for each step. Lines of a step that is trained again replace its earlier lines.

    Training does not depend on them: an OSError, as on a full disk, loses the step's lines. The first in a row is
    logged.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._fails = False

    def begin(self, step: int) -> None: ...

    def trained(self, done: StepDone) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            end_last_line(self._file)
            self._write(done)
            self._fails = False
        except OSError as error:
            if not self._fails:
                log.warning("trainer.step.not_written", step=done.step, file=str(self._file), reason=str(error))
            self._fails = True

    def close(self) -> None: ...

    def _write(self, done: StepDone) -> None:
        raise NotImplementedError

    def _append(self, lines: Iterator[dict[str, Any]]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


class Notes(_Appends):
    """Writes monitor/batches.jsonl: each step's groups, and the settings that determine the bits of its result.

    A replay needs the same settings. schedule_end(step): as in StepTrainer. rollback(): number of the newest rollback
    applied to the weights.
    """

    def __init__(
        self,
        folder: Path,
        engine: TrainEngine,
        ranks: Ranks,
        schedule_end: Callable[[int], int],
        rollback: Callable[[], int],
    ) -> None:
        super().__init__(folder / "monitor" / "batches.jsonl")
        self._engine = engine
        self._ranks = ranks
        self._schedule_end = schedule_end
        self._rollback = rollback

    def _write(self, done: StepDone) -> None:
        note = {
            "step": done.step,
            "groups": [group.log_sequence for group in done.raw.entry.groups],
            "last_step": self._schedule_end(done.step),
            "ranks": self._ranks.world_size,
            "device": self._engine.device.type,
            "threads": torch.get_num_threads(),
            "micro_batch_tokens": self._engine.micro_batch_tokens,
            "rollback": self._rollback(),
        }
        self._append(iter([note]))


class Experiences(_Appends):
    """Writes buffer/experience_buffer.jsonl for `trinity view`: a line for each trained experience.

    `arrays` are in base64, since numbers as text take far longer to write: token_ids little-endian int32 [P + R], mask
    uint8 [R] (1: trained), logprobs little-endian float32 [R], under the weights that sampled the response. A step that
    records TokenValues adds new_logprobs float32 [R], entropy float16 [R], clipped uint8 [R] if the loss has a clip,
    and proximal_logprobs float32 [R] if the step made several updates.
    `images` are files below the job's folder, each kept once. Above `most_bytes` the older half of the lines goes.
    """

    def __init__(self, folder: Path, most_bytes: int | None = None) -> None:
        super().__init__(folder / "buffer" / "experience_buffer.jsonl")
        self._folder = folder
        self._most_bytes = most_bytes

    def _write(self, done: StepDone) -> None:
        if not done.trained:
            return
        sequences = done.batch.sequences
        for image in {image.file for sequence in sequences for image in sequence.images}:
            file = self._folder / image_file(image)
            if not file.exists():
                write_atomic(file, image, durable=False)
        pairs = zip(sequences, done.tokens or [None] * len(sequences), strict=True)
        self._append(_line(done, s, values) for s, values in pairs if s.experience is not None)
        keep_newest_lines(self._file, self._most_bytes)


def _line(done: StepDone, sequence: TrainSequence, values: TokenValues | None) -> dict[str, Any]:
    experience, group = sequence.experience, done.raw.entry.groups[sequence.group]
    assert experience is not None
    return {
        "step": done.step,
        "task_id": group.task_id,
        "ordinal": group.ordinal,
        "rollout": experience.rollout,
        "turn": experience.step,
        "reward": experience.reward,
        "advantage": sequence.advantage,
        "versions": [[span.version, span.start, span.end] for span in experience.version_spans],
        "precisions": experience.precisions,
        "staleness": group.staleness_steps,
        "prompt_tokens": sequence.prompt_length,
        "response_tokens": sequence.response_length,
        "truncation": experience.truncation.name.lower(),
        "metrics": dict(experience.metrics),
        **experience.moved,
        **({"images": [image_file(image.file) for image in sequence.images]} if sequence.images else {}),
        "log_sequence": group.log_sequence,
        "prompt": experience.prompt_text,
        "response": experience.response_text,
        "arrays": {
            "token_ids": _base64(sequence.token_ids, "<i4"),
            "mask": _base64(sequence.mask, "u1"),
            "logprobs": _base64(sequence.old_logprobs, "<f4"),
            **({} if values is None else _arrays(values)),
        },
    }


def _arrays(values: TokenValues) -> dict[str, str]:
    found = {"new_logprobs": _base64(values.logprobs, "<f4"), "entropy": _base64(values.entropy, "<f2")}
    if values.clipped is not None:
        found["clipped"] = _base64(values.clipped, "u1")
    if values.proximal_logprobs is not None:
        found["proximal_logprobs"] = _base64(values.proximal_logprobs, "<f4")
    return found


def image_file(image: bytes) -> str:
    """Returns an image's path relative to the job's folder."""
    return f"buffer/images/{digest(image).hex()}.{form(image)}"


def _base64(values: np.ndarray, dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode()


@dataclass
class StepMonitor:
    """Updates status, log, Prometheus, and the monitors that the YAML names."""

    plan: Plan
    folder: Path
    control: Control
    times: StepTimes
    _monitor: Monitor | None = field(default=None, init=False)
    _gpus: GpuUse | None = field(default=None, init=False)

    def begin(self, step: int) -> None:
        if torch.cuda.is_initialized():
            self._gpus = GpuUse()
        fields = {**monitor_fields(self.plan, "trainer"), "folder": self.folder / "monitor"}
        self._monitor = open_monitor(MonitorOptions(**fields), first_step=step)

    def trained(self, done: StepDone) -> None:
        SECONDS.labels("train").observe(done.seconds)
        metrics = self._metrics(done)
        show_step(done.step, metrics, sum(s.length for s in done.batch.sequences) if done.trained else 0)
        if torch.cuda.is_initialized():
            cuda = torch.cuda
            show_memory(cuda.memory_allocated(), cuda.memory_reserved(), cuda.max_memory_allocated())
        tokens = self.control.progress.tokens_trained + (done.batch.totals.tokens if done.trained else 0)
        self.control.update(step=done.step, tokens_trained=tokens, metrics=metrics)
        with tracing.within(done.span):
            log.info("trainer.step.done", step=done.step, **{k: round(v, 5) for k, v in metrics.items()})
        if self._monitor is not None:
            self._monitor.log(metrics, done.step)

    def close(self) -> None:
        if self._gpus is not None:
            self._gpus.close()
        if self._monitor is not None:
            self._monitor.close()

    def _metrics(self, done: StepDone) -> dict[str, float]:
        batch, own = done.batch, done.metrics.items()
        named = {name if name.startswith("critic/") else f"actor/{name}": value for name, value in own}
        named |= {"time/step": done.seconds, **self.times.metrics(batch.made_at_seconds)}
        named["perf/tokens_per_second"] = sum(s.length for s in batch.sequences) / max(done.seconds, 1e-6)
        if self._gpus is not None:
            named |= {f"perf/gpu_use/{index}": use for index, use in self._gpus.take().items()}
        named["sample/response_tokens"] = float(batch.response_tokens)
        named["sample/response_length_mean"] = batch.response_tokens / max(1, len(batch.sequences))
        if not self.plan.algorithm.offline:
            rewards = [s.reward for s in batch.sequences if s.experience is not None]  # without duplicates
            named["sample/reward_mean"] = sum(rewards) / max(1, len(rewards))
            named["sample/staleness_mean"] = batch.staleness_mean
            named["sample/staleness_max"] = batch.staleness_max
            if batch.regraded_groups:
                named["sample/regraded_groups"] = float(batch.regraded_groups)
        return named


def show_step(step: int, metrics: Mapping[str, float], tokens: int) -> None:
    """Sets the Prometheus metrics of a step from those of the monitor. A metric that the step lacks keeps its value."""
    STEP.set(step)
    TOKENS.inc(tokens)
    BAD_STEPS.inc(metrics.get("actor/bad_step", 0.0))
    show(LOSS, {(name.partition("/")[2],): value for name, value in metrics.items() if name.endswith("_loss")})
    show(KL, {(of,): metrics[name] for name, of in _KL.items() if name in metrics})
    for name, gauge in _GAUGES.items():
        if name in metrics:
            gauge.set(metrics[name])


def show_memory(allocated: int, reserved: int, peak: int) -> None:
    """Sets the gauges of GPU memory, in bytes."""
    show(GPU_MEMORY, {("allocated",): allocated, ("reserved",): reserved, ("peak",): peak})
