"""`trinity view`: what is shown, in which order, and how little is read for it."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from support.fakes.data.experience import make_group, make_task
from support.fakes.data.files import Counting, write
from support.fakes.pages.recorded_run import make_job
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.inspect.view import find_rows, view
from trinity.reading.errors import RunError
from trinity.study import view as reading_view
from trinity.trainer.data.batch import TrainBatch, TrainSequence
from trinity.trainer.engine.token_record import TokenValues
from trinity.trainer.observers import Experiences

pytestmark = pytest.mark.core


def experience(step: int, task: str = "gsm8k/0/3/3", rollout: int = 0, **fields: object) -> str:
    row = {
        "step": step,
        "task_id": task,
        "ordinal": 4,
        "rollout": rollout,
        "reward": 1.0,
        "advantage": 0.5,
        "versions": [[step - 1, 0, 80]],
        "staleness": 1,
        "prompt_tokens": 33,
        "response_tokens": 80,
        "truncation": "none",
        "metrics": {"accuracy": 1.0},
        "log_sequence": 812,
        "prompt": "What is 1+1?",
        "response": "It is 2.",
    }
    return json.dumps({**row, **fields}) + "\n"


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Path]:
    """Writes the file of a job and returns the job's folder."""

    def make(*lines: str, stage: str = "") -> Path:
        write(tmp_path / stage / "buffer/experience_buffer.jsonl", *lines)
        return tmp_path

    return make


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def rows(folder: Path, step: int | None = None, index: int | None = None, task: str = "") -> list[dict[str, Any]]:
    found = json.loads(view(folder, step, index, task, True))
    assert isinstance(found, list)
    return found


def test_numbers_that_are_texts_cannot_command_the_terminal(job: Callable[..., Path]) -> None:
    folder = job(experience(1, prompt_tokens="\x1b[2J", response_tokens="\ud800"))
    text = view(folder, None, 0, "", False)
    assert "--- prompt: \\x1b[2J tokens ---" in text and "--- response: \\ud800 tokens ---" in text


def test_a_number_that_is_too_large_leaves_its_line_out(job: Callable[..., Path]) -> None:
    folder = job(experience(1), experience(1, rollout=1, reward=10**400))
    assert view(folder, None, None, "", False).startswith("step 1: 1 experiences, mean reward 1.000")


def test_the_newest_step_is_a_table(job: Callable[..., Path]) -> None:
    folder = job(
        experience(1),
        experience(2, reward=0.0),
        experience(2, rollout=1, versions=[[0, 0, 57], [1, 57, 80]], truncation="length", response="one\ntwo"),
    )
    text = view(folder, None, None, "", False)
    title, *lines = text.splitlines()
    assert title == "step 2: 2 experiences, mean reward 0.500"
    assert len(lines) == 3
    flat = " ".join(text.split())
    assert "0:0-57" in flat
    assert "1:57-80" in flat
    assert r"one\ntwo" in flat
    assert "33+80" in flat
    assert "length" in flat
    assert "12" not in title


def test_steps_tasks_and_numbers_are_those_asked_for(job: Callable[..., Path]) -> None:
    folder = job(
        *(experience(step, task, rollout) for step in (1, 2, 12) for task in ("math/7", "gsm/7") for rollout in (0, 1))
    )
    assert [row["step"] for row in rows(folder)] == [12] * 4
    assert [(row["task_id"], row["rollout"]) for row in rows(folder, 1)] == [
        ("math/7", 0),
        ("math/7", 1),
        ("gsm/7", 0),
        ("gsm/7", 1),
    ]
    assert [row["task_id"] for row in rows(folder, 2, None, "gsm")] == ["gsm/7"] * 2
    assert rows(folder, 2, 3) == [rows(folder, 2)[3]]
    with pytest.raises(RunError, match="--index 3 --task gsm: give one of them") as refused:
        rows(folder, 2, 3, "gsm")
    assert refused.value.code == 2
    table = view(folder, 2, None, "gsm", False)
    assert "2 of 4 experiences" in table
    assert re.findall(r"^(\d) ", table, re.MULTILINE) == ["2", "3"]


def test_a_step_trained_again_counts_as_it_was_the_last_time(job: Callable[..., Path]) -> None:
    first = [experience(step, "t", rollout, reward=0.0) for step in (10, 11, 12) for rollout in (0, 1, 2)]
    again = [experience(11, "t", rollout, reward=1.0) for rollout in (0, 1, 2)]
    cut = experience(12, "t", 9)[:80] + "\n"
    twelve = [experience(12, "t", rollout, reward=2.0) for rollout in (1, 0)]
    folder = job(*first, *again)
    assert [row["reward"] for row in rows(folder)] == [1.0] * 3  # what was trained last, not what is highest
    assert [row["reward"] for row in rows(folder, 12)] == [0.0] * 3
    job(*twelve, cut, experience(12, "t", 1, reward=3.0), experience(12, "t", 5)[:50])
    assert [(row["rollout"], row["reward"]) for row in rows(folder)] == [(0, 2.0), (1, 3.0)]
    assert rows(folder) == rows(folder, 12)
    assert [row["reward"] for row in rows(folder, 11)] == [1.0] * 3
    assert [row["reward"] for row in rows(folder, 10)] == [0.0] * 3


