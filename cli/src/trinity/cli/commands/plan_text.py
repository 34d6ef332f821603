"""A plan as text."""

from trinity.config import Plan
from trinity.config.advice import memory, memory_by_machines
from trinity.config.checks import weights
from trinity.config.names import auxiliary_name
from trinity.reading.render import visible
from trinity.runtime.logs import without_credentials

_FROM_RUN = "that of the run it joins"
_STYLES = {
    "fixed": "sync_offset batches ahead",
    "explorer_driven": "one sync_interval ahead, plus sync_offset",
    "trainer_driven": "one sync_interval ahead, plus sync_offset",
    "fully_async": "as far ahead as the buffer's capacity",
}


def describe(plan: Plan) -> str:
    """Returns the plan of a stage on the cluster that its YAML names."""
    config, lengths = plan.config, plan.lengths
    rows: list[tuple[str, str]] = [
        ("mode", config.mode),
        ("model", config.model.model_path or _FROM_RUN),
        (
            "lengths",
            f"{lengths.prompt} prompt + {lengths.response} response <= {lengths.model} tokens"
            if lengths.model
            else _FROM_RUN,
        ),
    ]
    if config.mode in ("both", "train"):
        rows += _training(plan)
    if config.mode == "bench":
        which = "the newest checkpoint" if config.explorer.bench_on_latest_checkpoint else "every checkpoint"
        base = " and the base model" if config.explorer.eval_on_startup else ""
        rows.append(("evaluation", f"{', '.join(t.name for t in plan.eval_tasksets)}: {which}{base}"))
    if config.mode == "serve":
        rows.append(("endpoint", f"http://{config.explorer.listen_address}:{config.explorer.proxy_port}/v1"))
    rows += _processes(plan)
    rows.append(("job folder", str(plan.job_dir)))
    advice = memory(plan) if config.mode in ("both", "train") else None
    if advice:
        rows += [("memory", advice), *(("", row) for row in memory_by_machines(plan))]
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        [f"{config.project}/{config.name}"]
        + [f"  {name:<{width}}  {visible(without_credentials(value))}" for name, value in rows]
    )


def _over_rollout(plan: Plan) -> str:
    if plan.fewest_groups == plan.groups_per_step:
        return ""
    wait = plan.config.explorer.over_rollout.wait_after_min
    return f"; {wait:g} s after {plan.fewest_groups} groups are there the other tasks are cut"


def _training(plan: Plan) -> list[tuple[str, str]]:
    config, staleness = plan.config, plan.staleness
    steps = str(plan.total_steps) if plan.total_steps else f"{config.buffer.total_epochs} epoch(s) of the data"
    rows = [
        ("algorithm", f"{plan.algorithm.algorithm_type} ({plan.algorithm.loss_aggregation})"),
        ("steps", steps),
    ]
    if plan.offline:
        unit = "rows" if plan.algorithm.offline else "groups of the archive"
        return [*rows, *_adapters(plan), ("batch", f"{plan.groups_per_step} {unit} per optimizer step")]
    repeat, size, bound = config.algorithm.repeat_times, plan.groups_per_step, staleness.bound
    style = config.synchronizer.sync_style
    evaluated = ", ".join(taskset.name for taskset in plan.eval_tasksets)
    rows += _adapters(plan)
    rows += [
        ("batch", f"{size} tasks x {repeat} rollouts = {plan.experiences_per_step} experiences per optimizer step"
                  f"{_over_rollout(plan)}"),
        ("staleness", f"at most {bound} step(s), {plan.outstanding_groups} groups outstanding ({style}: "
                      f"{_STYLES[style]})"),
        ("weights", weights.transports(config)),
        ("stores", weights.stores(config)),
        ("canary", weights.canary(config)),
        ("sampling", _sampling(plan)),
        ("operators", ", ".join(o.name for o in config.data_processor.experience_pipeline.operators) or "none"),
        ("tasksets", ", ".join(taskset.name for taskset in plan.tasksets) or "rewarded calls at the endpoint"),
        ("evaluation", f"{evaluated} every {config.explorer.eval_interval} steps" if evaluated else "none"),
    ]  # fmt: skip
    return rows


def _adapters(plan: Plan) -> list[tuple[str, str]]:
    lora = plan.config.model.lora
    if lora is None:
        return []
    if lora.path:
        return [("adapters", f"LoRA, beginning with {lora.path}: rank, alpha and layers are those there")]
    layers = lora.targets if isinstance(lora.targets, str) else ", ".join(lora.targets)
    return [("adapters", f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, on {layers}")]


def _sampling(plan: Plan) -> str:
    """Describes how groups become batches."""
    source, strategy = plan.experience_buffer, plan.algorithm.sample_strategy
    if plan.policy == "replay":
        rest = source.replay_buffer.reuse_cooldown_time
        again = "each once" if rest is None else f"again after {rest:g} s"
        return f"by priority ({source.replay_buffer.priority_fn}), {again}"
    if plan.policy == "arrival":
        limit = strategy.args.get("staleness_limit")
        old = "" if limit is None else f"; those older than {limit:g} step(s) are dropped and made up for"
        own = (
            "" if strategy.name == "staleness_control" else f"; what {strategy.name} refuses is dropped and made up for"
        )
        return f"in the order they are stored{old}{own}"
    experts = f", beside {plan.experts_per_step} expert rows" if plan.experts_per_step else ""
    return f"in the order of tasks; a batch waits for its slowest, {source.max_read_timeout:g} s at most{experts}"


def _processes(plan: Plan) -> list[tuple[str, str]]:
    """Describes processes and their GPUs."""
    config, gpus = plan.config, plan.gpus
    rollout = config.explorer.rollout_model
    on_gpus = bool(gpus.total)
    rows: list[tuple[str, str]] = []
    if on_gpus:
        cluster = f"{max(1, config.cluster.node_num)} node(s) x {config.cluster.gpu_per_node} GPU(s)"
        rows.append(("cluster", f"{cluster}; without GPUs one engine and one rank share the CPU"))
    else:
        rows.append(("cluster", "what this machine has: its GPUs (engine and trainer share one), or else its CPU"))
    if config.mode in ("both", "train"):
        names = "nats, buffer" if plan.offline else "nats, buffer, environment, sync"
        rows.append(("services", f"{names}: one process each, no GPU"))
    if config.mode != "train" and not plan.offline:
        size = f"{rollout.engine_num} engine(s) x {rollout.tensor_parallel_size} GPU(s)"
        rows.append(("explorer", f"{size} = {gpus.explorer} GPU(s)" if on_gpus else size))
        for model in config.explorer.auxiliary_models:
            size = f"{model.engine_num} engine(s) x {model.tensor_parallel_size} GPU(s)"
            size = f"served at {model.external_model.base_url}" if model.external_model else size
            size += f", follows {model.follows}" if model.follows else ""
            rows.append(("auxiliary", f"{auxiliary_name(model)}: {size}"))
    if config.mode in ("both", "train"):
        zero = f"ZeRO {config.trainer.deepspeed.zero_stage}"
        shared = " of the engines" if gpus.shared else ""
        ranks = f"{gpus.trainer} GPU(s){shared}" if on_gpus else f"{config.trainer.num_ranks or 'one'} rank(s) a GPU"
        rows.append(("trainer", f"{ranks}, {zero}"))
        keep = config.trainer.max_checkpoints_to_keep
        every = f"every {config.trainer.save_interval} steps and " if config.trainer.save_interval else ""
        rows.append(("checkpoints", f"{every}at the end, {f'the newest {keep}' if keep else 'all'} kept"))
    return rows
