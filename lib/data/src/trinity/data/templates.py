"""The chat template of a model: one text from all settings, for explorers, trainer and checks."""

from pathlib import Path
from typing import Any

from trinity.config.schema.model import ModelConfig
from trinity.runtime.errors import InvalidInput


def template_key(model: ModelConfig) -> str:
    """The YAML key that gives the chat template. model.model_path stands for the tokenizer's template."""
    if model.chat_template_path:
        return "model.chat_template_path"
    return "model.custom_chat_template" if model.custom_chat_template else "model.model_path"


def chat_template(model: ModelConfig, own: Any) -> str:
    """The template of a model, with model.enable_thinking set in it. `own` is the tokenizer's template.

    Raises InvalidInput for a missing template or an unreadable file.
    """
    template = model.custom_chat_template or own
    if model.chat_template_path:
        path = Path(model.chat_template_path).expanduser()
        try:
            if path.exists() and not path.is_file():  # a pipe might never end
                raise OSError("it is no file")
            template = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            what = f"{model.chat_template_path!r} cannot be read: {error}"
            raise InvalidInput("model.chat_template_path", what) from None
    if isinstance(template, dict):  # named templates; transformers takes the default
        template = template.get("default")
    if not template:
        raise InvalidInput(
            "model.model_path", f"{model.model_path} has no chat template; set model.custom_chat_template"
        )
    if model.enable_thinking is None:
        return str(template)
    return f"{{% set enable_thinking = {str(model.enable_thinking).lower()} +%}}{template}"
