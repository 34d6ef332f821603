"""The table of a run on real terminals of 80 and 160 columns: one copy, no line that wraps, and what was said stays."""

import signal
import sys
from pathlib import Path

import pytest

from support.programs.terminal import Terminal

pytestmark = pytest.mark.core

CODE = """
import signal
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.sync.v1 import sync_pb2
from trinity.api.trainer.v1 import trainer_pb2
from trinity.cli.supervise.stage.display import make_display
from trinity.cli.supervise.stage.progress import Starting
from trinity.reading.client import Answers

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
accuracy = {"accuracy/mean@1": 0.625}
tasksets = [pb.Evaluation(step=10, taskset=f"a-taskset-of-a-long-name-{n}", metrics=accuracy) for n in range(3)]
stats = pb.StatsResponse(fed=64, stored=32, groups_per_step=32, ledger_step=1, reward_mean=0.5, evaluations=tasksets,
                         max_staleness_steps=2, failure_causes={"scorer_error": 9}, last_failure="no number " * 30)
metrics = {"actor/kl_loss": 0.00123, "actor/pg_loss": -0.25, "sample/response_length_mean": 23.4}
members = [sync_pb2.Member(explorer_id="e", version=1, tokens_per_second=834.0)]
with make_display() as display:
    display.show(Answers(), "project/name", 40, [Starting("explorer", "loads vLLM and the model", 43.2)])
    for step in range(3):
        trainer = trainer_pb2.StatusResponse(step=step, last_step=40, state="training", metrics=metrics)
        display.show(Answers(stats, trainer, members), "project/name", 40)
        display.say(f"said at step {step}: " + "a long sentence " * 12)
    print("PAUSE", end="\\r", flush=True)
    signal.sigwait({signal.SIGUSR1})
"""


@pytest.mark.parametrize("columns", [80, 160])
def test_the_table_is_there_once_and_leaves_what_was_said(tmp_path: Path, columns: int) -> None:

    with Terminal([sys.executable, "-c", CODE], tmp_path, columns) as terminal:
        terminal.expect("PAUSE", 60)
        shown = terminal.screen()
        terminal.process.send_signal(signal.SIGUSR1)
        assert terminal.ended(30) == 0
        last = terminal.screen()
    title = [number for number, line in enumerate(shown.lines) if line == "project/name"]
    assert len(title) == 1, shown.lines
    table = [line for line in shown.lines[title[0] + 1 :] if line.startswith("  ")]
    assert all(len(line) < columns for line in table)
    names = [line.split("  ")[1].strip() for line in table]
    assert names == [
        "step", "loss", "kl", "length", "reward", "accuracy", "staleness", "tokens/s", "groups", "explorers", "failing",
    ]  # fmt: skip
    assert "━╌" in table[0] and "2/40" in table[0] and table[-1].endswith("...")
    said = [line for line in last.lines if line.startswith("said at step")]
    assert len(said) == 3
    assert not [line for line in last.lines if line == "project/name" or "2/40" in line]
