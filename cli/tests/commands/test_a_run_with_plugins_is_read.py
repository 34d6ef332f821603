"""What a stopped run has stored is read without the plugins of its algorithm, and with them where they are named."""

from pathlib import Path

import pytest

from trinity.buffer.service import BufferService
from trinity.buffer.settings import BufferSettings
from trinity.config import ConfigError
from trinity.reading import processes
from trinity.reading.nats import NatsAccess

pytestmark = pytest.mark.core

YAML = """
project: p
name: n
model: {model_path: m, max_model_len: 64}
algorithm: {algorithm_type: of_a_plugin, repeat_times: 4}
buffer: {batch_size: 8, total_steps: 2, explorer_input: {taskset: {name: t, path: d.jsonl}}}
"""


def test_a_buffer_that_only_reads_needs_no_algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRINITY_PLUGIN_DIRS", raising=False)
    (tmp_path / "config.json").write_text(YAML)
    child = processes.reader_child(tmp_path / "config.json", NatsAccess("nats://127.0.0.1:1"), "run", tmp_path)
    for name, value in child.environment.items():
        monkeypatch.setenv(name, value)
    BufferService(BufferSettings())
    monkeypatch.delenv("TRINITY_BUFFER_READ_ONLY")
    with pytest.raises(ConfigError, match="'of_a_plugin', which is not registered"):
        BufferService(BufferSettings())


def test_it_gets_the_folders_of_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_PLUGIN_DIRS", "/a,/b")
    child = processes.reader_child(tmp_path / "config.json", NatsAccess("nats://127.0.0.1:1"), "run", tmp_path)
    assert child.environment["TRINITY_BUFFER_PLUGIN_DIRS"] == "/a:/b"
