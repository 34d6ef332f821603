"""`trinity check --deep` renders rows with the model's template, and ends whatever the template or a regex does."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer
from typer.testing import CliRunner

from support.fakes.models.chat_templates import FAMILIES
from support.fakes.models.tokenizer_folder import make_tokenizer_folder
from trinity.cli.main import app
from trinity.cli.supervise.checks import adapters
from trinity.config import Problem, make_plan
from trinity.config.load import parse
from trinity.deep_check import rendered_rows

pytestmark = pytest.mark.core

_NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
_STRICT = "{% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}{{ messages[0].content }}"


def check(folder: Path, algorithm: str, rows: list[dict[str, Any]], **model: Any) -> tuple[int, str]:
    """Exit code and output for a dataset of an offline algorithm."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {
        "name": "rows",
        "path": str(folder / "rows.jsonl"),
        "format": {"prompt_key": "question", "response_key": "answer"},
    }
    config = {
        "mode": "train",
        "checkpoint_root_dir": str(folder / "jobs"),
        "model": {"model_path": str(make_tokenizer_folder(folder / "model")), "max_model_len": 16, **model},
        "algorithm": {"algorithm_type": algorithm},
        "buffer": {"train_batch_size": 1, "trainer_input": {"experience_buffer": dataset}},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    done = CliRunner().invoke(app, ["check", "--deep", str(folder / "run.yaml")])
    assert "Traceback" not in done.output
    return done.exit_code, done.output


def rows_of(algorithm: str, *questions: str) -> list[dict[str, Any]]:
    replies = {"chosen": "yes", "rejected": "no"} if algorithm == "dpo" else {"answer": "2"}
    return [{"question": question, **replies} for question in questions]


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
@pytest.mark.parametrize(
    ("questions", "code", "said"),
    [
        (("1+1", "no"), 2, "refuses row 1 of buffer.trainer_input.experience_buffer: TemplateError: not this"),
        (("1+1", "x" * 16), 0, "1 of 2 measured prompts have 16 tokens or more (model.max_model_len)"),
        (("x" * 16, "x" * 20), 2, "model.max_model_len: is 16; every prompt"),
        (("1+1", "2+2"), 0, "model and data are there"),
    ],
)
def test_examples_are_rendered(
    tmp_path: Path, algorithm: str, questions: tuple[str, ...], code: int, said: str
) -> None:
    found, text = check(tmp_path, algorithm, rows_of(algorithm, *questions), custom_chat_template=_STRICT)
    assert (found, said in text) == (code, True), text


@pytest.mark.parametrize(
    ("family", "workflow", "args", "code", "said"),
    [
        ("Qwen2.5 base", "simple_workflow", {}, 0, "'<|im_end|>' ends a reply, and is no eos token"),
        ("Qwen2.5", "simple_workflow", {}, 0, ""),
        ("Gemma 2", "math_workflow", {}, 0, "system prompts begin the first message of the user"),
        ("QwQ", "simple_workflow", {}, 0, "it begins each reply with '<think>\\n'"),
        ("R1 distillations", "environment_workflow", {"environment": "countdown"}, 2, "makes one sequence of several"),
        ("Qwen3", "tool_call_workflow", {"environment": "countdown"}, 2, "it leaves out what was thought in former"),
        ("Qwen3", "environment_workflow", {"environment": "countdown", "step_wise": True}, 0, ""),
        ("Phi-4", "tool_call_workflow", {"environment": "countdown"}, 0, "it shows the policy no tools"),
    ],
)
def test_what_a_template_does_is_said(
    tmp_path: Path, family: str, workflow: str, args: dict[str, Any], code: int, said: str
) -> None:
    folder = next(one for one in FAMILIES if one.name == family).save(tmp_path / "model")
    taskset = {"name": "a", "path": "a", "workflow_args": args, "default_workflow_type": workflow}
    values = {
        "checkpoint_root_dir": str(tmp_path),
        "model": {"model_path": str(folder), "max_model_len": 512},
        "buffer": {"explorer_input": {"taskset": taskset}},
    }
    config = parse(json.dumps(values))
    found = list(rendered_rows.check_rendering(make_plan(config), [], []))
    assert any(isinstance(one, Problem) for one in found) == (code == 2)
    assert any(said in str(one) for one in found) if said else not found, found


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_a_token_without_an_embedding_is_named(tmp_path: Path, algorithm: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer_folder(tmp_path / "own"))
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "own")
    (tmp_path / "own/config.json").write_text('{"vocab_size": 256}')
    rows = rows_of(algorithm, "1+1", "<new>1")
    code, text = check(tmp_path, algorithm, rows, model_path=str(tmp_path / "own"))
    assert (code, "its tokenizer has '<new>' as number 256, and its embedding 256 rows" in text) == (2, True), text
    (tmp_path / "own/config.json").write_text('{"vocab_size": 257}')
    code, text = check(tmp_path, algorithm, rows, model_path=str(tmp_path / "own"))
    assert "its embedding" not in text


