"""The errors with which a trainer of these settings would end before its first step, for `trinity check --deep`.

Each step is one of the start's own (build.py, engine/engine.py), on a model whose parameters have no values.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from trinity.config import Plan
from trinity.config.service import load_plan
from trinity.runtime.errors import InvalidInput
from trinity.trainer.build import weights_dir_of
from trinity.trainer.engine.checkpoint_store import CheckpointStore
from trinity.trainer.engine.critic import load_critic
from trinity.trainer.engine.deepspeed import deepspeed_config, dtype_of, import_deepspeed
from trinity.trainer.model.attention import check_sequence_parallel, check_shared_prompts
from trinity.trainer.model.policy import load_policy
from trinity.trainer.model.routers import routers_of
from trinity.trainer.model.sequence_parallel import check_ranks
from trinity.trainer.process import devices
from trinity.trainer.process.ranks import Ranks
from trinity.trainer.settings import TrainerSettings


def refused(settings: TrainerSettings) -> Iterator[InvalidInput]:
    """Yields errors of the device, the models, DeepSpeed, and the newest checkpoint of the job."""
    plan = load_plan(settings.config_file, settings.stage, settings.plugin_dirs, needs_algorithm=True)
    steps: list[Callable[[], object]] = [
        partial(_models, plan, settings),
        partial(_checkpoint, plan, settings),
    ]
    if not plan.offline:
        steps.append(partial(weights_dir_of, plan, settings))
    for step in steps:
        try:
            step()
        except InvalidInput as error:
            yield error


def _models(plan: Plan, settings: TrainerSettings) -> None:
    trainer, model = plan.config.trainer, plan.config.model
    device = torch.device(devices.choose(settings.device, Ranks(0, settings.num_ranks, 0)))
    dtype = dtype_of(trainer, device)
    size = trainer.ulysses_sequence_parallel_size
    check_ranks(settings.num_ranks, size)
    if model.lora is not None and model.lora.path:  # the adapters have values; the check before this one reads them
        model = model.model_copy(update={"lora_configs": None})
    packed, replay = trainer.use_remove_padding, plan.config.algorithm.enable_router_replay
    policy = load_policy(model, dtype, trainer.logprob_chunk_tokens, packed=packed, weights=False, replay=replay)
    if size > 1:
        check_sequence_parallel(policy.model, size)
    routers_of(policy.model, plan.config.algorithm.router_aux_loss_coef, shared=size > 1)
    if trainer.shared_prompts:
        check_shared_prompts(policy.model, policy.packed, plan.lengths.model)
    if plan.algorithm.critic:
        load_critic(model, dtype, packed=policy.packed, weights=False)
    import_deepspeed(device)
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(deepspeed_config(trainer, dtype, device, trainer.grad_clip))
    except (ValueError, AssertionError) as error:
        raise InvalidInput("trainer.deepspeed", f"DeepSpeed refuses it: {error}") from error


def _checkpoint(plan: Plan, settings: TrainerSettings) -> None:
    store = CheckpointStore(plan.job_dir)
    if plan.config.continue_from_checkpoint and (steps := store.steps()):
        store.check_shards(steps[-1], plan.config.trainer.deepspeed.zero_stage, settings.num_ranks)
