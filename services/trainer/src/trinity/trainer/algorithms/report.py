"""Metrics that add up: a sum and a weight each, so that micro-batches and ranks can be joined exactly."""

import torch

# name -> tensor [2]: sum of the values, number of the values
Report = dict[str, torch.Tensor]


def masked_sum(values_BR: torch.Tensor, mask_BR: torch.Tensor) -> torch.Tensor:
    """Sum over the masked positions and their number, [2]."""
    mask = mask_BR.to(torch.float32)
    return torch.stack([(values_BR.to(torch.float32) * mask).sum(), mask.sum()])


def join(reports: list[Report]) -> Report:
    """Add reports up."""
    total: Report = {}
    for report in reports:
        for name, pair in report.items():
            total[name] = total[name] + pair if name in total else pair.clone()
    return total


def means(report: Report) -> dict[str, float]:
    """Means; entries without values are dropped."""
    return {name: float(pair[0] / pair[1]) for name, pair in report.items() if pair[1] > 0}
