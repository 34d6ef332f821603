"""Checks rows as the model's chat template and tokenizer render them: prompts of tasksets, examples of datasets."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trinity.cli.supervise.checks.task_rows import names_for
from trinity.config import Plan, Problem
from trinity.config.memory import vocabulary_of
from trinity.config.schema.buffer import FormatConfig, TasksetConfig
from trinity.config.schema.model import ModelConfig
from trinity.config.workflows import reads_prompt
from trinity.data.datasets import Messages, Row, reader
from trinity.data.templates import (
    ChatTemplate,
    chat_template,
    load_tokenizer,
    refuse_rewritten_history,
    refuse_unembedded,
    template_key,
)
from trinity.runtime import files
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
    """Yields problems, and sentences on the template and on rows that are cut. Yields nothing without transformers.

    Measures at most 2,000 rows of a dataset, evenly spread, for at most a minute. The system prompt of a workflow is
    not included.
    """
    model, plain = plan.config.model, plan.algorithm.offline and plan.algorithm.rows == "text"
    tokenizer = _tokenizer(model)
    if isinstance(tokenizer, Problem):
        yield tokenizer
        return
    if tokenizer is None:
        return
    if plain:  # plain text needs no template
        for key, form, rows in examples:
            yield from _plain_texts(plan, tokenizer, key, form, rows)
        return
    try:
        with _limits():
            template = chat_template(model, tokenizer)
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
        try:
            with _limits():
                found = list(_properties(plan, template, tokenizer))
        except _Endless as error:
            found = [Problem(template_key(model), str(error))]
        yield from found
    for key, taskset, rows in tasksets:
        yield from _prompts(plan, tokenizer, key, taskset, rows)
    for key, form, rows in examples:
        yield from _examples(plan, template, tokenizer, key, form, rows)


def _properties(plan: Plan, template: ChatTemplate, tokenizer: Any) -> Iterator[Problem | str]:
    """Yields what the template does otherwise than a plain one, as the explorer and the trainer treat it."""
    key = template_key(plan.config.model)
    end = template.turn_end
    if end is None:
        yield f"{key}: no token ends a reply, only text; replies end with the tokenizer's eos_token, or at their limit"
    elif end not in _ends_of_text(plan.config.model.model_path, tokenizer):
        token = tokenizer.convert_ids_to_tokens(end)
        yield (
            f"{key}: {token!r} ends a reply, and is no eos token of the tokenizer or of generation_config.json; "
            "rollouts and the endpoint stop at it too, and SFT trains it"
        )
    if template.opened:
        yield f"{key}: it begins each reply with {template.opened!r}; scorers, environments and SFT see that once"
    if plan.offline:
        return
    if template.folds_system:
        yield f"{key}: it takes no system prompt; system prompts begin the first message of the user"
    if template.history_problem:
        try:
            refuse_rewritten_history(plan, template.history_problem)
        except InvalidInput as error:
            yield Problem(error.field, str(error).removeprefix(f"{error.field}: "))
    source = plan.config.buffer.explorer_input
    calls = any(source.workflow_of(one) == "tool_call_workflow" for one in (*plan.tasksets, *plan.eval_tasksets))
    if calls and not template.shows_tools:
        yield f"{key}: it shows the policy no tools; tool_call_workflow needs them in the prompt, so write them there"


def _ends_of_text(model_path: str, tokenizer: Any) -> set[int]:
    """Returns the tokens at which vLLM stops without being told."""
    given = files.read_json(Path(model_path).expanduser() / "generation_config.json")
    ends = given.get("eos_token_id") if isinstance(given, dict) else None
    return {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}


def _tokenizer(model: ModelConfig) -> Any:
    """Returns the model's tokenizer, a Problem if it is not usable, None without transformers or its files."""
    folder = Path(model.model_path).expanduser()
    try:
        return load_tokenizer(model)
    except ImportError:
        return None
    except InvalidInput as error:
        fails = error.__cause__ is not None  # otherwise transformers made one without tokens
        if fails and not any((folder / name).exists() for name in _TOKENIZER_FILES):
            return None  # the explorer says so
        return Problem(error.field, str(error).partition(": ")[2])


def _prompts(
    plan: Plan, tokenizer: Any, key: str, taskset: TasksetConfig, rows: Sequence[Row]
) -> Iterator[Problem | str]:
    place = template_key(plan.config.model)
    system = [{"role": "system", "content": taskset.format.system_prompt}] if taskset.format.system_prompt else []
    lengths, largest = list[int](), -1
    try:
        for row in _in_time(rows[:: _stride(rows)]):
            if taskset.format.prompt_key in row:
                given = row[taskset.format.prompt_key]
                talk = given if isinstance(given, list) else [{"role": "user", "content": str(given)}]
                messages = talk if talk[0]["role"] == "system" else [*system, *talk]
                tokens = tokenizer.encode(render(tokenizer, messages, True), add_special_tokens=False)
                lengths.append(len(tokens))
                largest = max([largest, *tokens])
    except Exception as error:  # a template that takes no system prompt, say
        what = f"renders no prompt of {key}: {_error_text(error)}"
        needed = reads_prompt(names_for(plan, key, taskset)[0])
        yield Problem(place, what) if needed else f"{place}: {what}"
        return
    yield from _unembedded(plan, tokenizer, largest)
    cut = sum(length > plan.lengths.prompt for length in lengths)
    if cut and cut == len(lengths):
        what = f"is {plan.lengths.prompt}; every prompt of {key} is longer ({min(lengths)} tokens at least)"
        yield Problem("model.max_prompt_tokens", f"{what}, and cut prompts are not trained; give more")
    elif cut:
        yield f"{key}: {cut} of {len(lengths)} measured prompts are longer than {plan.lengths.prompt} tokens; " \
              "they are cut and not trained"  # fmt: skip


