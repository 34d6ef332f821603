"""Metrics reach their place, a restart replaces what comes again, and a backend that fails never hurts the run."""

import importlib
import importlib.metadata
import importlib.util
import json
import math
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from trinity.config.schema.buffer import FormatConfig
from trinity.runtime import monitor
from trinity.runtime.errors import InvalidInput
from trinity.runtime.monitor import MonitorOptions, open_monitor
from trinity.runtime.monitor.guard import Background, Complaints

pytestmark = pytest.mark.core

KEY = "k" * 20 + "0" * 20


def _options(folder: Path, kind: str = "none", **args: Any) -> MonitorOptions:
    return MonitorOptions(
        kind=kind,
        args=args,
        project="sums",
        group="tests",
        name="sums/one_trainer",
        role="trainer",
        folder=folder / "monitor",
        config={
            "model": {"model_path": "/models/q", "max_response_tokens": 8},
            "stages": [{"lr": 1e-6}, {"lr": 1e-7}],
            "monitor": {"monitor_args": {"api_key": KEY, "uri": "http://me:hunter2@there/"}},
        },
    )


def _lines(options: MonitorOptions) -> list[dict[str, Any]]:
    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    text = (options.folder / f"{options.role}.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


class Fake:
    """A backend in memory; `act` runs before every call is noted."""

    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
        self.calls: list[tuple[Mapping[str, float], int]] = []
        self.closed = False
        self._act = act

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._act()
        self.calls.append((metrics, step))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[MonitorOptions], Any]], None]:
    """Put another backend where wandb was."""

    def put(opener: Callable[[MonitorOptions], Any]) -> None:
        monkeypatch.setattr(monitor, "_opener", lambda kind: opener)
        monkeypatch.setattr(monitor, "_installed", lambda package: True)

    return put


# The lines


def test_lines_are_valid_json_for_any_number(tmp_path: Path) -> None:
    options = _options(tmp_path)
    run = open_monitor(options)
    run.log({"loss": 0.5, "nan": math.nan, "inf": -math.inf, "none": None}, 1)  # type: ignore[dict-item]
    run.close()
    (line,) = _lines(options)
    assert (line["step"], line["loss"], line["nan"], line["inf"], line["none"]) == (1, 0.5, None, None, None)
    assert abs(line["time"] - time.time()) < 60


def test_a_line_that_a_crash_cut_off_costs_no_other(tmp_path: Path) -> None:
    options = _options(tmp_path)
    options.folder.mkdir()
    (options.folder / "trainer.jsonl").write_text('{"step": 1, "lo')
    open_monitor(options).log({"loss": 0.5}, 1)
    cut, whole = (options.folder / "trainer.jsonl").read_text().splitlines()
    assert cut == '{"step": 1, "lo'
    assert json.loads(whole)["loss"] == 0.5


def test_lines_that_cannot_be_written_do_not_stop_the_run(tmp_path: Path) -> None:
    options = _options(tmp_path)
    run = open_monitor(options)
    (options.folder / "trainer.jsonl").mkdir()
    with capture_logs() as logs:
        for step in range(3):
            run.log({"loss": 0.5}, step)
    assert [entry["event"] for entry in logs] == ["runtime.monitor.failed"]
    assert "IsADirectoryError" in logs[0]["error"]


# TensorBoard


