"""engine_args: names are those of the installed vLLM; what would break versions or log-probabilities is refused."""

from pathlib import Path
from typing import Any

import pytest

from trinity.config.checks import engine_args
from trinity.config.checks.sections import check
from trinity.config.schema import Config

pytestmark = pytest.mark.core

_SOURCE = """
class EngineArgs:
    model: str = ""
    quantization: str | None = None
    max_num_batched_tokens: int | None = None
    speculative_config: dict | None = None

    def create_engine_config(self): ...


class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False


class Other:
    not_an_argument: int = 0
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM whose source has few arguments, and which must not be imported."""
    (tmp_path / "vllm/engine").mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").write_text("raise AssertionError('vLLM was imported')")
    (tmp_path / "vllm/engine/arg_utils.py").write_text(_SOURCE)
    for folder, names in (("tool_parsers", ("hermes", "qwen3_xml")), ("reasoning", ("qwen3", "deepseek_r1"))):
        (tmp_path / "vllm" / folder).mkdir()
        table = {name: (f"{name}_parser", "Parser") for name in names}
        (tmp_path / "vllm" / folder / "__init__.py").write_text(f"raise AssertionError\n_TO_REGISTER = {table!r}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "vllm", raising=False)
    for name in ("installed_arguments", "installed_parsers"):
        monkeypatch.setattr(engine_args, name, getattr(engine_args, name).__wrapped__)


def said(arguments: dict[str, Any], auxiliary: bool = False) -> list[tuple[str, str]]:
    """(argument, problem) of what `trinity check` refuses."""
    return problems({"engine_args": arguments}, "engine_args.", auxiliary)


def problems(section: dict[str, Any], key: str = "", auxiliary: bool = False) -> list[tuple[str, str]]:
    explorer = {"auxiliary_models": [{"model_path": "/j", **section}]} if auxiliary else {"rollout_model": section}
    config = Config.model_validate(
        {
            "project": "p",
            "name": "n",
            "model": {"model_path": "/m", "max_prompt_tokens": 8, "max_response_tokens": 8},
            "buffer": {"explorer_input": {"taskset": {"name": "t", "path": "d.jsonl"}}},
            "explorer": explorer,
        }
    )
    place = "explorer.auxiliary_models.0." if auxiliary else "explorer.rollout_model."
    return [(p.path.removeprefix(place + key), p.message) for p in check(config) if p.path.startswith(place + key)]


def test_arguments_of_vllm_are_taken() -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    assert said({"quantization": "fp8", "speculative_config": ngram, "enable_log_requests": True}) == []


def test_a_name_that_this_vllm_lacks_is_refused_with_the_nearest() -> None:
    assert said({"max_num_batch_tokens": 9, "zzz": 1, "not_an_argument": 1}) == [
        ("max_num_batch_tokens", "is no argument of the installed vLLM; did you mean 'max_num_batched_tokens'?"),
        ("zzz", "is no argument of the installed vLLM; see vllm.AsyncEngineArgs"),
        ("not_an_argument", "is no argument of the installed vLLM; see vllm.AsyncEngineArgs"),
    ]


def test_names_are_not_looked_up_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert said({"max_num_batch_tokens": 9}) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("logprobs_mode", "log-probabilities would be of another distribution"),
        ("scheduler_cls", "weight versions travel and are counted through it"),
        ("hf_overrides", "the trainer would compute another model"),
        ("pipeline_parallel_size", "Trinity places engines"),
        ("hf_token", "secrets do not belong into a YAML"),
        ("max_num_seqs", "has a key of its own: explorer.rollout_model.max_num_seqs"),
        ("max_model_len", "has a key of its own: model.max_model_len"),
    ],
)
def test_what_would_break_versions_or_logprobs_is_refused_with_the_reason(name: str, reason: str) -> None:
    ((where, problem),) = said({name: 1})
    assert where == name
    assert reason in problem


def test_auxiliary_models_take_what_only_the_policy_cannot() -> None:
    assert said({"quantization": "fp8"}, auxiliary=True) == []
    refused = said({"max_model_len": 1, "runner": "pooling", "node_rank": 1}, auxiliary=True)
    assert [name for name, _ in refused] == ["max_model_len", "runner", "node_rank"]
    assert refused[0][1] == "has a key of its own: explorer.auxiliary_models.0.max_model_len"


def test_parsers_are_those_of_the_installed_vllm() -> None:
    assert problems({"tool_call_parser": "qwen3_xml", "reasoning_parser": "deepseek_r1"}) == []
    assert problems({"tool_call_parser": "hermes2", "reasoning_parser": ""}) == [
        ("tool_call_parser", "'hermes2' is no parser of the installed vLLM; did you mean 'hermes'?")
    ]
    assert problems({"reasoning_parser": "none"}) == [
        ("reasoning_parser", "'none' is no parser of the installed vLLM; known: deepseek_r1, qwen3")
    ]


def test_the_parsers_of_the_real_vllm_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    pytest.importorskip("vllm.version")
    assert {"hermes", "llama3_json"} <= engine_args.installed_parsers("tool_call_parser")
    assert {"qwen3", "deepseek_r1"} <= engine_args.installed_parsers("reasoning_parser")