def _examples(
    plan: Plan, template: ChatTemplate, tokenizer: Any, key: str, form: FormatConfig, rows: Sequence[Row]
) -> Iterator[Problem | str]:
    """Yields problems of conversations whose last message is trained, as the trainer renders them."""
    limit, stride = plan.lengths.model, _stride(rows)
    lengths, wholes, largest = list[int](), list[int](), -1
    example = reader(plan.algorithm.rows if plan.algorithm.offline else "messages", form, rows[0])
    try:
        for row in _in_time(rows[::stride]):
            fields = example(row, len(lengths) * stride)
            tools = json.loads(fields.pop("tools_json", "[]"))
            conversations: list[Messages] = [json.loads(text) for text in fields.values()]
            for messages in conversations:
                render(tokenizer, messages, False)
            pairs = [template.example(messages, tools) for messages in conversations]
            lengths.append(max(len(prompt) for prompt, _ in pairs))
            wholes.append(max(len(prompt) + len(response) for prompt, response in pairs))
            largest = max([largest, *(token for prompt, response in pairs for token in (*prompt, *response))])
    except Exception as error:  # Jinja templates raise what they like
        row_number = len(lengths) * stride
        yield Problem(template_key(plan.config.model), f"refuses row {row_number} of {key}: {_error_text(error)}")
        return
    yield from _unembedded(plan, tokenizer, largest)
    cut = sum(length >= limit for length in lengths)
    if cut and cut == len(lengths):
        what = f"is {limit}; every prompt of {key} has {min(lengths)} tokens or more, so no reply is trained"
        yield Problem("model.max_model_len", f"{what}; give more")
    elif cut:
        yield f"{key}: {cut} of {len(lengths)} measured prompts have {limit} tokens or more (model.max_model_len); " \
              "their rows are not trained"  # fmt: skip
    yield from _cut_ends(key, [whole for whole, length in zip(wholes, lengths, strict=True) if length < limit], limit)


def _plain_texts(
    plan: Plan, tokenizer: Any, key: str, form: FormatConfig, rows: Sequence[Row]
) -> Iterator[Problem | str]:
    """Yields remarks on texts of which every token is trained."""
    read, lengths, largest = reader("text", form, rows[0]), list[int](), -1
    for row in _in_time(rows[:: _stride(rows)]):
        tokens = tokenizer.encode(read(row, len(lengths) * _stride(rows))["text"])
        lengths.append(len(tokens))
        largest = max([largest, *tokens])
    yield from _unembedded(plan, tokenizer, largest)
    yield from _cut_ends(key, lengths, plan.lengths.model)


def _cut_ends(key: str, lengths: Sequence[int], limit: int) -> Iterator[str]:
    """Yields a remark on rows that are trained in part."""
    if cut := sum(length > limit for length in lengths):
        yield f"{key}: {cut} of {len(lengths)} measured rows have more than {limit} tokens (model.max_model_len); " \
              "the tokens behind are not trained"  # fmt: skip


def _stride(rows: Sequence[Row]) -> int:
    return max(1, len(rows) // _MOST_MEASURED)


def _in_time(rows: Sequence[Row]) -> Iterator[Row]:
    """Yields the first rows, for at most _MOST_SECONDS_OF_ALL."""
    begin = time.monotonic()
    for row in rows:
        if time.monotonic() - begin > _MOST_SECONDS_OF_ALL:
            return
        yield row


def _unembedded(plan: Plan, tokenizer: Any, largest: int) -> Iterator[Problem]:
    """Yields a problem if the model, on this machine, has no embedding of the largest token of the rows."""
    try:
        refuse_unembedded(tokenizer, largest, vocabulary_of(plan.config.model.model_path) or len(tokenizer))
    except InvalidInput as error:
        yield Problem(error.field, str(error).partition(": ")[2])


class _Endless(Exception):
    """A template that does not end, or fills the memory."""


def render(tokenizer: Any, messages: Messages, ask: bool) -> str:
    """Returns the text of a conversation. Raises _Endless, and any error of the template."""
    with _limits():
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask))


@contextmanager
def _limits() -> Iterator[None]:
    """Raises _Endless if the block takes too long, or too much memory."""
    try:
        with time_limit(_MOST_SECONDS), memory_limit(_MOST_BYTES):
            yield
    except TimeoutError:
        raise _Endless(f"does not render one conversation within {_MOST_SECONDS:g} s") from None
    except MemoryError:
        raise _Endless(f"takes more than {_MOST_BYTES / 2**30:g} GiB to render one conversation") from None


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, _Endless) else f"{type(error).__name__}: {error}"
