"""The model's tokenizer and chat template. Input text is tokenised once; sampled tokens are never tokenised again.

A conversation of several turns grows by appending tokens: the sampled reply, then `next_turn`, the template's text
between that reply and the next one. This requires a template that leaves former turns unchanged; `history_problem`
names the violation of any other.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import structlog

from trinity.config.schema.model import ModelConfig
from trinity.data.images import PlacedImage, expanded, placed
from trinity.data.templates import Message, chat_template, load_tokenizer, template_key
from trinity.data.vision import ImageRules, image_rules
from trinity.runtime.errors import InvalidInput

log = structlog.get_logger(__name__)

__all__ = ["ChatTokenizer", "Message"]


class ChatTokenizer:
    """Loaded once from the model folder. Raises InvalidInput if the folder has no usable tokenizer."""

    def __init__(self, model: ModelConfig) -> None:
        self.model_path = model.model_path
        self._image_rules = image_rules(model.model_path, model.images)
        self._tokenizer = load_tokenizer(model)
        self._template = chat_template(model, self._tokenizer)
        self.template = self._template.text
        self._check_syntax(template_key(model))

    def _check_syntax(self, key: str) -> None:
        """Raises InvalidInput if the template does not compile. It may refuse this conversation."""
        from jinja2 import TemplateSyntaxError

        try:
            self._tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
        except TemplateSyntaxError as error:
            raise InvalidInput(key, f"does not compile: line {error.lineno}: {error.message}") from None
        except Exception as error:  # Jinja templates raise what they like
            log.info("explorer.template.refused", reason=f"{type(error).__name__}: {error}")

    def prompt(
        self,
        messages: Sequence[Message],
        reply_prefix: str | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        images: Sequence[bytes] = (),
    ) -> list[int]:
        """Token ids of a conversation that the assistant answers next. Raises InvalidInput if the template refuses it.

        tools: JSON schemas of functions the assistant may call. images: files for the parts {"type": "image"}, in
        order; each takes the model's number of placeholder tokens.
        """
        asked = [*self.tokens(self._template.render(messages, tools=tools)), *self.tokens(reply_prefix or "")]
        return self._expanded(asked, images)

    def next_turn(self, messages: Sequence[Message], images: Sequence[bytes] = ()) -> list[int]:
        """Token ids between two replies: the end of the turn, the new messages and the begin of the next reply.

        The first id ends the turn. images: as in `prompt`. Raises InvalidInput if the template refuses the messages.
        """
        return self._expanded(self.tokens(self._template.after_reply(messages)), images)

    def placed(self, token_ids: Sequence[int], images: Sequence[bytes]) -> tuple[PlacedImage, ...]:
        """Images with positions in token ids of `prompt` or `next_turn`. Raises InvalidInput if they do not match."""
        return placed(token_ids, images, self._rules(images)) if images else ()

    def observed(self, text: str) -> str:
        """An environment's text, with a space inside any image token, since it may repeat text of the policy."""
        token = self._image_token
        return text.replace(token, f"{token[:-1]} {token[-1]}") if token else text

    @cached_property
    def _image_token(self) -> str:
        rules = self._image_rules
        return str(self._tokenizer.convert_ids_to_tokens(rules.token)) if rules is not None else ""

    def _expanded(self, token_ids: list[int], images: Sequence[bytes]) -> list[int]:
        return expanded(token_ids, images, self._rules(images)) if images else token_ids

    def _rules(self, images: Sequence[bytes]) -> ImageRules:
        if self._image_rules is None:
            raise InvalidInput("images", f"are {len(images)}, and the model {self.model_path!r} reads none")
        return self._image_rules

    def conversation(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a finished conversation, for a reward model. Raises InvalidInput if the template refuses it."""
        return self.tokens(self._template.render(messages, ask=False))

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text without template. Raises InvalidInput if the text has half of a surrogate pair."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidInput("messages", "have half of a surrogate pair (\\ud800 to \\udfff); remove it") from None
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    def text(self, token_ids: "Sequence[int] | np.ndarray") -> str:
        """Text of token ids for scorers and readers; never tokenised again."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    @property
    def vocabulary_size(self) -> int:
        """Upper bound of the tokenizer's token ids."""
        return len(self._tokenizer)

    def reply(self, token_ids: "Sequence[int] | np.ndarray") -> str:
        """Text of a sampled reply, with the begin that the template wrote before sampling (`<think>`)."""
        return self._template.opened + self.text(token_ids)

    @property
    def turn_end(self) -> int | None:
        """The token that ends a reply under this template; None if it only writes text there."""
        return self._template.turn_end

    @property
    def history_problem(self) -> str:
        """The reason why a conversation cannot grow by tokens under this template; empty if it can."""
        return self._template.history_problem
