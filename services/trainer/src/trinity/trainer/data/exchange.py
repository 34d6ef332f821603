"""Rank 0 talks to the services and shares with the other ranks: bytes and numbers, never pickles (invariant I9)."""

import struct
from collections.abc import Callable

import torch
import torch.distributed as dist

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.trainer.data.client import RawBatch
from trinity.trainer.ranks import Ranks

_NOTHING_YET = b"nothing yet"


def share_bytes(data: bytes | None, ranks: Ranks, device: torch.device) -> bytes:
    """Rank 0's bytes, on every rank."""
    if ranks.world_size == 1:
        return data or b""
    size = torch.tensor([len(data or b"")], dtype=torch.int64, device=device)
    dist.broadcast(size, src=0)
    if ranks.is_first:
        payload = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8).to(device)
    else:
        payload = torch.empty(max(1, int(size)), dtype=torch.uint8, device=device)
    if int(size):
        dist.broadcast(payload, src=0)
    return payload.cpu().numpy().tobytes()[: int(size)]


def share_when_known(look: Callable[[], bytes | None], ranks: Ranks, device: torch.device) -> bytes:
    """The result of rank 0's `look`, on every rank; repeats while it is None.

    Every rank takes part in each try: torch ends a rank that waits in a collective beyond its timeout.
    """
    while True:
        found = look() if ranks.is_first else None
        shared = share_bytes(_NOTHING_YET if found is None and ranks.is_first else found, ranks, device)
        if shared != _NOTHING_YET:
            return shared


def encode_batch(batch: RawBatch) -> bytes:
    """Length-prefixed messages: the entry, then groups or examples."""
    messages = [batch.entry, *batch.groups, *batch.examples]
    parts = [message.SerializeToString() for message in messages]
    head = struct.pack("<II", len(batch.groups), len(batch.examples))
    return head + b"".join(struct.pack("<Q", len(part)) + part for part in parts)


def decode_batch(data: bytes) -> RawBatch:
    groups, examples = struct.unpack_from("<II", data)
    at, parts = 8, []
    for _ in range(1 + groups + examples):
        (size,) = struct.unpack_from("<Q", data, at)
        parts.append(data[at + 8 : at + 8 + size])
        at += 8 + size
    return RawBatch(
        entry=pb.LedgerEntry.FromString(parts[0]),
        groups=[pb.BatchGroup.FromString(part) for part in parts[1 : 1 + groups]],
        examples=[pb.Example.FromString(part) for part in parts[1 + groups :]],
    )
