"""The chat template of a model: one text from all settings, for explorers, trainer and checks, and its properties.

Properties are found by rendering, not by a list of models: what the template opens of a reply (`<think>`), which token
ends a reply, whether former turns stay as they were, and whether it reads a system prompt.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from trinity.config import Plan
from trinity.config.schema.model import ModelConfig
from trinity.config.workflows import is_one_sequence
from trinity.runtime.errors import InvalidInput

Message = dict[str, Any]

# Characters of a private use area mark a text in a rendered one. Real text does not have them.
_MARK = "\ue0a1\ue0a2\ue0a3"
_ASKED: Message = {"role": "user", "content": "?"}
# A tag at the end of a generation prompt, opened or closed: <think>, [THINK], ◁think▷, </think>.
_LAST_TAG = re.compile(r"([<\[◁])(/?)(\w+)([>\]▷])(\s*)\Z")
_TOOL_NAME = "probed_tool"
_TOOL = {"name": _TOOL_NAME, "description": "", "parameters": {"type": "object", "properties": {}}}
# Puts a system prompt before the first message of the user, as the authors of Gemma do. One line: see chat_template.
_FOLD = (
    "{% if messages and messages[0].role == 'system' %}"
    "{% set folded = messages[0].content %}"
    "{% set folded = folded if folded is string else folded | map(attribute='text') | join %}"
    "{% set asked = messages[1].content if messages[1:] and messages[1].role == 'user' else none %}"
    "{% if asked is none %}{% set messages = [{'role': 'user', 'content': folded}] + messages[1:] %}"
    "{% else %}{% set folded = folded + '\\n\\n' %}"
    "{% set asked = folded + asked if asked is string else [{'type': 'text', 'text': folded}] + asked %}"
    "{% set messages = [{'role': 'user', 'content': asked}] + messages[2:] %}{% endif %}"
    "{% endif +%}"
)


def template_key(model: ModelConfig) -> str:
    """The YAML key that gives the chat template. model.model_path stands for the tokenizer's template."""
    if model.chat_template_path:
        return "model.chat_template_path"
    return "model.custom_chat_template" if model.custom_chat_template else "model.model_path"


def configured_template(model: ModelConfig) -> str | None:
    """Returns the chat template that the YAML gives, or None. Raises InvalidInput for an unreadable file."""
    if not model.chat_template_path:
        return model.custom_chat_template or None
    path = Path(model.chat_template_path).expanduser()
    try:
        if path.exists() and not path.is_file():  # a pipe might never end
            raise OSError("it is no file")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        what = f"{model.chat_template_path!r} cannot be read: {error}"
        raise InvalidInput("model.chat_template_path", what) from None


def load_tokenizer(model: ModelConfig) -> Any:
    """The model's tokenizer. Raises InvalidInput if it cannot be loaded, or has no tokens.

    For a folder without its files transformers makes one of a few special tokens (Qwen, Gemma, GPT-2).
    """
    from transformers import AutoTokenizer

    path = model.model_path
    try:
        found = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # files of a tokenizer may hold anything
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        raise InvalidInput("model.model_path", f"{path!r} has no usable tokenizer: {kind}{error}") from error
    if len(found) <= len(getattr(found, "added_tokens_decoder", ())):
        what = "has no files of a tokenizer, such as tokenizer.json; copy those of its base model into it"
        raise InvalidInput("model.model_path", f"{path!r} {what}")
    return found


def chat_template(model: ModelConfig, tokenizer: Any) -> "ChatTemplate":
    """Sets the model's template in its tokenizer, with model.enable_thinking, and returns its properties.

    A template that refuses or leaves out a system prompt gets it before the first message of the user. Raises
    InvalidInput for a missing template or an unreadable file.
    """
    template = configured_template(model) or tokenizer.chat_template
    if isinstance(template, dict):  # named templates; transformers takes the default
        template = template.get("default")
    if not template:
        raise InvalidInput(
            "model.model_path", f"{model.model_path} has no chat template; set model.custom_chat_template"
        )
    if model.enable_thinking is not None:
        template = f"{{% set enable_thinking = {str(model.enable_thinking).lower()} +%}}{template}"
    tokenizer.chat_template = str(template)
    found = ChatTemplate(tokenizer)
    if found.refuses_system:
        tokenizer.chat_template = _FOLD + tokenizer.chat_template
        found = ChatTemplate(tokenizer, folds_system=True)
    return found


