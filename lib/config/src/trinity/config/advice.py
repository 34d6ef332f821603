"""Advice on a valid configuration: keys with less effect than their name suggests, and memory."""

from collections.abc import Iterator
from pathlib import Path

from trinity.config.algorithms import for_quantized, resolvable, resolve
from trinity.config.checks.over_rollout import over_rollout_advice
from trinity.config.checks.players import players_advice, seats_of
from trinity.config.checks.weights import weights_advice
from trinity.config.memory import Sharding, host_gib, parameters_of, training_gib, weights_gib
from trinity.config.names import auxiliary_name
from trinity.config.plan import DEFAULT_TOKENS, Plan, expand, learns_from_disk
from trinity.config.schema import Config
from trinity.config.schema.algorithm import RolloutCorrectionConfig
from trinity.config.schema.buffer import DEFAULT_REWARD_FUNCTION, DEFAULT_WORKFLOW, TasksetConfig
from trinity.config.workflows import WORKFLOWS, asked_model, ignored_args, scores_by_name
from trinity.plugins.declarations import ADVANTAGES, ALGORITHMS

# Advantages relative to the other rollouts of a group.
_COMPARING = {
    "grpo", "step_wise_grpo", "gigpo", "grpo_reweight_adv", "rloo", "opmd", "opmd_reweight_adv", "rec", "asymre",
}  # fmt: skip
_MOST_FEWER = 8  # numbers of fewer machines whose memory is told


def advice(config: Config) -> Iterator[str]:
    """Yields sentences of the form `key: remark`, each once."""
    seen: set[str] = set()
    for stage in expand(config):
        for sentence in _advice(stage):
            if sentence not in seen:
                seen.add(sentence)
                yield sentence


def _advice(config: Config) -> Iterator[str]:
    model = config.model
    algorithm = ALGORITHMS.get(config.algorithm.algorithm_type)
    if algorithm is None:
        return
    if "algorithm_type" not in config.algorithm.model_fields_set and config.mode != "explore":
        yield "algorithm.algorithm_type: is not given; grpo is taken (Trinity-RFT takes ppo)"
    if (others := config.cluster.nodes - 1) and config.mode in ("both", "train"):
        joins = f"{others} other machine(s) join by mode=train_node"
        yield f"cluster.node_num: training begins once {joins} (docs/modes.md)"
    lengths = (model.max_model_len, model.max_prompt_tokens, model.max_response_tokens)
    if lengths == (None, None, None) and config.mode != "explore":
        yield f"model.max_model_len: no length is given; taken are {DEFAULT_TOKENS} prompt and as many response tokens"
    if not learns_from_disk(config):
        yield from weights_advice(config)
    elif config.buffer.explorer_input.eval_tasksets:
        what = "has no effect: there are no explorers; mode bench evaluates the checkpoints (docs/modes.md)"
        yield f"buffer.explorer_input.eval_tasksets: {what}"
    explorer = config.explorer
    if (
        not algorithm.offline
        and not config.buffer.explorer_input.eval_tasksets
        and "eval_interval" in explorer.model_fields_set
    ):
        yield "explorer.eval_interval: has no effect: there are no eval_tasksets"
    if config.mode == "explore" and config.buffer.explorer_input != type(config.buffer.explorer_input)():
        yield "buffer.explorer_input: has no effect in mode explore: tasks are those of the run that is joined"
    yield from algorithm_advice(config)
    if not learns_from_disk(config) and config.mode in ("both", "train", "bench"):
        yield from _tasks_advice(config)
    if not learns_from_disk(config) and config.mode in ("both", "train"):
        yield from _evaluated_rows_advice(config)
    if not learns_from_disk(config) and resolvable(config.algorithm):
        yield from over_rollout_advice(config)
        yield from players_advice(config)


