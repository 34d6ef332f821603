"""Conditions on this machine for a start: the model exists, and the data can be read."""

import contextlib
import importlib.util
import netrc
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

from trinity import plugins
from trinity.cli.supervise.checks.adapters import check_lora
from trinity.cli.supervise.checks.task_rows import check_each, check_tasks, check_text
from trinity.cli.supervise.processes.endpoint import endpoint_problems, is_taken
from trinity.cli.supervise.processes.services import container_problems
from trinity.config import Config, ConfigError, Plan, Problem, devices, expand, make_plan
from trinity.config.checks.weights import S3
from trinity.config.memory import quantization_of
from trinity.config.names import auxiliary_name, rates
from trinity.config.schema.buffer import ExperienceBufferConfig, TasksetConfig
from trinity.config.schema.explorer import AuxiliaryModelConfig
from trinity.data.datasets import DatasetError, Row, check_columns, features, read_buffer, read_taskset, reader
from trinity.data.vision import image_rules, why_no_images
from trinity.plugins import satellites
from trinity.runtime import files, hub
from trinity.runtime.devices import detect_gpus, host_memory, torch_build
from trinity.runtime.errors import InvalidInput
from trinity.runtime.monitor import why_not
from trinity.runtime.settings import split_address
from trinity.weights.adapters import why_no_base
from trinity.weights.checkpoints import check_weights

_ENDPOINT_SECONDS = 10.0
_LISTEN = "TRINITY_ENVIRONMENT_LISTEN"
_HUB_SECONDS = 10.0
_HUB_FILES = (
    ("config.json",),
    ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
)


@dataclass(frozen=True)
class Dataset:
    """One dataset and its key in the YAML. `makes_steps`: its rows count for the number of optimizer steps."""

    key: str
    config: TasksetConfig | ExperienceBufferConfig
    makes_steps: bool = False


def check_stages(config: Config, source: str) -> dict[str, tuple[int, list[str]]]:
    """Checks model and data of every stage. Returns each stage's optimizer steps and the report of its task pipeline.

    The model of a later stage is made by the stage before it, so only its data is checked. Raises ConfigError.
    """
    found = {}
    for stage in expand(config):
        with contextlib.ExitStack() as stack:
            processed, report = stage, list[str]()
            if stage.data_processor.task_pipeline is not None:
                pipeline = satellites.find("task_pipeline")
                preview = pipeline.previewed(stage, make_plan(stage).job_dir, source)
                processed, result = stack.enter_context(preview)
                report = [*pipeline.describe(result, with_paths=False)]
            plan = make_plan(processed.model_copy(update={"model": config.model}))
            found[stage.name] = (check_inputs(plan, source), report)
    return found


def check_inputs(plan: Plan, source: str, *, listens: bool = True) -> int:
    """Checks model and data of a stage, and the needs of its endpoint and containers on this machine.

    `listens`: whether an explorer that serves or records opens its endpoint. Returns the last optimizer step; raises
    ConfigError with all problems.
    """
    checks = (
        _check_engine, _check_model, _check_vision, _check_critic, _check_reward_models, check_lora, _check_optimizers,
        _check_monitor, _check_stores, _check_endpoints, _check_operators, _check_containers, _check_port,
    )  # fmt: skip
    problems = [problem for check in checks for problem in check(plan)]
    if listens and plan.config.mode in ("explore", "serve", *([] if plan.offline else ["both"])):
        problems += endpoint_problems(plan.config)
    rows = 0
    for dataset in datasets_of(plan):
        config = dataset.config
        assert config.path is not None
        try:
            found = read_buffer(config) if isinstance(config, ExperienceBufferConfig) else read_taskset(config)
            kind = plan.algorithm.rows if plan.algorithm.offline else "messages"  # those of experts
            if isinstance(config, TasksetConfig):
                problems += check_tasks(plan, dataset.key, config, found)
                problems += _not_repeatable(plan, dataset.key, config, found)
            else:
                problems += _check_rows(config, found, kind)
        except DatasetError as error:
            problems.append(error.at(dataset.key))
            continue
        rows += len(found) if dataset.makes_steps else 0
    if not problems and plan.config.mode in ("both", "train") and plan.steps_for(rows) < 1:
        need = plan.groups_per_step
        problems.append(Problem("buffer.batch_size", f"one step needs {need} rows, all epochs together have {rows}"))
    if problems:
        raise ConfigError(source, problems)
    return plan.steps_for(rows)


def machine_problems(plan: Plan) -> list[Problem]:
    """Returns the problems of a stage on this machine's GPUs, or on its CPU if it has none."""
    gpus = detect_gpus()
    return list(devices.problems(plan, gpus, torch_build(), host_memory()))


