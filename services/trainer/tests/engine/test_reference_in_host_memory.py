"""`offload_reference`: a frozen model that is on the device only while it is used."""

from typing import Any

import pytest
import torch
from torch import nn

from trinity.trainer.model.policy import OffloadedReference

pytestmark = pytest.mark.core

META = torch.device("meta")  # the one device beside the CPU that is always there


class Model(nn.Module):
    """Says where its tensors are while it computes: those of a layer whose weight is tied, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.layer.weight
        self.register_buffer("frequencies", torch.arange(3.0), persistent=False)

    def forward(self, micro: Any) -> set[str]:
        tensors = (self.layer.weight, self.layer.bias, self.tied.weight, self.frequencies)
        return {tensor.device.type for tensor in tensors}


def test_weights_are_on_the_device_within_and_untouched_in_host_memory() -> None:
    model: Any = Model()
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    reference: Any = OffloadedReference(model, META)
    for _ in range(2):
        with reference.on_device():
            assert reference(None) == {"meta"}
        assert reference(None) == {"cpu"}
    for name, tensor in model.state_dict().items():
        place, values = before[name]
        assert tensor.data_ptr() == place
        assert torch.equal(tensor, values)


def test_nothing_stays_on_the_device_when_its_memory_runs_out() -> None:
    model: Any = Model()
    reference: Any = OffloadedReference(model, META)
    with pytest.raises(torch.OutOfMemoryError), reference.on_device():
        raise torch.OutOfMemoryError("out of memory")
    assert reference(None) == {"cpu"}