def _tasks_advice(config: Config) -> Iterator[str]:
    """Workflows and reward functions taken by default, arguments that nothing reads, models that nothing asks."""
    source, others = config.buffer.explorer_input, False
    asked = {who for _, seats in seats_of(config) for who in seats.values() if isinstance(who, str)}
    for key, taskset in config.buffer.explorer_input.by_key():
        place = f"buffer.explorer_input.{key}"
        given = source.workflow_of(taskset, key.startswith("eval"), default="")
        workflow = given or DEFAULT_WORKFLOW
        if not given and not taskset.format.workflow_key:
            yield f"{place}.default_workflow_type: is not given; {workflow} is taken"
        reward = source.reward_of(taskset, default=taskset.format.reward_fn_key)
        model = asked_model(workflow, taskset.workflow_args)
        if not reward and scores_by_name(workflow) and model is None:
            yield f"{place}.default_reward_fn_type: is not given; {DEFAULT_REWARD_FUNCTION} is taken"
        if "repeat_times" in taskset.model_fields_set and not key.startswith("eval"):
            yield f"{place}.repeat_times: has no effect: algorithm.repeat_times says it for tasks of training"
        longest, asked_for = config.model.max_response_tokens, taskset.rollout_args.max_tokens
        if longest is not None and asked_for is not None and asked_for > longest:
            yield f"{place}.rollout_args.max_tokens: is {asked_for}; model.max_response_tokens = {longest} is the limit"
        own = taskset.rollout_args.temperature
        greedy = (config.model.temperature if own is None else own) == 0 and config.mode in ("both", "train")
        if greedy and config.algorithm.repeat_times > 1 and not key.startswith("eval"):
            where = "model" if own is None else f"{place}.rollout_args"
            yield f"{where}.temperature: is 0; the rollouts of a group are equal, and teach nothing"
        for name in ignored_args(workflow, taskset.workflow_args):
            yield f"{place}.workflow_args.{name}: has no effect: {workflow} does not read it"
        asked |= {model} if model is not None else set()
        others = others or workflow not in WORKFLOWS or bool(taskset.format.workflow_key)
    for index, auxiliary in enumerate(config.explorer.auxiliary_models):
        name, gpus = auxiliary_name(auxiliary), auxiliary.gpus
        if gpus and not others and not asked & {"", name}:
            yield f"explorer.auxiliary_models.{index}: no workflow asks {name}, and it takes {gpus} GPU(s); remove it"


def _evaluated_rows_advice(config: Config) -> Iterator[str]:
    """Rows that are trained and evaluated."""
    source = config.buffer.explorer_input
    trained = {_rows_of(taskset): key for key, taskset in source.by_key() if not key.startswith("eval")}
    for index, taskset in enumerate(source.eval_tasksets):
        if key := trained.get(_rows_of(taskset)):
            what = f"has the rows of {key}, which are trained; its scores say nothing on new tasks"
            yield f"buffer.explorer_input.eval_tasksets.{index}.path: {what}"


def _rows_of(taskset: TasksetConfig) -> tuple[str | None, ...]:
    """Returns a key that is equal for tasksets of the same rows. A single file has no splits."""
    file = Path(taskset.path).expanduser()
    return (str(file.resolve()),) if file.is_file() else (taskset.path, taskset.split, taskset.subset_name)


def memory(plan: Plan) -> str | None:
    """Memory of weights and training states, as text; None where the size of the model is not known."""
    known = parameters_of(plan.config.model.model_path)
    if known is None:
        return None
    count, source = known
    sharding = Sharding.of(plan, _ranks(plan))
    trainer, host = training_gib(plan, count, sharding), host_gib(plan, count, sharding)
    beside = f" and {host:.1f} GiB of host memory" if host else ""
    engine = weights_gib(count, plan.config.explorer.rollout_model)
    least = "" if plan.config.trainer.max_token_len_per_gpu else "at least "
    rollout = "" if plan.offline else f"; weights of an engine {engine:.1f} GiB a GPU, plus the key-value cache"
    return (
        f"{count / 1e9:.2f} billion parameters {source}: training states {trainer:.1f} GiB a rank{beside}, "
        f"activations of {least}{plan.micro_batch_tokens} tokens in addition{rollout}"
    )