def test_nothing_a_model_wrote_reaches_the_terminal_as_control(job: Callable[..., Path]) -> None:
    evil = "\x1b[2J[bold]loud[/bold]\x07\u202e\ud800\x7f\r[/]"
    folder = job(
        experience(3, f"task{evil}", prompt=f"p{evil}\nnext", response=evil, metrics={evil: 1}, truncation=evil)
    )
    for text in (view(folder, None, None, "", False), view(folder, 3, 0, "", False), view(folder, 3, None, "", True)):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800]", text)
    whole = view(folder, 3, 0, "", False)
    assert "p\\x1b[2J[bold]loud[/bold]\\x07\\u202e\\ud800\\x7f\\r[/]\nnext" in whole
    assert rows(folder)[0]["response"] == evil


def test_one_experience_is_shown_whole(job: Callable[..., Path]) -> None:
    response = "\n".join(f"line {number}\tend" for number in range(300))
    folder = job(experience(3), experience(3, rollout=1, response=response, versions=[[1, 0, 9], [2, 9, 80]]))
    text = view(folder, None, 1, "", False)
    assert text.endswith(f"--- response: 80 tokens ---\n{response}")
    assert "What is 1+1?" in text
    for key, value in {"versions": "1:0-9 2:9-80", "log_sequence": "812", "metrics": '{"accuracy": 1.0}'}.items():
        assert re.search(rf"^{key} +{re.escape(value)}$", text, re.MULTILINE)


def test_an_episode_that_moved_says_where(job: Callable[..., Path]) -> None:
    moved = [{"turn": 1, "from": "a", "to": "b", "token": 4}, {"turn": 3, "from": "b", "to": "c"}]
    text = view(job(experience(3, moved=moved)), None, 0, "", False)
    assert re.search(r"^moved +turn 1, token 4: a -> b; turn 3: b -> c$", text, re.MULTILINE)


@pytest.mark.parametrize("said", ["x", [1, None], {"a": []}, [{"turn": 3}], 7, [[["\x1b[31m"]]]])
def test_what_is_no_move_and_no_version_is_shown_as_it_is(job: Callable[..., Path], said: Any) -> None:
    """An explorer of another's writes `info.moved`."""
    text = view(job(experience(1, moved=said, versions=said)), None, 0)
    assert "--- response: 80 tokens ---" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("arrays", [{"token_ids": "AAA="}, {"mask": 5}, {"nope": "AA=="}, [1]])
def test_damaged_arrays_are_one_sentence(job: Callable[..., Path], arrays: Any) -> None:
    with pytest.raises(RunError, match="step 1: arrays of an experience are damaged"):
        rows(job(experience(1, arrays=arrays)))


def test_offline_experience_has_no_versions(job: Callable[..., Path]) -> None:
    folder = job(experience(3, versions=[], reward=0.0, advantage=0.0))
    assert "mean reward 0.000" in view(folder, None, None, "", False)
    assert re.search(r"^versions +-$", view(folder, None, 0, "", False), re.MULTILINE)


def test_the_stage_trained_last_is_shown(job: Callable[..., Path]) -> None:
    folder = job(experience(7), stage="sft")
    job(experience(2), stage="rft")
    os.utime(folder / "sft/buffer/experience_buffer.jsonl", (1, 1))
    assert rows(folder)[0]["step"] == 2


def test_what_is_not_there_is_said(job: Callable[..., Path], tmp_path: Path) -> None:
    for _ in range(2):  # no file, then one without a whole line
        with pytest.raises(RunError, match=r"no experience is kept in .*buffer\.save_experiences"):
            view(tmp_path, None, None, "", False)
        folder = job(experience(5)[:60])
    job("\n", experience(5), experience(9), experience(8))
    for step in (4, 6, 10):
        with pytest.raises(RunError, match=rf"no experience of step {step}; there are steps 5 to 9"):
            view(folder, step, None, "", False)
    for index in (-1, 1):
        with pytest.raises(RunError, match="there are 0 to 0"):
            view(folder, 5, index, "", False)
    with pytest.raises(RunError, match="one of them is 'gsm8k/0/3/3'"):
        view(folder, 5, None, "math", False)


