"""Serves the members' store of the collective group, forms epochs, and broadcasts versions as rank 0."""

from collections import Counter
from collections.abc import Callable, Iterator

import structlog
import torch

from trinity.weights.client import Call, form_epoch
from trinity.weights.collective import Group, GroupBroken, Store, send
from trinity.weights.manifest import CollectiveOffer, Manifest
from trinity.weights.pointer import Epoch

log = structlog.get_logger(__name__)

_FORM_ATTEMPTS = 2
_FAILURES = (GroupBroken, torch.OutOfMemoryError)  # out of memory: a step has taken the memory of a bucket
_MOST_PUBLISHES_LEFT_OUT = 64


class CollectiveSender:
    """Offers each version to the explorers that are ready. Logs errors and silence of members, and lack of memory.

    ask: sends a call to the sync service. A member that misses a deadline is excluded from one version, then from twice
    as many each time. After the second failure in a row all members are left out of one version, then of three, and so
    on, and get these by storage: whoever joins under new names and never answers, or breaks each broadcast, cannot cost
    each version a deadline.
    """

    def __init__(
        self,
        ask: Callable[[Call[Epoch | None]], Epoch | None],
        host: str,
        device: torch.device,
        bucket_bytes: int,
        timeout_seconds: float,
    ) -> None:
        self._ask = ask
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout_seconds
        self._backend = "gloo" if device.type == "cpu" else "nccl"
        self._store = Store.serve(host)
        self._epoch: Epoch | None = None
        self._group: Group | None = None
        self._left_out: Counter[str] = Counter()  # number of further versions
        self._missed: Counter[str] = Counter()
        self._failures = self._pause = 0  # in a row; further versions without a group

    def offer(self, lease_id: str) -> CollectiveOffer | None:
        """Returns the group for the next version, formed again if members joined or left; None if it has no members."""
        self._left_out -= Counter(dict.fromkeys(self._left_out, 1))
        if self._pause:
            self._pause -= 1
            return None
        missed = self._missed.total()
        for _ in range(_FORM_ATTEMPTS):
            renew = self._group is None and self._epoch is not None
            store, excluded = self._store, list(self._left_out)
            epoch = self._ask(form_epoch(lease_id, self._backend, store.address, store.secret, excluded, renew=renew))
            if epoch is None:
                self._break_epoch()
                return None
            if self._group is not None and self._epoch is not None and epoch.number == self._epoch.number:
                return CollectiveOffer(epoch.number, self._bucket_bytes)
            self._break_epoch()
            self._epoch = epoch
            if self._enter(epoch):
                return CollectiveOffer(epoch.number, self._bucket_bytes)
        self._note_failure(missed)
        return None

    def _note_failure(self, missed: int) -> None:
        """Pauses the group if members were excluded since `missed` counted them."""
        if self._missed.total() == missed:
            return
        self._failures += 1
        self._pause = min(2 ** (self._failures - 1), _MOST_PUBLISHES_LEFT_OUT) - 1
        if self._pause:
            log.warning("trainer.epoch.paused", versions=self._pause, failures=self._failures)

    def _enter(self, epoch: Epoch) -> bool:
        if not self._all_answer_yes(epoch, f"here/{epoch.number}"):
            return False
        self._store.say(f"go/{epoch.number}")
        try:
            self._group = Group(
                self._store, epoch.number, self._backend, 0, epoch.world_size, self._device, self._timeout
            )
        except _FAILURES as error:
            log.warning("trainer.epoch.failed", epoch=epoch.number, reason=str(error))
            self._exclude([member.explorer_id for member in epoch.members])  # the absent member is unknown
            return False
        names = [member.explorer_id for member in epoch.members]
        log.info("trainer.epoch.formed", epoch=epoch.number, world_size=epoch.world_size, members=names)
        return True

    def send(self, manifest: Manifest, weights: Iterator[tuple[str, torch.Tensor]]) -> bool:
        """Broadcasts a version when all members are ready; returns False if it was cancelled or failed."""
        epoch, group = self._epoch, self._group
        assert epoch is not None and group is not None
        prefix, missed = f"{epoch.number}/{manifest.version}", self._missed.total()
        if not self._all_answer_yes(epoch, f"ready/{prefix}"):
            self._store.say(f"go/{prefix}", yes=False)
            self._note_failure(missed)
            return False
        self._store.say(f"go/{prefix}")
        try:
            send(group, manifest.tensors, weights, self._bucket_bytes)
        except _FAILURES as error:
            log.warning("trainer.epoch.broken", epoch=epoch.number, version=manifest.version, reason=str(error))
            self._break_epoch()
            self._note_failure(-1)  # the member that broke it is unknown
            return False
        self._failures = 0
        for member in epoch.members:
            del self._missed[member.explorer_id]
        return True

    def _all_answer_yes(self, epoch: Epoch, what: str) -> bool:
        names = [member.explorer_id for member in epoch.members]
        answers = self._store.wait_all([f"{what}/{name}" for name in names], self._timeout)
        silent = [name for name, answer in zip(names, answers, strict=True) if answer is None]
        if False in answers:  # one member is busy; the others had too little time to answer
            log.info("trainer.epoch.declined", what=what)
            return False
        self._exclude(silent)
        if silent:
            log.warning("trainer.epoch.silent", what=what, members=silent, seconds=self._timeout)
        return not silent

    def _exclude(self, names: list[str]) -> None:
        """Excludes members from one version, then from two, four, and so on."""
        for name in names:
            self._missed[name] += 1
            self._left_out[name] = min(2 ** (self._missed[name] - 1), _MOST_PUBLISHES_LEFT_OUT) + 1

    def _break_epoch(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None

    def close(self) -> None:
        self._break_epoch()
        self._store.close()
