"""A maker of weight versions: the trainer's own publisher and collective group, on weights that a test thinks up."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from trinity.trainer.weights.claim import Claim
from trinity.trainer.weights.collective import CollectiveSender
from trinity.trainer.weights.publisher import Publisher
from trinity.trainer.weights.shards import describe
from trinity.trainer.weights.verification import VerificationResults
from trinity.trainer.weights.version_stores import VersionStores
from trinity.weights.client import BlockingSyncClient, Call
from trinity.weights.manifest import Canary, Probe, TensorInfo
from trinity.weights.stores import open_store

_PROBES = [[5, 9, 33, 70, 12, 4], [61, 44, 7, 19]]

Named = list[tuple[str, torch.Tensor]]


class Policy(Protocol):
    """A model: `path` is its folder, `base` are its weights as they are there."""

    path: str
    base: Named

    def logprobs(self, weights: Named, token_ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first, at temperature 1."""


class Maker:
    """Makes versions of a model. The weights of each version differ from those of all others."""

    def __init__(
        self,
        sync: str,
        run: str,
        policy: Policy,
        folder: Path,
        storage: Sequence[str] = ("folder",),
        *,
        nats_url: str = "",
        collective: bool = False,
        full_interval: int = 3,
        deadline_seconds: float = 6.0,
        bucket_bytes: int = 64 * 1024,
    ) -> None:
        torch.set_num_threads(1)
        self.policy = policy
        self.client = BlockingSyncClient(sync, run)
        self._claim = Claim(self.client)
        self._claim.start()
        sender = None
        if collective:
            sender = CollectiveSender(self.client.ask, "127.0.0.1", torch.device("cpu"), bucket_bytes, deadline_seconds)
        self.publisher = Publisher(
            self.client,
            self._claim,
            VerificationResults(self.client, lambda: self._claim.renew().withdrawn, False, (1e-3, 1e-2)),
            VersionStores(
                folder / "weights",
                run,
                [open_store(entry, run, folder=folder / "weights", nats_url=nats_url) for entry in storage],
                full_interval,
                nats_url,
            ),
            versions_to_keep=8,
            collective=sender,
        )
        self.version = 0
        self.publisher.open(0)
        self.publisher.announce_base(policy.path, self.canary(policy.base))

    def weights_of(self, version: int) -> Named:
        """One tensor in three is another than in the version before, so that a difference is worth its while."""
        return [
            (name, value + self._change(index, version, value)) for index, (name, value) in enumerate(self.policy.base)
        ]

    @staticmethod
    def _change(index: int, version: int, like: torch.Tensor) -> torch.Tensor:
        changed = version - (version - index) % 3  # the newest version that changed this tensor
        if changed < 1:
            return torch.zeros_like(like)
        generator = torch.Generator().manual_seed(1000 * changed + index)
        return 0.05 * torch.randn(like.shape, generator=generator)

    def canary(self, weights: Named) -> Canary:
        probes = (Probe(tuple(ids), tuple(self.policy.logprobs(weights, ids))) for ids in _PROBES)
        return Canary(tuple(probes), 1e-3, 1e-2)

    def logprobs(self, version: int, token_ids: Sequence[int]) -> list[float]:
        """A version's log-probability of each token but the first."""
        return self.policy.logprobs(self.weights_of(version), token_ids)

    def publish(self, *, canary: Canary | None = None, after_tensor: Callable[[int], None] = lambda index: None) -> int:
        """The next version, in all stores and to the group. `after_tensor` is called while it is broadcast."""
        while True:
            self.publisher.poll()
            if (due := self.publisher.due_rollback) is not None:
                self.publisher.follows(due)
            self.version += 1
            weights = self.weights_of(self.version)
            layout: list[TensorInfo] = [describe(name, value.dtype, value.shape) for name, value in weights]
            if self.publisher.publish(self.version, layout, iter(weights), canary or self.canary(weights)):
                self.publisher.broadcast(_watched(weights, after_tensor))
            if self.publisher.due_rollback is None:  # else it was refused: it comes of a withdrawn version
                break
        return self.version

    def before_publishing(self, work: Callable[[Callable[[], Any]], Any]) -> None:
        """Once: `work` is given the next call that publishes a version, to make it when it likes.

        The version is not registered by then, although its files are in all stores.
        """
        ask = self.client.ask

        def struck(call: Call[Any]) -> Any:
            if call.method != "Publish":
                return ask(call)
            self.client.ask = ask  # type: ignore[method-assign]
            return work(lambda: ask(call))

        self.client.ask = struck  # type: ignore[method-assign,assignment]

    def close(self) -> None:
        self.publisher.close()


def _watched(weights: Named, after_tensor: Callable[[int], None]) -> Iterator[tuple[str, torch.Tensor]]:
    for index, pair in enumerate(weights):
        yield pair
        after_tensor(index)
