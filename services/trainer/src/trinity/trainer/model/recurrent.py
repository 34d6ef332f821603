"""Layers that carry a state from token to token, over packed sequences: the state begins anew at each sequence.

transformers' own path carries the state over the whole row, beyond the ends of sequences. Here such a layer reads one
sequence in each row, padded at its end, which no earlier token sees. The lengths in a call differ by less than a factor
of two. A segment reads the shared prefixes before it again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from trinity.trainer.data.shared_prefixes import path_to

# Classes of transformers whose forward takes hidden states [B, T, H] first, and returns [B, T, H].
LAYERS = {
    "Qwen3NextGatedDeltaNet",
    "Qwen3_5GatedDeltaNet",
    "Qwen3_5MoeGatedDeltaNet",
    "KimiLinearDeltaAttention",
    "GraniteMoeHybridMambaLayer",
}


@dataclass(frozen=True)
class Rows:
    """Rows of each call, and how their outputs become the packed row again.

    places: for each call int64 [B, L], the positions in the packed row that are read. own: bool [B, L], the outputs
    that are kept: neither those of padding nor those of a prefix that is read again. order: int64 [T], for each
    position its index among all outputs that are kept.
    """

    places: list[torch.Tensor]
    own: list[torch.Tensor]
    order: torch.Tensor


def rows_of(lengths: Sequence[int], parents: Sequence[int | None] | None, device: torch.device) -> Rows:
    """Lays out the segments of a packed row. parents: of SharedPrefixes."""
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    alike: dict[int, list[tuple[torch.Tensor, int]]] = {}
    for segment, length in enumerate(lengths):
        path = path_to(segment, parents)
        places = torch.cat([torch.arange(starts[one], starts[one] + lengths[one]) for one in path])
        alike.setdefault(len(places).bit_length(), []).append((places, length))
    every, own = [], []
    for rows in alike.values():
        width = max(len(places) for places, _ in rows)
        places_of = torch.zeros(len(rows), width, dtype=torch.int64)
        own_of = torch.zeros(len(rows), width, dtype=torch.bool)
        for row, (places, length) in enumerate(rows):
            places_of[row, : len(places)] = places
            own_of[row, len(places) - length : len(places)] = True
        every.append(places_of)
        own.append(own_of)
    kept = torch.cat([places[mask] for places, mask in zip(every, own, strict=True)])
    return Rows([one.to(device) for one in every], [one.to(device) for one in own], kept.argsort().to(device))


def recurrent_layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yields the known layers of a transformers model that carry a state."""
    return (module for module in model.modules() if type(module).__name__ in LAYERS)


def begin_anew_at_sequences(model: torch.nn.Module) -> None:
    """Makes these layers read packed rows sequence by sequence where a call has `packing` (attention.Packing)."""
    for layer in recurrent_layers(model):
        layer.forward = partial(_by_sequence, layer.forward)


def _by_sequence(
    forward: Callable[..., torch.Tensor], hidden_states: torch.Tensor, *, packing: Any = None, **others: Any
) -> torch.Tensor:
    if packing is None:
        return forward(hidden_states, **others)
    rows, others = packing.rows, others | {"attention_mask": None}
    every, own = rows.places, rows.own
    if any(hasattr(one, "ds_id") for one in forward.__self__.parameters()):  # type: ignore[attr-defined]
        # ZeRO 3 gathers parameters at each call, and each rank must make the same number of calls.
        every, own = [_joined(every)], [_joined(own)]
    mixed = [forward(hidden_states[0, places], **others)[mask] for places, mask in zip(every, own, strict=True)]
    return torch.cat(mixed)[rows.order][None]


def _joined(groups: list[torch.Tensor]) -> torch.Tensor:
    """Pads groups of rows with zeros to one width: [rows, width]."""
    width = max(group.shape[1] for group in groups)
    return torch.cat([pad(group, (0, width - group.shape[1])) for group in groups])
