"""`trinity env tokens`: the token is printed once, listed with its expiry, and revoked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trinity.inspect.env_tokens import find_tokens
from trinity.reading.errors import RunError
from trinity.runtime.trust.attach_tokens import AttachTokens

pytestmark = pytest.mark.core


def _tokens(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "trinity.cli.main", "env", "tokens", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_create_list_and_revoke(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    option = ("--file", str(file))
    made = _tokens("create", "ann", "--days", "7", *option)
    assert made.returncode == 0, made.stderr
    token = made.stdout.strip()
    found = AttachTokens("", file).find(token)
    assert found is not None
    assert found.name == "ann"
    (listed,) = json.loads(_tokens("list", "--json", *option).stdout)
    assert (listed["name"], listed["expired"], listed["expires_at"]) == ("ann", False, found.expires_at)
    assert token not in _tokens("list", *option).stdout
    again = _tokens("create", "ann", *option)
    assert (again.returncode, "has a token named 'ann'" in again.stderr) == (1, True)
    assert _tokens("revoke", "ann", *option).returncode == 0
    gone = _tokens("revoke", "ann", *option)
    assert (gone.returncode, "has no token named 'ann'" in gone.stderr) == (1, True)
    assert "no tokens" in _tokens("list", *option).stdout


def test_the_file_is_that_of_the_job_that_a_yaml_describes(tmp_path: Path) -> None:
    """Before its first run too."""
    yaml = tmp_path / "run.yaml"
    yaml.write_text(f"project: p\nname: n\ncheckpoint_root_dir: {tmp_path}\nmode: explore\nmodel: {{model_path: m}}\n")
    made = _tokens("create", "ann", "--config", str(yaml))
    assert made.returncode == 0, made.stderr
    assert AttachTokens("", tmp_path / "p/n/attach_tokens.json").find(made.stdout.strip()) is not None
    assert (tmp_path / "p/n").stat().st_mode & 0o777 == 0o700
    with pytest.raises(RunError, match=r"--file .* and --config .* each name a file of tokens") as refused:
        find_tokens(yaml, None, tmp_path / "tokens.json")
    assert refused.value.code == 2


def test_a_folder_that_cannot_be_made_is_one_sentence() -> None:
    made = _tokens("create", "ann", "--file", "/proc/nope/x")
    assert (made.returncode, made.stdout) == (1, "")
    assert made.stderr == "trinity: /proc/nope: No such file or directory\n"
