"""YAMLs that are broken on purpose, and what `trinity check` says of them."""

import time
from pathlib import Path

import yaml
from typer.testing import CliRunner

from trinity.cli.main import app

BASE = """
project: p
name: n
model: {model_path: some/model, max_prompt_tokens: 16, max_response_tokens: 16}
algorithm: {algorithm_type: grpo, repeat_times: 4}
buffer:
  batch_size: 8
  total_steps: 2
  explorer_input:
    taskset: {name: sums, path: data.jsonl}
"""


def changed(path: str, value: str) -> str:
    """BASE with a value, as text, at a key path."""
    document = yaml.safe_load(BASE)
    *sections, name = path.split(".")
    at = document
    for section in sections:
        at = at.setdefault(section, {})
    at[name] = "THE-VALUE"
    return yaml.safe_dump(document, sort_keys=False, width=10**9).replace("THE-VALUE", value)


def check(path: Path, *overrides: str) -> str:
    """Output of `trinity check` for a refused file."""
    begin = time.process_time()
    done = CliRunner().invoke(app, ["check", "--config", str(path), *overrides])
    assert time.process_time() - begin < 5
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert done.stderr.startswith(str(path))
    return done.stderr
