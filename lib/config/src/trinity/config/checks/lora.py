"""Which layers of a model get adapters: model.lora_configs, matched with the names of the model's modules.

These are linear layers, and the experts of a mixture, which transformers has as two parameters of a layer.
"""

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trinity.config.errors import Problem
from trinity.config.experts import ADAPTED
from trinity.config.schema import Config
from trinity.config.schema.model import NAMES_EXPERTS, LoraConfig

ALL_LINEAR = "all-linear"
PLACE = "model.lora_configs.0"
MOST_RANK = 512  # that vLLM computes unmerged
# Embeddings and output heads by their names in the models of transformers; they are not adapted.
_ENDS = {"lm_head", "embed_out", "embed_tokens", "embed_tokens_per_layer", "embed_in", "wte", "wpe", "pos_embed"}
# Parts of models that read images or sound, besides the language model, in the names of their modules.
_TOWERS = frozenset(
    {"visual", "vision_tower", "vision_model", "multi_modal_projector", "embed_vision", "audio_tower", "embed_audio"}
)
_ROUTERS = {"gate", "router", "shared_expert_gate"}
_EXPERTS = re.compile(r".+\.experts\.(gate_up_proj|down_proj)")


def modules_of(weights: Iterable[tuple[str, int]], model_type: str = "") -> list[str]:
    """Names of the layers of a checkpoint, from the name and the number of dimensions of each of its tensors.

    The experts of a layer must be one tensor (trinity.weights.lora.fused). model_type: of the language model.
    """
    matrices = (
        name.removesuffix(".weight")
        for name, rank in weights
        if (rank == 2 and name.endswith(".weight")) or (rank == 3 and model_type in ADAPTED and is_experts(name))
    )
    return [name for name in matrices if _last(name) not in _ENDS]


def is_experts(name: str) -> bool:
    """Returns True for the name of a parameter that holds the experts of a layer."""
    return _EXPERTS.fullmatch(name) is not None


def in_four_bits(name: str, shape: tuple[int, ...]) -> bool:
    """Returns True for a tensor of a model that `load_in_4bit` holds in four bits, by its name and shape.

    These are matrices of linear layers; not embeddings, output heads, routers, experts, or parts of a vision tower.
    """
    module, _, kind = name.rpartition(".")
    parts = module.split(".")
    apart = {*_TOWERS, *_ROUTERS, *_ENDS, "experts"}
    return kind == "weight" and len(shape) == 2 and apart.isdisjoint(parts)


def select(lora: LoraConfig, modules: Iterable[str]) -> tuple[list[str], list[Problem]]:
    """Picks the modules that get adapters from the linear layers `modules`; returns them and the problems.

    A name stands for every module that ends with it: q_proj for model.layers.0.self_attn.q_proj and all others. Only
    names or a regex with a tower's name in them (`visual`) choose its modules, and with `experts` those of a mixture:
    `experts` for both parameters, `experts.down_proj` for one.
    """
    known = list(modules)
    problems = [*_unknown("target_modules", lora.targets, known)]
    if lora.exclude_modules is not None:
        problems += _unknown("exclude_modules", lora.exclude_modules, known)
    if problems:
        return [], problems
    excluded = lora.exclude_modules or []
    found = [name for name in known if _chosen(lora.targets, name) and not _matches(excluded, name)]
    if not found:
        problems.append(Problem(f"{PLACE}.target_modules", "and exclude_modules leave no layer to adapt"))
    return found, problems


def refuse_unmerged(rank: int, modules: Iterable[str]) -> Iterator[Problem]:
    """Finds what vLLM cannot compute unmerged of the adapters that train."""
    if rank > MOST_RANK:
        what = f"has adapters of rank {rank}, and vLLM computes unmerged ones up to {MOST_RANK}; set merged: true"
        yield Problem(f"{PLACE}.path", what)
    for name in modules:
        if not _TOWERS.isdisjoint(name.split(".")):
            what = f"choose {name}, and vLLM does not adapt a vision tower; leave it out, or set merged: true"
            yield Problem(f"{PLACE}.target_modules", what)
            return
        if is_experts(name):
            what = f"choose {name}, and engines hold adapters of experts only merged; leave it out, or set merged: true"
            yield Problem(f"{PLACE}.target_modules", what)
            return


