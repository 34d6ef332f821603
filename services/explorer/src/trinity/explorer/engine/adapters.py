"""Adapters that one engine holds unmerged: vLLM adds scale B A x to W x, by the adapter of each request.

    load -> use ... -> drop

A name may be loaded again. Every load gets a new id, name and path at vLLM, which are in its hashes of key-value
blocks, so no block is shared between two loads. A running request keeps the adapter that it began with: a replaced or
dropped adapter holds its slot until its last request has ended. vLLM would read an adapter without a slot from its
folder again; that never happens here, so the folder may go after `load`.
"""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trinity.runtime.errors import Full, InvalidInput
from trinity.weights.adapters import CONFIG, WEIGHTS
from trinity.weights.lora import Lora

_READ_SECONDS = 0.01  # between questions whether an adapter is read


@dataclass(eq=False)
class Held:
    """A loaded adapter. `request`: vLLM's LoRARequest, None for the base model. `running`: its requests."""

    request: Any
    serial: int
    salt: str
    running: int = 0


class HeldAdapters:
    """Loads and drops the adapters of one engine by name. Adapters that still leave occupy one of the `slots` each.

    The name "" stands for the base model at first.
    """

    def __init__(self, llm: Any, slots: int) -> None:
        self._llm = llm
        self._slots = slots
        self._named = {"": Held(None, 0, "adapter0")}
        self._leaving: list[Held] = []
        self._ids = itertools.count(1)
        self._loading = asyncio.Lock()
        self._left = asyncio.Event()

    @property
    def names(self) -> list[str]:
        return list(self._named)

    @property
    def held(self) -> int:
        """Slots in use."""
        return len(self._occupied())

    def serial(self, name: str) -> int | None:
        """Returns the serial of a name's load; None if unknown."""
        return self._named[name].serial if name in self._named else None

    async def load(self, name: str, folder: Path | None, serial: int = 0, keep: str = "") -> float:
        """Load a folder of peft under a name; None stands for the base model. Returns the seconds of the engine.

        serial: recorded in the spans of tokens. keep: another name for the adapter before, which then stays; "": it
        leaves. New requests of the name use the new adapter once this returns. Waits
        while replaced adapters hold the slot that it needs. Raises Full if the named ones hold all, and InvalidInput
        with vLLM's reason if it refuses the folder; then the adapter before stays.
        """
        async with self._loading:
            if keep and (kept := self._named.pop(keep, None)) is not None:
                self._leaving.append(kept)
            request, begin = None, time.monotonic()
            number = next(self._ids)
            if folder is not None:
                await self._make_room(name)
                from vllm.lora.request import LoRARequest

                request = LoRARequest(f"{name}/{number}", number, str(folder))
                try:
                    await self._read(request)
                    begin = time.monotonic()
                    await self._llm.add_lora(request)
                except asyncio.CancelledError:
                    self._leaving.append(Held(request, serial, ""))  # the engine may have it, or get it yet
                    raise
                except Exception as error:  # vLLM's core wraps every error
                    raise InvalidInput("adapter", f"{name!r} cannot be loaded from {folder}: {error}") from error
            seconds = time.monotonic() - begin
            if (before := self._named.get(name)) is not None and keep:
                self._named[keep] = before
            elif before is not None:
                self._leaving.append(before)
            self._named[name] = Held(request, serial, f"adapter{number}")
            await self._remove_idle()
            return seconds

    async def _read(self, request: Any) -> None:
        """Make the workers read the folder while their steps go on."""
        args = request.lora_name, request.lora_int_id, request.lora_path
        await self._llm.collective_rpc("read_adapter", args=args)
        while not all(await self._llm.collective_rpc("adapter_is_read")):
            await asyncio.sleep(_READ_SECONDS)

    async def drop(self, name: str) -> None:
        """Refuse new requests of an adapter, and remove it after its last one. Raises InvalidInput if unknown."""
        async with self._loading:
            self._find(name)
            self._leaving.append(self._named.pop(name))
            await self._remove_idle()

    @contextlib.asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Held]:
        """The adapter of a request that runs until the context ends. Raises InvalidInput if unknown."""
        held = self._find(name)
        held.running += 1
        try:
            yield held
        finally:
            held.running -= 1
            if not held.running:
                self._left.set()

    def _find(self, name: str) -> Held:
        if name not in self._named:
            known = ", ".join(map(repr, filter(None, self._named))) or "none"
            raise InvalidInput("adapter", f"is {name!r}, and this engine holds {known}; load it first")
        return self._named[name]

    def _occupied(self) -> list[Held]:
        return [held for held in (*self._named.values(), *self._leaving) if held.request is not None]

    async def _make_room(self, name: str) -> None:
        while True:
            self._left.clear()
            await self._remove_idle()
            if len(self._occupied()) < self._slots:
                return
            if not any(held.request is not None for held in self._leaving):
                raise Full(f"all {self._slots} slots for adapters hold named ones; drop one before {name!r} is loaded")
            await self._left.wait()

    async def _remove_idle(self) -> None:
        """Remove replaced and dropped adapters that no request uses."""
        for held in [held for held in self._leaving if not held.running]:
            self._leaving.remove(held)
            if held.request is not None:
                await self._llm.remove_lora(held.request.lora_int_id)


def lay_out(folder: Path, lora: Lora, files: Sequence[Path]) -> None:
    """Makes a folder of peft from the files of a version: one file is linked, several are joined."""
    config = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [target.name.removesuffix(".weight") for target in lora.targets],
    }
    (folder / CONFIG).write_text(json.dumps(config))
    if len(files) == 1:
        (folder / WEIGHTS).symlink_to(files[0].absolute())
        return
    from safetensors.torch import load_file, save_file

    save_file({name: tensor for file in files for name, tensor in load_file(file).items()}, folder / WEIGHTS)
