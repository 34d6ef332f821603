"""Reads rows of a dataset: a file, a folder of files or of tasks in Harbor's form, or a hub name.

All rows are checked before a run starts.
"""

import contextlib
import json
import math
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from trinity.config.schema.buffer import ExperienceBufferConfig, FormatConfig, SelectorConfig, TasksetConfig
from trinity.data.data_files import FORMS, files_of_split, is_data, read_file
from trinity.data.tables import DatasetError, Row, column_value
from trinity.data.task_folders import read_task, task_folders
from trinity.runtime import hub
from trinity.runtime.errors import Unavailable
from trinity.runtime.files import start_of

Messages = list[dict[str, Any]]

# Columns of published datasets.
_TEXTS = ("text", "content")
_MESSAGES = ("messages", "conversations", "conversation")
# `from` of ShareGPT's messages, and the role.
SHAREGPT = {"human": "user", "gpt": "assistant"} | {role: role for role in ("system", "user", "assistant")}
_PAIRS = (("question", "answer"), ("prompt", "completion"), ("instruction", "output"), ("problem", "solution"))


def read(path: str, split: str = "train", subset: str | None = None, texts: Collection[str] = ()) -> Sequence[Row]:
    """All rows, as mappings. `texts`: columns of csv that stay texts. Raises DatasetError."""
    try:
        return _read(path, split, subset, texts)
    except DatasetError:
        raise
    except (OSError, ValueError) as error:  # no permission; a split or subset that is no file name
        raise DatasetError(f"{path!r} cannot be read: {error}") from None


def _read(path: str, split: str, subset: str | None, texts: Collection[str]) -> Sequence[Row]:
    place = Path(path).expanduser()
    if "[" in split and place.exists():
        what = f"is on this machine, where the split {split!r} cannot be cut out"
        raise DatasetError(f"{path!r} {what}; save these rows as a file of their own")
    if place.is_dir():
        rows: list[Row] = [read_task(folder) for folder in task_folders(place, split)]
        for file in [] if rows else files_of_split(place, split, subset):
            rows.extend(read_file(file, texts))
    elif place.is_file():
        rows = list(read_file(place, texts))
    elif place.is_absolute() or path.startswith((".", "~")) or is_data(place):
        raise DatasetError(f"{path!r} does not exist; give a {FORMS} file, a folder, or a hub name{start_of(place)}")
    else:
        rows = _read_hub(path, split, subset)
    if not rows:
        raise DatasetError(f"{path!r} has no rows")
    return rows


def read_buffer(config: ExperienceBufferConfig) -> Sequence[Row]:
    """The rows of an experience buffer that is a dataset (files, hub name, table). Raises DatasetError."""
    if not config.path:
        raise DatasetError(f"{config.name}: path is missing")
    if config.storage_type == "sql":
        from trinity.data.tables import read_table

        rows = read_table(config.path, config.name)
    else:
        rows = read(config.path, config.split, config.subset_name, _texts(config.format))
    return _with_nested(rows, config.format, config.data_selector)


def read_taskset(config: TasksetConfig) -> Sequence[Row]:
    """The rows of a taskset, with the nested columns that it names. Raises DatasetError."""
    rows = read(config.path, config.split, config.subset_name, _texts(config.format))
    return _with_nested(rows, config.format, config.data_selector)


def _texts(form: FormatConfig) -> set[str]:
    """The columns that are read as texts."""
    return {*_TEXTS, *(name for pair in _PAIRS for name in pair), *_named(form)}


def _named(form: FormatConfig) -> list[str]:
    return [name for key, name in form if key.endswith("_key") and name]


def _with_nested(rows: Sequence[Row], form: FormatConfig, selector: SelectorConfig) -> Sequence[Row]:
    """Adds to each row the columns `a.b` that format and selector name: `b` inside of column `a`."""
    nested = [name for name in (*_named(form), *selector.feature_keys) if "." in name]
    for row in rows if nested else ():
        for name in nested:
            there, value = column_value(row, name)
            if there:
                row[name] = value
    return rows


