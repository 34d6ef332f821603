"""Checks explorer.auxiliary_models. A URL may hold a key of an API, so no sentence shows one."""

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from trinity.config.errors import Problem
from trinity.config.names import auxiliary_name
from trinity.config.schema import Config
from trinity.config.schema.explorer import AuxiliaryModelConfig, ExternalModelConfig

_OURS = {"name", "model_path", "kind", "enable_thinking", "external_model"}
_VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]*")


def check_auxiliary(config: Config) -> Iterator[Problem]:
    """Finds a name that two models have, and settings that do not fit a model served elsewhere."""
    names = [auxiliary_name(model) for model in config.explorer.auxiliary_models]
    for index, model in enumerate(config.explorer.auxiliary_models):
        place = f"explorer.auxiliary_models.{index}"
        if names[index] in names[:index]:
            yield Problem(f"{place}.name", f"is {names[index]!r}, which another model has already")
        if model.external_model is not None:
            yield from _of_an_engine(place, model)
            yield from _of_the_endpoint(f"{place}.external_model", model.external_model)


def _of_an_engine(place: str, model: AuxiliaryModelConfig) -> Iterator[Problem]:
    if model.kind == "score":
        yield Problem(f"{place}.kind", "is score; an external model writes, use generate")
    for key, field in AuxiliaryModelConfig.model_fields.items():  # a process reads a YAML that has every default
        if key in _OURS or getattr(model, key) == field.get_default(call_default_factory=True):
            continue
        yield Problem(f"{place}.{key}", "is for an engine; the model is served elsewhere, remove it")


def _of_the_endpoint(place: str, given: ExternalModelConfig) -> Iterator[Problem]:
    try:
        parts = urlsplit(given.base_url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        secret = parts.username is not None or bool(parts.query)
    except ValueError:  # of the port, or of an IPv6 address
        usable = secret = False
    if secret:
        yield Problem(f"{place}.base_url", "holds a user or a query; a key comes from the variable api_key_env names")
    elif not usable:
        yield Problem(f"{place}.base_url", "must be http://host[:port]/path or https://host[:port]/path")
    if given.api_key_env and not _VARIABLE.fullmatch(given.api_key_env):
        problem = "is no name of a variable; export the key, and give the name of the variable that holds it"
        yield Problem(f"{place}.api_key_env", problem)