class ChatTemplate:
    """The template of a tokenizer. `folds_system`: it writes a system prompt into the first message of the user."""

    def __init__(self, tokenizer: Any, folds_system: bool = False) -> None:
        self._tokenizer = tokenizer
        self.text = str(getattr(tokenizer, "chat_template", ""))
        self.folds_system = folds_system

    def render(
        self, messages: Sequence[Message], ask: bool = True, tools: Sequence[dict[str, Any]] | None = None
    ) -> str:
        """The text of a conversation, with `ask` up to the next reply. Raises InvalidInput if the template refuses."""
        try:
            text: Any = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=ask, tools=list(tools) if tools else None
            )
        except (TimeoutError, MemoryError):  # limits of the caller
            raise
        except Exception as error:  # Jinja templates raise what they like
            raise InvalidInput("messages", f"the chat template refuses them: {error}") from error
        return str(text)

    def after_reply(self, messages: Sequence[Message]) -> str:
        """The text between a reply and the next one: the end of the turn, new messages and the begin of the reply."""
        _, found, after = self.render([_ASKED, _said(_MARK), *messages]).partition(_MARK)
        if not found:
            raise InvalidInput("messages", "the chat template leaves out a former reply")
        return after

    @property
    def refuses_system(self) -> bool:
        """True if it refuses or leaves out a system prompt, and takes the same conversation without one."""
        try:
            if _MARK not in self.render([{"role": "user", "content": _MARK}]):
                return False
        except InvalidInput:
            return False
        try:
            return _MARK not in self.render([{"role": "system", "content": _MARK}, _ASKED])
        except InvalidInput:
            return True

    @cached_property
    def opened(self) -> str:
        """The begin of a reply that the template itself writes before sampling: `<think>` and a newline, or nothing."""
        try:
            asked, before = self.render([_ASKED]), self._around_reply()[0]
        except InvalidInput:
            return ""
        tag = _LAST_TAG.search(asked)
        begin = asked[len(before) :] if asked.startswith(before) else tag[0] if tag and not tag[2] else ""
        text = str(self._tokenizer.decode(self._encode(begin), skip_special_tokens=True))
        return text if text.strip() else ""

    @cached_property
    def turn_end(self) -> int | None:
        """The token that ends the last reply of a conversation; None if the template only writes text there.

        Templates that write nothing after the last reply (GLM) end it with the token that begins the next turn.
        """
        for messages in ([], [_ASKED]):
            try:
                after = self._around_reply(messages)[1]
            except InvalidInput:
                continue
            if after.strip():
                return self._first_special(after)
        return None

    @cached_property
    def history_problem(self) -> str:
        """The reason why a conversation cannot grow by tokens under this template; empty if it can.

        Some templates drop the thoughts of former turns, begin a reply with text that they drop later, or end former
        replies otherwise than the last one. Then the second prompt does not continue the first.
        """
        for reply, what in (
            ("Yes.", "it writes former replies otherwise than it asked for them"),
            ("<think>\nA thought.\n</think>\n\nYes.", "it leaves out what was thought in former turns"),
        ):
            asked: list[Message] = [{"role": "user", "content": text} for text in ("First?", "Second?", "Third?")]
            said = _said(reply)
            try:
                whole = self.render([asked[0], said, asked[1], said, asked[2]])
                after = self.after_reply(asked[1:2])
                grown = self.render(asked[:1]) + reply + after + reply + self.after_reply(asked[2:])
            except InvalidInput as error:
                return f"it takes no conversation of several turns: {error}"
            if whole != grown:
                return what
        if self.turn_end is not None and self._first_special(after) != self.turn_end:
            return "it ends former replies with another token than the last one"
        return ""

    @cached_property
    def shows_tools(self) -> bool:
        """True if a prompt names the tools that the assistant may call."""
        try:
            return _TOOL_NAME in self.render([_ASKED], tools=[{"type": "function", "function": _TOOL}])
        except InvalidInput:
            return False

    def example(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> tuple[list[int], list[int]]:
        """Token ids of a conversation's prompt, and of its last message up to the end of the turn, which are trained.

        `tools` are those that the assistant may call. A template without a place for tools leaves them out.
        The prompt ends as in rollouts. If it opens thoughts, the reply continues them: a `<think>` at its begin is
        left out, and a reply without thoughts closes them at once. If it closes them, the reply's own are left out.
        Raises InvalidInput if the template refuses.
        """
        asked, whole = self.render(messages[:-1], tools=tools), self.render(messages, ask=False, tools=tools)
        content = messages[-1].get("content")
        prompt, tokens = self._encode(asked), self._encode(whole)
        tag = self._last_tag if self._last_tag is not None and asked.endswith(self._last_tag[0]) else None
        doubled = tag is not None and whole[len(asked) :].lstrip().startswith(_written(tag))
        if tokens[: len(prompt)] == prompt and not doubled:
            response = tokens[len(prompt) :]
        elif whole.startswith(asked) and not doubled:  # a token of the whole text crosses the end of the prompt
            response = self._encode(whole[len(asked) :])
        else:
            marked = self.render([*messages[:-1], {**messages[-1], "content": _MARK}], ask=False, tools=tools)
            _, found, after = marked.partition(_MARK)
            text = content if isinstance(content, str) else ""
            response = self._encode(_continued(text, tag) + (after if found else ""))
        return prompt, _up_to(self._end_of(messages), response)

    @cached_property
    def _last_tag(self) -> re.Match[str] | None:
        try:
            return _LAST_TAG.search(self.render([_ASKED]))
        except InvalidInput:
            return None

    def _end_of(self, messages: Sequence[Message]) -> int:
        """The token that ends the last message. A call of tools may end otherwise than an answer.

        gpt-oss writes another token there, and GLM nothing: its calls end with the token that begins the tool's turn.
        """
        usual = self.turn_end if self.turn_end is not None else end_of_text(self._tokenizer)
        if not messages[-1].get("tool_calls"):
            return usual
        whole = self.render(messages, ask=False)
        last = self._encode(whole.rstrip())[-1:]
        if last and last[0] in self._tokenizer.all_special_ids:
            return last[0]
        try:
            after = self.render([*messages, {"role": "tool", "content": _MARK}], ask=False)
        except InvalidInput:
            return usual
        found = self._first_special(after.removeprefix(whole)) if after.startswith(whole) else None
        return usual if found is None else found

    def _around_reply(self, messages: Sequence[Message] = ()) -> tuple[str, str]:
        """The text before a reply of a finished conversation, and the text after it."""
        before, found, after = self.render([_ASKED, _said(_MARK), *messages], ask=False).partition(_MARK)
        if not found:
            raise InvalidInput("messages", "the chat template leaves out a reply")
        return before, after

    def _first_special(self, text: str) -> int | None:
        """The first token after spaces, if it is a special or added token, else None."""
        tokens = self._encode(text.lstrip())
        special = {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}
        return tokens[0] if tokens and tokens[0] in special else None

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]