def _events(folder: Path) -> Iterator[Any]:
    """The events of a folder, in the order TensorBoard reads them. A record: length, its CRC, content, its CRC."""
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto import event_pb2

    def masked(data: bytes) -> int:
        crc = crc32c(data)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    for path in sorted(folder.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:
            length, length_crc = struct.unpack("<QI", data[:12])
            content, data = data[12 : 12 + length], data[12 + length :]
            assert length_crc == masked(struct.pack("<Q", length))
            assert struct.unpack("<I", data[:4])[0] == masked(content)
            data = data[4:]
            yield event_pb2.Event.FromString(content)


def _points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every tag's points as TensorBoard shows them: a START of step k removes what was read from step k on."""
    shown: dict[str, list[tuple[int, float]]] = {}
    for event in _events(folder):
        if event.session_log.status == event.session_log.START:
            shown = {tag: [point for point in points if point[0] < event.step] for tag, points in shown.items()}
        for value in event.summary.value:
            if value.HasField("simple_value"):
                shown.setdefault(value.tag, []).append((event.step, value.simple_value))
    return shown


def test_tensorboard_has_the_points_of_a_process_that_was_killed_and_a_restart_replaces_them(tmp_path: Path) -> None:
    options = _options(tmp_path, "tensorboard")
    folder = options.folder / "tensorboard" / "trainer"
    first = open_monitor(options)  # never closed
    for step in range(1, 6):
        first.log({"actor/loss": step / 2, "eval/mean@4": math.nan}, step)
    assert _points(folder)["actor/loss"] == [(step, step / 2) for step in range(1, 6)]
    assert len(_points(folder)["eval/mean@4"]) == 5

    second = open_monitor(options, first_step=3)  # the checkpoint
    second.log({"actor/loss": 40.0}, 4)
    second.close()
    assert _points(folder)["actor/loss"] == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 40.0)]
    assert len(list(folder.iterdir())) == 2
    assert [line["step"] for line in _lines(options)] == [1, 2, 3, 4, 5, 4]


def test_tensorboard_shows_the_configuration_without_secrets(tmp_path: Path) -> None:
    options = _options(tmp_path, "tensorboard")
    open_monitor(options).close()
    texts = [v.tensor.string_val[0].decode() for e in _events(options.folder / "tensorboard/trainer")
             for v in e.summary.value]  # fmt: skip
    assert len(texts) == 1
    assert '"max_response_tokens": 8' in texts[0]
    assert KEY not in texts[0]
    assert "hunter2" not in texts[0]