def test_the_newest_step_of_a_big_file_needs_few_bytes(
    job: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "x" * 20_000
    folder = job(*(experience(step, rollout=rollout, response=long) for step in range(200) for rollout in range(8)))
    path = reading_view.find_file(folder)
    assert path.stat().st_size > 30_000_000

    class CountingPath:
        def open(self, *_: object, **__: object) -> Counting:
            Counting.bytes_read = 0
            return Counting(path)

    monkeypatch.setattr(reading_view, "find_file", lambda _: CountingPath())
    assert len(rows(folder)) == 8
    assert Counting.bytes_read < 1_000_000
    assert [row["step"] for row in rows(folder, 150)] == [150] * 8


def test_json_has_tokens_mask_and_log_probabilities_as_the_trainer_writes_them(tmp_path: Path) -> None:
    sampled = make_group(make_task(7)).experiences[0]
    mask = np.arange(sampled.response_length) % 2 == 0
    logprobs = np.linspace(-1.5, -0.25, sampled.response_length, dtype=np.float32)
    sequence = TrainSequence(sampled.token_ids, sampled.prompt_length, logprobs, mask, group=0, experience=sampled)
    entry = pb.LedgerEntry(step=3, groups=[pb.LedgerGroup(task_id="sums/0/7")])
    values = TokenValues(logprobs + 0.125, np.full(len(mask), 1.5, np.float32), ~mask, None)
    done = SimpleNamespace(
        step=3, trained=True, raw=SimpleNamespace(entry=entry), batch=TrainBatch(3, (sequence,)), tokens=[values]
    )
    observer = Experiences(tmp_path)
    observer.begin(3)
    observer.trained(cast(Any, done))
    observer.close()
    (row,) = rows(tmp_path)
    assert row["new_logprobs"] == pytest.approx((logprobs + 0.125).tolist(), abs=1e-6)
    assert row["entropy"] == [1.5] * len(mask)
    assert row["clipped"] == [1 - one for one in row["mask"]]
    assert "proximal_logprobs" not in row, "the step made one update"
    assert row["token_ids"] == sampled.token_ids.tolist()
    assert row["mask"] == [1, 0] * (len(mask) // 2) + [1] * (len(mask) % 2)
    assert row["logprobs"] == pytest.approx(logprobs.tolist(), abs=1e-6)
    assert "arrays" not in row
    assert row["task_id"] == "sums/0/7"
    for text in (view(tmp_path), view(tmp_path, index=0)):
        assert "arrays" not in text


def test_the_worst_come_first_with_their_prompts(job: Callable[..., Path]) -> None:
    rewards = (0.5, -1.0, 1.0)
    lines = (experience(1, rollout=n, reward=r, prompt=f"What is {n}+1?", metrics={}) for n, r in enumerate(rewards))
    folder = job(*lines)
    text = view(folder, sort="reward", limit=2)
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["1", "0"]
    assert "2 of 3 experiences" in text and "What is 1+1?" in text
    assert json.loads(view(folder, sort="-reward", limit=1, as_json=True))[0]["reward"] == 1.0
    with pytest.raises(RunError, match=r"--sort colour: no experience has this number; there are .*reward"):
        view(folder, sort="colour")


def test_rewards_that_are_no_numbers_come_last(job: Callable[..., Path]) -> None:
    rewards = [0.5, float("nan"), -0.5, "many", 0.1, float("-inf")]
    folder = job(*(experience(3, rollout=place, reward=reward) for place, reward in enumerate(rewards)))
    for sort, order in (("reward", [-0.5, 0.1, 0.5]), ("-reward", [0.5, 0.1, -0.5])):
        assert [row["reward"] for row in json.loads(view(folder, sort=sort, as_json=True))][:3] == order


def test_metrics_that_are_no_object_have_no_number(job: Callable[..., Path]) -> None:
    folder = job(experience(3, metrics="x"), experience(3, rollout=1, metrics={"length": 2}))
    assert [row["metrics"] for row in json.loads(view(folder, sort="length", as_json=True))] == [{"length": 2}, "x"]


def test_the_answer_of_the_taskset_is_shown(tmp_path: Path) -> None:
    data = tmp_path / "words.jsonl"
    data.write_text("\n".join(json.dumps({"q": f"word {row}", "right": f"right-{row}"}) for row in range(9)))
    folder = make_job(tmp_path / "job", lambda row: row.update(task_id=f"words/0/3/{row['ordinal']}"))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    form = {"prompt_key": "q", "response_key": "right"}
    config["buffer"]["explorer_input"]["taskset"] = {"name": "words", "path": str(data), "format": form}
    path.write_text(json.dumps(config))
    text = view(folder, step=2, sort="reward", limit=1)
    number = re.search(r"words/0/3/(\d)", text)
    assert number and "reference" in text and f"right-{number[1]}" in text
    found = json.loads(view(folder, step=2, as_json=True))
    assert {row["task_id"].replace("words/0/3/", "right-") for row in found} == {row["reference"] for row in found}
    assert "right-" in view(folder, step=2, index=0)
    data.unlink()
    assert "reference" not in view(folder, step=2)


def test_stage_chooses_one_of_a_job(tmp_path: Path) -> None:
    for name, reward in (("early", 0.25), ("late", 0.75)):
        make_job(tmp_path / "job" / name, lambda row, reward=reward: row.update(reward=reward))  # type: ignore[misc]
    (tmp_path / "job" / "version.json").write_text("{}")
    for name, reward in (("early", "0.250"), ("late", "0.750")):
        text = view(find_rows(job=tmp_path / "job", stage=name), 2)
        assert text.startswith(f"step 2: 8 experiences, mean reward {reward}")
    with pytest.raises(RunError, match=r"--stage none: .* has 'early', 'late'"):
        find_rows(job=tmp_path / "job", stage="none")
