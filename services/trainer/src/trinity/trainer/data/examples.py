"""Makes sequences from rows of datasets (conversations, preference pairs, plain text) by the model's tokenizer.

A row whose prompt leaves no room for a response within the model's length is not trained; the log names it.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import structlog

from trinity.runtime.errors import InvalidInput
from trinity.trainer.data.batch import LedgerEntry, TrainBatch, TrainSequence

log = structlog.get_logger(__name__)


class Example(Protocol):
    """A row of a dataset: buffer.v1.Example, whose fields these are."""

    @property
    def row(self) -> int: ...

    @property
    def messages_json(self) -> str: ...

    @property
    def rejected_json(self) -> str: ...

    @property
    def text(self) -> str: ...


def from_examples(entry: LedgerEntry, examples: Iterable[Example], tokenizer: Any, limit: int) -> TrainBatch:
    """Makes an offline batch; sequences are cut at `limit` tokens, and a preference pair is one group."""
    sequences: list[TrainSequence] = []
    for index, example in enumerate(examples):
        if example.rejected_json:
            sequences += _pair(example, index, tokenizer, limit)
        elif example.text:
            sequences.append(_text(example, index, tokenizer, limit))
        else:
            sequences.append(_conversation(example, example.messages_json, index, tokenizer, limit))
    return TrainBatch(step=entry.step, sequences=tuple(sequences))


def experts_of(entry: LedgerEntry, examples: Sequence[Example], tokenizer: Any, limit: int) -> list[TrainSequence]:
    """Makes the expert rows of an online batch; each is a group, numbered after the rolled-out groups."""
    first = len(entry.groups)
    conversations = (_conversation(e, e.messages_json, first + i, tokenizer, limit) for i, e in enumerate(examples))
    return [replace(conversation, expert=True) for conversation in conversations]


def _pair(example: Example, index: int, tokenizer: Any, limit: int) -> list[TrainSequence]:
    """Makes the chosen and the rejected sequence. Neither is trained unless both have a response."""
    texts = (example.messages_json, example.rejected_json)
    two = [_conversation(example, text, index, tokenizer, limit) for text in texts]
    if not all(sequence.response_length for sequence in two):
        return [replace(sequence, mask=np.zeros_like(sequence.mask)) for sequence in two]
    return [replace(sequence, pair=pair) for sequence, pair in zip(two, (index + 1, -index - 1), strict=True)]


def _text(example: Example, index: int, tokenizer: Any, limit: int) -> TrainSequence:
    """Trains every token but the first, and the end of the text."""
    tokens = [*tokenizer.encode(example.text), _end(tokenizer)][:limit]
    return _sequence(example.row, tokens[:1], tokens[1:], index, limit)


def _conversation(example: Example, text: str, index: int, tokenizer: Any, limit: int) -> TrainSequence:
    """Trains the last message."""
    messages = json.loads(text)
    prompt = _template(tokenizer, messages[:-1], True, example.row)
    whole = _template(tokenizer, messages, False, example.row)
    if whole[: len(prompt)] == prompt:
        response = _up_to_end(whole[len(prompt) :], tokenizer.eos_token_id)
    else:  # templates whose generation prompt differs from the start of an assistant message
        response = [*tokenizer.encode(messages[-1]["content"], add_special_tokens=False), _end(tokenizer)]
    return _sequence(example.row, prompt, response, index, limit)


def _sequence(row: int, prompt: list[int], response: list[int], index: int, limit: int) -> TrainSequence:
    if len(prompt) >= limit:
        log.warning("trainer.row.too_long", row=row, prompt_tokens=len(prompt), limit=limit)
    prompt = prompt[:limit]
    tokens = np.asarray((prompt + response)[:limit], dtype=np.int32)
    length = len(tokens) - len(prompt)
    return TrainSequence(tokens, len(prompt), np.zeros(length, np.float32), np.ones(length, bool), group=index)


def _template(tokenizer: Any, messages: Sequence[dict[str, Any]], ask: bool, row: int) -> list[int]:
    try:
        ids = tokenizer.apply_chat_template(list(messages), tokenize=True, add_generation_prompt=ask, return_dict=False)
    except Exception as error:  # Jinja templates may raise any exception
        raise InvalidInput(f"row {row}", f"the chat template refuses it: {error}") from None
    return [int(token) for token in ids]


def _end(tokenizer: Any) -> int:
    """Returns the token that ends a response. Raises InvalidInput if the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        what = f"is missing in {tokenizer.name_or_path or 'the tokenizer'}; responses end with it: name it there"
        raise InvalidInput("tokenizer.eos_token", what)
    return int(tokenizer.eos_token_id)


def _up_to_end(response: list[int], end: int | None) -> list[int]:
    """Cuts off the text that a template writes after the last end token (Qwen's newline)."""
    if end in response:
        return response[: len(response) - response[::-1].index(end)]
    return response