@pytest.mark.parametrize(
    "given",
    [
        {"explorer": {"env_vars": {"GREETING": "s3cr3t", "AWS_ACCESS_KEY_ID": "s3cr3t"}}},
        {"stages": [{"explorer": {"env_vars": {"GREETING": "s3cr3t"}}}]},
        {"headers": {"Authorization": "s3cr3t", "Cookie": "s3cr3t"}},
        {"credentials": {"user": ["s3cr3t"]}},
        {"uri": "tls://me:s3@s3cr3t@there/"},
        *({name: "s3cr3t"} for name in ("AWS_SESSION_TOKEN", "GITHUB_TOKEN", "SLACK_BOT_TOKEN", "WANDB_KEY")),
        *({name: "s3cr3t"} for name in ("judge_key", "apiKey", "passphrase", "client_secret", "password")),
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_secret_is_hidden_whatever_holds_it(given: dict[str, Any], tmp_path: Path) -> None:
    options = replace(_options(tmp_path), config={"buffer": {"explorer_input": {"taskset": {"workflow_args": given}}}})
    assert "***" in str(options.public_config())
    assert "s3cr3t" not in str(options.public_config()) + str(options.flat_config())


def test_columns_and_numbers_are_no_secrets(tmp_path: Path) -> None:
    columns = dict.fromkeys((name for name in FormatConfig.model_fields if name.endswith("_key")), "question")
    config = {"format": columns, "max_tokens": 8, "stop_token": 7, "rubric_key": "rubric", "feature_keys": ["length"]}
    assert replace(_options(tmp_path), config=config).public_config() == config


def test_tensorboard_loads_no_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from trinity.runtime.monitor import MonitorOptions, open_monitor
options = MonitorOptions("tensorboard", {{}}, "p", "g", "n", "explorer", Path({str(tmp_path)!r}), {{}})
run = open_monitor(options)
run.log({{"a": 1.0}}, 1)
run.close()
print("torch" in sys.modules, "tensorboardX" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "True"], done.stderr


# A backend that fails


def test_an_unknown_kind_and_a_missing_package_name_the_key_and_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInput, match=r"monitor\.monitor_type: is 'tensorbord'"):
        open_monitor(_options(tmp_path, "tensorbord"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"monitor\.monitor_type: is 'wandb'.* pip install wandb"):
        open_monitor(_options(tmp_path, "wandb"))
    monkeypatch.setattr(monitor, "entry_points", lambda group: importlib.metadata.EntryPoints())
    with pytest.raises(InvalidInput, match=r"is 'wandb', .* not installed: pip install trinity-trackers"):
        open_monitor(_options(tmp_path, "wandb"))


def test_a_backend_that_raises_is_reported_once_a_minute_without_the_key(tmp_path: Path, hosted: Any) -> None:
    def fail() -> None:
        raise ConnectionError(f"refused: {KEY}")

    backend = Fake(fail)
    hosted(lambda options: backend)
    options = _options(tmp_path, "wandb", api_key=KEY)
    assert KEY not in repr(options)
    with capture_logs() as logs:
        run = open_monitor(options)
        for step in range(1, 6):
            run.log({"loss": 0.5}, step)
        run.close()
    assert [entry["event"] for entry in logs] == ["runtime.monitor.failed", "runtime.monitor.left"]
    assert logs[0]["error"] == "ConnectionError: refused: ***"
    assert logs[0]["kind"] == "wandb"
    assert logs[1]["failed"] == 4
    assert backend.closed
    assert len(_lines(options)) == 5


def test_a_backend_that_hangs_holds_up_nothing(tmp_path: Path, hosted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, release = threading.Event(), threading.Event()

    def hang() -> None:
        hanging.set()
        release.wait(30)

    backend = Fake(hang)
    hosted(lambda options: backend)
    monkeypatch.setattr(Background.__init__, "__defaults__", (10, 60.0, 0.3))
    options = _options(tmp_path, "wandb")
    begin = time.monotonic()
    with capture_logs() as logs:
        run = open_monitor(options)
        run.log({}, 0)
        assert hanging.wait(5)
        while len(logs) == 0 and time.monotonic() - begin < 5:
            run.log({"loss": 0.5}, 1)
        run.close()
    assert time.monotonic() - begin < 6
    release.set()
    dropped, left = logs
    assert (dropped["event"], dropped["count"]) == ("runtime.monitor.dropped", 1)
    assert (left["event"], left["unsent"], left["hanging"]) == ("runtime.monitor.left", 10, True)
    assert len(_lines(options)) >= 12


def test_the_oldest_calls_are_dropped_and_counted() -> None:
    started, release = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        release.wait(30)

    backend = Fake(wait)
    with capture_logs() as logs:
        background = Background(lambda: backend, Complaints("fake", str), queue_calls=3)
        background.log({}, 0)
        assert started.wait(5)
        for step in range(1, 9):
            background.log({}, step)
        release.set()
        background.close()
    assert [step for _, step in backend.calls] == [0, 6, 7, 8]
    assert [(e["event"], e.get("count"), e.get("dropped")) for e in logs] == [
        ("runtime.monitor.dropped", 1, None),
        ("runtime.monitor.left", None, 4),
    ]


def test_a_backend_that_cannot_be_opened_is_tried_again_and_gets_what_waited() -> None:
    backend = Fake()
    tries = iter([OSError("no network"), SystemExit(1), None])

    def opener() -> Fake:
        if error := next(tries):
            raise error
        return backend

    with capture_logs() as logs:
        background = Background(opener, Complaints("fake", str), retry_seconds=0.05)
        background.log({"a": 1.0}, 1)
        deadline = time.monotonic() + 5
        while not backend.calls and time.monotonic() < deadline:
            time.sleep(0.01)
        background.close()
    assert backend.calls == [({"a": 1.0}, 1)]
    assert logs[0]["error"] == "OSError: no network"


def test_closing_waits_for_no_retry() -> None:
    def opener() -> Fake:
        raise OSError("no network")

    background = Background(opener, Complaints("fake", str))
    begin = time.monotonic()
    with capture_logs() as logs:
        background.log({}, 1)
        background.close()
    assert time.monotonic() - begin < 5
    assert logs[-1]["unsent"] == 1
