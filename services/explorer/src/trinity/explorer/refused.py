"""The errors with which an explorer of these settings would end before it serves, for `trinity check --deep`.

Each step is one of the start's own (service.py, build.py) and stops before an engine or its weights are loaded.
"""

from collections.abc import Iterator
from functools import partial

from trinity.config.schema.explorer import AuxiliaryModelConfig
from trinity.config.service import load_plan
from trinity.data.templates import refuse_rewritten_history
from trinity.explorer.build import ExplorerBuilder
from trinity.explorer.chat import ChatTokenizer
from trinity.explorer.engine.auxiliary import prepare
from trinity.explorer.engine.start import check_options
from trinity.explorer.settings import ExplorerSettings
from trinity.explorer.types import EngineOptions
from trinity.runtime.errors import InvalidInput


def refused(settings: ExplorerSettings) -> Iterator[InvalidInput]:
    """Yields errors of the policy's tokenizer and engine, and of each auxiliary model's."""
    plan = load_plan(settings.config_file, settings.stage, settings.plugin_dirs)
    build = ExplorerBuilder(plan, settings, "check", "check")
    try:
        build.limits()
        tokenizer = ChatTokenizer(plan.config.model)
        options = build.engine_options(tokenizer.turn_end)
    except InvalidInput as error:
        yield error
        return
    steps = [partial(check_options, options, settings.devices or None)]
    if plan.config.mode != "serve":
        steps.append(partial(refuse_rewritten_history, plan, tokenizer.history_problem))
        own = [one for one in plan.config.explorer.auxiliary_models if not one.external_model]
        steps += [partial(_auxiliary, one, options) for one in own]
    for step in steps:
        try:
            step()
        except InvalidInput as error:
            yield error


def _auxiliary(config: AuxiliaryModelConfig, policy: EngineOptions) -> None:
    check_options(prepare(config, policy)[0], None)
