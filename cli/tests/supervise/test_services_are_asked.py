"""`trinity check --deep` asks explorer and trainer what their start would refuse, with the start's own functions."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trinity.config import make_plan
from trinity.config.load import parse

pytestmark = [pytest.mark.extended, pytest.mark.slow]

EXPLORER, TRAINER = "explorer", "trainer"


def refused(service: str, folder: Path, model: Path, **sections: Any) -> list[str]:
    """The answers of several starts of one service, whose modules are imported once. `sections`: lists of values."""
    code = (
        "import sys, json, os\n"
        "from trinity.runtime.torch_builds import hide_unusable_companions\n"
        "hide_unusable_companions()\n"
        f"from trinity.{service}.refused import refused\n"
        f"from trinity.{service}.settings import {service.capitalize()}Settings as Settings\n"
        "for path in sys.argv[1:]:\n"
        "    print('ANSWER', json.dumps([str(error) for error in refused(Settings(config_file=path, device='cpu'))]))\n"
    )
    paths = []
    for index, changes in enumerate(sections["runs"]):
        values: dict[str, Any] = {
            "name": f"run{index}",
            "checkpoint_root_dir": str(folder),
            "model": {"model_path": str(model), "max_model_len": 64},
            "buffer": {"batch_size": 2, "explorer_input": {"taskset": {"name": "a", "path": "a"}}},
        }
        for key, value in changes.items():
            *parents, last = key.split(".")
            section = values
            for parent in parents:
                section = section.setdefault(parent, {})
            section[last] = value
        make_plan(parse(json.dumps(values)))
        paths.append(folder / f"{index}.json")
        paths[-1].write_text(json.dumps(values))
    command = [sys.executable, "-c", code, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ}, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.removeprefix("ANSWER ") for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    return [" | ".join(json.loads(line)) for line in lines]


@pytest.fixture
def strange(quickstart_model: Path, tmp_path: Path) -> Path:
    """A model of a type that neither vLLM nor transformers knows."""
    folder = tmp_path / "strange"
    shutil.copytree(quickstart_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen9", "architectures": ["Qwen9"]}))
    return folder


def test_an_explorer_is_refused_for_what_vllm_and_the_template_refuse(
    quickstart_model: Path, strange: Path, tmp_path: Path
) -> None:
    rewrites = "{% for m in messages %}<|user|>{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
    played = "buffer.explorer_input.taskset.default_workflow_type"
    runs = [
        {},
        {"explorer.rollout_model.engine_args": {"quantization": "none_such"}},
        {"explorer.rollout_model.engine_args": {"block_size": "many"}},
        {"model.model_path": str(strange)},
        {"model.custom_chat_template": rewrites, played: "tool_call_workflow"},
        {"model.custom_chat_template": "{% endif %}"},
        {"explorer.auxiliary_models": [{"model_path": str(strange), "name": "judge"}]},
    ]
    found = refused(EXPLORER, tmp_path, quickstart_model, runs=runs)
    expected = (
        "",
        "Unknown quantization method: none_such",
        "block_size",
        "explorer.rollout_model: vLLM refuses",
        "tool_call_workflow of taskset a makes one sequence of several turns",
        "model.custom_chat_template: does not compile",
        "qwen9",
    )
    for answer, said in zip(found, expected, strict=True):
        assert said in answer and bool(said) == bool(answer), (said, answer)


def test_a_trainer_is_refused_for_what_transformers_and_its_engine_refuse(
    quickstart_model: Path, strange: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    shutil.copytree(quickstart_model, empty)
    (empty / "model.safetensors").unlink()
    runs = [
        {},
        {"model.model_path": str(empty)},
        {"model.model_path": str(strange)},
        {"model.lora_configs": [{"lora_rank": 2, "target_modules": "none_such"}]},
        {"trainer.ulysses_sequence_parallel_size": 2},
    ]
    found = refused(TRAINER, tmp_path, quickstart_model, runs=runs)
    expected = (
        "",
        "cannot be loaded: Error no file named model.safetensors",
        "does not know its model_type 'qwen9'; a newer one may (pip install -U transformers)",
        "none_such",
        "ulysses_sequence_parallel_size: is 2, which does not divide the 1 ranks",
    )
    for answer, said in zip(found, expected, strict=True):
        assert said in answer and bool(said) == bool(answer), (said, answer)
