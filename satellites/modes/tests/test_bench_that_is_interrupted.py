"""`mode=bench` that is interrupted, or fails at a later checkpoint, keeps the results before that."""

import asyncio
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trinity.cli.supervise.stage.progress import Starting
from trinity.config import Config, make_plan
from trinity.config.load import parse
from trinity.config.run_record import Addresses
from trinity.modes import bench
from trinity.reading.client import Answers
from trinity.reading.ending import Interrupted
from trinity.reading.errors import RunError

pytestmark = pytest.mark.core

CANDIDATES = [bench.Candidate(0, Path("m")), bench.Candidate(4, Path("m4")), bench.Candidate(8, Path("m8"))]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Of a job with two checkpoints; no process of its bench is started, and nothing is published."""

    async def opened(*_: Any) -> None:
        return None

    async def published(*_: Any) -> None:
        return None

    monkeypatch.setattr(bench, "check_inputs", lambda plan, source: None)
    monkeypatch.setattr(bench, "_candidates", lambda plan, folder: CANDIDATES)
    monkeypatch.setattr(bench, "open_nats", opened)
    monkeypatch.setattr(bench, "_publish", published)
    monkeypatch.setattr(bench, "manifest_of_folder", lambda *_: None)
    monkeypatch.setattr(bench.services, "infrastructure", lambda *_: ([], Addresses()))
    monkeypatch.setattr(bench.services, "explorer", lambda *_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(bench, "_evaluate_all", _without_processes(bench._evaluate_all))
    monkeypatch.setattr(bench, "stop_all", opened)
    model = "model: {model_path: m, max_prompt_tokens: 8, max_response_tokens: 8}"
    data = "buffer: {explorer_input: {taskset: {path: d}, eval_tasksets: [{name: e, path: d}]}}"
    return parse(f"mode: bench\nname: fresh\ncheckpoint_root_dir: {tmp_path}\n{model}\n{data}\n")


def _without_processes(evaluate_all: Any) -> Any:
    async def call(plan: Any, children: Any, *others: Any) -> None:
        await evaluate_all(plan, [], *others)

    return call


def _evaluated(step: int) -> list[dict[str, Any]]:
    return [{"step": step, "taskset": "e", "metrics": {"accuracy/mean@1": 0.5}}]


def _kept(folder: Path) -> list[int]:
    (file,) = folder.rglob("bench.json")
    return [result["step"] for result in json.loads(file.read_text())["results"]]


def test_a_checkpoint_that_fails_keeps_the_results_before_it(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def evaluation(step: int, *_: Any) -> list[dict[str, Any]]:
        if step == 8:
            raise RunError("the engine ended")
        assert step == 0 or _kept(tmp_path) == [0], "each is written before the next begins"
        return _evaluated(step)

    monkeypatch.setattr(bench, "_evaluation", evaluation)
    with pytest.raises(RunError, match="the engine ended"):
        bench.bench(config, "x.yaml")
    assert _kept(tmp_path) == [0, 4]
    assert "results: " in capsys.readouterr().out


def test_a_signal_keeps_them_too_and_promises_no_continuation(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def evaluation(step: int, *rest: Any) -> list[dict[str, Any]]:
        if step == 0:
            return _evaluated(step)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(rest[-1].wait(), 30)
        return []

    monkeypatch.setattr(bench, "_evaluation", evaluation)
    with pytest.raises(
        Interrupted, match="ended by SIGINT; the same command evaluates all from the beginning"
    ) as ended:
        bench.bench(config, "x.yaml")
    assert ended.value.code == 130
    assert _kept(tmp_path) == [0]
    assert "results: " in capsys.readouterr().out


async def test_processes_that_start_are_shown(config: Config) -> None:
    stop, shown = asyncio.Event(), []

    async def refresh() -> Answers:
        return Answers()

    def show(view: Answers, title: str, last_step: int = 0, starting: Sequence[Starting] = ()) -> None:
        shown.extend([title, *map(str, starting)])
        stop.set()

    child = SimpleNamespace(name="explorer", waits="", phase="loads vLLM and the model", start_seconds=20.0)
    watcher, display = SimpleNamespace(refresh=refresh), SimpleNamespace(show=show)
    assert await bench._evaluation(4, make_plan(config), [child], [], watcher, display, stop) == []  # type: ignore[arg-type, list-item]
    assert shown == ["bench, step 4", "loads vLLM and the model, 20 s"]
