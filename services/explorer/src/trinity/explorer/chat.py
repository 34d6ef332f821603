"""The model's tokenizer and chat template. Text becomes tokens once, on the way in; what was sampled stays tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trinity.config.schema.model import ModelConfig
from trinity.runtime.errors import InvalidInput

Message = dict[str, Any]


class ChatTokenizer:
    """Loaded once from the model folder."""

    def __init__(self, model: ModelConfig) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model.model_path, trust_remote_code=model.trust_remote_code)
        if model.chat_template_path:
            self._tokenizer.chat_template = Path(model.chat_template_path).read_text(encoding="utf-8")
        elif model.custom_chat_template:
            self._tokenizer.chat_template = model.custom_chat_template
        if not self._tokenizer.chat_template:
            raise InvalidInput(
                "model.model_path", f"{model.model_path} has no chat template; set model.custom_chat_template"
            )

    def prompt(self, messages: Sequence[Message], reply_prefix: str | None = None) -> list[int]:
        """Token ids of a conversation, ready for the assistant to answer. InvalidInput if the template refuses it."""
        try:
            ids: Any = self._tokenizer.apply_chat_template(
                list(messages), tokenize=True, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # Jinja templates raise what they like
            raise InvalidInput("messages", f"the chat template refuses them: {error}") from None
        if reply_prefix:
            ids = ids + self._tokenizer.encode(reply_prefix, add_special_tokens=False)
        return [int(token) for token in ids]

    def conversation(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation that is over, for a reward model. InvalidInput if the template refuses it."""
        try:
            ids: Any = self._tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False)
        except Exception as error:  # Jinja templates raise what they like
            raise InvalidInput("messages", f"the chat template refuses them: {error}") from None
        return [int(token) for token in ids]

    def text(self, token_ids: "Sequence[int] | np.ndarray") -> str:
        """For scorers and people; never tokenised again."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
