"""Twelve families' chat templates: what a reply is, where it ends, and what is trained (docs/chat_templates.md)."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.fakes.models.chat_templates import FAMILIES, Family
from trinity.config.schema.model import ModelConfig
from trinity.data.templates import ChatTemplate, chat_template, load_tokenizer
from trinity.runtime.errors import InvalidInput

pytestmark = pytest.mark.core

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "2+2"}
THOUGHT = "<think>\nA.\n</think>\n\n4"
HEAD = "| family | a reply ends with | begun by the prompt | trained of `4` | several turns | system prompt | tools |"

by_name = pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])


def load(family: Family, template: str = "") -> tuple[Any, ChatTemplate]:
    tokenizer = family.tokenizer()
    model = ModelConfig(model_path="m", enable_thinking=family.thinking, custom_chat_template=template or None)
    return tokenizer, chat_template(model, tokenizer)


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def code(text: str) -> str:
    return f"`{json.dumps(text, ensure_ascii=False)[1:-1]}`".replace("|", "\\|")


def row(family: Family) -> str:
    tokenizer, template = load(family)
    assert template.turn_end is not None
    end = tokenizer.convert_ids_to_tokens(template.turn_end)
    stops = code(end) + ("" if end in {family.eos, *family.ends} else ", which is no eos")
    trained = tokenizer.decode(template.example([ASKED, said("4")])[1])
    system = "in the first message of the user" if template.folds_system else "yes"
    cells = (
        family.name, stops, code(template.opened) if template.opened else "", code(trained),
        "rewritten" if template.history_problem else "one sequence", system, "yes" if template.shows_tools else "no",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def test_the_page_has_the_table_of_these_templates(repository: Path) -> None:
    table = "\n".join([HEAD, "|---|---|---|---|---|---|---|", *map(row, FAMILIES)])
    assert table in (repository / "docs/chat_templates.md").read_text(), f"write this table:\n{table}"


@by_name
@pytest.mark.parametrize("reply", ["4", THOUGHT, "A.\n</think>\n\n4"])
def test_a_trained_reply_follows_the_prompt_of_rollouts_and_ends_once(family: Family, reply: str) -> None:
    tokenizer, template = load(family)
    talk = [SYSTEM, ASKED]
    prompt, response = template.example([*talk, said(reply)])
    assert prompt == tokenizer.encode(template.render(talk), add_special_tokens=False)
    assert response[-1] == template.turn_end and response.count(response[-1]) == 1
    text = tokenizer.decode([*prompt, *response])
    assert "Be brief." in text
    part = text[text.index("2+2") :]
    assert part.count("<think>") <= 1, part
    assert "A." in part or "A." not in reply or family.thinking is False
    assert re.search(r"4(<[^>]+>|</s>)$", part)


@by_name
def test_a_conversation_that_is_not_rewritten_grows_by_tokens(family: Family) -> None:
    tokenizer, template = load(family)
    talk = [ASKED, said("4"), {"role": "user", "content": "3+3"}, said("6")]
    grown = template.render(talk[:1]) + "4" + template.after_reply(talk[2:3]) + "6"
    whole = template.render(talk, ask=False)
    assert whole.startswith(grown) == (not template.history_problem)
    if not template.history_problem:
        after = tokenizer.encode(template.after_reply(talk[2:3]), add_special_tokens=False)
        assert after[0] == template.turn_end


_CALL = "{% if m.tool_calls %}<tool_call>{{ m.tool_calls[0].function.name }}</tool_call>{% endif %}"


@pytest.mark.parametrize(
    ("name", "turn", "call_end", "answer_end"),
    [
        ("GLM-4.5", "<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content or '' }}" + _CALL,
         "<|observation|>", "<|user|>"),
        ("gpt-oss", "<|start|>{{ m.role }}<|message|>{{ m.content or '' }}" + _CALL
         + "{{ '<|call|>' if m.tool_calls else '<|return|>' if loop.last else '<|end|>' }}", "<|call|>", "<|return|>"),
        ("Qwen2.5", "<|im_start|>{{ m.role }}\n{{ m.content or '' }}" + _CALL + "<|im_end|>\n",
         "<|im_end|>", "<|im_end|>"),
        ("GLM-4.5", "<|{{ m.role }}|>\n{{ m.content or '' }}{% if m.role == 'tool' %}{{ raise_exception('no') }}"
         "{% endif %}" + _CALL, "<|user|>", "<|user|>"),
    ],
)  # fmt: skip
def test_a_call_of_tools_ends_as_before_its_result(name: str, turn: str, call_end: str, answer_end: str) -> None:
    family = next(one for one in FAMILIES if one.name == name)
    begin = {"GLM-4.5": "<|assistant|>\n", "gpt-oss": "<|start|>assistant<|message|>"}.get(
        name, "<|im_start|>assistant\n"
    )
    asks = f"{{% if add_generation_prompt %}}{begin}{{% endif %}}"
    tokenizer, template = load(family, f"{{% for m in messages %}}{turn}{{% endfor %}}{asks}")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    for content in ("", None, "I add."):
        message = {"role": "assistant", "content": content, "tool_calls": [call]}
        trained = tokenizer.decode(template.example([ASKED, message])[1])
        assert trained == f"{content or ''}<tool_call>add</tool_call>{call_end}"
    assert tokenizer.decode(template.example([ASKED, said("4")])[1]) == f"4{answer_end}"


def test_a_system_prompt_is_folded_where_the_template_refuses_or_drops_it() -> None:
    gemma = next(family for family in FAMILIES if family.name == "Gemma 2")
    drops = "{% for m in messages if m.role != 'system' %}<start_of_turn>{{ m.content }}<end_of_turn>{% endfor %}"
    for template in ("", drops):
        _, found = load(gemma, template)
        assert found.folds_system
        text = found.render([SYSTEM, ASKED, said("4"), {"role": "user", "content": "3+3"}])
        assert "Be brief.\n\n2+2<end_of_turn>" in text and text.count("Be brief.") == 1
    _, found = load(gemma)
    assert "user\nBe brief.<end_of_turn>" in found.render([SYSTEM])
    parts = [{**SYSTEM, "content": [{"type": "text", "text": "Be brief."}]}, ASKED]
    assert found.render(parts) == found.render([SYSTEM, ASKED])
    _, listed = load(gemma, drops.replace("m.content", "m.content[0].text + m.content[1].text"))
    assert "Be brief." not in listed.text


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
        ("{% for m in messages %}{{ m.content }} <|im_end|>\n{% endfor %}", "<|im_end|>"),
        ("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", "<|im_start|>"),
    ],
)
def test_the_end_of_a_turn_is_found_by_rendering(template: str, end: str | None) -> None:
    tokenizer, found = load(FAMILIES[0], template)
    assert found.turn_end == (None if end is None else tokenizer.convert_tokens_to_ids(end))
    response = found.example([ASKED, said("4")])[1]
    assert response[-1] == (tokenizer.eos_token_id if end is None else found.turn_end)


@pytest.mark.parametrize("tag", ["<reasoning>", "[THINK]", "◁think▷"])
@pytest.mark.parametrize("space", ["", "\n"])
@pytest.mark.parametrize("drops", [False, True])
def test_any_tag_that_a_prompt_opens_is_trained_once(tag: str, space: str, drops: bool) -> None:
    shut = tag[0] + "/" + tag[1:]
    content = f"m.content.split('{shut}')[-1]" if drops else "m.content"
    tokenizer, template = load(
        FAMILIES[0],
        f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ {content} }}}}<|im_end|>{{% endfor %}}"
        f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{tag}{space}{{% endif %}}",
    )
    assert template.opened == tag + space
    for reply in (f"{tag}{space}A.{shut}4", f"A.{shut}4"):
        assert tokenizer.decode(template.example([ASKED, said(reply)])[1]) == f"A.{shut}4<|im_end|>"
    assert tokenizer.decode(template.example([ASKED, said("4")])[1]).split() == [shut, "4<|im_end|>"]


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text"])
def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(InvalidInput, match=r"model.model_path: .* has no files of a tokenizer, such as tokenizer.json"):
        load_tokenizer(ModelConfig(model_path=str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(InvalidInput, match=r"model.model_path: .* has no usable tokenizer: JSONDecodeError: Expecting"):
        load_tokenizer(ModelConfig(model_path=str(tmp_path)))
