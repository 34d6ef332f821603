"""vLLM's products of adapters on a CPU, computed adapter by adapter.

vLLM up to 0.32 copies A and B for every token: [tokens, rank, in], gigabytes for a prompt on a model of 1 B. And it
takes the index of a token without an adapter, -1, for the last slot, so such a token gets that slot's adapter.
"""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.lora.punica_wrapper import punica_cpu

Rows = torch.Tensor | slice


def install() -> None:
    """Replace the functions that PunicaWrapperCPU calls by name."""
    here: Any = punica_cpu
    here.bgmv_shrink, here.sgmv_shrink = shrink, _of_runs(shrink)
    here.bgmv_expand, here.sgmv_expand = expand, _of_runs(expand)
    here.bgmv_expand_slice, here.sgmv_expand_slice = expand_slice, _of_runs(expand_slice)


def shrink(
    inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, indices: torch.Tensor, scale: float = 1.0
) -> None:
    """output [tokens, rank] = scale A x, with A `weights[i]` [1, rank, in] by the index of a token; -1 changes nothing.

    An inputs row is a token's x.
    """
    for index, rows in _by_adapter(indices):
        matrix = _matrix(weights, index, output.dtype)
        output[rows, : len(matrix)] = scale * (inputs[rows].to(output.dtype) @ matrix.T)


def expand(
    inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, indices: torch.Tensor, add_inputs: bool = True
) -> None:
    """The first columns of output [tokens, out] become B x, with B `weights[i]` [1, out, rank], or get it added."""
    expand_slice(inputs, weights, output, indices, 0, min(weights.shape[-2], output.shape[1]), add_inputs)


def expand_slice(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    indices: torch.Tensor,
    offset: int,
    size: int,
    add_inputs: bool = True,
) -> None:
    """Does the same for `size` columns from `offset`."""
    columns = output[:, offset : offset + size]
    for index, rows in _by_adapter(indices):
        made = inputs[rows].to(output.dtype) @ _matrix(weights, index, output.dtype)[:size].T
        columns[rows] = columns[rows] + made if add_inputs else made


def _of_runs(of_tokens: Any) -> Any:
    """The form of a function whose tokens lie in runs of one adapter: (run's index, run's length)."""

    def of_runs(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        indices: torch.Tensor,
        runs: int,
        longest: int,
        tokens: int,
        *others: Any,
    ) -> None:
        of_tokens(inputs, weights, output, indices if runs == 1 else indices.repeat_interleave(lengths), *others)

    return of_runs


def _by_adapter(indices: torch.Tensor) -> Iterator[tuple[int, Rows]]:
    """Each adapter with the rows of its tokens. One index stands for all rows."""
    found = torch.unique(indices).tolist()
    for index in found:
        if index >= 0:
            yield index, slice(None) if len(found) == 1 else torch.nonzero(indices == index)[:, 0]


def _matrix(weights: torch.Tensor, index: int, dtype: torch.dtype) -> torch.Tensor:
    return weights[index].squeeze(0).to(dtype)
