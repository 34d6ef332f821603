"""scripts/install.py: uv gets pip's configuration, and pip installs where uv cannot; run.txt is a part of cpu.txt."""

import os
import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import install  # noqa: E402

CONFIGURED = """
[global]
index-url = https://of-the-file.example/simple
extra-index-url =
    https://one.example/simple
    https://two.example/simple
trusted-host = one.example two.example
timeout = 60
[install]
index-url = https://of-installs.example/simple
find-links = /wheels
"""


def test_uv_gets_the_indexes_and_certificates_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "pip.conf").write_text(CONFIGURED)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_CERT", "/our.pem")
    monkeypatch.setenv("PIP_TIMEOUT", "90")
    monkeypatch.setenv("SSL_CERT_FILE", "/of/the/system.pem")
    environment, options = install.from_pip(install.pip_settings())
    assert environment["UV_INDEX_URL"] == "https://of-installs.example/simple"
    assert environment["UV_EXTRA_INDEX_URL"] == "https://one.example/simple https://two.example/simple"
    assert (environment["SSL_CERT_FILE"], environment["UV_HTTP_TIMEOUT"]) == ("/our.pem", "90")
    hosts = ["--allow-insecure-host", "one.example", "--allow-insecure-host", "two.example"]
    assert options == ["--find-links", "/wheels", *hosts]


def test_without_a_configuration_uv_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_INDEX_URL", "https://of-uv.example/simple")
    environment, options = install.from_pip({"no-index": "false"})
    assert environment["UV_INDEX_URL"] == "https://of-uv.example/simple"
    assert not options
    assert install.from_pip({"no-index": "true"})[1] == ["--no-index"]


def _program(path: Path, code: int) -> list[str]:
    """Returns a command that writes its arguments into a file beside it, and exits with a code."""
    path.write_text(f'#!/bin/sh\n[ "$1" = config ] || echo "{path.name} $@" >> {path.parent}/asked\nexit {code}\n')
    path.chmod(0o700)
    return [str(path)]


@pytest.mark.parametrize("has_uv", [True, False])
def test_pip_installs_where_uv_fails(has_uv: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(install, "PIP", _program(tmp_path / "pip", 0))
    monkeypatch.setattr(install, "UV", tmp_path / "uv")
    if has_uv:
        _program(tmp_path / "uv", 2)
    Path("torch-cpu.txt").touch()
    Path("run.txt").write_text("a==1 \\\n    --hash=sha256:0\n")
    install.main(["run.txt", "torch-cpu.txt", "."])
    asked = [line.split(" --find-links")[0] for line in Path("asked").read_text().splitlines()]
    of_pip = [line for line in asked if line.startswith("pip")]
    assert of_pip == [
        "pip install --no-deps --require-hashes -r run.txt",
        "pip install --no-deps --require-hashes -r torch-cpu.txt",
        "pip install --no-deps --no-build-isolation -e .",
    ]
    of_uv = [line for line in asked if line.startswith("uv")]
    assert len(of_uv) == 4 * has_uv  # torch-cpu.txt also from PyTorch's own index
    assert all("--require-hashes" in line for line in of_uv[:3])


def test_an_installation_that_fails_says_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "PIP", _program(tmp_path / "pip", 0))
    monkeypatch.setattr(install, "UV", tmp_path / "uv")
    lock = tmp_path / "torch-cpu.txt"
    lock.touch()
    monkeypatch.setattr(install, "pip_settings", dict)
    _program(tmp_path / "pip", 1)
    with pytest.raises(SystemExit, match=r"torch-cpu.txt cannot be installed:(?s:.*)download.pytorch.org"):
        install.main([str(lock)])


def test_uv_comes_in_the_version_of_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip").write_text(f'#!/bin/sh\neval "cp \\${{$#}} {tmp_path}/asked"\n')
    (tmp_path / "pip").chmod(0o700)
    monkeypatch.setattr(install, "PIP", [str(tmp_path / "pip")])
    monkeypatch.setattr(install, "UV", tmp_path / "uv")
    assert install._install_uv([str(ROOT / "requirements/run.txt")])
    assert re.match(r"uv==[\d.]+ [^\n]*\\\n( +--hash=sha256:[0-9a-f]{64}( \\)?\n)+$", (tmp_path / "asked").read_text())


def _locked(name: str) -> set[str]:
    return set(re.findall(r"^[A-Za-z0-9._-]+==\S+", (ROOT / f"requirements/{name}.txt").read_text(), re.MULTILINE))


def test_the_lock_for_running_is_a_part_of_the_lock_for_tests() -> None:
    running, tests = _locked("run"), _locked("cpu")
    assert running < tests
    assert not {entry.split("==")[0] for entry in running} & {"pytest", "mypy", "ruff", "playwright", "triton"}
