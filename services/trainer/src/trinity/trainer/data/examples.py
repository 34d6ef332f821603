"""Makes sequences from rows of datasets (conversations, preference pairs, plain text) by the model's tokenizer.

A row whose prompt leaves no room for a response within the model's length is not trained; the log names it.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import structlog

from trinity.data.templates import ChatTemplate, end_of_text
from trinity.runtime.errors import InvalidInput
from trinity.trainer.data.batch import TrainBatch, TrainSequence
from trinity.trainer.data.client import Example, LedgerEntry

log = structlog.get_logger(__name__)


def from_examples(entry: LedgerEntry, examples: Iterable[Example], tokenizer: Any, limit: int) -> TrainBatch:
    """Makes an offline batch; sequences are cut at `limit` tokens, and a preference pair is one group."""
    sequences: list[TrainSequence] = []
    template = ChatTemplate(tokenizer)
    for index, example in enumerate(examples):
        if example.rejected_json:
            sequences += _pair(example, index, template, limit)
        elif example.text:
            sequences.append(_text(example, index, tokenizer, limit))
        else:
            sequences.append(_conversation(example, example.messages_json, index, template, limit))
    return TrainBatch(step=entry.step, sequences=tuple(sequences))


def experts_of(entry: LedgerEntry, examples: Sequence[Example], tokenizer: Any, limit: int) -> list[TrainSequence]:
    """Makes the expert rows of an online batch; each is a group, numbered after the rolled-out groups."""
    first, template = len(entry.groups), ChatTemplate(tokenizer)
    conversations = (_conversation(e, e.messages_json, first + i, template, limit) for i, e in enumerate(examples))
    return [replace(conversation, expert=True) for conversation in conversations]


def _pair(example: Example, index: int, template: ChatTemplate, limit: int) -> list[TrainSequence]:
    """Makes the chosen and the rejected sequence. Neither is trained unless both have a response."""
    texts = (example.messages_json, example.rejected_json)
    two = [_conversation(example, text, index, template, limit) for text in texts]
    if not all(sequence.response_length for sequence in two):
        return [replace(sequence, mask=np.zeros_like(sequence.mask)) for sequence in two]
    return [replace(sequence, pair=pair) for sequence, pair in zip(two, (index + 1, -index - 1), strict=True)]


def _text(example: Example, index: int, tokenizer: Any, limit: int) -> TrainSequence:
    """Trains every token but the first, and the end of the text."""
    tokens = [*tokenizer.encode(example.text), end_of_text(tokenizer)][:limit]
    return _sequence(example.row, tokens[:1], tokens[1:], index, limit)


def _conversation(example: Example, text: str, index: int, template: ChatTemplate, limit: int) -> TrainSequence:
    """Trains the last message, as `ChatTemplate.example` splits it."""
    try:
        tools = json.loads(example.tools_json) if example.tools_json else ()
        prompt, response = template.example(json.loads(text), tools)
    except InvalidInput as error:
        if error.field != "messages":
            raise
        raise InvalidInput(f"row {example.row}", str(error).partition(": ")[2]) from None
    return _sequence(example.row, prompt, response, index, limit)


def _sequence(row: int, prompt: list[int], response: list[int], index: int, limit: int) -> TrainSequence:
    if len(prompt) >= limit:
        log.warning("trainer.row.too_long", row=row, prompt_tokens=len(prompt), limit=limit)
    prompt = prompt[:limit]
    tokens = np.asarray((prompt + response)[:limit], dtype=np.int32)
    length = len(tokens) - len(prompt)
    return TrainSequence(tokens, len(prompt), np.zeros(length, np.float32), np.ones(length, bool), group=index)
