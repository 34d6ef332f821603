"""Checkpoints as Megatron writes them, of a Hugging Face model: `dist_ckpt` (torch_dist), and `mp_rank_*` folders.

The names and cuts are those of megatron-core's GPTModel with Transformer Engine's layers. torch's own writer of
distributed checkpoints makes the files of `dist_ckpt`. megatron-core itself is not needed.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Parts = dict[str, tuple[torch.Tensor, int | None]]
"""Whole tensors in Megatron's layout, and the dimension that tensor-parallel ranks cut; None: all have the whole."""


def megatron_layer(state: dict[str, torch.Tensor], layer: int, groups: int) -> Parts:
    """One layer by the names within `decoder.layers.<n>.`"""
    old = f"model.layers.{layer}."
    made: Parts = {}
    for kind in ("weight", "bias"):
        if f"{old}self_attn.q_proj.{kind}" in state:
            parts = [state[f"{old}self_attn.{part}_proj.{kind}"] for part in "qkv"]
            grouped = torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], dim=1)
            made[f"self_attention.linear_qkv.{kind}"] = grouped.reshape(-1, *parts[0].shape[1:]), 0
    gate, up = state[f"{old}mlp.gate_proj.weight"], state[f"{old}mlp.up_proj.weight"]
    made |= {
        "self_attention.linear_qkv.layer_norm_weight": (state[f"{old}input_layernorm.weight"], None),
        "self_attention.linear_proj.weight": (state[f"{old}self_attn.o_proj.weight"], 1),
        "mlp.linear_fc1.layer_norm_weight": (state[f"{old}post_attention_layernorm.weight"], None),
        "mlp.linear_fc1.weight": (torch.cat([gate, up]), 0),
        "mlp.linear_fc2.weight": (state[f"{old}mlp.down_proj.weight"], 1),
    }
    for part in "qk":
        if (norm := state.get(f"{old}self_attn.{part}_norm.weight")) is not None:
            made[f"self_attention.{part}_layernorm.weight"] = norm, None
    return made


def outside(state: dict[str, torch.Tensor], tied: bool, padded: int = 0) -> Parts:
    """Weights outside of layers. `padded`: rows that Megatron adds to the vocabulary."""
    embedding = torch.cat(
        [state["model.embed_tokens.weight"], torch.full((padded, state["model.norm.weight"].numel()), 7.0)]
    )
    made: Parts = {"embedding.word_embeddings.weight": (embedding, 0)}
    made["decoder.final_layernorm.weight"] = state["model.norm.weight"], None
    if not tied:
        made["output_layer.weight"] = state["lm_head.weight"], 0
    return made


def _cut(name: str, whole: torch.Tensor, dim: int | None, ranks: int) -> list[torch.Tensor]:
    if dim is None:
        return [whole] * ranks
    if "linear_fc1" in name:
        halves = [half.chunk(ranks) for half in whole.chunk(2)]
        return [torch.cat([gate, up]) for gate, up in zip(*halves, strict=True)]
    return list(whole.chunk(ranks, dim))


def write_ranks(folder: Path, state: dict[str, torch.Tensor], config: Any, tensor: int, pipeline: int) -> None:
    """mp_rank_<t>[_<p>]/model.pt, each a list of one state dict."""
    tied, per_stage = bool(config.tie_word_embeddings), config.num_hidden_layers // pipeline
    others = outside(state, tied)
    for stage in range(pipeline):
        parts: Parts = {}
        if stage == 0:
            parts |= {name: part for name, part in others.items() if name.startswith("embedding")}
        for local in range(per_stage):
            layer = megatron_layer(state, stage * per_stage + local, config.num_key_value_heads)
            parts |= {f"decoder.layers.{local}.{name}": part for name, part in layer.items()}
        if stage == pipeline - 1:
            parts |= {name: part for name, part in others.items() if not name.startswith("embedding")}
            if tied and pipeline > 1:
                parts["output_layer.weight"] = others["embedding.word_embeddings.weight"]
        for rank in range(tensor):
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else "")
            (folder / name).mkdir(parents=True)
            mine = {key: _cut(key, *part, tensor)[rank].clone() for key, part in parts.items()}
            extra = {"decoder.layers.0.mlp.linear_fc1._extra_state": None}  # of Transformer Engine
            torch.save([mine | extra], folder / name / "model.pt")


class Chunks(torch.Tensor):
    """A whole tensor of `whole_size` that is saved in parts: (offsets, part). It holds no elements itself."""

    whole_size: tuple[int, ...]
    parts: list[tuple[tuple[int, ...], torch.Tensor]]

    @staticmethod
    def of(size: tuple[int, ...], parts: list[tuple[tuple[int, ...], torch.Tensor]]) -> "Chunks":
        made: Chunks = torch.Tensor._make_subclass(Chunks, torch.empty(0))
        made.whole_size, made.parts = size, parts
        return made

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), part.shape),
                    properties=TensorProperties.create_from_tensor(part),
                    size=torch.Size(self.whole_size),
                ),
            )
            for offsets, part in self.parts
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), part.shape) for offsets, part in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(part for offsets, part in self.parts if torch.Size(offsets) == index.offset)


def _chunks(
    name: str, whole: torch.Tensor, dim: int | None, ranks: int
) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """The gate and the up projection are cut each, so there are two chunks of a rank."""
    if dim is None:
        ranks, dim = 1, 0
    at = 0
    for part in whole.chunk(ranks * (2 if "linear_fc1.weight" in name else 1), dim):
        yield tuple(at if each == dim else 0 for each in range(whole.dim())), part.clone()
        at += part.shape[dim]


def write_dist(
    folder: Path, state: dict[str, torch.Tensor], config: Any, tensor: int, files: int, padded: int = 0
) -> None:
    """`files`: how many files the chunks are spread over."""
    layers = config.num_hidden_layers
    saved: dict[str, Any] = {"decoder.layers.mlp.linear_fc1._extra_state/shard_0_2": b"x", "rng_state/shard_0": [1]}
    saved["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.zeros(3)
    for name, (whole, dim) in outside(state, bool(config.tie_word_embeddings), padded).items():
        saved[name] = Chunks.of(tuple(whole.shape), list(_chunks(name, whole, dim, tensor)))
    every = [megatron_layer(state, layer, config.num_key_value_heads) for layer in range(layers)]
    for name, (whole, dim) in every[0].items():
        parts = [
            ((layer, *offsets), part[None])
            for layer, each in enumerate(every)
            for offsets, part in _chunks(name, each[name][0], dim, tensor)
        ]
        saved[f"decoder.layers.{name}"] = Chunks.of((layers, *whole.shape), parts)
    writer = dcp.FileSystemWriter(folder, thread_count=files)
    dcp.save(saved, storage_writer=writer, no_dist=True)
    torch.save({"iteration": 1}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
