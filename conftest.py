"""Fixtures for every test: a real nats-server, the quickstart's model and data."""

import contextlib
import importlib.metadata
import os
import runpy
import signal
import sys
import tomllib
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from support.servers.nats import NatsServer
from trinity.runtime.torch_builds import hide_unusable_companions
from trinity.runtime.trust import identity

hide_unusable_companions()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Several engines and trainers share the cores: more threads of models this small would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A shell without job control starts what is in the background with SIGINT ignored, and processes of tests inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# An example takes long where several workers share the cores. That is no failure.
settings.register_profile("patient", parent=settings(), deadline=None)
settings.load_profile("patient")
ROOT = Path(__file__).parent
pytest_plugins = [
    "support.plugin.tiers",
    "support.plugin.failed_tests",
    "support.plugin.pytest_starts",
    "support.servers.shared_engine",
]


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are not part of a test's name: archives hold the time of their making, and each worker makes its own."""
    return argname if isinstance(val, bytes) else None


def pytest_configure() -> None:
    """Satellites are found by entry points, which an editable installation has as they were when it was made."""
    parts = [tomllib.loads(path.read_text())["project"] for path in ROOT.glob("*/*/pyproject.toml")]
    groups = [group for part in parts for group in part.get("entry-points", {}).items()]
    declared = {(group, *entry) for group, entries in groups for entry in entries.items()}
    installed = {(one.group, one.name, one.value) for one in importlib.metadata.distribution("trinity").entry_points}
    if missing := declared - installed:
        fix = ".venv/bin/python -m pip install --no-deps --no-build-isolation -e ."
        pytest.exit(f"entry points are not installed: {sorted(missing)[0]}; {fix}", 2)


def pytest_runtest_setup() -> None:
    """Tables are as wide as in a pipe; earlier tests and the terminal may have set a width."""
    os.environ.pop("COLUMNS", None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Replaces half surrogates in captured logs: a worker cannot send them, and its whole run would end."""
    report = yield
    report.sections = [(name, text.encode(errors="replace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(autouse=True, scope="module")
def _no_identity_of_another_file() -> Iterator[None]:
    """A command that a fixture calls in this process leaves no identity to the tests of other files."""
    identity.configure(None)
    yield
    identity.configure(None)


@pytest.fixture(autouse=True)
def _services_are_not_asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks in tests of the command line start no explorer and no trainer, whose imports take 10 s.

    A name of a hub counts as one that is there.

    test_services_are_asked.py and test_the_machine_is_checked.py call what is replaced here.
    """
    if any(f"{name}/tests" in str(request.path) for name in ("cli", "deep_check", "import_verl")):
        from trinity.cli.supervise.checks import preflight
        from trinity.deep_check import check

        monkeypatch.setattr(check, "ask_services", lambda plan: contextlib.nullcontext(lambda: []))
        monkeypatch.setattr(preflight, "hub_problem", lambda name: "")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """A command that a test calls in this process leaves no identity to the tests after it."""
    before = identity.own()
    try:
        return (yield)
    finally:
        identity.configure(before)


@pytest.fixture
def nats_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NatsServer]:
    """A nats-server of this test alone; it may kill and start it. It has users; the test itself may do everything."""
    server = NatsServer(tmp_path / "nats", users=tmp_path / "identity" / "nats")
    monkeypatch.setenv("TRINITY_NATS_CREDS", str(server.admin()))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def nats_url(nats_server: NatsServer) -> str:
    return nats_server.url


@pytest.fixture(scope="session")
def repository() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def quickstart_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model: Qwen2, random weights, byte tokenizer."""
    folder = tmp_path_factory.mktemp("quickstart") / "model"
    _make("make_model.py", folder)
    return folder


@pytest.fixture(scope="session")
def quickstart_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's sums: train.jsonl and test.jsonl in the GSM8K form."""
    folder = tmp_path_factory.mktemp("quickstart") / "data"
    _make("make_data.py", folder)
    return folder


def _make(script: str, folder: Path) -> None:
    """In this process: a new one would import transformers once more."""
    path = ROOT / "examples/quickstart" / script
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), str(folder)])
        runpy.run_path(str(path), run_name="__main__")
