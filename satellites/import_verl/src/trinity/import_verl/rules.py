"""Keys of the YAML whose value depends on more than one option of veRL."""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

from trinity.compat_rft.translate import known_names, translate
from trinity.import_verl.losses import aggregation, arguments, correction, loss
from trinity.import_verl.run import Run
from trinity.import_verl.tables import (
    ACTOR,
    KL_IN_LOSS,
    KL_IN_REWARD,
    LOGGERS,
    MODEL,
    NAME,
    NOT_NEEDED,
    PASSED,
    PASSED_WITHOUT_EFFECT,
    PROJECT,
    ROLLOUT,
    reason,
)
from trinity.import_verl.values import Leaf, Node, is_true, loaded, node_of, text_leaf, texts_of

NEVER = 1_000_000_000  # steps
_PARALLEL = f"{ROLLOUT}.tensor_model_parallel_size"
_STEPS = {
    "trainer.total_training_steps": "buffer.total_steps",
    "trainer.save_freq": "trainer.save_interval",
    "trainer.test_freq": "explorer.eval_interval",
    f"{ACTOR}.optim.lr_warmup_steps": "algorithm.optimizer.lr_warmup_steps",
}
_TRAIN, _MINI, _N = "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.n"


def _checkpoint_root(run: Run) -> Node:
    """veRL's folder is the run's own; ours is the root, below which come project and name."""
    folder = run.take("trainer.default_local_dir")
    if folder is None:
        return Leaf("./checkpoints")
    own = f"/{run.take('trainer.project_name') or PROJECT}/{run.take('trainer.experiment_name') or NAME}"
    root = folder.rstrip("/").removesuffix(own)
    return text_leaf(root, "trainer.default_local_dir; the job folder is <this>/<project>/<name>")


def _kl_penalty(run: Run) -> Node:
    if not is_true(run.take("algorithm.use_kl_in_reward") or "False"):
        for name in ("algorithm.kl_penalty", "algorithm.kl_ctrl."):
            run.not_needed[name] = "algorithm.use_kl_in_reward is off"
        return Leaf("none", "algorithm.use_kl_in_reward=False")
    return run.named("algorithm.kl_penalty", "kl", KL_IN_REWARD)


def _kl_penalty_args(run: Run) -> Node | None:
    if not is_true(run.take("algorithm.use_kl_in_reward") or "False"):
        return None
    args = run.picked("algorithm.kl_ctrl", {"kl_coef": "kl_coef", "target_kl": "target_kl", "horizon": "horizon"})
    kind = run.take("algorithm.kl_ctrl.type")
    if kind is not None:
        args["adaptive"] = Leaf(str(kind == "adaptive").lower(), f"algorithm.kl_ctrl.type={kind}")
    return args or None


def _kl_loss(run: Run) -> Node:
    if is_true(run.take(f"{ACTOR}.use_kl_loss") or "False"):
        return run.named(f"{ACTOR}.kl_loss_type", "low_var_kl", KL_IN_LOSS)
    for name in ("kl_loss_type", "kl_loss_coef"):
        run.not_needed[f"{ACTOR}.{name}"] = f"{ACTOR}.use_kl_loss is off"
    return Leaf("none", f"{ACTOR}.use_kl_loss=False")


def _kl_loss_args(run: Run) -> Node | None:
    used = is_true(run.take(f"{ACTOR}.use_kl_loss") or "False")
    return (run.picked(ACTOR, {"kl_loss_coef": "kl_coef"}) or None) if used else None


def _adapters(run: Run) -> Node | None:
    """veRL trains adapters if their rank is above 0."""
    if run.number(f"{MODEL}.lora_rank", 0, derived=False) == 0:
        for name in ("lora_alpha", "target_modules", "exclude_modules"):
            run.not_needed[f"{MODEL}.{name}"] = f"{MODEL}.lora_rank is 0"
        return None
    alpha = Leaf("16", f"{MODEL}.lora_alpha, veRL's default")
    given = run.picked(MODEL, {name: name for name in ("lora_rank", "lora_alpha", "target_modules", "exclude_modules")})
    return [{"lora_rank": given["lora_rank"], "lora_alpha": alpha, **given}]


def _train_batch(run: Run) -> Node | None:
    """Experiences per optimizer step: veRL counts the mini-batch in prompts, each with n responses."""
    mini, n = run.number(_MINI, 256), run.number(_N, 1)
    return None if mini is None or n is None else Leaf(str(mini * n), f"{_MINI} * {_N} = {mini} * {n}")