def _up_to(end: int, response: list[int]) -> list[int]:
    """Cuts off the text that a template writes after the last end of a turn (Qwen's newline), or adds the end."""
    if end in response:
        return response[: len(response) - response[::-1].index(end)]
    return [*response, end]


def end_of_text(tokenizer: Any) -> int:
    """The tokenizer's token that ends a text. Raises InvalidInput if it has none."""
    if tokenizer.eos_token_id is None:
        what = f"is missing in {tokenizer.name_or_path or 'the tokenizer'}; responses end with it: name it there"
        raise InvalidInput("tokenizer.eos_token", what)
    return int(tokenizer.eos_token_id)


def refuse_unembedded(tokenizer: Any, largest: int, rows: int) -> None:
    """Raises InvalidInput if the largest token lies beyond the rows of the model's embedding."""
    if largest >= rows:
        token = tokenizer.convert_ids_to_tokens(largest)
        what = f"its tokenizer has {token!r} as number {largest}, and its embedding {rows} rows, from 0 on"
        raise InvalidInput("model.model_path", f"{what}; call resize_token_embeddings and save it again")


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _written(tag: re.Match[str], shut: bool = False) -> str:
    return f"{tag[1]}{'/' if shut else ''}{tag[3]}{tag[4]}"


def _continued(content: str, tag: re.Match[str] | None) -> str:
    """A reply's text after a prompt that ends with this tag."""
    if tag is None:
        return content
    shut, begins = _written(tag, shut=True), content.lstrip().startswith(_written(tag))
    if tag[2]:
        return content.partition(shut)[2].lstrip() if begins and shut in content else content
    if begins:
        return content.lstrip().removeprefix(_written(tag)).removeprefix(tag[5])
    return content if shut in content else f"{'' if tag[5] else chr(10)}\n{shut}\n\n{content}"


def refuse_rewritten_history(plan: Plan, history_problem: str) -> None:
    """Raises InvalidInput if a taskset's workflow needs former turns unchanged, and this template changes them."""
    source = plan.config.buffer.explorer_input
    tasksets = [(taskset, source.workflow_of(taskset, False)) for taskset in plan.tasksets]
    tasksets += [(taskset, source.workflow_of(taskset, True)) for taskset in plan.eval_tasksets]
    for taskset, workflow in tasksets:
        if history_problem and is_one_sequence(workflow, taskset.workflow_args):
            raise InvalidInput(
                "model.custom_chat_template",
                f"{workflow} of taskset {taskset.name} makes one sequence of several turns, but of the model's chat "
                f"template {history_problem}; set its workflow_args.step_wise: true, or give a template that leaves "
                "former turns as they were",
            )
