"""The example of geometry runs on CPUs, with the tiny model and a dataset of the shape that the hub's has."""

import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.fakes.data.vision import EXAMPLE, make_model, picture
from support.programs.run import TrinityRun, write_config

pytestmark = [
    pytest.mark.extended,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("torchvision") is None, reason="vLLM's Qwen2.5-VL needs torchvision: '.[vision]'"
    ),
]

ROWS, TESTS, BATCH, EPOCHS = 8, 4, 4, 2
SMALLER: dict[str, Any] = {
    "model": {"max_prompt_tokens": 192, "max_response_tokens": 8},
    "algorithm": {"repeat_times": 2},
    "cluster": {"gpu_per_node": 0},
    "buffer": {"batch_size": BATCH, "total_epochs": EPOCHS},
    "explorer": {"eval_interval": 2, "runner_per_model": 8},
    "trainer": {"save_interval": 2},
}


def make_data(folder: Path) -> dict[tuple[str, int], bytes]:
    """Parquet files as the hub has them: `images` are a list of files, `problem` has <image>. The files, by row."""
    hub = pytest.importorskip("datasets")
    text, files = hub.Value("string"), {}
    kinds = hub.Features({"images": hub.List(hub.Image()), "problem": text, "answer": text})
    (folder / "data").mkdir(parents=True)
    for split, count in (("train", ROWS), ("test", TESTS)):
        rows = []
        for number in range(count):
            files[split, number] = file = picture(16 + 8 * number, 24, colour="red")
            problem = f"<image>Find x, the length of side {number}."
            rows.append({"images": [{"bytes": file, "path": None}], "problem": problem, "answer": str(number)})
        made = hub.Dataset.from_list(rows, features=kinds)
        made.to_parquet(str(folder / f"data/{split}-00000-of-00001.parquet"))
    return files


def test_the_example_shows_each_rows_picture_and_ends_evaluated(tmp_path: Path) -> None:
    files = make_data(tmp_path / "data")
    config = write_config(EXAMPLE / "geometry3k.yaml", tmp_path / "geometry3k.yaml", SMALLER)
    model = make_model(tmp_path / "model")
    run = TrinityRun(config, tmp_path, TRINITY_MODEL_PATH=str(model), TRINITY_TASKSET_PATH=str(tmp_path / "data"))
    try:
        run.start()
        code = run.finish(600)
    finally:
        run.end()
    assert code == 0, run.tail()
    summary = json.loads((run.job / "summary.json").read_text())
    assert summary["steps"] == ROWS * EPOCHS // BATCH
    assert summary["groups_fed"] == summary["groups_stored"] == ROWS * EPOCHS
    assert summary["dead_letters"] == summary["outstanding"] == summary["failed_attempts"] == 0
    (stage,) = summary["stages"]
    evaluated = {one["step"]: one["metrics"] for one in stage["evaluations"]}
    assert sorted(evaluated) == [0, 2, 4]
    for metrics in evaluated.values():
        assert (metrics["finished_task_count"], metrics["failed_task_count"]) == (TESTS, 0)
        assert "accuracy/mean@1" in metrics  # math_boxed_reward scored them
    lines = [json.loads(line) for line in (run.job / "buffer/experience_buffer.jsonl").read_text().splitlines()]
    assert Counter(int(line["task_id"].split("/")[3]) for line in lines) == dict.fromkeys(range(ROWS), EPOCHS * 2)
    for line in lines:
        row = int(line["task_id"].split("/")[3])
        assert [(run.job / image).read_bytes() for image in line["images"]] == [files["train", row]]
        assert line["prompt"].endswith(f"ind x, the length of side {row}.")  # no capitals in the tokenizer
        assert line["prompt_tokens"] == 99 + 3 * (2 + row)
