"""Mode serve: which file of keys the endpoint asks for, and when a run is refused without one."""

from pathlib import Path

import pytest

from trinity.cli.supervise.endpoint import api_keys
from trinity.cli.supervise.job import Job
from trinity.config import Config, ConfigError

pytestmark = pytest.mark.core


def _config(folder: Path, **explorer: str) -> Config:
    model = {"model_path": "model"}
    given = {"project": "p", "name": "n", "checkpoint_root_dir": str(folder), "model": model, "explorer": explorer}
    return Config.model_validate({"mode": "serve", **given})


def test_a_key_is_made_in_the_job_folder_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRINITY_EXPLORER_API_KEYS_FILE", raising=False)
    config = _config(tmp_path)
    file = api_keys(config, Job(config), "run.yaml")
    made = file.read_text()
    assert (file, file.stat().st_mode & 0o777) == (tmp_path / "p/n/serve.keys", 0o600)
    assert api_keys(config, Job(config), "run.yaml").read_text() == made


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "::"])
def test_other_machines_need_a_file_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.delenv("TRINITY_EXPLORER_API_KEYS_FILE", raising=False)
    config = _config(tmp_path, listen_address=host)
    with pytest.raises(ConfigError, match=r"explorer.api_keys_file.*TRINITY_EXPLORER_API_KEYS_FILE"):
        api_keys(config, Job(config), "run.yaml")
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    monkeypatch.setenv("TRINITY_EXPLORER_API_KEYS_FILE", str(keys))
    assert api_keys(config, Job(config), "run.yaml") == keys


def test_the_yaml_names_a_file_that_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRINITY_EXPLORER_API_KEYS_FILE", raising=False)
    config = _config(tmp_path, api_keys_file=str(tmp_path / "keys"))
    with pytest.raises(ConfigError, match="is no file"):
        api_keys(config, Job(config), "run.yaml")