def test_rows_that_are_trained_in_part_are_said(tmp_path: Path) -> None:
    said = "1 of 2 measured rows have more than 16 tokens (model.max_model_len); the tokens behind are not trained"
    assert said in check(tmp_path, "sft", [{"question": "1", "answer": "2" * n} for n in (14, 20)])[1]
    assert said in check(tmp_path, "cpt", [{"text": "2" * n} for n in (16, 20)])[1]


def test_plain_text_needs_no_template(tmp_path: Path) -> None:
    code, text = check(tmp_path, "cpt", [{"question": "a text"}], custom_chat_template="{% if %}")
    assert code == 0, text


@pytest.mark.parametrize("only", ["", "{% if messages[0].content == 'no' %}"])
def test_a_template_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: str) -> None:
    monkeypatch.setattr(rendered_rows, "_MOST_SECONDS", 0.2)
    template = f"{only}{_NESTED}{'{% endif %}' if only else ''}{{{{ messages[0].content }}}}"
    code, text = check(tmp_path, "sft", rows_of("sft", "no"), custom_chat_template=template)
    assert (code, "does not render one conversation within 0.2 s" in text) == (2, True), text


def test_a_constant_that_takes_long_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendered_rows, "_MOST_SECONDS", 0.2)
    code, text = check(tmp_path, "sft", rows_of("sft", "no"), custom_chat_template="{{ 7 ** (10 ** 7) }}")
    assert (code, "does not render one conversation within 0.2 s" in text) == (2, True), text


def test_a_template_that_fills_the_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendered_rows, "_MOST_BYTES", 2**28)
    template = "{% if messages[0].content == 'no' %}{{ 'x' * 800000000 }}{% endif %}{{ messages[0].content }}"
    code, text = check(tmp_path, "sft", rows_of("sft", "no"), custom_chat_template=template)
    assert (code, "takes more than 0.25 GiB to render one conversation" in text) == (2, True), text


def test_given_adapters_of_another_model_are_named_with_their_file(tmp_path: Path) -> None:
    make_tokenizer_folder(tmp_path / "model")
    matrix = "layers.0.q_proj", "layers.0.q_proj.lora_A", "layers.0.q_proj.lora_B"
    for path, prefix, names, shape in (
        ("model/model.safetensors", "", matrix[:1], [2, 2]),
        ("a/adapter_model.safetensors", "base_model.model.", matrix[1:], [4, 1]),
    ):
        header = {f"{prefix}{name}.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, 16]} for name in names}
        content = json.dumps(header).encode()
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(struct.pack("<Q", len(content)) + content + bytes(16))
    config = tmp_path / "a/adapter_config.json"
    config.write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
    rows, lora = rows_of("sft", "1+1"), [{"path": str(tmp_path / "a")}]
    code, text = check(tmp_path, "sft", rows, lora_configs=lora)
    assert (code, "lora_A.weight [4, 1]; rank 4 on" in text and "adapter_model.safetensors" in text) == (2, True), text
    config.unlink()
    code, text = check(tmp_path, "sft", rows, lora_configs=lora)
    assert (code, f"{config}: cannot be read" in text.replace("\n", " ")) == (2, True), text


def test_a_regex_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_MOST_REGEX_SECONDS", 0.2)
    make_tokenizer_folder(tmp_path / "model")
    name = f"model.layers.0.{'a' * 40}_proj.weight"
    header = json.dumps({name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(16)
    (tmp_path / "model/model.safetensors").write_bytes(content)
    lora = [{"lora_rank": 2, "target_modules": ".*(a+)+b"}]
    code, text = check(tmp_path, "sft", rows_of("sft", "1+1"), lora_configs=lora)
    assert (code, "is a regex that does not end within 0.2 s; give names of layers" in text) == (2, True), text
