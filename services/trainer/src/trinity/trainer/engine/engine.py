"""Trains the models: all updates of one step from a batch, for every ZeRO stage and number of ranks.

The loss of a micro-batch is its share of the global batch's loss, times the number of ranks because DeepSpeed averages
over them. Backward passes only accumulate (managed_gradient_accumulation is off); `step` reduces and updates. So the
gradient does not depend on the split into micro-batches and ranks, but for the balance of experts (routers.py).
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed as dist

from trinity.config import Plan
from trinity.data.images import PlacedImage
from trinity.data.vision import ImageRules
from trinity.runtime import waits
from trinity.runtime.errors import InvalidInput
from trinity.trainer.algorithms.aggregation import Report, join, means
from trinity.trainer.algorithms.inputs import LIMIT
from trinity.trainer.algorithms.kl import KlCoefficients
from trinity.trainer.algorithms.loss import LossInputs, compute_loss, wants_entropy_gradient
from trinity.trainer.data.bad_steps import BadStep
from trinity.trainer.data.batch import TrainBatch, TrainSequence
from trinity.trainer.data.images import ImageReader
from trinity.trainer.data.microbatch import Limit, MicroBatch, MicroBatchPlanner, after_first_token
from trinity.trainer.engine.critic import in_rows, load_critic, value_loss
from trinity.trainer.engine.deepspeed import DeepSpeedModel, dtype_of, import_deepspeed
from trinity.trainer.engine.learner import Learner, LossOf, NoGradForward, learning_rate
from trinity.trainer.engine.slices import Write
from trinity.trainer.engine.token_record import TokenRecord
from trinity.trainer.engine.weights import PolicyWeights
from trinity.trainer.engine.whole_batch import BatchPreparer, rolled_out
from trinity.trainer.model import activations
from trinity.trainer.model.attention import check_shared_prompts
from trinity.trainer.model.checkpointing import recompute_activations
from trinity.trainer.model.policy import OffloadedReference, PolicyModel, TokenModel, disable_dropout, load_policy
from trinity.trainer.model.router_replay import replayed_share
from trinity.trainer.model.routers import routers_of
from trinity.trainer.model.sequence_parallel import make_groups
from trinity.trainer.model.vision import freeze_all_but_text, has_vision
from trinity.trainer.process import devices
from trinity.trainer.process.exchange import Together, meet_in_store
from trinity.trainer.process.ranks import LONGEST_EXCHANGE, Ranks
from trinity.weights.collective import NCCL_OF_PROCESS
from trinity.weights.lora import Lora

log = structlog.get_logger(__name__)


class TrainEngine:
    """The policy, its optimizer and, if the algorithm needs them, the frozen reference and the critic."""

    def __init__(
        self,
        plan: Plan,
        ranks: Ranks,
        device: str,
        gpu_memory_gib: float = 0,
        together: Together = contextlib.nullcontext,
    ) -> None:
        """gpu_memory_gib: limit of this rank's memory on its GPU; 0: all of it. together: as of `Exchange`."""
        self._plan = plan
        self._together = together
        self._ranks = ranks
        trainer = plan.config.trainer
        self.device = torch.device("cpu" if device == "cpu" else f"cuda:{ranks.local_rank}")
        on_gpu = self.device.type == "cuda"
        self.dtype = dtype_of(trainer, self.device)
        deepspeed = import_deepspeed(self.device)
        if on_gpu:
            torch.cuda.set_device(self.device)
            if plan.config.reproducible:
                devices.only_deterministic_kernels()
        for name, value in NCCL_OF_PROCESS.items():
            os.environ.setdefault(name, value)
        backend = "nccl" if on_gpu else "gloo"
        others = f"the other {ranks.world_size - 1} of {ranks.world_size} ranks (this is rank {ranks.rank})"
        limit = LONGEST_EXCHANGE.total_seconds()
        rendezvous = f"rendezvous at {ranks.meeting_place}"
        with waits.waiting(others, rendezvous, limit_seconds=limit), together(f"the {rendezvous}"):
            meet_in_store(ranks, backend)
            deepspeed.init_distributed(
                dist_backend=backend,
                verbose=False,
                timeout=LONGEST_EXCHANGE,
                init_method=ranks.init_method,
                rank=ranks.rank,
                world_size=ranks.world_size,
            )
        waits.phase("loads the model")
        self._group = make_groups(ranks, trainer.ulysses_sequence_parallel_size)
        self._fused = trainer.fused_kernels if on_gpu else False
        policy = self._load()
        self._freeze(policy)
        disable_dropout(policy, "policy")
        coefficient = plan.config.algorithm.router_aux_loss_coef
        self._routers = routers_of(policy.model, coefficient, shared=self._group is not None)
        memory = devices.limit_memory(self.device, gpu_memory_gib) if on_gpu else None
        self._activations = activations.choose(plan, policy, ranks, self.device, memory)
        recompute_activations(policy.model, self._activations.recompute, self._activations.layers)
        self._planner = self._make_planner(policy)
        self.reference = self._load_reference() if plan.algorithm.needs_reference else None
        self._kl = KlCoefficients.of(plan.algorithm)
        waits.phase("prepares the optimizer")
        self._model = DeepSpeedModel(
            policy, plan.config.algorithm.optimizer, trainer, self.dtype, self.device, trainer.grad_clip, together
        )
        self.weights = PolicyWeights(self._model, plan, ranks, self.dtype, self.device)
        self._no_grad = NoGradForward(self._planner, ranks, self.device)
        self._learner = Learner(self._model, self._no_grad)
        self._critic = self._load_critic() if plan.algorithm.critic else None
        critic = None if self._critic is None else self._critic.model
        self._preparer = BatchPreparer(plan, self._no_grad, self._model, self.reference, critic)

    def on_micro_batch(self, called: Callable[[], object]) -> None:
        """Has `called` called before each micro-batch."""
        self._planner.on_next = called

    def _make_planner(self, policy: PolicyModel) -> MicroBatchPlanner:
        plan, trainer = self._plan, self._plan.config.trainer
        copies = 1 if self._group is None else self._group.size
        rows = None if trainer.use_dynamic_bsz else trainer.micro_batch_size_per_gpu
        limit = Limit(self._activations.tokens * copies, policy.packed, rows, trainer.shared_prompts)
        if limit.share_prefixes:
            check_shared_prompts(policy.model, policy.packed, plan.lengths.model)
        padding = int(getattr(policy.model.config, "pad_token_id", None) or 0)
        return MicroBatchPlanner(limit, padding, self._ranks, copies, self.device, ImageReader.of(plan.config.model))

    def _load(self) -> PolicyModel:
        trainer = self._plan.config.trainer
        return load_policy(
            self._plan.config.model,
            self.dtype,
            trainer.logprob_chunk_tokens,
            packed=trainer.use_remove_padding,
            group=self._group,
            head_in_float32=trainer.lm_head_float32,
            fused=self._fused,
            replay=self._plan.config.algorithm.enable_router_replay,
            device=self.device,
        )

    def _freeze(self, model: TokenModel) -> None:
        if self._plan.config.trainer.freeze_vision_tower or not has_vision(model.model):
            freeze_all_but_text(model.model)

    def _load_reference(self) -> Callable[[MicroBatch], tuple[torch.Tensor, torch.Tensor]]:
        """Loads the base model, frozen and whole on every rank; with LoRA it is the policy without its adapters."""
        if self._plan.config.model.lora is not None:
            return self._without_adapters
        model = self._load().eval().requires_grad_(False)
        offloaded = self._plan.config.trainer.deepspeed.offload_reference
        return OffloadedReference(model, self.device) if offloaded else model.to(self.device)

    def _without_adapters(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        with self.policy.base():
            logprobs, entropy = self._model(micro)
        return logprobs, entropy

    def _load_critic(self) -> Learner:
        trainer = self._plan.config.trainer
        model = load_critic(
            self._plan.config.model,
            self.dtype,
            packed=self._model.module.packed,
            group=self._group,
            fused=self._fused,
        )
        self._freeze(model)
        recompute_activations(model.model, self._activations.recompute, self._activations.layers)
        disable_dropout(model, "critic")
        learns = DeepSpeedModel(
            model,
            trainer.critic.optimizer,
            trainer,
            self.dtype,
            self.device,
            trainer.critic.grad_clip,
            self._together,
        )
        return Learner(learns, self._no_grad, "critic")

    @property
    def policy(self) -> PolicyModel:
        module: PolicyModel = self._model.module
        return module

    @property
    def micro_batch_tokens(self) -> int:
        """Token limit of a micro-batch on each GPU."""
        return self._planner.tokens_per_gpu

    @property
    def zero_stage(self) -> int:
        return self._model.zero_stage

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.policy.model.config.get_text_config().vocab_size)

    @property
    def trains_in_float32(self) -> bool:
        return self.dtype is torch.float32

    def token_record(self) -> TokenRecord:
        """Returns an empty record for `train`."""
        return TokenRecord(self._ranks, self._planner.copies, self.device)

    def train(self, batch: TrainBatch, last_step: int, record: TokenRecord | None = None) -> dict[str, float]:
        """Calls `train_batch` and returns its metrics."""
        return self.train_batch(batch, last_step, record)[1]

    def train_batch(
        self, batch: TrainBatch, last_step: int, record: TokenRecord | None = None
    ) -> tuple[TrainBatch, dict[str, float]]:
        """Makes all updates of one step. Every rank must pass the same batch.

        Returns the batch as it was trained, with the advantages and masks that need a pass of the models, and metrics;
        the metric `updates` counts the policy's. `record` receives the token values of the updates.
        Raises BadStep if the batch cannot be trained; the failed update has changed no weight.
        """
        plan, critic = self._plan.algorithm, self._plan.config.trainer.critic
        rate = learning_rate(self._plan.config.algorithm.optimizer, batch.step, last_step)
        critic_rate = learning_rate(critic.optimizer, batch.step, last_step)
        if self.policy.replay is not None:
            self.policy.replay.check(batch)
        batch, metrics = self._preparer.for_step(batch, self._kl.reward)
        reports: list[Report] = []
        try:
            for part in self._preparer.mini_batches(batch):
                if self._critic is not None:
                    reports.append(self._critic.update(rolled_out(part), critic_rate, self._critic_loss(part)))
                if self._critic is None or batch.step > critic.warmup_steps:
                    part = self._preparer.for_update(part)
                    reports.append(self._learner.update(part, rate, self._policy_loss(part, record)))
        except BadStep as error:
            error.updates = len([report for report in reports if report])
            error.among = sorted({sequence.group for sequence in part.sequences})
            raise
        updates = float(sum("lr" in report for report in reports))  # the critic's rate is critic/lr
        metrics = {**means(join(reports)), **metrics, "updates": updates}
        kl = metrics.get("kl_loss"), metrics.get("reward_kl")
        self._kl = self._kl.after(plan, *kl, len(batch.sequences))
        return batch, metrics

    @torch.no_grad()
    def per_group_stats(self, batch: TrainBatch) -> list[dict[str, Any]]:
        """Computes statistics of each group of an untrained batch under the current weights.

        One entry for each group, in the order of the batch: numbers of sequences and tokens, mean reward and advantage,
        its share of the batch's loss, mean and maximum ratio to the behaviour policy; `finite`: whether all of these
        are. A collective; changes nothing.
        """
        batch = self._preparer.for_update(self._preparer.for_step(batch, self._kl.reward)[0])
        loss_of = self._policy_loss(batch)
        groups: dict[int, list[TrainSequence]] = {}
        for sequence in batch.sequences:
            groups.setdefault(sequence.group, []).append(sequence)
        return [{"group": number, **self._group_stats(members, loss_of)} for number, members in groups.items()]

    def _group_stats(self, members: Sequence[TrainSequence], loss_of: LossOf) -> dict[str, Any]:
        reports: list[Report] = []
        for indices, micro in self._planner.micro_batches(members):
            share, _ = loss_of([members[index] for index in indices], micro)
            reports.append({"loss": torch.stack([share.float(), torch.ones_like(share, dtype=torch.float32)])})
        loss = float(self._no_grad.total(join(reports))["loss"][0]) / self._planner.copies
        policy = self._no_grad.tokens(members, lambda micro: self._model(micro)[0])
        distances = [(p - s.old_logprobs)[s.mask] for p, s in zip(policy, members, strict=True)]
        ratios = np.exp(np.clip(np.concatenate(distances).astype(np.float64), -LIMIT, LIMIT))
        advantages = np.concatenate([s.advantages[s.mask] for s in members])
        values = {
            "reward": float(np.mean([s.reward for s in members])),
            "advantage": float(advantages.mean()) if len(advantages) else 0.0,
            "loss": loss,
            "ratio": float(ratios.mean()) if len(ratios) else 1.0,
            "ratio_max": float(ratios.max()) if len(ratios) else 1.0,
        }
        finite = all(np.isfinite(value) for value in values.values())
        return {"sequences": len(members), "tokens": len(ratios), "finite": finite, **values}

    def _policy_loss(self, batch: TrainBatch, record: TokenRecord | None = None) -> LossOf:
        plan, totals = self._plan.algorithm, batch.totals

        def loss_of(sequences: Sequence[TrainSequence], micro: MicroBatch) -> tuple[torch.Tensor, Report]:
            reference = self._preparer.reference_of(micro)  # before the policy: with LoRA both run the same module
            nothing = contextlib.nullcontext(list[torch.Tensor]())
            with nothing if self._routers is None else self._routers.recording() as logits:
                logprobs, entropy, *top = self._model(micro, micro.top_ids is not None)
            inputs = LossInputs(
                logprobs=logprobs,
                entropy=entropy if wants_entropy_gradient(plan) else entropy.detach(),
                mask=micro.mask,
                old_logprobs=micro.old_logprobs,
                advantages=micro.advantages,
                reference_logprobs=reference,
                proximal_logprobs=micro.proximal_logprobs,
                on_policy_mask=micro.on_policy_mask,
                keep_mask=micro.keep_mask,
                expert_B=micro.expert,
                pairs_B=micro.pairs,
                peers_B=micro.peers,
                top_logprobs=top[0] if top else None,
                teacher_top=micro.teacher_top,
                step=batch.step,
            )
            loss, report = compute_loss(
                plan, inputs, totals, self._kl.loss, None if record is None else partial(record.add, sequences)
            )
            if self._routers is not None:  # a micro-batch counts by its trained tokens
                tokens, balance = micro.mask.sum(), self._routers.balance_loss(logits, micro)
                weight = self._plan.config.algorithm.router_aux_loss_coef * tokens / max(totals.tokens, 1)
                loss = loss + weight * balance
                report["router_aux_loss"] = torch.stack([balance.detach() * tokens, tokens]).float()
            if self.policy.replay is not None:
                report["router_replayed"] = replayed_share(micro)
            return loss, report

        return loss_of

    def _critic_loss(self, batch: TrainBatch) -> LossOf:
        """Returns the critic's loss of rolled-out sequences; expert rows have no reward."""
        assert self._critic is not None
        model, cliprange = self._critic.model, self._plan.config.trainer.critic.cliprange_value
        totals = rolled_out(batch).totals

        def loss_of(sequences: Sequence[TrainSequence], micro: MicroBatch) -> tuple[torch.Tensor, Report]:
            old, returns = (in_rows([getattr(s, name) for s in sequences], micro) for name in ("values", "returns"))
            return value_loss(model(micro), old, returns, micro.mask, totals, cliprange)

        return loss_of

    @property
    def image_rules(self) -> ImageRules | None:
        """Rules by which the policy reads images; None for a text model."""
        return self._planner.image_rules

    @torch.no_grad()
    def probe_logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        images: Sequence[tuple[PlacedImage, ...]] = (),
        both_heads: bool = False,
    ) -> tuple[list[list[float]], list[list[float]]]:
        """Computes log-probabilities of each sequence's tokens but the first, at temperature 1.

        images: images of the first sequences; the others have none. The second result equals the first unless
        both_heads is set: then it comes from the same pass with the output projection in bfloat16 if it usually
        computes in float32, and vice versa. A collective under ZeRO-3; changes nothing.
        """
        self._model.engine.eval()
        probes = [after_first_token(*pair) for pair in zip_longest(sequences, images, fillvalue=())]
        with self.policy.both_heads() if both_heads else contextlib.nullcontext():
            usual, others = self._model(self._planner.one(probes))
        usual, others = (
            [row[: len(tokens) - 1] for row, tokens in zip(found.tolist(), sequences, strict=True)]
            for found in (usual, others if both_heads else usual)
        )
        return usual, others

    @property
    def lora(self) -> Lora | None:
        """Description of the adapters that `weights` yields; None if it yields the whole model."""
        return self.policy.lora

    def reserve(self) -> list[Callable[[], None]]:
        """Returns functions that allocate the memory of `snapshot`, for another thread. A collective."""
        models = [self._model] if self._critic is None else [self._model, self._critic.model]
        return [model.reserve() for model in models]

    def snapshot(self, folder: Path, state: dict[str, Any]) -> Write:
        """Copies this rank's share of all trained models to host memory; a critic's for the sibling folder `critic`.

        Returns a function that writes the copy, while training continues, and returns the paths.
        """
        writes = [self._model.snapshot(folder, {**state, "kl_coefficients": asdict(self._kl)})]
        if self._critic is not None:
            writes.append(self._critic.model.snapshot(folder.with_name("critic"), {}))
        return lambda: [path for write in writes for path in write()]

    def load(self, folder: Path) -> dict[str, Any]:
        """Loads what `snapshot` wrote; returns its state. Raises InvalidInput for a checkpoint without the critic."""
        if self._critic is not None:
            critic = folder.with_name("critic")
            if not critic.is_dir():
                what = f"needs a critic, and the checkpoint {folder.parent} has none; keep the algorithm of that run"
                raise InvalidInput("algorithm.algorithm_type", f"{what}, or begin another from model.model_path")
            self._critic.model.load(critic)
        state = self._model.load(folder)
        if "kl_coefficients" in state:  # absent in checkpoints of former versions
            self._kl = KlCoefficients(**state["kl_coefficients"])
        return state

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
