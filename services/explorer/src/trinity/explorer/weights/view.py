"""The state that the sync service announces, and the version to load next."""

from dataclasses import dataclass

from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.weights import Manifest, manifest_from_proto


@dataclass(frozen=True)
class View:
    """The newest WatchResponse. `gate_step` is the optimizer step up to which the LIVE version meets gates."""

    live: Manifest | None = None
    gate_step: int = -1
    candidate: Manifest | None = None
    epoch: pb.Epoch | None = None
    rejected: frozenset[int] = frozenset()

    @classmethod
    def from_proto(cls, message: pb.WatchResponse) -> "View":
        live = manifest_from_proto(message.live) if message.HasField("live") else None
        return cls(
            live=live,
            gate_step=max(message.gate_step, live.step) if live is not None else -1,
            candidate=manifest_from_proto(message.candidate) if message.HasField("candidate") else None,
            epoch=message.epoch if message.HasField("epoch") else None,
            rejected=frozenset(message.rejected),
        )


@dataclass(frozen=True)
class Held:
    """What the engines hold. `version` is -1 before the first.

    `corrupt`: known to be wrong, or a load failed. `was_live`: it was LIVE once. `refused` are candidates
    whose canary failed here.
    """

    version: int = -1
    corrupt: bool = False
    was_live: bool = False
    refused: frozenset[int] = frozenset()


def epoch_number(epoch: pb.Epoch | None) -> int:
    """0 for none."""
    return epoch.number if epoch is not None else 0


def next_load(view: View, held: Held, evaluating: bool) -> Manifest | None:
    """What to load now; None: nothing.

    While an evaluation runs here newer versions wait, so that one evaluation measures one version. A load that replaces
    wrong or withdrawn weights does not wait.
    """
    live = view.live if view.live is None or view.live.version not in view.rejected else None
    candidate, unwanted = view.candidate, view.rejected | held.refused
    if live is not None:
        withdrawn = held.version in view.rejected or (live.version < held.version and held.was_live)
        if held.version < 0 or held.corrupt or withdrawn:
            return live
    newer = live if live is not None and live.version > held.version else None
    if candidate is not None and candidate.version > held.version and candidate.version not in unwanted:
        newer = candidate
    return None if evaluating and held.version >= 0 else newer
