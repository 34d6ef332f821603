"""A veRL script and its parquet learn as they are: import-verl, then `trinity run`, with only the model replaced."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.programs.run import TrinityRun

pytestmark = [pytest.mark.extended, pytest.mark.slow, pytest.mark.timeout(900)]

CASES = Path(__file__).parents[1] / "support/cases"


def test_a_script_and_its_parquet_are_enough(tmp_path: Path, quickstart_model: Path) -> None:
    (tmp_path / "data/gsm8k").mkdir(parents=True)
    shutil.copy(CASES / "datasets/verl/train.parquet", tmp_path / "data/gsm8k")
    config, script = tmp_path / "run.yaml", CASES / "import_verl/gsm8k_grpo.sh"
    command = [sys.executable, "-m", "trinity.cli.main", "import-verl", str(script), "-o", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "not mapped" not in done.stderr, done.stderr
    text = config.read_text()
    config.write_text(text.replace("${oc.env:HOME}", str(tmp_path)))  # a home of its own would hide all caches
    run = TrinityRun(config, tmp_path)
    try:
        run.start(f"model.model_path={quickstart_model}", f"checkpoint_root_dir={tmp_path / 'jobs'}")
        assert run.finish(800) == 0, run.tail()
    finally:
        run.end()
    assert json.loads((run.job / "summary.json").read_text())["stages"][-1]["steps"] == 6
    lines = (run.job / "buffer/experience_buffer.jsonl").read_text().splitlines()
    assert len(lines) == 6 * 64 and all("accuracy" in json.loads(line)["metrics"] for line in lines)
