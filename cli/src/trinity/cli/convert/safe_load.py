"""Reading a trainer's pickle without running any of it.

Torch's restricted unpickler (`weights_only`) rebuilds tensors and plain containers. The few other classes that a
checkpoint holds are replaced by stand-ins that only keep what they were given, so neither their code nor the version
of the library that wrote them matters. Every other global ends the reading.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch

from trinity.cli.convert.errors import CheckpointError

_ZIP = b"PK\x03\x04"
_REFUSED = re.compile(r"GLOBAL (\S+)")


class StandIn:
    """An object of a class we do not run: its arguments and its state."""

    args: tuple[Any, ...]
    state: dict[str, Any]

    def __new__(cls, *args: Any) -> Self:
        made = super().__new__(cls)
        made.args, made.state = args, {}
        return made

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.state.update(part)


class Mesh(StandIn):
    """A DeviceMesh. Its state's `_coordinate_on_dim` says where on the mesh the rank that saved it was."""


class Spec(StandIn):
    """A DTensorSpec: `mesh`, and one of `placements` for each dimension of the mesh."""


class Shard(StandIn):
    """The placement of a tensor that is cut along its dimension `dim`."""


class Replicate(StandIn):
    """The placement of a tensor that is whole."""


class ShardedTensor(torch.Tensor):
    """A DTensor: shape and dtype of the whole, `_local_tensor` of this rank and `_spec`. No operation is defined."""

    _local_tensor: torch.Tensor
    _spec: Spec

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} of a tensor that lies on several ranks")


_NEW = "torch.distributed.tensor"
_OLD = "torch.distributed._tensor"
_ALLOWED: list[Any] = [
    (ShardedTensor, f"{_NEW}.DTensor"),
    (ShardedTensor, f"{_OLD}.api.DTensor"),
    (Mesh, "torch.distributed.device_mesh.DeviceMesh"),
    *((Spec, f"{module}.DTensorSpec") for module in (f"{_NEW}._dtensor_spec", f"{_OLD}.placement_types")),
    *((Shard, f"{module}.placement_types.Shard") for module in (_NEW, _OLD)),
    *((Replicate, f"{module}.placement_types.Replicate") for module in (_NEW, _OLD)),
    *((StandIn, f"{module}.TensorMeta") for module in (f"{_NEW}._dtensor_spec", f"{_OLD}.placement_types")),
    (StandIn, f"{_NEW}._dtensor_spec.ShardOrderEntry"),
    (StandIn, "torch.distributed._mesh_layout._MeshLayout"),
    (StandIn, "torch.distributed._mesh_layout._FlatLayout"),
    (StandIn, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (StandIn, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (StandIn, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (StandIn, "deepspeed.utils.tensor_fragment.fragment_address"),
]


def load_safely(path: Path) -> dict[str, Any]:
    """The dict in a file of torch.save; tensors are views of the file where its format allows.

    Raises CheckpointError if the file is missing, damaged, or asks for a global that is not allowed.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        with path.open("rb") as file:
            can_map = file.read(len(_ZIP)) == _ZIP
        with _only_ours():
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=can_map)
    except Exception as error:  # a damaged pickle can raise anything
        if refused := _REFUSED.search(str(error)):
            raise CheckpointError(f"{path} asks for {refused[1]}, which no checkpoint needs; it was refused") from None
        first = (str(error).rpartition("WeightsUnpickler error:")[2].strip().splitlines() or [""])[0][:200]
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {first})") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not a state dict")
    return found


@contextlib.contextmanager
def _only_ours() -> Iterator[None]:
    """Allow our stand-ins and nothing that other modules have allowed (torch allows the real DTensor, for one)."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)