def sft_format(form: FormatConfig, row: Row) -> FormatConfig:
    """The format of an SFT dataset: the YAML's format, or a common format that fits the first row.

    A common format is only tried if the YAML names no columns. Raises DatasetError with the columns if none fits.
    """
    if form.prompt_type == "messages" and conversation_in(row, form.messages_key) is not None:
        return form
    if _has_both(row, form.prompt_key, form.response_key):
        return form
    plain = FormatConfig()
    if (form.messages_key, form.prompt_key, form.response_key) == (
        plain.messages_key,
        plain.prompt_key,
        plain.response_key,
    ):
        for key in _MESSAGES:
            if form.prompt_type == "messages" and conversation_in(row, key) is not None:
                return form.model_copy(update={"messages_key": key})
        for prompt, response in _PAIRS:
            if _has_both(row, prompt, response):
                if prompt == "instruction" and "input" in row:
                    what = "'instruction' and 'input' belong together: write both into one column and name it in"
                    raise DatasetError(f"{what} format.prompt_key; or name 'instruction' there, to leave 'input' out")
                return form.model_copy(update={"prompt_key": prompt, "response_key": response})
    what = f"neither a conversation in {form.messages_key!r} nor texts or messages in {form.prompt_key!r}"
    if form.prompt_key in row and form.response_key in row:
        return form  # sft_messages says which row has another kind of value
    raise DatasetError(
        f"the rows have {what} and {form.response_key!r}; they have {', '.join(row)}. Set format.messages_key, or "
        "prompt_key and response_key"
    )


def conversation_in(row: Row, key: str) -> list[Any] | None:
    """The messages in a column, a list or its JSON text; None for other values."""
    value = row.get(key)
    if isinstance(value, str) and re.match(r"\s*\[\s*{", value):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    return value if isinstance(value, list) else None


def _has_both(row: Row, prompt: str, response: str) -> bool:
    return isinstance(row.get(prompt), str | list) and isinstance(row.get(response), str | list)


def sft_messages(row: Row, form: FormatConfig, number: int) -> list[dict[str, Any]]:
    """A row as chat messages that end with the assistant's. Raises DatasetError naming row and column."""
    told = conversation_in(row, form.messages_key) if form.prompt_type == "messages" else None
    if told is not None:
        messages = [_message(one, form.messages_key, number) for one in told]
        if not messages or not _is_assistants(messages[-1]):
            raise DatasetError(f"row {number}: {form.messages_key!r} must end with an assistant message")
        messages = _with_system(messages, row, form, number)
        _check_messages(messages, form.messages_key, number)
        return messages
    for key in (form.prompt_key, form.response_key):
        if not isinstance(found := row.get(key), str | list) or found == []:
            what = f"is {found!r}, must be text or messages (columns: {', '.join(row)})"
            raise DatasetError(f"row {number}: {key!r} {what}")
    messages = [*_prompt(row, form, number), *_reply(row, form.response_key, number)]
    _check_messages(messages, form.response_key, number)
    return messages


def _prompt(row: Row, form: FormatConfig, number: int) -> Any:
    """The messages of a prompt, which is text or messages; other values as they are."""
    prompt = row.get(form.prompt_key)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        return prompt
    return _with_system([_message(one, form.prompt_key, number) for one in prompt], row, form, number)


def _reply(row: Row, key: str, number: int) -> Messages:
    """The messages of a reply: text, a message, or messages. Raises DatasetError unless the assistant's is the last."""
    reply = row.get(key)
    if isinstance(reply, str):
        return [{"role": "assistant", "content": reply}]
    messages = [_message(one, key, number) for one in (reply if isinstance(reply, list) else [reply])]
    if not messages or not _is_assistants(messages[-1]):
        what = "must be text, or messages that end with the assistant's"
        raise DatasetError(f"row {number}: {key!r} is {reply!r}, {what} (columns: {', '.join(row)})")
    return messages


def _message(value: Any, key: str, number: int) -> Any:
    """A message as it is, or ShareGPT's {from, value} as {role, content}. Raises DatasetError for unknown speakers."""
    if not isinstance(value, dict) or "role" in value or "from" not in value:
        return value
    role = SHAREGPT.get(str(value["from"]))
    if role is None:
        what = f"{key!r} has a message from {value['from']!r:.100}, must be from {', '.join(SHAREGPT)}"
        raise DatasetError(f"row {number}: {what}; write messages of role and content for others, such as tools")
    return {"role": role, "content": value.get("value")}


