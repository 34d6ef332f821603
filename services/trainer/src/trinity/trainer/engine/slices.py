"""Saves and loads a trained module as slices of named parameters, so that ranks and ZeRO stage may change in between.

Each rank writes the elements that it updates: float32 masters and the states of the optimizer, elementwise tensors as
slices and others as numbers. Under ZeRO 0, where every rank updates everything, each writes an equal share. A loading
rank reads the elements that it will update, from the files of any ranks, and rounds the weights from the masters, as an
update does. trinity.weights.checkpoint_slices has the format. The places of elements are DeepSpeed's:

ZeRO 0     the parameters; in bfloat16 `fp32_groups` has a master for each of `fp16_groups`
ZeRO 1, 2  parameters lie in `bit16_groups_flat`, of which a rank updates one of equal parts
ZeRO 3     `fp32_partitioned_groups_flat` has a rank's parts of the parameters of `fp16_groups`, each padded
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trinity.runtime import files
from trinity.runtime.errors import InvalidInput
from trinity.trainer.process.exchange import Together
from trinity.trainer.weights.shards import CHECKPOINT_SHARD_BYTES, Snapshot, describe, write_shards
from trinity.weights.checkpoint_slices import BUFFER, INDEX, MASTER, SliceIndex, SliceReader
from trinity.weights.manifest import TensorInfo

_OPTIMIZER = "optimizer"  # entry of the index's state
Named = tuple[str, torch.Tensor]
Write = Callable[[], list[Path]]  # writes files, and returns their paths


@dataclass(frozen=True)
class Fragment:
    """Elements of a flattened parameter, `start` to `start + length`, from `offset` on in a flat `master`.

    `master` is a parameter of the optimizer, and the key of its state.
    """

    name: str
    start: int
    length: int
    master: torch.Tensor
    offset: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the fragment's elements of a tensor like `master`."""
        return flat.detach().view(-1)[self.offset : self.offset + self.length]

    def cut(self, begin: int, end: int) -> "Fragment":
        """Returns elements `begin` to `end` of the fragment."""
        return Fragment(self.name, self.start + begin, end - begin, self.master, self.offset + begin)


