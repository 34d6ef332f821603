"""What a joining explorer's YAML brings to a run, and what it does not."""

from pathlib import Path
from typing import Any

import pytest

from trinity.cli.supervise.stage.display import PlainDisplay
from trinity.config import Config, ConfigError, make_plan
from trinity.config.run_record import Addresses, RunRecord, announcement
from trinity.modes import own_tasks as module
from trinity.modes.own_tasks import OwnTasks, own_tasks
from trinity.reading.errors import RunError
from trinity.runtime.errors import Unavailable

pytestmark = pytest.mark.core


def config(path: Path, **taskset: Any) -> Config:
    given = {"name": "sums", "path": str(path), **taskset}
    return Config.model_validate(
        {
            "mode": "explore",
            "model": {"model_path": "m", "max_model_len": 64},
            "buffer": {"total_epochs": 2, "explorer_input": {"taskset": given}},
            "explorer": {"name": "new"},
        }
    )


def record(run: Config) -> RunRecord:
    """Of a run of this configuration, as it is read from NATS."""
    addresses = Addresses("b:1")
    made = RunRecord(version="1", run="r", stage="", online=True, last=True, addresses=addresses, config=run)
    return RunRecord.model_validate_json(announcement(made))


def brought(explorer: Config, run: Config) -> list[OwnTasks]:
    return own_tasks(explorer, make_plan(explorer), record(run), "explorer.yaml")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in ("run", "own"):
        (tmp_path / name).mkdir()
        lines = (f'{{"prompt": "{name} {i}"}}\n' for i in range(3))
        (tmp_path / name / "train.jsonl").write_text("".join(lines))
    return tmp_path


def test_the_runs_own_data_is_not_brought_a_second_time(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert brought(config(data / "run"), config(data / "run", name="other", weight=3.0)) == []
    monkeypatch.chdir(data)
    assert brought(config(Path("run")), config(data / "run")) == []
    assert [one.name for one in brought(config(data / "own"), config(data / "run"))] == ["new-sums"]


def test_a_yaml_of_the_whole_run_brings_nothing(data: Path) -> None:
    explorer, run = config(data / "own"), config(data / "run")
    staged = explorer.model_dump(exclude_unset=True) | {"stages": [{"stage_name": "rft"}]}
    assert brought(explorer, run)
    assert own_tasks(Config.model_validate(staged), make_plan(explorer), record(run), "explorer.yaml") == [], (
        "its stages may name other data"
    )
    processed = explorer.model_dump(exclude_unset=True) | {"data_processor": {"task_pipeline": {}}}
    assert own_tasks(Config.model_validate(processed), make_plan(explorer), record(run), "explorer.yaml") == []
    assert own_tasks(explorer, make_plan(explorer), record(run).model_copy(update={"data": ()}), "e.yaml") == []


async def test_every_task_is_offered_in_order_and_after_those_fed_before(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[str] = ["new-sums/0/0/0", "new-sums/0/1/1"]
    calls = 0

    async def publish(address: str, run: str, name: str, weight: float, first: int, tasks: Any, seconds: float) -> int:
        nonlocal calls
        calls += 1
        assert (address, run, name, weight) == ("b:1", "r", "new-sums", 6.0)
        if calls == 2:
            raise Unavailable("the buffer starts again")
        if tasks:
            assert first == len(fed)
            fed.append(tasks[0].task_id)
        return len(fed)

    monkeypatch.setattr(module, "publish_joined", publish)
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.0)
    (one,) = brought(config(data / "own", weight=2.0), config(data / "run"))
    await one.offer("b:1", PlainDisplay())
    assert fed == [f"new-sums/{position // 3}/{position}/{position % 3}" for position in range(6)]


async def test_a_refusal_names_the_key(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def publish(*_: Any) -> int:
        raise RunError("joined: the run is synchronous", 2)

    monkeypatch.setattr(module, "publish_joined", publish)
    (one,) = brought(config(data / "own"), config(data / "run"))
    with pytest.raises(RunError, match=r"^buffer\.explorer_input\.taskset: the run refuses it: joined: "):
        await one.offer("b:1", PlainDisplay())


def test_data_that_cannot_be_read_and_selectors_that_learn_are_refused(data: Path) -> None:
    with pytest.raises(ConfigError, match=r"buffer\.explorer_input\.taskset"):
        brought(config(data / "nothing"), config(data / "run"))
    (data / "own/train.jsonl").write_text('{"prompt": "a", "rate": 0.5}\n')
    learning = {"selector_type": "diff_based", "feature_keys": ["rate"]}
    with pytest.raises(ConfigError, match=r"taskset\.data_selector\.selector_type"):
        brought(config(data / "own", data_selector=learning), config(data / "run"))