def _with_system(messages: Messages, row: Row, form: FormatConfig, number: int) -> Messages:
    """The messages behind the row's or the YAML's system message, unless they begin with one of their own."""
    first = messages[:1]
    if first and isinstance(first[0], dict) and first[0].get("role") == "system":
        return messages
    system = row.get(form.system_prompt_key) if form.system_prompt_key else form.system_prompt
    if system is not None and not isinstance(system, str):
        raise DatasetError(
            f"row {number}: {form.system_prompt_key!r} is {system!r:.100}, must be text: a system message"
        )
    return [{"role": "system", "content": system}, *messages] if system else messages


def text_key(form: FormatConfig, row: Row) -> str:
    """The column of plain text (cpt) in the first row: format.prompt_key or a common name. Raises DatasetError."""
    for key in (form.prompt_key, *_TEXTS):
        if isinstance(row.get(key), str):
            return key
    found = ", ".join(row)
    raise DatasetError(f"the rows have no text in {form.prompt_key!r}; they have {found}. Set format.prompt_key")


def plain_text(row: Row, key: str, number: int) -> str:
    """A row's text. Raises DatasetError naming row and column."""
    text = row.get(key)
    if not isinstance(text, str) or not text:
        raise DatasetError(f"row {number}: {key!r} is {text!r}, must be text (columns: {', '.join(row)})")
    return text


def preference_pair(row: Row, form: FormatConfig, number: int) -> tuple[Messages, Messages]:
    """A row's chosen and rejected conversation, both ending with an assistant message. Raises DatasetError.

    Each column has a reply to the prompt, which is text or messages, or a whole conversation.
    """
    prompt = _prompt(row, form, number)
    pair = []
    for key in (form.chosen_key, form.rejected_key):
        messages = _reply(row, key, number)
        if len(messages) == 1:
            if not isinstance(prompt, list) or not prompt:
                what = "must be text or messages"
                raise DatasetError(f"row {number}: {form.prompt_key!r} is {row.get(form.prompt_key)!r}, {what}")
            messages = [*prompt, *messages]
        else:
            messages = _with_system(messages, row, form, number)
        _check_messages(messages, key, number)
        pair.append(messages)
    return pair[0], pair[1]


def _check_messages(messages: list[Any], key: str, number: int) -> None:
    """Raises DatasetError unless every message has a role and text, and the last one, which is trained, text or calls.

    A content of parts becomes their text, as templates that read parts write it; others would write the list itself.
    The null content of a last message that only calls tools becomes an empty text.
    """
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DatasetError(f"row {number}: {key!r} has {message!r:.100}, must be a message with a role")
        content = message.get("content")
        if isinstance(content, list):
            texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
                     for part in content]  # fmt: skip
            if not all(isinstance(text, str) for text in texts):
                what = f"has a message with the content {content!r:.100}, must be text, or parts of the type text"
                raise DatasetError(f"row {number}: {key!r} {what}")
            messages[place] = {**message, "content": "".join(map(str, texts))}
        elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise DatasetError(f"row {number}: {key!r} has a message with the content {content!r:.100}, must be text")
    if messages[-1].get("content") is None:
        messages[-1] = {**messages[-1], "content": ""}