def memory_by_machines(plan: Plan) -> list[str]:
    """The rows of a table: training states of a rank by the number of machines that train; none for one machine."""
    known, cluster = parameters_of(plan.config.model.model_path), plan.config.cluster
    if known is None or cluster.nodes < 2:
        return []
    rows = [f"{'machines':>8}  {'ranks':>5}  {'GiB a rank':>10}"]
    for number in range(max(cluster.fewest_nodes, cluster.nodes - _MOST_FEWER), cluster.nodes + 1):
        ranks = max(1, _ranks(plan) * number // cluster.nodes)
        size = training_gib(plan, known[0], Sharding.of(plan, ranks))
        rows.append(f"{number:>8}  {ranks:>5}  {size:>10.1f}")
    return rows


def _ranks(plan: Plan) -> int:
    return plan.gpus.trainer or (plan.config.trainer.num_ranks or 1) * plan.config.cluster.nodes


def algorithm_advice(config: Config) -> Iterator[str]:
    """Yields sentences of the form `key: remark`. The config need not have been checked."""
    if not resolvable(config.algorithm) or config.mode not in ("both", "train"):
        return
    plan, warmup = resolve(config.algorithm), config.algorithm.optimizer.lr_warmup_steps
    compares = ADVANTAGES[plan.advantage.name] if plan.advantage is not None else None
    if config.algorithm.repeat_times == 1 and compares and (compares.alias_of or compares.name) in _COMPARING:
        yield "algorithm.repeat_times: is 1; the advantage in a group of one is its reward, without a baseline"
    steps = config.buffer.total_steps or config.trainer.total_steps
    if steps is not None and warmup > steps:
        yield f"algorithm.optimizer.lr_warmup_steps: is {warmup}; in a run of {steps} steps the rate never reaches lr"
    if plan.of_pairs and config.algorithm.loss_agg_mode is not None:
        yield "algorithm.loss_agg_mode: only affects the KL and entropy terms; dpo is a mean over pairs"
    if plan.teacher_top:
        k = plan.teacher_top
        yield f"algorithm.policy_loss_fn_args.top_k: is {k}, which takes {8 * k} bytes of the log a response token"
    correction, name = plan.correction, plan.policy_loss.name
    if config.explorer.rollout_model.quantized and correction == RolloutCorrectionConfig():
        correction = for_quantized(plan)
        yield (
            f"algorithm.rollout_correction: engines quantize, so token_cap is {correction.token_cap}"
            if correction.token_cap
            else f"algorithm.rollout_correction: engines quantize, and {name} takes no token_cap against it"
        )
    weighed = correction.token_cap is not None or correction.sequence_cap is not None or correction.decoupled is False
    if "ratio" in plan.loss_traits and not weighed and _asynchronous(config) and _several_updates(config):
        yield (
            f"algorithm.rollout_correction.token_cap: is null; with several updates of a batch {name} compares with "
            "the weights as the step began, and nothing weighs tokens that older weights sampled: "
            "{decoupled: true, token_cap: 2} would (arXiv:2110.00641, equation 5)"
        )


def _asynchronous(config: Config) -> bool:
    """Tells if experience may be older than the weights that a step begins with."""
    sync = config.synchronizer
    ahead = sync.sync_offset > 0 or sync.sync_interval > 1 or sync.sync_style != "fixed"
    return ahead or learns_from_disk(config)


def _several_updates(config: Config) -> bool:
    """Tells if a batch makes several updates of the weights, counting one experience per rollout."""
    trainer, buffer = config.trainer, config.buffer
    size = buffer.train_batch_size or buffer.batch_size * config.algorithm.repeat_times
    return trainer.epochs_per_batch > 1 or (trainer.mini_batch_size or size) < size