def _not_repeatable(plan: Plan, key: str, taskset: TasksetConfig, rows: Sequence[Row]) -> list[Problem]:
    if not plan.config.reproducible:
        return []
    from trinity.cli.supervise.checks.task_environments import check_repeatable  # its environments load sympy

    return list(check_repeatable(plan, key, taskset, rows))


def _check_rows(config: TasksetConfig | ExperienceBufferConfig, rows: Sequence[Row], kind: str) -> list[Problem]:
    """Raises DatasetError if some rows cannot be trained."""
    features(rows, config.data_selector.feature_keys)
    if "token_ids" in rows[0]:  # an archive of experience, which the buffer itself reads
        if satellites.find("archive") is None:
            raise DatasetError(f"has experience and not rows; archives need {satellites.missing('archive')}")
        return []
    check_columns(config.format, rows)
    example = reader(kind, config.format, rows[0])

    def check_row(row: Row, number: int) -> None:
        check_text(row, number)
        example(row, number)

    check_each(rows, check_row)
    return []


def _check_monitor(plan: Plan) -> list[Problem]:
    kind = plan.config.monitor.monitor_type
    if kind in ("none", "tensorboard"):
        return []
    if problem := why_not(kind):
        return [Problem("monitor.monitor_type", f"{problem}; or use tensorboard")]
    if kind != "wandb" or _has_wandb_key(plan.config.monitor.monitor_args or {}):
        return []
    what = "is 'wandb', which has no key; set WANDB_API_KEY, run 'wandb login', or set WANDB_MODE=offline"
    return [Problem("monitor.monitor_type", what)]


