"""`trinity replay`: which steps it trains again, how it compares, and what damaged files of a run say."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.fakes.stopped_job import stopped_job
from trinity.lineage import replay
from trinity.lineage import replay_report as report
from trinity.reading.errors import RunError
from trinity.reading.reader import JobStage, find_job_stage
from trinity.study.bisect import metrics_by_step

pytestmark = pytest.mark.core


@pytest.fixture
def stopped(tmp_path: Path) -> Callable[..., Path]:
    return partial(stopped_job, tmp_path / "jobs")


def job_stage_of(job: Path) -> JobStage:
    return find_job_stage(None, job)


def make_report(
    *steps: report.Step, different: dict[str, float | None] | None = None, compared: bool = True
) -> report.Report:
    weights = report.Weights(steps[-1].step, compared, 2, different or {})
    return report.Report("r", "/f", 0, 1, "cpu", list(steps), weights)


def test_equal_metrics_and_weights_are_identical() -> None:
    same = {"actor/pg_loss": 0.1, "actor/grad_norm": None}
    found = make_report(report.Step(1, 4, same, dict(same)), report.Step(2, 4, same, dict(same)))
    assert found.identical
    text = report.render(found)
    assert text.endswith("identical, bit for bit")
    assert "all 2 tensors equal those of the run's checkpoint of step 2" in text
    assert json.loads(json.dumps(found.as_json()))["identical"]


def test_the_last_bit_of_one_metric_is_found() -> None:
    before, after = (
        {"actor/pg_loss": 0.1, "sample/reward_mean": 1.0},
        {"actor/pg_loss": 0.1 + 2**-56, "sample/reward_mean": 1.0},
    )
    found = make_report(report.Step(1, 4, before, before), report.Step(2, 4, before, after))
    assert not found.identical
    text = report.render(found)
    assert "0.1 / 0.10000000000000002" in text
    assert "no: pg_loss" in text
    assert text.endswith("NOT identical: step 2 is the first that differs")


def test_weights_that_differ_are_named_with_the_greatest_difference() -> None:
    same = {"actor/pg_loss": 0.1}
    found = make_report(report.Step(1, 4, same, same), different={"a": 0.5, "b": 2.0, "c": None})
    assert not found.identical
    assert "most in b, by 2" in report.render(found)
    assert report.render(found).endswith("NOT identical: the weights differ")


def test_nothing_compared_is_not_identical() -> None:
    found = make_report(report.Step(1, 4, None, {"actor/pg_loss": 0.1}), compared=False)
    assert not found.identical
    assert "the run noted nothing" in report.render(found)
    assert report.render(found).endswith("nothing could be compared")


def test_of_a_step_trained_twice_the_last_time_counts(tmp_path: Path) -> None:
    (tmp_path / "monitor").mkdir()
    lines = [{"step": 1, "time": 1, "actor/x": 1.0}, {"step": 1, "time/step": 2, "actor/x": 2.0, "sample/y": None}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 2, "act'
    (tmp_path / "monitor/trainer.jsonl").write_text(text)
    assert metrics_by_step(tmp_path) == {1: {"actor/x": 2.0, "sample/y": None}}
    assert report.circumstances(tmp_path) == {}


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        (4, 3, "steps 1 to 8"),
        (3, 9, "steps 1 to 8"),
        (4, None, "the run keeps 5, 7: begin at 6 or later. --from-step 1 begins at the base model"),
    ],
)
def test_steps_that_cannot_be_trained_again(
    stopped: Callable[..., Path], first: int, last: int | None, said: str
) -> None:
    job_stage = job_stage_of(stopped(steps=8, checkpoints=(5, 7)))
    with pytest.raises(RunError) as caught:
        replay.replay(job_stage, first, [], last)
    assert said in str(caught.value)
    assert not (job_stage.folder / "replay").exists()


def test_a_replay_begins_at_the_newest_checkpoint_before_it(stopped: Callable[..., Path]) -> None:
    job_stage = job_stage_of(stopped(steps=8, checkpoints=(5, 7)))
    assert replay._wanted(job_stage, 8, None, 8) == replay.Wanted(8, 8, 7)
    assert replay._wanted(job_stage, 7, 7, 8) == replay.Wanted(7, 7, 5)
    assert replay._wanted(job_stage, 1, 2, 8) == replay.Wanted(1, 2, 0)
    assert list(replay.Wanted(7, 7, 5).steps) == [6, 7]


def test_ranks_are_those_of_the_run(stopped: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "visible_gpus", lambda: ["0", "1"])
    job_stage, wanted = job_stage_of(stopped(steps=8)), replay.Wanted(1, 2, 0)
    notes = report.circumstances(job_stage.folder)
    placement, threads = replay.placement_of(job_stage, wanted, notes)
    assert (placement.device, placement.trainer_ranks, threads) == ("cpu", 1, 2)
    on_gpus = {step: {**note, "device": "cuda", "ranks": 2} for step, note in notes.items()}
    placement, _ = replay.placement_of(job_stage, wanted, on_gpus)
    assert (placement.device, placement.trainer) == ("cuda", ["0", "1"])
    monkeypatch.setattr(replay, "visible_gpus", lambda: ["0"])
    with pytest.raises(RunError, match=r"2 rank\(s\) on GPUs; here 1 GPU\(s\) are free"):
        replay.placement_of(job_stage, wanted, on_gpus)
    with pytest.raises(RunError, match=r"1 rank\(s\) on cpu and 2 rank\(s\) on cuda; choose steps of one of them"):
        replay.placement_of(job_stage, wanted, {1: notes[1], 2: on_gpus[2]})


@pytest.mark.parametrize("state", ["[1]", "7", '{"world_size": "2"}', '{"world_size": [2]}'])
def test_a_damaged_state_of_a_checkpoint_says_nothing_of_ranks(state: str, stopped: Callable[..., Path]) -> None:
    job_stage = job_stage_of(stopped(steps=8))
    file = job_stage.folder / "global_step_4/trainer_state.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(state)
    assert replay.placement_of(job_stage, replay.Wanted(5, 6, 4), {})[0].trainer_ranks == 1


def test_micro_batches_are_as_large_as_those_of_the_run(stopped: Callable[..., Path]) -> None:
    job_stage = job_stage_of(stopped(steps=3, micro_batch_tokens=16_384))
    notes, wanted = report.circumstances(job_stage.folder), replay.Wanted(1, 3, 0)
    tokens = replay._micro_batch_tokens(wanted, notes)
    assert replay.trainer_config(job_stage, [], tokens).trainer.max_token_len_per_gpu == 16_384
    asked = ["trainer.max_token_len_per_gpu=99"]
    assert replay.trainer_config(job_stage, asked, tokens).trainer.max_token_len_per_gpu == 99
    notes[2]["micro_batch_tokens"] = 20_000
    assert replay._micro_batch_tokens(wanted, notes) is None
    assert replay._micro_batch_tokens(wanted, {}) is None


def test_every_replay_has_a_folder_of_its_own(tmp_path: Path) -> None:
    assert [replay.new_folder(tmp_path, "from_4").name for _ in range(3)] == ["from_4", "from_4_2", "from_4_3"]


def test_a_job_that_was_moved_is_trained_again_where_it_is(stopped: Callable[..., Path], tmp_path: Path) -> None:
    job = stopped(steps=2)
    (tmp_path / "elsewhere/p").mkdir(parents=True)
    moved = job.rename(tmp_path / "elsewhere/p/n")
    config = replay.trainer_config(job_stage_of(moved), ["algorithm.optimizer.lr=0.5"])
    assert config.checkpoint_root_dir == str(tmp_path / "elsewhere")
    assert (config.mode, config.algorithm.optimizer.lr) == ("train", 0.5)
    other = job_stage_of(moved.rename(moved.parent / "m"))
    with pytest.raises(RunError, match="does not end in p/n"):
        replay.trainer_config(other, [])


def test_lines_without_a_step_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "monitor").mkdir()
    lines = [{"step": step, "actor/x": 1.0} for step in (None, "1", [1], True, 2)]
    for name in ("trainer", "batches"):
        (tmp_path / f"monitor/{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert metrics_by_step(tmp_path) == {2: {"actor/x": 1.0}}
    assert list(report.circumstances(tmp_path)) == [2]


@pytest.mark.parametrize("value", ["x", [1.0], {}, {"a": 1}])
def test_what_is_no_metric_is_not_compared(value: Any, tmp_path: Path) -> None:
    (tmp_path / "monitor").mkdir()
    line = {"step": 1, "actor/x": 1.0, "actor/y": None, "actor/z": value}
    (tmp_path / "monitor/trainer.jsonl").write_text(json.dumps(line) + "\n")
    assert metrics_by_step(tmp_path) == {1: {"actor/x": 1.0, "actor/y": None}}


@pytest.mark.parametrize("value", [None, "2", [2], {}, 2.0])
def test_circumstances_of_another_type_were_not_noted(value: Any, tmp_path: Path) -> None:
    (tmp_path / "monitor").mkdir()
    known = {"device": "cpu", "threads": 2}
    line = {"step": 1, "groups": [3], **known, "ranks": value, "micro_batch_tokens": value}
    (tmp_path / "monitor/batches.jsonl").write_text(json.dumps(line) + "\n")
    assert report.circumstances(tmp_path) == {1: known}


@pytest.mark.parametrize("weights", [[1], 7, {}, {"step": 2}, {"step": 2, "compared": True, "different": [1]}])
def test_a_comparison_of_weights_that_says_nothing_is_named(weights: Any, tmp_path: Path) -> None:
    (tmp_path / "weights.json").write_text(json.dumps(weights))
    with pytest.raises(RunError, match=r"weights\.json does not say how the weights compare"):
        report.Weights.read(tmp_path / "weights.json")


def test_the_comparison_of_weights_is_read_as_the_trainer_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "weights.json"
    file.write_text(json.dumps({"step": 2, "compared": False}))
    assert report.Weights.read(file) == report.Weights(2, False, 0, {})
    file.write_text(json.dumps({"step": 2, "compared": True, "tensors": 3, "different": {"a": None, "b": 0.5}}))
    assert report.Weights.read(file) == report.Weights(2, True, 3, {"a": None, "b": 0.5})
