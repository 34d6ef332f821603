"""Registering a new version: the claim, the checks of its manifest, and then its record."""

from trinity.runtime.errors import Conflict, NotFound
from trinity.sync.checks import examine
from trinity.sync.claims import Claims
from trinity.sync.store.manifests import Manifests, digest_of
from trinity.sync.store.state import Judged, RunState
from trinity.sync.versions import Versions
from trinity.weights import Manifest


class Staging:
    """Stage, for one run."""

    def __init__(self, state: RunState, versions: Versions, manifests: Manifests, claims: Claims) -> None:
        self._state = state
        self._versions = versions
        self._manifests = manifests
        self._claims = claims

    async def stage(self, manifest: Manifest, lease_id: str = "", rollback: int | None = None) -> Judged:
        """Register a version. Idempotent for the same manifest. `rollback`: the newest one that its weights follow.

        Raises InvalidInput for a manifest that contradicts itself, the run's other versions or its files (the last
        leaves the version REJECTED), Conflict for a number that is taken or not newer than every other, a base that
        cannot be used, or a trainer that does not have the run.
        """
        manifest.check()
        claim = await self._claims.check(lease_id)
        try:
            there = await self._versions.get(manifest.version)
        except NotFound:
            pass
        else:
            if there.record.digest != digest_of(manifest):
                raise Conflict(
                    f"manifest.version: {manifest.version} exists with another content; versions never change"
                )
            return there
        newest = (await self._state.pointer()).newest_version
        if manifest.version < newest:
            raise Conflict(f"manifest.version: is {manifest.version}, must be newer than {newest}")
        record, problem = await examine(manifest, self._state, self._manifests)
        await self._manifests.put(manifest)
        judged = await self._versions.register(record, claim=claim, rollback=rollback)
        if problem is not None:
            raise problem
        return judged
