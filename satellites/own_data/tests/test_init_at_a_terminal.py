"""`trinity init` asks at a real terminal: bad answers again with a reason, nothing half-written after Ctrl-C."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from support.programs.terminal import Terminal
from trinity.config import load

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(600)]

COMMAND = [sys.executable, "-m", "trinity.cli.main", "init"]
_SMI = """#!/bin/sh
echo "0, GPU-aaaa, A card, 81920, 81000, 550.1"
echo "1, GPU-bbbb, A card, 81920, 81000, 550.1"
"""


@pytest.fixture
def folder(tmp_path: Path, quickstart_model: Path) -> Path:
    (tmp_path / "small").symlink_to(quickstart_model)
    rows = [{"id": n, "problem": f"{n}+1", "solution": str(n + 1)} for n in range(5)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_questions_lead_to_a_yaml_that_passes_the_deep_check(folder: Path) -> None:
    with Terminal([*COMMAND, "-o", "mine.yaml"], folder) as terminal:
        for question, bad, reason, good in (
            (r"Model \(a folder or a hub name\): ", "smal", "'smal' does not exist; give a model folder", "small"),
            (r"Data \(.*\): ", "sum.jsonl", "'sum.jsonl' does not exist; give a jsonl", "sums.jsonl"),
            (r"Column of the prompts \[problem\]: ", "text", "'text' is no column of the data, which has id", ""),
            (r"Column of the right answers \[solution\]: ", "answr", "'answr' is no column of the data", "id"),
        ):
            terminal.expect(question, 60)
            terminal.type(f"{bad}\n")
            terminal.expect(reason, 60)
            terminal.expect(question, 60)
            terminal.type(f"{good}\n")
        terminal.expect("mine.yaml is written; trinity check --deep mine.yaml:", 60)
        terminal.expect(r"asks explorer and trainer, which import vLLM and torch \.\.\. \d+ s", 120)
        terminal.expect("next: trinity run mine.yaml", 300)
        assert terminal.ended(30) == 0
        shown = terminal.screen()
    assert [line for line in shown.lines if line.startswith('  problem: "0+1"')], shown.lines
    assert "grpo (accuracy_reward compares each reply with the row's answer)" in "".join(shown.lines)
    taskset = load(folder / "mine.yaml").buffer.explorer_input.taskset
    assert taskset is not None
    assert (taskset.format.prompt_key, taskset.format.response_key) == ("problem", "id")


def test_a_machine_with_gpus_asks_for_their_number(folder: Path) -> None:
    tools = folder / "bin"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(_SMI)
    (tools / "nvidia-smi").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    command = [*COMMAND, "--model", "small", "--data", "sums.jsonl"]
    with Terminal(command, folder, environment=environment) as terminal:
        for _ in ("prompts", "right answers"):
            terminal.expect(r"Column of .*\]: ", 60)
            terminal.type("\n")
        for bad in ("three", "3"):
            terminal.expect(r"GPUs to use, of 2 \[2\]: ", 60)
            terminal.type(f"{bad}\n")
            terminal.expect(f"'{bad}' is no number from 0 to 2", 60)
        terminal.expect(r"GPUs to use, of 2 \[2\]: ", 60)
        terminal.type("1\n")
        terminal.expect("run.yaml is written", 60)
        terminal.interrupt()
        assert terminal.ended(60) != 0
    assert load(folder / "run.yaml").cluster.gpu_per_node == 1


@pytest.mark.parametrize("key", ["\x03", "\x04"], ids=["Ctrl-C", "Ctrl-D"])
def test_an_end_in_the_middle_leaves_no_file(folder: Path, key: str) -> None:
    with Terminal([*COMMAND, "--model", "small", "--data", "sums.jsonl"], folder) as terminal:
        terminal.expect(r"Column of the prompts \[problem\]: ", 60)
        terminal.type("\n")
        terminal.expect(r"Column of the right answers \[solution\]: ", 60)
        time.sleep(1)  # a signal between the question and the wait for its answer would be lost
        terminal.type(key)
        terminal.expect("trinity: ended before run.yaml was written", 60)
        assert terminal.ended(30) == 130
    assert sorted(path.name for path in folder.iterdir()) == ["small", "sums.jsonl"]
