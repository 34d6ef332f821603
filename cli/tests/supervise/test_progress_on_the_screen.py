"""The screen of a run: progress with times, processes that start, waits and troubles, each in one readable line."""

import re
from pathlib import Path

import pytest

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.sync.v1 import sync_pb2
from trinity.api.trainer.v1 import trainer_pb2
from trinity.cli.supervise.stage import display, progress
from trinity.cli.supervise.stage.display import LiveDisplay, PlainDisplay
from trinity.cli.supervise.stage.outcome import closing, last_lines
from trinity.cli.supervise.stage.progress import Pace, Starting, facts
from trinity.reading.client import Answers

pytestmark = pytest.mark.core

METRICS = {
    "actor/kl_loss": 0.00123,
    "actor/pg_loss": -0.25,
    "sample/response_length_mean": 23.4,
    "sample/reward_mean": 1,
}


def trainer(
    step: int, last_step: int = 40, state: str = "training", waiting_for: str = ""
) -> trainer_pb2.StatusResponse:
    metrics = METRICS if step else {}
    return trainer_pb2.StatusResponse(
        step=step, last_step=last_step, state=state, metrics=metrics, waiting_for=waiting_for
    )


def stats(**more: object) -> pb.StatsResponse:
    accuracy = pb.Evaluation(step=10, taskset="sums-test", metrics={"accuracy/mean@1": 0.625})
    given = {"fed": 64, "stored": 32, "groups_per_step": 32, "ledger_step": 1, "reward_mean": 0.5, "live_step": 0}
    return pb.StatsResponse(**(given | {"max_staleness_steps": 2, "evaluations": [accuracy]} | more))  # type: ignore[arg-type]


def view(step: int) -> Answers:
    return Answers(stats(), trainer(step), [sync_pb2.Member(explorer_id="e", version=step, tokens_per_second=834.0)])


def test_a_step_has_everything_that_one_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    pace = Pace(now)
    facts(view(10), 40, pace)
    now += 20
    shown = facts(view(20), 40, pace)
    assert shown["step"] == "20/40, 0:20 elapsed, 0:40 left"
    assert (shown["loss"], shown["kl"], shown["length"]) == ("-0.25", "0.00123", "23.4")
    assert (shown["reward"], shown["accuracy"]) == ("0.500", "0.625 of sums-test after step 10")
    assert (shown["tokens/s"], shown["staleness"]) == ("834", "0/2")
    facts(view(11), 40, pace)  # the trainer died, and continues at its checkpoint
    assert facts(view(11), 40, pace)["step"] == "11/40, 0:20 elapsed"


def test_the_number_of_steps_is_never_unknown() -> None:
    assert "step" not in facts(Answers(None, trainer(0, 0, "starting")), 40)
    assert facts(Answers(None, trainer(0, 0)), 40)["step"] == "0/40"


def test_an_explorer_that_loads_is_what_the_trainer_waits_for() -> None:
    waits = trainer(0, 40, "waiting", "step 1: 32 of 32 groups are missing")
    loading, serving = sync_pb2.Member(explorer_id="e", version=-1), sync_pb2.Member(explorer_id="e", version=0)
    assert Answers(stats(), waits).waiting_for == "an explorer: none has joined yet"
    assert Answers(stats(), waits, [loading]).waiting_for == "an explorer: none serves the weights yet"
    assert Answers(stats(), waits, [serving]).waiting_for == "step 1: 32 of 32 groups are missing"
    assert Answers(stats(fed=0), waits).waiting_for == "step 1: 32 of 32 groups are missing"  # rows of a file


def test_plain_lines_are_single_and_short(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 1000.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    screen, title = PlainDisplay(), "project/a-name-as-long-as-people-give/rft"
    starting = [Starting("explorer", "loads vLLM", 43.4), Starting("trainer", "loads the model", 12)]
    screen.show(Answers(None, trainer(0, 0, "starting")), title, 40, starting)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(f"{title}: explorer loads vLLM, 43 s, trainer loads the model, 12 s")
    for step in range(1, 4):
        now += 5
        screen.show(view(step), title, 40)
    now += 5
    broken = stats(failure_causes={"scorer_error": 9}, last_failure="no\nnumber " * 40)
    screen.show(Answers(broken, trainer(4)), title, 40)
    lines = capsys.readouterr().out.splitlines()
    assert [re.search(r"step (\d)/40", line) is not None for line in lines] == [True, True, True, False, True]
    assert "failing: 9 attempts failed, mostly of scorer_error; the newest: no number" in lines[3]
    assert all(len(line) < 160 for line in lines)


def test_a_long_wait_is_said_and_the_short_one_of_each_step_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    screen = PlainDisplay()
    waits = Answers(None, trainer(1, 40, "waiting", "the buffer"))
    lines = []
    for _ in range(30):
        now += 0.5
        screen.show(waits, "p/n", 40)
        lines.append(capsys.readouterr().out)
    assert "waits for" not in "".join(lines[:18])
    assert "waits for the buffer" in "".join(lines[18:25])


def test_only_lines_that_changed_are_written_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "clock", lambda _: "0:00")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "40")
    with LiveDisplay() as screen:
        screen.show(view(10), "p/n", 40)
        first = capsys.readouterr().out
        assert "p/n" in first and "━" in first and "10/40" in first
        screen.show(view(10), "p/n", 40)
        assert capsys.readouterr().out == ""
        screen.show(view(11), "p/n", 40)
        again = capsys.readouterr().out
        assert "11/40" in again and "p/n" not in again and "0.625" not in again
        screen.say("the trainer died")
        said = capsys.readouterr().out
        assert said.index("the trainer died") < said.index("p/n")
    assert capsys.readouterr().out.endswith("\x1b[J")  # the table goes; what was said stays


def test_a_stage_and_a_run_end_with_what_changed_and_what_to_do(tmp_path: Path) -> None:
    evaluations = [{"step": 0, "taskset": "sums-test", "metrics": {}}]
    part = {"steps": 40, "wall_seconds": 151.0, "eval_before": 0.412, "eval_after": 0.871, "evaluations": evaluations}
    assert closing(part) == "40 steps in 2:31, accuracy 0.412 -> 0.871 of sums-test"
    lines = list(last_lines(tmp_path / "my job", tmp_path / "rft", part))
    assert lines[0] == "the run is finished in 2:31: accuracy 0.412 -> 0.871 of sums-test"
    assert [line.split()[1] for line in lines[-3:]] == ["ui", "serve", "convert"]
    assert f"trinity serve --job '{tmp_path / 'my job'}'" in lines[-2]


def test_folders_below_the_current_one_are_said_as_one_types_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    *_, summary, _, pages, _, convert = last_lines(tmp_path / "jobs/a", Path("jobs/a/rft"), {"eval_after": 0.5})
    assert summary == "summary: jobs/a/summary.json"
    assert pages.startswith("  trinity ui --job jobs/a  ") and "--checkpoint-dir jobs/a/rft  " in convert
    assert any(f"--job {tmp_path}-2/a" in line for line in last_lines(Path(f"{tmp_path}-2/a"), None, {}))