def _tasksets(run: Run) -> Node | None:
    """Makes a taskset per file. The first samples by `model`; each other one states its sampling."""
    found = run.tasksets("data.train_files", "")
    shuffle = run.take("data.shuffle")
    kind = "shuffle" if is_true(shuffle or "True") else "sequential"
    source = "data.shuffle, veRL's default" if shuffle is None else f"data.shuffle={shuffle}"
    order = {"selector_type": Leaf(kind, source), **run.picked("data", {"seed": "seed"})}
    temperature = run.take(f"{ROLLOUT}.temperature")
    for index, taskset in enumerate(found):
        if index:
            source = f"{ROLLOUT}.temperature" + ("" if temperature else ", veRL's default")
            taskset["rollout_args"] = {"temperature": node_of(temperature or "1.0", source)}
        taskset["data_selector"] = dict(order)
    return list(found) or None


def _eval_tasksets(run: Run) -> Node | None:
    found = run.tasksets("data.val_files", "_eval")
    values = f"{ROLLOUT}.val_kwargs"
    if not found:
        return None
    sampling = run.picked(values, {name: name for name in ("temperature", "top_p", "top_k")})
    run.take(f"{values}.do_sample")  # veRL's engines read the temperature, which is 0 with and without do_sample
    sampling.setdefault("temperature", Leaf("0", f"{values}.temperature, veRL's default"))
    for name, default in (("top_p", "1.0"), ("top_k", "-1")):
        if run.take(f"{ROLLOUT}.{name}") is not None:  # those of training would hold
            sampling.setdefault(name, Leaf(default, f"{values}.{name}, veRL's default"))
    repeat = run.picked(values, {"n": "repeat_times"})
    for taskset in found:
        taskset |= {**repeat, "rollout_args": dict(sampling)}
    return list(found)


def _own_reward(run: Run) -> Node | None:
    """A script's own reward function, which `trinity check` refuses until a plugin registers it."""
    name = run.own_reward()
    return None if name is None else text_leaf(name, "custom_reward_function; a plugin must register it")


def _eval_interval(run: Run) -> Node:
    every = run.number("trainer.test_freq", -1, derived=False)
    if every is None or every > 0:
        return node_of(run.take("trainer.test_freq") or "", "trainer.test_freq")
    return Leaf(str(NEVER), f"trainer.test_freq={every}: never")


def _save_interval(run: Run) -> Node | None:
    every = run.number("trainer.save_freq", -1, derived=False)
    if every is None or every > 0:
        return node_of(run.take("trainer.save_freq") or "", "trainer.save_freq")
    return Leaf("0", f"trainer.save_freq={every}: only the last step")


def _quarter(run: Run) -> tuple[int, int]:
    """All GPUs, and the quarter of them that the rollout engines get; a reward model gets a second quarter.

    veRL's workers take turns on the same GPUs, so no option says this. A quarter is what both examples of the guide
    give: 2 of 8 GPUs, in engines of 1 or of 2.
    """
    nodes, each = run.number("trainer.nnodes", 1), run.number("trainer.n_gpus_per_node", 8)
    note = "how many GPUs there are is not known here; engine_num is made for nodes of 8"
    if (nodes is None or each is None) and note not in run.notes:
        run.notes.append(note)
    gpus = (nodes or 1) * (each or 8)
    return gpus, gpus // 4


def _parallel_size(run: Run) -> Leaf:
    """veRL's default is 2. Where a quarter of the GPUs is one, an engine without a size in the script gets one."""
    given = run.take(_PARALLEL)
    if given is None:
        return Leaf("2" if _quarter(run)[1] >= 2 else "1", f"{_PARALLEL} is not given")
    return text_leaf(given, _PARALLEL) if run.number(_PARALLEL, 2) is None else Leaf(given.strip(), _PARALLEL)


