"""Checks rows as the model's chat template and tokenizer render them: prompts of tasksets, examples of datasets."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trinity.cli.supervise.checks.task_rows import names_for
from trinity.config import Plan, Problem
from trinity.config.schema.buffer import FormatConfig, TasksetConfig
from trinity.config.workflows import reads_prompt
from trinity.data.datasets import Messages, Row, reader
from trinity.data.templates import chat_template, template_key
from trinity.runtime.errors import InvalidInput
from trinity.runtime.process import memory_limit, time_limit

_MOST_MEASURED = 2_000
_MOST_SECONDS = 5.0  # of one conversation
_MOST_BYTES = 4 * 1024**3
_MOST_SECONDS_OF_ALL = 60.0  # of a dataset
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def check_rendering(
    plan: Plan,
    tasksets: Sequence[tuple[str, TasksetConfig, Sequence[Row]]],
    examples: Sequence[tuple[str, FormatConfig, Sequence[Row]]],
) -> Iterator[Problem | str]:
    """Yields problems, and sentences on rows that are cut. Yields nothing without transformers, or for a model with a
    hub name.

    Measures at most 2,000 rows of a dataset, evenly spread, for at most a minute. The system prompt of a workflow is
    not included.
    """
    model, plain = plan.config.model, plan.algorithm.offline and plan.algorithm.rows == "text"
    if not Path(model.model_path).expanduser().is_dir():
        return
    tokenizer = _tokenizer(Path(model.model_path).expanduser(), model.trust_remote_code)
    if isinstance(tokenizer, Problem):
        yield tokenizer
        return
    if tokenizer is None or plain:  # plain text needs no template
        return
    try:
        tokenizer.chat_template = chat_template(model, tokenizer.chat_template)
        text = render(tokenizer, [{"role": "user", "content": "?"}], True)
    except InvalidInput as error:
        yield Problem(error.field, str(error).partition(": ")[2])
        return
    except _Endless as error:
        yield Problem(template_key(model), str(error))
        return
    except Exception as error:  # Jinja templates raise what they like
        if type(error).__name__ == "TemplateSyntaxError":
            yield Problem(template_key(model), f"does not compile: {error}")
            return
    else:
        if not text:
            yield Problem(template_key(model), "renders nothing of a user's message; write what the model reads")
            return
    for key, taskset, rows in tasksets:
        yield from _prompts(plan, tokenizer, key, taskset, rows)
    for key, form, rows in examples:
        yield from _examples(plan, tokenizer, key, form, rows)


def _tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    """Returns the model's tokenizer, a Problem if its files hold no tokenizer, None without such files."""
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except ImportError:
        return None
    except Exception as error:  # files of a tokenizer may hold anything; who has none here is told by the explorer
        if any((folder / name).exists() for name in _TOKENIZER_FILES):
            return Problem("model.model_path", f"its tokenizer cannot be read: {type(error).__name__}: {error}")
        return None


def _prompts(
    plan: Plan, tokenizer: Any, key: str, taskset: TasksetConfig, rows: Sequence[Row]
) -> Iterator[Problem | str]:
    place = template_key(plan.config.model)
    system = [{"role": "system", "content": taskset.format.system_prompt}] if taskset.format.system_prompt else []
    lengths: list[int] = []
    try:
        for row in _in_time(rows[:: _stride(rows)]):
            if taskset.format.prompt_key in row:
                given = row[taskset.format.prompt_key]
                talk = given if isinstance(given, list) else [{"role": "user", "content": str(given)}]
                messages = talk if talk[0]["role"] == "system" else [*system, *talk]
                lengths.append(_length(tokenizer, messages))
    except Exception as error:  # a template that takes no system prompt, say
        what = f"renders no prompt of {key}: {_error_text(error)}"
        needed = reads_prompt(names_for(plan, key, taskset)[0])
        yield Problem(place, what) if needed else f"{place}: {what}"
        return
    cut = sum(length > plan.lengths.prompt for length in lengths)
    if cut and cut == len(lengths):
        what = f"is {plan.lengths.prompt}; every prompt of {key} is longer ({min(lengths)} tokens at least)"
        yield Problem("model.max_prompt_tokens", f"{what}, and cut prompts are not trained; give more")
    elif cut:
        yield f"{key}: {cut} of {len(lengths)} measured prompts are longer than {plan.lengths.prompt} tokens; " \
              "they are cut and not trained"  # fmt: skip


def _examples(plan: Plan, tokenizer: Any, key: str, form: FormatConfig, rows: Sequence[Row]) -> Iterator[Problem | str]:
    """Yields problems of conversations whose last message is trained, as the trainer renders them."""
    limit, stride = plan.lengths.model, _stride(rows)
    lengths: list[int] = []
    example = reader(plan.algorithm.rows if plan.algorithm.offline else "messages", form, rows[0])
    try:
        for row in _in_time(rows[::stride]):
            texts = example(row, len(lengths) * stride).values()
            conversations: list[Messages] = [json.loads(text) for text in texts]
            for messages in conversations:
                render(tokenizer, messages, False)
            lengths.append(max(_length(tokenizer, messages[:-1]) for messages in conversations))
    except Exception as error:  # Jinja templates raise what they like
        row_number = len(lengths) * stride
        yield Problem(template_key(plan.config.model), f"refuses row {row_number} of {key}: {_error_text(error)}")
        return
    cut = sum(length >= limit for length in lengths)
    if cut and cut == len(lengths):
        what = f"is {limit}; every prompt of {key} has {min(lengths)} tokens or more, so no reply is trained"
        yield Problem("model.max_model_len", f"{what}; give more")
    elif cut:
        yield f"{key}: {cut} of {len(lengths)} measured prompts have {limit} tokens or more (model.max_model_len); " \
              "their rows are not trained"  # fmt: skip


def _stride(rows: Sequence[Row]) -> int:
    return max(1, len(rows) // _MOST_MEASURED)


def _in_time(rows: Sequence[Row]) -> Iterator[Row]:
    """Yields the first rows, for at most _MOST_SECONDS_OF_ALL."""
    begin = time.monotonic()
    for row in rows:
        if time.monotonic() - begin > _MOST_SECONDS_OF_ALL:
            return
        yield row


def _length(tokenizer: Any, messages: Messages) -> int:
    return len(tokenizer.encode(render(tokenizer, messages, True), add_special_tokens=False))


class _Endless(Exception):
    """A template that does not end, or fills the memory."""


def render(tokenizer: Any, messages: Messages, ask: bool) -> str:
    """Returns the text of a conversation. Raises _Endless, and any error of the template."""
    try:
        with time_limit(_MOST_SECONDS), memory_limit(_MOST_BYTES):
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask))
    except TimeoutError:
        raise _Endless(f"does not render one conversation within {_MOST_SECONDS:g} s") from None
    except MemoryError:
        raise _Endless(f"takes more than {_MOST_BYTES / 2**30:g} GiB to render one conversation") from None


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, _Endless) else f"{type(error).__name__}: {error}"
