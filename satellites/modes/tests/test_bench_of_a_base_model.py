"""`mode=bench` without a job evaluates the base model alone, and says so."""

import json
from pathlib import Path
from typing import Any

import pytest

from trinity.config import Config
from trinity.config.load import parse
from trinity.modes import bench
from trinity.plugins import satellites
from trinity.reading.errors import RunError

pytestmark = pytest.mark.core


def config(folder: Path, *overrides: str) -> Config:
    model = "model: {model_path: m, max_prompt_tokens: 8, max_response_tokens: 8}"
    data = "buffer: {explorer_input: {taskset: {path: d}, eval_tasksets: [{name: e, path: d}]}}"
    text = f"mode: bench\nname: fresh\ncheckpoint_root_dir: {folder}\n{model}\n{data}\n"
    return parse(text, overrides=[f"checkpoint_root_dir={folder}", *overrides])


@pytest.mark.parametrize("overrides", [[], ["explorer.bench_on_latest_checkpoint=true"]])
def test_a_fresh_job_folder_is_benched_with_the_base_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str]
) -> None:
    asked: list[bench.Candidate] = []

    async def evaluated(
        plan: Any, job: Any, candidates: list[bench.Candidate], taken: set[str], keep: bench.Keep
    ) -> None:
        asked.extend(candidates)
        keep([{"step": 0, "taskset": "e", "metrics": {"accuracy/mean@1": 0.5}}])

    monkeypatch.setattr(bench, "_bench", evaluated)
    monkeypatch.setattr(bench, "check_inputs", lambda plan, source: None)
    bench.bench(config(tmp_path, *overrides), "x.yaml")
    assert asked == [bench.Candidate(0, Path("m"))]
    assert bench._what(asked) == "the base model m, as the job folder has no checkpoint"
    (file,) = tmp_path.rglob("bench.json")
    assert json.loads(file.read_text())["results"][0]["step"] == 0


def test_a_bench_of_nothing_names_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "check_inputs", lambda plan, source: None)
    with pytest.raises(RunError, match="eval_on_startup: false leaves the base model out"):
        bench.bench(config(tmp_path, "explorer.eval_on_startup=false"), "x.yaml")


def test_a_checkpoint_to_convert_names_the_distribution_of_convert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = config(tmp_path)
    (tmp_path / given.project / given.name / "global_step_4/actor/deepspeed").mkdir(parents=True)
    monkeypatch.setattr(bench, "check_inputs", lambda plan, source: None)
    monkeypatch.setattr(bench, "verify", lambda folder, below: None)
    monkeypatch.setattr(satellites, "find", lambda hook: None)
    with pytest.raises(RunError, match=r"not in Hugging Face form: 4; .* by trinity-convert, which is not installed$"):
        bench.bench(given, "x.yaml")
