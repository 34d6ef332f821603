"""The quickstart's GRPO learns while `tests/security/attacks.py` attacks it, as it does without.

Processes are forked, and transformers samples where vLLM would (support/programs/forked_run.py). The model has seen
worked sums before, as in the quickstart's first stage, but without a run.
"""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.fakes.explorers.torch_engine import BatchedTorchEngine
from support.programs.forked_run import ForkedRun
from support.programs.run import write_config
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.data.datasets import read
from trinity.trainer.data.examples import from_examples

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(3600)]

sys.path.insert(0, str(Path(__file__).parent))

import attacks  # noqa: E402

STEPS, WARM_STEPS = 40, 200


@pytest.fixture
def runs(repository: Path, quickstart_model: Path, tmp_path: Path) -> Iterator[Callable[[str], ForkedRun]]:
    """Runs of the same model, data and YAML, by the name of their folder."""
    make_data = [sys.executable, str(repository / "examples/quickstart/make_data.py"), str(tmp_path / "data")]
    subprocess.run([*make_data, "--test-size", "200"], check=True, timeout=60, capture_output=True)
    warmed(quickstart_model, tmp_path)
    short = {"buffer": {"total_steps": STEPS}, "explorer": {"eval_interval": STEPS}, "stages": []}
    given = {"TRINITY_MODEL_PATH": str(tmp_path / "warm"), "TRINITY_TASKSET_PATH": str(tmp_path / "data")}
    made: list[ForkedRun] = []

    def make(name: str) -> ForkedRun:
        (folder := tmp_path / name).mkdir()
        config = write_config(repository / "examples/quickstart/arithmetic.yaml", folder / "arithmetic.yaml", short)
        made.append(ForkedRun(config, folder, BatchedTorchEngine, **given))
        return made[-1]

    yield make
    for run in made:
        run.end()


def warmed(folder: Path, place: Path) -> None:
    """The model after some supervised steps, in `place`/warm."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    rows, chosen = read(str(place / "data")), random.Random(0)
    talks = [[{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
             for row in rows]  # fmt: skip
    for step in range(WARM_STEPS):
        examples = [pb.Example(messages_json=json.dumps(talk)) for talk in chosen.sample(talks, 64)]
        sequences = from_examples(pb.LedgerEntry(), examples, tokenizer, 64).sequences
        tokens = torch.zeros(64, max(sequence.length for sequence in sequences), dtype=torch.long)
        labels = torch.full_like(tokens, -100)
        for row, one in enumerate(sequences):
            tokens[row, : one.length] = torch.from_numpy(one.token_ids)
            labels[row, one.prompt_length : one.length] = tokens[row, one.prompt_length : one.length]
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 20)
        model(tokens, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(place / "warm")
    tokenizer.save_pretrained(place / "warm")


def gain(run: ForkedRun) -> float:
    """How much better a run that ends well is at the end."""
    assert run.finish(1200) == 0, run.tail()
    summary = json.loads((run.job / "summary.json").read_text())
    assert summary["steps"] == STEPS
    return float(summary["eval_after"] - summary["eval_before"])


def test_a_run_under_attack_learns_as_one_without(runs: Callable[[str], ForkedRun]) -> None:
    control = runs("control")
    control.start()
    without = gain(control)
    attacked = runs("attacked")
    attacked.start()
    attacked.until(lambda status: (status["step"] or 0) >= 1, 600, "the first step")
    rows = asyncio.run(attacks.attack(attacked.job))
    under_attack = gain(attacked)
    assert {row.attack: row.problem for row in rows if row.problem} == {}
    assert without > 0.1
    assert under_attack > max(0.1, without / 2), f"{under_attack:.3f} beside {without:.3f}"
