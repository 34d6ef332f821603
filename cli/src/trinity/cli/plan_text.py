"""A plan in words."""

from trinity.config import Plan

_FROM_RUN = "that of the run it joins"


def describe(plan: Plan) -> str:
    """What a stage would do on the cluster its YAML names."""
    config, lengths, staleness = plan.config, plan.lengths, plan.staleness
    rollout = config.explorer.rollout_model
    rows: list[tuple[str, str]] = [
        ("mode", config.mode),
        ("algorithm", f"{plan.algorithm.algorithm_type} ({plan.algorithm.loss_aggregation})"),
        ("model", config.model.model_path or _FROM_RUN),
        (
            "lengths",
            f"{lengths.prompt} prompt + {lengths.response} response <= {lengths.model} tokens"
            if lengths.model
            else _FROM_RUN,
        ),
        ("steps", str(plan.total_steps) if plan.total_steps else f"{config.buffer.total_epochs} epoch(s) of the data"),
    ]
    if plan.algorithm.offline:
        rows.append(("batch", f"{plan.groups_per_step} rows per optimizer step"))
    else:
        repeat, size = config.algorithm.repeat_times, plan.groups_per_step
        rows += [
            ("batch", f"{size} tasks x {repeat} rollouts = {size * repeat} experiences per optimizer step"),
            ("staleness", f"at most {staleness.bound} steps: {(staleness.bound + 1) * size} tasks outstanding at most"),
            ("weights", f"every {staleness.interval} step(s)"),
            ("explorer", f"{rollout.engine_num} engine(s) x {rollout.tensor_parallel_size} GPU(s)"),
        ]
    rows += [("trainer", _trainer(plan)), ("job folder", str(plan.job_dir))]
    width = max(len(name) for name, _ in rows)
    return "\n".join([f"{config.project}/{config.name}"] + [f"  {name:<{width}}  {value}" for name, value in rows])


def _trainer(plan: Plan) -> str:
    config, rollout = plan.config, plan.config.explorer.rollout_model
    total = config.cluster.node_num * config.cluster.gpu_per_node
    stage = f"ZeRO {config.trainer.deepspeed.zero_stage}"
    if not total:
        return f"{config.trainer.num_ranks or 'one'} rank(s) on what this machine has, {stage}"
    used = 0 if config.mode == "train" else rollout.engine_num * rollout.tensor_parallel_size
    return f"{config.trainer.num_ranks or total - used} GPU(s), {stage}; on a machine without GPUs, the CPU"