class Given(Protocol):
    """Adapters in a folder: trinity.weights.adapters.AdapterFolder."""

    @property
    def folder(self) -> Path: ...
    @property
    def rank(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def modules(self) -> list[str]: ...


@dataclass(frozen=True)
class Choice:
    """The adapters that train; `modules` are the layers that have them."""

    rank: int
    alpha: float
    modules: list[str]


def choose(lora: LoraConfig, modules: Iterable[str], given: Given | None) -> tuple[Choice, list[Problem]]:
    """Does the same as `select`, with the `given` targets where the YAML has none."""
    linear = list(modules)
    if given is None:
        chosen, problems = select(lora, linear)
        return Choice(lora.rank, lora.alpha, chosen), problems
    numbers = (("lora_rank", lora.lora_rank, given.rank), ("lora_alpha", lora.lora_alpha, given.alpha))
    problems = [
        Problem(
            f"{PLACE}.{key}", f"is {wanted:g}, and that of the adapters in {given.folder} is {there:g}; leave it out"
        )
        for key, wanted, there in numbers
        if wanted is not None and wanted != there
    ]
    if lora.target_modules is not None or lora.exclude_modules is not None:
        chosen, unknown = select(lora, linear)
        problems += unknown
        if not unknown and (differs := sorted(set(chosen) ^ set(given.modules))):
            which = "has" if differs[0] in given.modules else "lacks"
            what = f"chooses other layers than {given.folder}, which {which} {differs[0]}; leave it out"
            problems.append(Problem(f"{PLACE}.target_modules", what))
    return Choice(given.rank, given.alpha, [name for name in linear if name in set(given.modules)]), problems


def _unknown(key: str, wanted: str | list[str], known: list[str]) -> Iterator[Problem]:
    """Finds names and patterns that fit no module."""
    place = f"{PLACE}.{key}"
    if isinstance(wanted, str):
        try:
            if wanted != ALL_LINEAR and not any(re.fullmatch(wanted, name) for name in known):
                near = _near(wanted, known) if _last(wanted).isidentifier() else "it must match whole names"
                yield Problem(place, f"is {wanted!r}, a regex that no linear layer's whole name matches; {near}")
        except re.error as error:
            yield Problem(place, f"is {wanted!r}, which is no regex: {error}")
        return
    for name in wanted:
        ends = [module for module in known if _ends_with(module, name)]
        if not ends:
            what = "embeddings and output heads are not adapted" if _last(name) in _ENDS else _near(name, known)
            yield Problem(place, f"has {name!r}, which no linear layer of the model is called; {what}")
        elif key == "target_modules" and not any(_chosen([name], module) for module in ends):
            whole, where = ends[0].removeprefix("model."), "layers in the vision tower"
            if is_experts(ends[0]):
                whole, where = f"experts.{_last(whole)}", "experts"
            what = f"a name of {where} only; name them with it: {whole}, or by a regex"
            yield Problem(place, f"has {name!r}, {what}")


def _near(name: str, known: list[str]) -> str:
    names = {_last(module): f"experts.{_last(module)}" if is_experts(module) else _last(module) for module in known}
    near = difflib.get_close_matches(_last(name), sorted(names), n=1, cutoff=0.5)
    return f"did you mean [{names[near[0]]}]?" if near else f"it has {', '.join(sorted(names.values())) or 'none'}"


def _chosen(wanted: str | list[str], name: str) -> bool:
    """The same as _matches, for targets."""
    in_tower = not _TOWERS.isdisjoint(name.split("."))
    if in_tower or is_experts(name):
        asked = list(filter(_names_tower if in_tower else NAMES_EXPERTS.search, _listed(wanted)))
        return bool(asked) and _matches(wanted if isinstance(wanted, str) else asked, name)
    return _matches(wanted, name)


def _names_tower(wanted: str) -> bool:
    return any(tower in wanted for tower in _TOWERS)


def _matches(wanted: str | list[str], name: str) -> bool:
    if isinstance(wanted, str):
        return wanted == ALL_LINEAR or re.fullmatch(wanted, name) is not None
    return any(_ends_with(name, end) for end in wanted)


def _listed(wanted: str | list[str]) -> list[str]:
    return [wanted] if isinstance(wanted, str) else wanted


def _ends_with(name: str, end: str) -> bool:
    of_experts = is_experts(name) and name.rpartition(".")[0].endswith(f".{end}")
    return name == end or name.endswith(f".{end}") or of_experts


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def check_lora(config: Config) -> Iterator[Problem]:
    """Finds contradictions that show without the model."""
    lora = config.model.lora
    if lora is None:
        return
    if not lora.targets:
        yield Problem(f"{PLACE}.target_modules", f"is empty; give names of layers, or {ALL_LINEAR}")
    if config.trainer.freeze_vision_tower and any(map(_names_tower, _listed(lora.targets))):
        problem = "has layers of the vision tower, and trainer.freeze_vision_tower is true; leave out one of them"
        yield Problem(f"{PLACE}.target_modules", problem)
    if not lora.merged and lora.rank > MOST_RANK:
        problem = f"is {lora.rank}, and vLLM computes unmerged adapters up to rank {MOST_RANK}; set merged: true"
        yield Problem(f"{PLACE}.lora_rank", problem)
    if not lora.merged and any(map(_names_tower, _listed(lora.targets))):
        problem = "has layers of the vision tower, which vLLM does not adapt; leave them out, or set merged: true"
        yield Problem(f"{PLACE}.target_modules", problem)
    if not lora.merged and lora.names_experts:
        problem = "has experts, whose adapters engines hold only merged; leave them out, or set merged: true"
        yield Problem(f"{PLACE}.target_modules", problem)
    if lora.load_in_4bit and config.trainer.deepspeed.offload_param:
        problem = "is true, and trainer.deepspeed.offload_param is too; a base of four bits stays on the GPU, set one "
        yield Problem(f"{PLACE}.load_in_4bit", f"{problem}to false")
    dtype = config.trainer.deepspeed.dtype
    if "auto" not in (lora.lora_dtype, dtype) and lora.lora_dtype != dtype:
        problem = f"is {lora.lora_dtype}, but trainer.deepspeed.dtype is {dtype}; adapters train in that, use auto"
        yield Problem(f"{PLACE}.lora_dtype", problem)


def check_stages(config: Config) -> Iterator[Problem]:
    """Refuses a folder of adapters for a later stage, which begins with the merged model of the stage before."""
    if config.model.lora is not None and config.model.lora.path and len(config.stages) > 1:
        what = "a later stage begins with the merged model of the one before; give each stage a separate YAML"
        yield Problem(f"{PLACE}.path", f"is given with {len(config.stages)} stages: {what}")