def _engines(run: Run) -> Node:
    gpus, quarter = _quarter(run)
    parallel = run.number(_PARALLEL, int(_parallel_size(run).text) if run.take(_PARALLEL) is None else 1) or 1
    engines = max(1, quarter // parallel)
    used = engines * parallel * (2 if _has_reward_model(run) else 1)
    if used == gpus:
        run.notes.append(f"the engines take all GPUs ({gpus}), and the trainer shares them")
    elif used > gpus:
        run.notes.append(
            f"the engines take {used} of {gpus} GPUs; lower explorer.*.tensor_parallel_size, or give the cluster more"
        )
    return Leaf(str(engines), f"a quarter of {gpus} GPUs")


def _has_reward_model(run: Run) -> bool:
    return is_true(run.take("reward_model.enable") or "False")


def _auxiliary_models(run: Run) -> Node | None:
    if not _has_reward_model(run):
        run.not_needed["reward_model.model."] = "reward_model.enable is off"
        return None
    path = run.take("reward_model.model.path")
    if path is None:
        run.notes.append("reward_model.model.path is not given; set explorer.auxiliary_models yourself")
        return None
    gpus, quarter = _quarter(run)
    option = "reward_model.rollout.tensor_model_parallel_size"
    parallel = run.number(option, 1) or 1
    engines = Leaf(str(max(1, quarter // parallel)), f"a quarter of {gpus} GPUs")
    model = {"model_path": node_of(path, "reward_model.model.path"), "engine_num": engines}
    return [{**model, "tensor_parallel_size": Leaf(str(parallel), option if run.take(option) else "")}]


def _synchronizer(run: Run) -> Node:
    train, mini = run.number(_TRAIN, 1024), run.number(_MINI, 256)
    if not train or not mini:
        run.notes.append(f"{_TRAIN} / {_MINI} is not known here; set synchronizer.sync_interval yourself")
        interval = Leaf("1")
    else:
        if train % mini:
            run.notes.append(
                f"{_TRAIN} = {train} is no multiple of {_MINI} = {mini}; synchronizer.sync_interval is rounded"
            )
        for option, key in _STEPS.items():
            steps = run.number(option, 0, derived=False) or 0
            if steps > 0 and train // mini > 1:
                run.notes.append(
                    f"{option}={steps} counts batches of {train} prompts, {key} those of {mini}; "
                    f"{steps * (train // mini)} would mean as many"
                )
        interval = Leaf(str(max(1, train // mini)), f"{_TRAIN} / {_MINI} = {train} / {mini}")
    offset = Leaf("1", "explorers work one batch ahead; 0 is veRL's order, one after the other")
    return {"sync_style": Leaf("fixed"), "sync_offset": offset, "sync_interval": interval, "sync_timeout": Leaf("1200")}


def _trainer_config(run: Run) -> Node | None:
    """Options of actor, reference or critic that `trinity check` takes there."""
    if run.advantage != "ppo":
        run.not_needed["critic."] = "only algorithm.adv_estimator=gae has a critic"
    tree: dict[str, Node] = {}
    for option in sorted(run.left(), key=lambda name: not name.startswith("actor_rollout_ref.")):
        quiet = option.startswith(PASSED_WITHOUT_EFFECT)
        if reason(run.not_needed, option) or reason(NOT_NEEDED, option):
            continue
        if option.startswith(PASSED) or quiet:
            value = run.take(option) or ""
            node = node_of(value, option)
            if refusal := _refusal(option, loaded(node)):
                run.unmapped.append(f"{option}={value}: {refusal}")
                continue
            if not run.put(tree, option, node):
                run.unmapped.append(f"{option}={value}: another option is a part of it")
            if quiet:
                run.unneeded.append(f"{option}={value}: kept, but the trainer's rollout section has no effect")
    if run.advantage == "ppo":
        run.put(tree, "critic.optim.lr", Leaf("1e-5", "critic.optim.lr, veRL's default"))
    return tree or None


def _refusal(option: str, value: Any) -> str:
    """Why `trinity check` would refuse the option below trainer.trainer_config; empty if it would not."""
    path = f"trainer.trainer_config.{option}".split(".")
    document: dict[str, Any] = reduce(lambda inside, name: {name: inside}, reversed(path), value)
    for notice in translate(document).refused:
        *section, name = notice.path.split(".")
        if name not in known_names(section):
            return "no counterpart"
        return notice.message.partition("; remove it")[0].removeprefix(f"is {value!r}: ")
    return ""


def _monitor(run: Run) -> Node | None:
    named = [name for name in texts_of(run.take("trainer.logger") or "[console,wandb]") if name != "console"]
    known = [name for name in named if name in LOGGERS]
    for name in named:
        if name not in known[:1]:
            why = "one monitor at a time" if name in known else f"no counterpart; there are {', '.join(LOGGERS)}"
            run.unmapped.append(f"trainer.logger={name}: {why}")
    return text_leaf(known[0], "trainer.logger; the console is always on") if known else None


RULES: Mapping[str, Callable[[Run], Node | None]] = {
    "checkpoint_root_dir": _checkpoint_root,
    "algorithm.kl_penalty_fn": _kl_penalty,
    "algorithm.kl_penalty_fn_args": _kl_penalty_args,
    "algorithm.kl_loss_fn": _kl_loss,
    "algorithm.kl_loss_fn_args": _kl_loss_args,
    "algorithm.policy_loss_fn": loss,
    "algorithm.policy_loss_fn_args": arguments,
    "algorithm.loss_agg_mode": aggregation,
    "algorithm.rollout_correction": correction,
    "model.lora_configs": _adapters,
    "buffer.train_batch_size": _train_batch,
    "buffer.explorer_input.tasksets": _tasksets,
    "buffer.explorer_input.eval_tasksets": _eval_tasksets,
    "buffer.explorer_input.default_reward_fn_type": _own_reward,
    "explorer.eval_interval": _eval_interval,
    "explorer.rollout_model.engine_num": _engines,
    "explorer.rollout_model.tensor_parallel_size": _parallel_size,
    "explorer.auxiliary_models": _auxiliary_models,
    "synchronizer": _synchronizer,
    "trainer.save_interval": _save_interval,
    "trainer.trainer_config": _trainer_config,
    "monitor.monitor_type": _monitor,
}
