"""The configuration of a joining explorer: numbers and names of the run, never code or paths.

A process that may write the run's record on NATS could otherwise choose the code that an explorer runs. So the keys in
`_OWN` come from the explorer's YAML, or from the config.json that `trinity run` of the same user wrote into the job
folder, and the explorer joins only if the record says the same. The keys in `_SHARED` come from the record. The
explorer's YAML has all other keys.
"""

import os
import stat
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trinity.config import Config, make_plan
from trinity.config.checks.players import plays_older
from trinity.config.checks.reproducible import check_reproducible
from trinity.config.run_record import RunRecord, workflows
from trinity.config.schema.model import LoraConfig, ModelConfig
from trinity.reading.errors import RunError
from trinity.reading.render import visible
from trinity.runtime import files, names

_OWN = ("model_path", "trust_remote_code", "custom_chat_template", "chat_template_path")
_SHARED = (
    "enable_thinking", "temperature", "top_p", "top_k", "repetition_penalty",
    "max_model_len", "max_prompt_tokens", "max_response_tokens", "min_response_tokens",
    "rope_scaling", "rope_theta", "images",
)  # fmt: skip
_UNUSED = ("critic_model_path", "lora_configs")  # the trainer's: an explorer gets LoRA with the weights
_SHOWN = 200


def joined_config(config: Config, about: RunRecord) -> Config:
    """Returns the configuration of an explorer (mode explore) that joins a run.

    Raises RunError as `check_identity` and `own_model` do, and for keys that contradict a reproducible run.
    """
    check_identity(config, about)
    theirs = about.config
    synchronizer = config.synchronizer.model_copy(update={"collective_timeout": theirs.synchronizer.collective_timeout})
    buffer = config.buffer.model_copy(update={"explorer_input": workflows(theirs.buffer.explorer_input)})
    explorer = config.explorer.model_copy(update={"older_versions": theirs.explorer.older_versions})
    if theirs.reproducible:
        engine = explorer.rollout_model.model_copy(update={"seed": theirs.explorer.rollout_model.seed})
        explorer = explorer.model_copy(update={"rollout_model": engine})
    joined = config.model_copy(
        update={"mode": "explore", "name": theirs.name, "model": own_model(config, about), "explorer": explorer,
                "reproducible": theirs.reproducible, "synchronizer": synchronizer, "buffer": buffer, "stages": []}
    )  # fmt: skip
    lora = theirs.model.lora
    if plays_older(joined) and joined.model.lora is None and lora is not None and (lora.lora_rank or not lora.path):
        numbers = LoraConfig(lora_rank=lora.rank, merged=lora.merged, load_in_4bit=lora.load_in_4bit)
        joined = joined.model_copy(update={"model": joined.model.model_copy(update={"lora_configs": [numbers]})})
    for problem in check_reproducible(joined):
        raise RunError(f"the run is reproducible, and {problem.path} {problem.message}", code=2)
    return joined


def check_identity(config: Config, about: RunRecord) -> None:
    """Raises RunError if the record belongs to another run, whose folder and subjects the explorer would use."""
    theirs = about.config
    ours = (config.project, config.group, config.name)
    of_job = (theirs.project, theirs.group) == ours[:2] and (theirs.name + "/").startswith(config.name + "/")
    if not of_job or about.run != names.run_id(theirs.project, theirs.name, theirs.group):
        found = visible(f"{theirs.project}, {theirs.group}, {theirs.name}")[:_SHOWN]
        raise RunError(f"the record of the run has project, group, name = {found}, not {', '.join(ours)}")


def own_model(config: Config, about: RunRecord) -> ModelConfig:
    """Returns the `model` section: lengths and sampling from the record, code and paths from this YAML or the job
    folder.

    Raises RunError with both values if neither agrees with the record.
    """
    theirs = about.config.model
    known = [config.model, *_written_here(config, about)]
    for ours in known:
        if _code(ours) == _code(theirs):
            return ours.model_copy(update={key: getattr(theirs, key) for key in _SHARED})
    ours = known[-1]
    key = next(key for key in _OWN if getattr(ours, key) != getattr(theirs, key))
    raise RunError(
        f"model.{key} is {_shown(getattr(ours, key))} here, and {_shown(getattr(theirs, key))} in the record of run "
        f"{about.run}; an explorer takes neither code nor paths from a run: set model.{key} in this YAML to the run's "
        f"value if you trust it, or start the explorer as the run's user with the run's checkpoint_root_dir",
        code=2,
    )


def _code(model: ModelConfig) -> tuple[Any, ...]:
    return tuple(getattr(model, key) for key in _OWN)


def _shown(value: Any) -> str:
    return "not set" if value in ("", None) else visible(repr(value))[:_SHOWN]


def _written_here(config: Config, about: RunRecord) -> list[ModelConfig]:
    """Returns the `model` of the stage's config.json, if only this user can write it."""
    folder = make_plan(config.model_copy(update={"name": about.config.name})).job_dir
    path = folder / "config.json"
    value = files.read_json(path) if _is_mine(folder) and _is_mine(path) else None
    if not isinstance(value, dict):
        return []
    try:
        return [ModelConfig.model_validate(value.get("model"))]
    except ValidationError:  # of another version
        return []


def _is_mine(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not stat.S_ISLNK(found.st_mode) and not found.st_mode & stat.S_IWOTH
