"""Keys, modes and options that a satellite adds are refused by the name of its distribution."""

from pathlib import Path

import pytest

from trinity.commands.request import Request, own_yaml
from trinity.config import ConfigError
from trinity.plugins import satellites
from trinity.reading.errors import RunError

pytestmark = pytest.mark.core

RUN = "model: {model_path: m}\nbuffer: {batch_size: 8, total_steps: 9, explorer_input: {taskset: {path: d.jsonl}}}\n"
BUFFER = "buffer.trainer_input.experience_buffer.path"
SAVED = "data_processor.experience_pipeline.input_save_path"
SFT = "{algorithm_type: sft}"


def _problems(folder: Path, *overrides: str) -> list[str]:
    file = folder / "run.yaml"
    file.write_text(RUN)
    try:
        Request(file, [f"checkpoint_root_dir={folder}", *overrides], []).load()
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.fixture(autouse=True)
def _without_satellites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(satellites, "find", lambda hook: None)


@pytest.mark.parametrize(
    ("overrides", "key", "distribution"),
    [
        (("mode=bench", "buffer.explorer_input.eval_tasksets=[{path: d.jsonl}]"), "mode", "modes"),
        (("mode=serve",), "mode", "modes"),
        ((f"{BUFFER}=kept.jsonl",), BUFFER, "archive"),
        ((f"{SAVED}=kept.db",), SAVED, "archive"),
        (("data_processor.task_pipeline={top_k: 8}",), "data_processor.task_pipeline", "task-pipeline"),
        (
            ("explorer={record: true, traffic: {}}", "algorithm.repeat_times=1", "buffer.explorer_input={}",
             "synchronizer={sync_interval: 1, sync_offset: 1}"),
            "explorer.traffic",
            "traffic",
        ),
    ],
)  # fmt: skip
def test_a_key_names_the_distribution(tmp_path: Path, overrides: tuple[str, ...], key: str, distribution: str) -> None:
    problems = _problems(tmp_path, *overrides)
    named = f"trinity-{distribution}, which is not installed"
    assert [one for one in problems if f"{key}: " in one and named in one], problems


def test_rows_of_a_dataset_are_no_archive(tmp_path: Path) -> None:
    source = "{storage_type: file, path: rows.jsonl, format: {prompt_type: plaintext}}"
    sft = (f"algorithm={SFT}", "mode=train", "buffer={train_batch_size: 4, total_steps: 2}")
    assert _problems(tmp_path, *sft, f"buffer.trainer_input.experience_buffer={source}") == []


def test_a_run_without_a_yaml_names_the_distribution() -> None:
    assert own_yaml("", "", "", "", "", "") is None
    with pytest.raises(RunError, match="needs trinity-own-data, which is not installed; give --config FILE"):
        own_yaml("m", "d.jsonl", "", "", "", "")