class SlicedState:
    """The trained state of a module wrapped by DeepSpeed: gathered for writing, and loaded.

    The states of an 8-bit optimizer are blocks of a master's elements with a scale each. They are saved as they are, by
    rank and master, and only the same ranks and stage can load them.
    """

    def __init__(
        self,
        engine: Any,
        optimizer: torch.optim.Optimizer,
        kind: str,
        zero_stage: int,
        dtype: torch.dtype,
        device: torch.device,
        together: Together = contextlib.nullcontext,
    ) -> None:
        """kind: `optimizer_type` of the configuration."""
        self._engine, self._optimizer, self._zero_stage, self._dtype = engine, optimizer, zero_stage, dtype
        self._kind, self._in_blocks = kind, kind == "adamw_8bit"
        self._together = together
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._held = Snapshot(device)

    def reserve(self) -> Callable[[], None]:
        """Returns a function that allocates the memory of `snapshot`, for another thread. A collective."""
        layout, _, _ = self._described()
        return lambda: self._held.reserve(layout) if self._held.fits(layout) else None

    def _described(self) -> tuple[list[TensorInfo], list[Named], list[Fragment]]:
        """The tensors of this rank's files with their descriptions, and the fragments that they are of."""
        fragments = self._share(self._fragments())
        tensors = sorted(self._tensors(fragments), key=lambda named: str(named[1].dtype))  # a file has one dtype
        return [describe(key, tensor.dtype, tensor.shape) for key, tensor in tensors], tensors, fragments

    def snapshot(self, folder: Path, state: dict[str, Any]) -> Write:
        """Copies this rank's state to host memory; returns a function that writes the copy, while training continues.

        If host memory lacks room for the copy, the files are written before this returns. `state`: JSON, for rank 0's
        index. The next snapshot overwrites the memory: it must begin after the write.
        """
        layout, tensors, fragments = self._described()
        documents: dict[str, Any] = {f"{self._prefix}.json": {part.name: self._numbers(part) for part in fragments}}
        if self._rank == 0:
            documents[INDEX] = asdict(self._index(state))
        if not self._held.fits(layout):
            written = self._write(folder, layout, tensors, documents)
            return lambda: written
        copies = list(self._held.take(layout, tensors))  # in memory that is kept: new pages take longer than the copy
        return lambda: self._write(folder, layout, copies, documents)

    @property
    def _prefix(self) -> str:
        return f"rank_{self._rank:05d}"

    def _write(
        self, folder: Path, layout: list[TensorInfo], tensors: list[Named], documents: dict[str, Any]
    ) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        pattern = self._prefix + "_{:05d}.safetensors"
        _, infos = write_shards(tensors, layout, folder, pattern, CHECKPOINT_SHARD_BYTES, all_stay=True)
        for name, value in documents.items():
            files.write_json(folder / name, value)
        written = [folder / name for name in (*(info.name for info in infos), *documents)]
        for path in written:
            files.sync_file(path)
        return written

    def load(self, folder: Path) -> dict[str, Any]:
        """Loads what ranks of any number and stage wrote; returns their state. A collective.

        Raises InvalidInput for another model, and for missing or damaged files. States that an optimizer has and the
        checkpoint lacks become zero, as before the first update.
        """
        reader = SliceReader(folder)
        self._check(reader)
        counts = _largest(reader)
        sharded = self._engine.optimizer
        if self._zero_stage == 3:
            sharded.checkpoint_event_prologue()  # frees parameters that are whole: they have the old values
        clear_state(self._optimizer)
        with torch.no_grad():
            if self._in_blocks:
                self._load_blocks(reader)
            for master, fragments in self._by_master().items():
                self._load(reader, master, fragments, counts)
            for name, buffer in self._buffers():
                if reader.index.buffers.get(name) == list(buffer.shape):
                    flat = torch.empty(buffer.numel(), dtype=buffer.dtype)
                    _copy(flat, reader.whole(BUFFER, name, list(buffer.shape)))
                    buffer.copy_(flat.view(buffer.shape))
        with self._together("the load of a checkpoint"):
            with torch.no_grad():
                self._round()
            if self._zero_stage == 3:
                sharded.checkpoint_event_epilogue()
        return reader.index.state

    def _load(
        self, reader: SliceReader, master: torch.Tensor, fragments: list[Fragment], counts: dict[str, float]
    ) -> None:
        """counts: numbers of the states of all parameters, which ZeRO 1 to 3 update together."""
        kinds = {kind for fragment in fragments for kind in reader.kinds(fragment.name)} - {MASTER, BUFFER}
        numbers = [found for fragment in fragments if (found := reader.numbers(fragment.name))]
        state = self._optimizer.state[master] if kinds or numbers else {}
        state |= {kind: torch.zeros_like(master) for kind in sorted(kinds - state.keys())}
        for fragment in fragments:
            for kind in (MASTER, *sorted(kinds & reader.kinds(fragment.name))):
                whole = master if kind == MASTER else state[kind]
                _copy(fragment.of(whole), reader.read(kind, fragment.name, fragment.start, fragment.length))
        for key, number in (counts if self._zero_stage and numbers else dict(*numbers)).items():
            state[key] = self._number(master, state.get(key), number)

    def _load_blocks(self, reader: SliceReader) -> None:
        """Loads 8-bit states of every master that has been updated."""
        optimizer: Any = self._optimizer
        groups = optimizer.param_groups
        for index, master in enumerate(self._by_master()):
            name = self._name_of_blocks(index)
            if not reader.kinds(name):
                continue
            state = optimizer.state[master]
            if not state:
                optimizer.param_groups = [{**groups[0], "params": [master]}]
                optimizer.init_state(optimizer.param_groups[0], master, 0, 0)
                optimizer.param_groups = groups
            for kind in reader.kinds(name):
                held = state[kind].view(-1)
                _copy(held, reader.read(kind, name, 0, len(held)))

    def _blocks(self) -> Iterator[Named]:
        """Yields the 8-bit states of this rank's masters, and under ZeRO 0 rank 0's."""
        for index, master in enumerate(self._by_master() if self._zero_stage or self._rank == 0 else ()):
            for kind, value in self._optimizer.state.get(master, {}).items():
                if isinstance(value, torch.Tensor) and not kind.startswith("qmap"):  # tables of codes are constant
                    yield f"{kind}/0/{self._name_of_blocks(index)}", value.view(-1)

    def _name_of_blocks(self, index: int) -> str:
        return f"rank {self._rank if self._zero_stage else 0} master {index}"

    def _by_master(self) -> dict[torch.Tensor, list[Fragment]]:
        found: dict[torch.Tensor, list[Fragment]] = {}
        for fragment in self._fragments():
            found.setdefault(fragment.master, []).append(fragment)
        return found

    def _numbers(self, fragment: Fragment) -> dict[str, float]:
        """Returns the count of the parameter's updates, if its optimizer counts."""
        state = self._optimizer.state.get(fragment.master, {})
        return {"step": float(state["step"])} if "step" in state else {}

    def _number(self, master: torch.Tensor, before: Any, number: float) -> Any:
        """Returns a number in the form of the optimizer: torch's are tensors, DeepSpeedCPUAdam's an int."""
        if isinstance(before, torch.Tensor):
            return before.fill_(number)
        if before is not None or not isinstance(self._optimizer, torch.optim.AdamW):
            return type(before or 0)(number)
        on_device = self._optimizer.param_groups[0].get("fused")
        return torch.tensor(number, dtype=torch.float32, device=master.device if on_device else "cpu")

    def _round(self) -> None:
        """Makes the weights from the masters."""
        sharded = self._engine.optimizer
        if self._zero_stage == 3:
            for weights, masters in zip(
                sharded.fp16_partitioned_groups_flat, sharded.fp32_partitioned_groups_flat, strict=True
            ):
                weights.data.copy_(masters.data)
        elif self._zero_stage:
            sharded.update_lp_params()
        elif hasattr(sharded, "fp32_groups"):
            for weights, masters in zip(sharded.fp16_groups, sharded.fp32_groups, strict=True):
                torch._foreach_copy_([weight.data for weight in weights], [master.data for master in masters])

    def _index(self, state: dict[str, Any]) -> SliceIndex:
        names = {id(parameter): name for name, parameter in self._engine.module.named_parameters()}
        both = self._engine.module.named_parameters(remove_duplicate=False)
        tied = {name: names[id(parameter)] for name, parameter in both if names[id(parameter)] != name}
        buffers = {name: list(buffer.shape) for name, buffer in self._buffers()}
        dtype = str(self._dtype).removeprefix("torch.")
        state = {**state, _OPTIMIZER: {"type": self._kind, "zero_stage": self._zero_stage}}
        return SliceIndex(self._ranks, dtype, self._shapes(), buffers, tied, state)

    def _check(self, reader: SliceReader) -> None:
        saved, mine = reader.index.parameters, self._shapes()
        for name in sorted(saved.keys() | mine.keys()):
            if saved.get(name) != mine.get(name):
                there, here = (f"of shape {of[name]}" if name in of else "not at all" for of in (saved, mine))
                problem = f"is of another model: it has {name} {there}, the model of this run {here}"
                raise InvalidInput(str(reader.folder), problem)
        made = {"type": "adamw", "zero_stage": self._zero_stage, **reader.index.state.get(_OPTIMIZER, {})}
        if made["type"] != self._kind:
            problem = f"has states of {made['type']}, but optimizer_type is {self._kind}; set it to {made['type']}"
            raise InvalidInput(str(reader.folder), f"{problem}, or begin another run with these weights")
        shape, now = (reader.index.ranks, made["zero_stage"]), (self._ranks, self._zero_stage)
        if self._in_blocks and shape != now:
            there, here = (f"{ranks} rank(s) under zero_stage {stage}" for ranks, stage in (shape, now))
            problem = f"has 8-bit states of {there}, which {here} cannot load; resume with {there}"
            raise InvalidInput(str(reader.folder), problem)

    def _shapes(self) -> dict[str, list[int]]:
        """Shapes of the trained parameters, whole under ZeRO 3 too."""
        named = self._engine.module.named_parameters()
        return {name: list(getattr(p, "ds_shape", p.shape)) for name, p in named if p.requires_grad}

    def _buffers(self) -> list[Named]:
        """The buffers that belong to a model's files."""
        kept = self._engine.module.state_dict().keys()
        return [(name, buffer) for name, buffer in self._engine.module.named_buffers() if name in kept]

    def _tensors(self, fragments: list[Fragment]) -> Iterator[Named]:
        for fragment in fragments:
            place = f"{fragment.start}/{fragment.name}"
            yield f"{MASTER}/{place}", fragment.of(fragment.master)
            for kind, value in {} if self._in_blocks else self._optimizer.state.get(fragment.master, {}).items():
                if isinstance(value, torch.Tensor) and kind != "step" and value.shape == fragment.master.shape:
                    yield f"{kind}/{place}", fragment.of(value)
        if self._in_blocks:
            yield from self._blocks()
        if self._rank == 0:
            yield from ((f"{BUFFER}/0/{name}", buffer.reshape(-1)) for name, buffer in self._buffers())

    def _share(self, fragments: list[Fragment]) -> list[Fragment]:
        """Returns the fragments that this rank writes: its own, or under ZeRO 0 an equal share."""
        if self._zero_stage:
            return fragments
        total = sum(fragment.length for fragment in fragments)
        first, last = (total * rank // self._ranks for rank in (self._rank, self._rank + 1))
        found: list[Fragment] = []
        at = 0
        for fragment in fragments:
            begin, end = max(first - at, 0), min(last - at, fragment.length)
            if begin < end:
                found.append(fragment.cut(begin, end))
            at += fragment.length
        return found

    def _fragments(self) -> list[Fragment]:
        """Returns the elements that this rank updates."""
        return [one for one in all_fragments(self._engine, self._optimizer, self._zero_stage) if one.length > 0]


def all_fragments(engine: Any, optimizer: torch.optim.Optimizer, zero_stage: int) -> list[Fragment]:
    """Returns the elements of every trained parameter that this rank updates; a length below 1 means none."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    sharded = engine.optimizer
    if zero_stage == 3:
        return list(_parts_of_parameters(sharded, names, dist.get_rank()))
    if zero_stage:
        return list(_parts_of_groups(sharded, names, dist.get_rank()))
    groups = [group["params"] for group in optimizer.param_groups]
    return [
        Fragment(names[id(parameter)], 0, parameter.numel(), master, 0)
        for parameters, masters in zip(getattr(sharded, "fp16_groups", groups), groups, strict=True)
        for parameter, master in zip(parameters, masters, strict=True)
    ]


def clear_state(optimizer: torch.optim.Optimizer) -> None:
    """Sets the optimizer's states to zero, as before the first update; tables of 8-bit codes stay."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if not key.startswith("qmap"):
                state[key] = value.zero_() if isinstance(value, torch.Tensor) else type(value)(0)


def _parts_of_groups(sharded: Any, names: dict[int, str], rank: int) -> Iterator[Fragment]:
    for parameters, flat, master in zip(
        sharded.bit16_groups, sharded.bit16_groups_flat, sharded.single_partition_of_fp32_groups, strict=True
    ):
        first = rank * master.numel()
        for parameter in parameters:
            place = (parameter.data_ptr() - flat.data_ptr()) // flat.element_size()
            start = max(first - place, 0)
            end = min(first + master.numel() - place, parameter.numel())
            yield Fragment(names[id(parameter)], start, end - start, master, place + start - first)


def _parts_of_parameters(sharded: Any, names: dict[int, str], rank: int) -> Iterator[Fragment]:
    for parameters, master in zip(sharded.fp16_groups, sharded.fp32_partitioned_groups_flat, strict=True):
        offset = 0
        for parameter in parameters:
            size = parameter.partition_numel()
            start = rank * size
            yield Fragment(names[id(parameter)], start, min(size, parameter.ds_numel - start), master, offset)
            offset += size


def _largest(reader: SliceReader) -> dict[str, float]:
    """Returns the largest numbers of all parameters: ZeRO 1 to 3 update them together.

    Under ZeRO 0, steps in which a parameter had no gradient are not counted for it.
    """
    found: dict[str, float] = {}
    for name in reader.index.parameters:
        for key, number in reader.numbers(name).items():
            found[key] = max(number, found.get(key, number))
    return found


def _copy(target: torch.Tensor, pieces: list[torch.Tensor]) -> None:
    at = 0
    for piece in pieces:
        target[at : at + len(piece)].copy_(piece)
        at += len(piece)