def _is_assistants(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def reader(kind: str, form: FormatConfig, first: Row) -> Callable[[Row, int], dict[str, str]]:
    """A function from a row and its number to the fields of an Example, for rows of a kind (AlgorithmPlan.rows).

    Raises DatasetError if the first row does not fit. The function raises DatasetError naming row and column.
    """
    if kind == "text":
        key = text_key(form, first)
        return lambda row, number: {"text": plain_text(row, key, number)}
    if kind == "pairs":
        if form.prompt_key not in first and isinstance(first.get(form.messages_key), list):
            form = form.model_copy(update={"prompt_key": form.messages_key})  # as Trinity-RFT names it

        def pair(row: Row, number: int) -> dict[str, str]:
            chosen, rejected = preference_pair(row, form, number)
            fields = {"messages_json": _dumped(chosen, number), "rejected_json": _dumped(rejected, number)}
            return fields | _tools(row, number)

        return pair
    usual = sft_format(form, first)
    return lambda row, number: {
        "messages_json": _dumped(sft_messages(row, usual, number), number),
        **_tools(row, number),
    }


def _tools(row: Row, number: int) -> dict[str, str]:
    """The field of the tools that the assistant may call: the row's column `tools`, a list or its JSON text."""
    found = row.get("tools")
    if isinstance(found, str):
        try:
            found = json.loads(found) if found.strip() else None
        except ValueError as error:
            raise DatasetError(f"row {number}: 'tools' is no JSON: {error}") from None
    if not found:
        return {}
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise DatasetError(f"row {number}: 'tools' is {found!r:.100}, must be a list of descriptions of tools")
    return {"tools_json": _dumped(found, number)}


def _dumped(messages: Messages, number: int) -> str:
    """Messages as JSON. Times and decimals of parquet become text. Raises DatasetError for bytes, such as a picture."""

    def as_text(value: Any) -> str:
        if isinstance(value, bytes):
            raise DatasetError(f"row {number}: its messages hold {len(value)} bytes, must be text")
        return str(value)

    return json.dumps(messages, default=as_text)


def check_columns(form: FormatConfig, rows: Sequence[Row]) -> None:
    """Raises DatasetError for an optional column of the format that no row has: it would never be read."""
    for key in ("system_prompt_key", "workflow_key", "reward_fn_key"):
        column = getattr(form, key)
        if column and not any(column in row for row in rows):
            found = ", ".join(rows[0])
            raise DatasetError(f"format.{key} is {column!r}, and no row has such a column; they have {found}")


def features(rows: Sequence[Row], keys: Sequence[str]) -> list[list[float]]:
    """Values of numeric columns, for selectors. Raises DatasetError naming row and column."""
    return [[_number(row, number, key) for key in keys] for number, row in enumerate(rows)]


def _number(row: Row, number: int, key: str) -> float:
    found = finite(row.get(key))
    if found is None:
        raise DatasetError(f"row {number}: {key!r} is {row.get(key)!r:.100}, must be a number")
    return found


def finite(value: Any) -> float | None:
    """A finite number as a float. Returns None for other values, and for integers beyond float64."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def _read_hub(path: str, split: str, subset: str | None) -> list[Row]:
    """Rows of a hub dataset. If the hub does not answer, the cache of the datasets library is read.

    Raises DatasetError also for a hub that sends next to nothing.
    """
    try:
        from huggingface_hub import constants

        whom = f"the hub at {constants.ENDPOINT}"
        silence = hub.bounded(lambda: _hub_silence(constants.ENDPOINT), whom, "an answer")
        constants.HF_HUB_OFFLINE = bool(silence)  # otherwise each request is tried six times, in 25 s
        import datasets
    except Unavailable as error:
        raise DatasetError(f"{path!r} is no file or folder here, and {error}; give a local path") from None
    except ImportError:
        raise DatasetError(
            f"{path!r} is no file or folder here, and a hub name needs the datasets library; "
            "pip install -e '.[hub]', or give a local path"
        ) from None
    try:
        found = hub.bounded(lambda: datasets.load_dataset(path, subset, split=split), whom, f"the dataset {path}")
        if "Image(" in repr(found.features):  # the files, not the decoded images
            rows: list[Row] = found.with_format("arrow")[:].to_pylist()
            return rows
        return [dict(row) for row in found]
    except Exception as error:  # datasets raises many types, from ConnectionError to ValueError
        if silence:
            what = f"is no file or folder here, and the hub at {constants.ENDPOINT} (HF_ENDPOINT) does not answer"
            raise DatasetError(f"{path!r} {what} ({silence}); give a local path") from None
        raise DatasetError(f"{path!r}: the datasets library cannot load it: {error}") from None


def _hub_silence(endpoint: str, seconds: float = 5) -> str:
    """Returns the reason why the hub does not answer; empty if it does. Its client honours proxies, HF_HUB_OFFLINE."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=seconds)
    except Exception as error:  # the client's library, and so its errors, may change
        return str(error) or type(error).__name__
    return ""
