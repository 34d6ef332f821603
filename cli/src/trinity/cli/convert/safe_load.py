"""Reading a trainer's pickle without running any of it, and without the libraries that wrote it.

The few classes that a checkpoint holds beside tensors and plain containers are replaced by stand-ins that only keep
what they were given, so neither their code nor the version of the library that wrote them matters.
"""

from pathlib import Path
from typing import Any, Self

import torch

from trinity.cli.errors import CheckpointError
from trinity.runtime.errors import InvalidInput
from trinity.weights import safe_load


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
    try:
        return safe_load.load_safely(path, _ALLOWED)
    except InvalidInput as error:
        raise CheckpointError(str(error)) from None
