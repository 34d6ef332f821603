"""Trackio keeps one run over restarts, in the folder that the user names, else in the job folder."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

KEY = "k" * 20 + "0" * 20


@pytest.mark.timeout(120)
def test_trackio_keeps_the_run_over_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID"):
        monkeypatch.delenv(name, raising=False)
    job = tmp_path / "job"
    places = job / "trackio", tmp_path / "elsewhere"
    for folder in places:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        if folder is places[0]:
            monkeypatch.delenv("TRACKIO_DIR", raising=False)
        else:
            monkeypatch.setenv("TRACKIO_DIR", str(folder))
        for first in (0, 1):  # step 2 comes again
            done = subprocess.run(
                [sys.executable, "-c", _TRACKED, str(job), str(first)],
                capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert (done.returncode, done.stdout) == (0, ""), done.stderr
        with sqlite3.connect(folder / "sums.db") as database:
            rows = database.execute("SELECT run_id, run_name, step, metrics FROM metrics").fetchall()
            [(config,)] = database.execute("SELECT config FROM configs").fetchall()
        assert {row[:2] for row in rows} == {(rows[0][0], "sums/one_trainer")}
        values = sorted((row[2], json.loads(row[3])["actor/loss"]) for row in rows)
        assert values == [(1, 1.25), (2, 2.25), (2, 2.25), (3, 3.25)]
        assert json.loads(config)["monitor"] == {"monitor_args": {"api_key": "***"}}
    assert not (tmp_path / "home").exists()


_TRACKED = f"""
import math, sys
from pathlib import Path
from trinity.runtime.monitor import MonitorOptions, open_monitor
config = {{"monitor": {{"monitor_args": {{"api_key": "{KEY}"}}}}}}
options = MonitorOptions("trackio", {{}}, "sums", "tests", "sums/one_trainer", "trainer", Path(sys.argv[1]), config)
run = open_monitor(options, int(sys.argv[2]))
for step in (int(sys.argv[2]) + 1, int(sys.argv[2]) + 2):
    run.log({{"actor/loss": step + 0.25, "bad": math.nan}}, step)
run.close()
"""
