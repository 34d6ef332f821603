"""Reading a trainer's pickle without running any of it, and without the libraries that wrote it.

Stand-ins replace the few classes of a checkpoint that are neither tensors nor plain containers. They only keep their
arguments, so neither the code of the classes nor the version of their library matters.
"""

import pickle
from pathlib import Path
from typing import Any, Self

import torch

from trinity.convert.find import CheckpointError
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


class ZeroStage(StandIn):
    """A member of DeepSpeed's ZeroStageEnum. Early Pythons 3.11 write its name, others its value."""

    @classmethod
    def member_by_name(cls, name: str) -> Self:
        return cls(("disabled", "optimizer_states", "gradients", "weights").index(name))


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
    (ZeroStage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (StandIn, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (StandIn, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (StandIn, "deepspeed.utils.tensor_fragment.fragment_address"),
    (StandIn, "_io.BytesIO"),  # Transformer Engine's addition to a layer's tensors
]

_DCP = "torch.distributed.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
# What describes a distributed checkpoint (torch.distributed.checkpoint, with Megatron's additions).
_DESCRIBES: dict[str, Any] = {
    "torch.Size": torch.Size,
    "builtins.getattr": StandIn,  # some versions of Python pickle the member of an enum so
    "torch.serialization._get_layout": StandIn,
    **dict.fromkeys((f"pathlib.{name}" for name in ("PosixPath", "_local.PosixPath")), StandIn),
    **dict.fromkeys((f"{_MEGATRON}.{name}" for name in ("MCoreSavePlan", "MCoreMetadata")), StandIn),
    **dict.fromkeys((f"{_DCP}.filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")), StandIn),
    **dict.fromkeys(
        (f"{_DCP}.planner.{name}" for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")), StandIn
    ),
    **dict.fromkeys(
        (
            f"{_DCP}.metadata.{name}"
            for name in (
                "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
                "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
            )
        ),
        StandIn,
    ),
}  # fmt: skip


class _Describing(pickle.Unpickler):
    """Plain containers, data types of torch, and stand-ins for the classes above; every other global is refused."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        known = _DESCRIBES.get(f"{module}.{name}")
        if known is None:
            raise CheckpointError(f"asks for {module}.{name}, which no checkpoint needs; it was refused")
        return known


def load_safely(path: Path) -> dict[str, Any]:
    """The dict in a file of torch.save; tensors are views of the file where its format allows.

    Raises CheckpointError if the file is missing, damaged, or asks for a global that is not allowed.
    """
    try:
        return safe_load.load_safely(path, _ALLOWED)
    except InvalidInput as error:
        raise CheckpointError(str(error)) from None


def load_any(path: Path, span: tuple[int, int] | None = None) -> object:
    """Does the same as `load_safely` for any type; `span`: first byte and length of the part of the file to read."""
    try:
        return safe_load.load_any(path, _ALLOWED, span=span)
    except InvalidInput as error:
        raise CheckpointError(str(error)) from None


def load_description(path: Path) -> StandIn:
    """The Metadata of a distributed checkpoint, in a file that pickle wrote. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            found = _Describing(file).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path} {error}") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {str(error)[:200]})") from None
    if not isinstance(found, StandIn):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not what describes a distributed checkpoint")
    return found
