"""`trinity check --deep` says where the images that an environment shows cannot be read."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.checks.deep_check import check, play
from support.fakes.data.vision import make_files, pretend_torchvision
from support.fakes.environments.gallery import Gallery
from trinity.deep_check import check as deep_check
from trinity.sdk import serving

pytestmark = pytest.mark.core

ROW = {"question": "?", "answer": "2"}
TASKSET = "buffer.explorer_input.taskset"
PLUGIN = """
from trinity import plugins
from trinity.sdk import Description, Environment, Observation


@plugins.environment("pictures")
class Pictures(Environment):
    description = Description("pictures", images=True)

    def reset(self, task, args, seed):
        return Observation("?", info={"tools": [{"name": "look"}]})

    def step(self, action):
        return Observation("", done=True)
"""
SHOWS = f"{TASKSET}.workflow_args.environment: is 'pictures', which shows images"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plugin's module has one place in a process."""
    made = tmp_path_factory.mktemp("plugins")
    (made / "plugins_of_pictures.py").write_text(PLUGIN)
    return made


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision is no requirement of these tests; nor are a tokenizer and weights."""
    pretend_torchvision(monkeypatch)
    monkeypatch.setattr(deep_check, "check_rendering", lambda *_: [])


def seeing(folder: Path) -> str:
    return f"model.model_path={make_files(folder / 'seeing')}"


def of_workflow(name: str) -> dict[str, Any]:
    return {"default_workflow_type": name, "workflow_args": {"environment": "pictures"}}


@pytest.mark.parametrize(
    ("taskset", "sees", "overrides", "said"),
    [
        (play("pictures"), True, [], ""),
        (play("pictures"), False, [], f"{SHOWS}, and the model"),
        (play("countdown"), False, [], ""),
        (of_workflow("R3L_workflow"), True, [], f"{SHOWS}; R3L_workflow reads only text"),
        (of_workflow("tool_call_workflow"), True, [], f"{SHOWS}; tool_call_workflow reads only text"),
    ],
)
def test_images_that_are_not_read_are_named_with_their_key(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    taskset: dict[str, Any],
    sees: bool,
    overrides: list[str],
    said: str,
) -> None:
    monkeypatch.setenv("TRINITY_PLUGIN_DIRS", str(folder))
    given = [seeing(tmp_path)] if sees else []
    row = {**ROW, "nums": [10, 4, 4], "target": 24}
    code, output = check(tmp_path, row, *given, *overrides, **taskset)
    assert code == (2 if said else 0), output
    assert said in " ".join(output.split())


@pytest.mark.parametrize("sees", [True, False])
def test_the_provider_at_an_address_announces_its_images(tmp_path: Path, sees: bool) -> None:
    given = [seeing(tmp_path)] if sees else []
    with gallery() as address:
        provided = f"explorer.environments=[{{name: gallery, address: '{address}'}}]"
        code, output = check(tmp_path, ROW, provided, *given, **play("gallery"))
    assert code == (0 if sees else 2), output
    assert ("which shows images, and the model" in " ".join(output.split())) is not sees


@contextmanager
def gallery() -> Iterator[str]:
    """Served by a thread."""
    found, over = threading.Event(), threading.Event()
    addresses: list[str] = []

    async def serve() -> None:
        async with serving(Gallery) as address:
            addresses.append(address)
            found.set()
            await asyncio.to_thread(over.wait, 60)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert found.wait(10)
        yield addresses[0]
    finally:
        over.set()
        thread.join(10)
