"""A member of a collective group, as a separate process: python group_member.py ADDRESS EPOCH RANK WORLD LIMIT.

It enters, prints "entered", receives one version for every line on stdin (bucket bytes, then name:dtype:shape ...), and
prints each as a line of JSON: the sums by name, or {"broken": why}.
"""

import json
import math
import sys

import torch

from trinity.weights.collective import Group, GroupBroken, Store, receive
from trinity.weights.manifest import TensorInfo

_BYTES = {"F32": 4, "BF16": 2, "I64": 8}


def info(text: str) -> TensorInfo:
    """From name:dtype:2x3."""
    name, dtype, shape = text.split(":")
    sizes = tuple(int(size) for size in shape.split("x") if size)
    return TensorInfo(name, dtype, sizes, _BYTES[dtype] * math.prod(sizes), "part")


def main() -> None:
    address, secret, epoch, rank, world = sys.argv[1:6]
    timeout = float(sys.argv[6])
    store = Store.connect(address, secret, timeout)
    group = Group(store, int(epoch), "gloo", int(rank), int(world), torch.device("cpu"), 60)
    group._timeout = timeout  # of transfers; another member may start much later than this one
    print("entered", flush=True)
    for line in sys.stdin:
        size, *texts = line.split()
        try:
            received = receive(group, [info(text) for text in texts], int(size))
            told: dict[str, object] = {name: float(tensor.double().sum()) for name, tensor in received}
        except GroupBroken as error:
            told = {"broken": str(error)}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