def _has_wandb_key(args: Mapping[str, object]) -> bool:
    """Tells if wandb needs no key, or has one in the arguments, the environment, or the netrc of `wandb login`."""
    if (
        os.environ.get("WANDB_MODE") in ("offline", "disabled")
        or args.get("api_key")
        or os.environ.get("WANDB_API_KEY")
    ):
        return True
    url = str(args.get("base_url") or os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai")
    places = [os.environ.get("NETRC") or "~/.netrc", "~/_netrc"]
    place = next((path for path in map(os.path.expanduser, places) if os.path.exists(path)), os.devnull)
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(place).authenticators(urlsplit(url).netloc) is not None
    return False


def _check_operators(plan: Plan) -> list[Problem]:
    where = "data_processor.experience_pipeline.operators"
    return [
        Problem(
            f"{where}.{index}.name", f"is {one.name!r}, which declares random=True; remove it or reproducible: true"
        )
        for index, one in enumerate(plan.config.data_processor.experience_pipeline.operators)
        if plan.config.reproducible and plugins.EXPERIENCE_OPERATORS.get(one.name) in plugins.RANDOM
    ]


def _check_containers(plan: Plan) -> list[Problem]:
    """Explorers that join or serve start no environments."""
    return container_problems(plan) if not plan.offline and plan.config.mode not in ("explore", "serve") else []


def _check_port(plan: Plan) -> list[Problem]:
    """The environment service of a run listens where its providers look for it."""
    listen = os.environ.get(_LISTEN, "")
    if not listen or plan.offline or plan.config.mode not in ("both", "bench"):
        return []
    host, port = split_address(listen, _LISTEN)
    what = f"another process listens on {listen}; choose another port"
    return [Problem(_LISTEN, what)] if is_taken(host, port) else []


def _check_engine(plan: Plan) -> list[Problem]:
    """vLLM comes with an extra: its builds for CPUs and for GPUs are different packages."""
    if plan.config.mode in ("train", "train_node") or importlib.util.find_spec("vllm") is not None:
        return []
    what = "needs vLLM, which is not installed: `pip install -e '.[cpu]'`, or '.[cuda]' on a machine with GPUs"
    return [Problem("mode", f"{plan.config.mode!r} {what}")]


def _check_optimizers(plan: Plan) -> list[Problem]:
    if plan.config.mode not in ("both", "train") or importlib.util.find_spec("bitsandbytes") is not None:
        return []
    sections = {"algorithm.optimizer": plan.config.algorithm.optimizer}
    if plan.algorithm.critic:
        sections["trainer.critic.optimizer"] = plan.config.trainer.critic.optimizer
    what = "is adamw_8bit, which needs bitsandbytes; `pip install -e '.[bitsandbytes]'`"
    return [
        Problem(f"{key}.optimizer_type", what)
        for key, optimizer in sections.items()
        if optimizer.optimizer_type == "adamw_8bit"
    ]


def _check_stores(plan: Plan) -> list[Problem]:
    """Checks the needs of a store on this machine."""
    stores = {
        "synchronizer.storage": [] if plan.offline else plan.config.synchronizer.storage,
        "trainer.checkpoint_storage": plan.config.trainer.checkpoint_storage,
    }
    if importlib.util.find_spec("obstore") is not None:
        return []
    needed = [key for key, storage in stores.items() if any(entry.startswith(S3) for entry in storage)]
    return [Problem(key, f"{S3} needs obstore; `pip install -e '.[s3]'`") for key in needed]


def _check_model(plan: Plan) -> list[Problem]:
    model, critic = plan.config.model, plan.config.model.critic_model_path
    models = [("model.model_path", model.model_path), *([("model.critic_model_path", critic)] if critic else [])]
    for index, further in enumerate(plan.config.explorer.auxiliary_models if not plan.offline else []):
        if further.external_model is None:
            models.append((f"explorer.auxiliary_models.{index}.model_path", further.model_path))
    problems = [problem for key, path in models for problem in check_model_folder(key, path)]
    if problems or plan.config.mode == "explore":
        return problems
    method = quantization_of(model.model_path) if plan.config.mode in ("both", "train") else ""
    if method and (method != "mxfp4" or not plan.offline):
        what = f"{model.model_path!r} is quantized ({method}), which engines and trainer do not share"
        return [Problem("model.model_path", f"{what}; begin with bfloat16 weights (docs/models.md)")]
    own = not plan.config.model.rope
    longest = _longest(Path(plan.config.model.model_path).expanduser()) if own else 0
    if longest and plan.lengths.model > longest:
        what = f"is {plan.lengths.model}, but the model was made for at most {longest} tokens (max_position_embeddings)"
        return [Problem("model.max_model_len", what)]
    return []


def _check_endpoints(plan: Plan) -> Iterator[Problem]:
    """Checks the keys of external models, and that a server answers."""
    for index, model in enumerate(plan.config.explorer.auxiliary_models if plan.config.mode != "train" else []):
        if (external := model.external_model) is None:
            continue
        place = f"explorer.auxiliary_models.{index}.external_model"
        if external.api_key_env and not os.environ.get(external.api_key_env):
            what = f"{external.api_key_env} is not set; export it with the key, or leave api_key_env out"
            yield Problem(f"{place}.api_key_env", what)
        try:
            with urlopen(f"{external.base_url.rstrip('/')}/models", timeout=_ENDPOINT_SECONDS):
                pass
        except HTTPError:  # an answer: the key is not sent from here
            pass
        except (OSError, HTTPException) as error:
            what = f"{external.base_url} is not reachable: {getattr(error, 'reason', error)}"
            yield Problem(f"{place}.base_url", what)


def _check_reward_models(plan: Plan) -> list[Problem]:
    """Tasksets scored by a reward model need a reward model. Models without a local config.json are accepted."""
    key = "explorer.auxiliary_models"
    models = {auxiliary_name(model): model for model in plan.config.explorer.auxiliary_models}
    for taskset in [] if plan.offline else [*plan.tasksets, *plan.eval_tasksets]:
        name = taskset.workflow_args.get("reward_model")
        candidates = [model for known, model in models.items() if name in ("", known)]
        if candidates and not any(_may_rate(model) for model in candidates):
            what = f"are to score {taskset.name}, and write text; add a sequence classifier, or name a "
            return [Problem(key, f"{what}default_reward_fn_type for the taskset")]
    return []


def _may_rate(model: AuxiliaryModelConfig) -> bool:
    if model.external_model or model.kind != "auto":
        return model.kind == "score"
    found = files.read_json(Path(model.model_path).expanduser() / "config.json")
    return not isinstance(found, dict) or rates(found.get("architectures") or [])


def _check_vision(plan: Plan) -> list[Problem]:
    """The model reads the images of the tasks with local files and packages."""
    path, wanted = plan.config.model.model_path, plan.config.model.images
    tasksets = [dataset for dataset in datasets_of(plan) if isinstance(dataset.config, TasksetConfig)]
    keys = [f"{dataset.key}.format.image_key" for dataset in tasksets if dataset.config.format.image_key]
    if (reason := why_no_images(path, wanted)) is not None:
        found = [Problem(key, f"is given, and {reason}; mend that, or remove it") for key in keys]
        return [*found, Problem("model.images", f"is true, and {reason}; remove it")] if wanted else found
    try:
        if image_rules(path, wanted) is None:
            return []
    except InvalidInput as error:
        return [Problem(error.field, str(error).partition(": ")[2])]
    needs = [name for name in ("PIL", "torchvision") if importlib.util.find_spec(name) is None]
    return [Problem("model.model_path", f"reads images, which needs {name}; `pip install -e '.[vision]'`")
            for name in needs if plan.config.mode != "explore"]  # fmt: skip


def _check_critic(plan: Plan) -> list[Problem]:
    """The critic reads the images that the policy reads, with local files."""
    path, critic = plan.config.model.model_path, plan.config.model.critic_model_path
    wanted = plan.config.model.images
    if not critic or not all(os.path.isfile(Path(one).expanduser() / "config.json") for one in (path, critic)):
        return []
    try:
        rules = image_rules(path, wanted)
    except InvalidInput:  # _check_vision says so
        return []
    with contextlib.suppress(InvalidInput):
        if image_rules(critic, wanted) == rules:
            return []
    what = f"{critic!r} reads images otherwise than model.model_path does, or none; leave it empty"
    return [Problem("model.critic_model_path", what)]


def _longest(folder: Path) -> int:
    """Returns max_position_embeddings of a local model without rope scaling; 0 if unknown."""
    config = files.read_json(folder / "config.json")
    if not isinstance(config, dict) or config.get("rope_scaling"):
        return 0
    longest = config.get("max_position_embeddings")
    return longest if type(longest) is int and longest > 0 else 0


def check_model_folder(key: str, path: str) -> list[Problem]:
    """Returns problems of a model's path, a folder on this machine or a name on the hub."""
    place = Path(path).expanduser()
    if os.path.isdir(place):  # Path's own raises where it may not look
        if problem := why_no_base(path):
            return [Problem(key, problem)]
        if not os.path.isfile(place / "config.json"):
            return [Problem(key, f"{path!r} has no config.json; it is no Hugging Face model folder")]
        if not isinstance(files.read_json(place / "config.json"), dict):
            return [Problem(key, f"{path!r} has a config.json that is no JSON object")]
        try:
            check_weights(place)
        except InvalidInput as error:
            return [Problem(key, f"{error}; download it again, with `git lfs pull` in a clone")]
        return []
    looks_local = place.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1
    if looks_local or os.path.exists(place):
        what = f"{path!r} does not exist; give a model folder or a hub name (owner/name){files.start_of(place)}"
        return [Problem(key, what)]
    problem = hub_problem(path)
    return [Problem(key, problem)] if problem else []


def hub_problem(name: str) -> str:
    """Returns why a hub's model is not to be had, with its config.json fetched if it is; else an empty string."""
    try:
        from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
    except ImportError:  # the services that load it are elsewhere
        return ""
    if all(any(isinstance(try_to_load_from_cache(name, file), str) for file in one) for one in _HUB_FILES):
        return ""

    def ask() -> None:
        HfApi().model_info(name, timeout=_HUB_SECONDS)  # asks once; a download would try for half a minute
        hf_hub_download(name, "config.json")

    try:
        hub.bounded(ask, f"the hub at {constants.ENDPOINT}", f"the config.json of {name}")
    except Exception as error:  # of the hub's client, and of the HTTP client below it
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        return f"{name!r} is no folder here, is not in the hub's cache, and cannot be fetched: {reason}"
    return ""


def datasets_of(plan: Plan) -> list[Dataset]:
    """Returns the datasets of a stage."""
    buffer, mode = plan.config.buffer, plan.config.mode
    if plan.offline:
        source = buffer.trainer_input.experience_buffer
        assert source is not None
        if not plan.algorithm.offline:  # an archive, which the buffer itself reads
            return []
        return [Dataset("buffer.trainer_input.experience_buffer", source, makes_steps=True)]
    if mode == "serve":
        return []
    inputs = "buffer.explorer_input"
    found = []
    for index, taskset in enumerate(plan.tasksets if mode in ("both", "train") else []):
        key = f"{inputs}.taskset" if buffer.explorer_input.taskset else f"{inputs}.tasksets.{index}"
        found.append(Dataset(key, taskset, makes_steps=True))
    if plan.experts_per_step:
        name = plan.algorithm.sample_strategy.args["sft_dataset_name"]
        expert, key = buffer.trainer_input.auxiliary_buffers[name], f"buffer.trainer_input.auxiliary_buffers.{name}"
        found.append(Dataset(key, expert))
    evaluated = (Dataset(f"{inputs}.eval_tasksets.{i}", t) for i, t in enumerate(plan.eval_tasksets))
    return [*found, *evaluated]
