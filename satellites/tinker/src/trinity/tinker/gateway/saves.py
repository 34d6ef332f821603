"""The states and adapters that tenants saved under a name: which are there, and how many a tenant may have."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from trinity.runtime.errors import InvalidInput, NotFound
from trinity.tinker.commands.log import now

_DELETE = "delete one by RestClient.delete_checkpoint_from_tinker_path"


@dataclass(frozen=True)
class Saved:
    """A state, or adapters to sample by. `position`: of the command that saves it. `time`: when the command was
    accepted; `expires`: when the save goes, 0 for never; both seconds since 1970."""

    tenant: str
    request_id: str
    position: int
    time: float
    expires: float


class Saves:
    """Named saves of each tenant, by path."""

    def __init__(self, most: int, has_failed: Callable[[str], bool] = lambda request_id: False) -> None:
        """most: saves of one tenant. has_failed: returns True for the request id of a command that failed."""
        self._most, self._has_failed = most, has_failed
        self._named: defaultdict[str, dict[str, Saved]] = defaultdict(dict)  # oldest first

    def take(self, path: str, saved: Saved) -> None:
        """Takes a new save, and forgets those of the tenant whose time was over before it."""
        self.drop(saved.tenant, path)
        named = self._named[saved.tenant]
        for old in [old for old, one in named.items() if 0 < one.expires < saved.time]:
            del named[old]
        named[path] = saved

    def drop(self, tenant: str, path: str) -> None:
        self._named[tenant].pop(path, None)

    def find(self, tenant: str, path: str) -> Saved:
        """Raises NotFound unless the tenant saved it."""
        saved = self._named[tenant].get(path)
        if saved is None:
            raise NotFound(f"{path[:300]} is not known; RestClient.list_user_checkpoints names what is there")
        return saved

    def lack(self, saved: Saved) -> str:
        """Returns why a save is not there, or an empty text."""
        if 0 < saved.expires < now():
            return "ttl_seconds are over"
        return "save failed; save again" if self._has_failed(saved.request_id) else ""

    def of(self, tenant: str) -> dict[str, Saved]:
        """Returns the saves that a tenant has, oldest first."""
        return {path: one for path, one in self._named[tenant].items() if not self.lack(one)}

    def check_new(self, tenant: str, path: str, *, overwrite: bool = False) -> None:
        """Raises InvalidInput for a name that is there already, and for one more than the tenant may have."""
        there, name = self.of(tenant), path.rpartition("/")[2]
        if path in there:
            if overwrite:
                return
            raise InvalidInput("path", f"is {name!r}, under which this model has a save; choose another, or delete it")
        if len(there) >= self._most:
            what = f"is {name!r}; this tenant has the {self._most} named saves that it may have (max_saves)"
            raise InvalidInput("path", f"{what}; {_DELETE}, such as the oldest, {next(iter(there))}")


def about(path: str, saved: Saved) -> dict[str, Any]:
    """Returns what the client's Checkpoint tells."""
    _, _, _, checkpoint_id = path.split("/", 3)
    return {
        "checkpoint_id": checkpoint_id,
        "checkpoint_type": "training" if checkpoint_id.startswith("weights/") else "sampler",
        "time": _iso(saved.time),
        "tinker_path": path,
        "expires_at": _iso(saved.expires) if saved.expires else None,
    }


def _iso(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat()
