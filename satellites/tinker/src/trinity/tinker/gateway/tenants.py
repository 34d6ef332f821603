"""Tenants and their keys: a folder with a file of keys for each tenant, read again for every request."""

from pathlib import Path

from trinity.runtime.errors import InvalidInput, Unauthenticated
from trinity.runtime.trust.keys import KeyFile

_FIELD = "TRINITY_TINKER_KEYS_FOLDER"


class TenantKeys:
    def __init__(self, folder: Path) -> None:
        """Raises InvalidInput for a folder without tenants, and for a file without a key."""
        self._folder = folder
        if not self._tenants():
            raise InvalidInput(_FIELD, f"is {folder}, which has no file of keys; name each file as its tenant")
        for tenant in self._tenants():
            KeyFile(self._folder / tenant, _FIELD)

    def tenant_of(self, key: str) -> str:
        """Raises Unauthenticated for an unknown key."""
        found = [one for one in self._tenants() if self._allows(one, key)]
        if not found:
            raise Unauthenticated("X-API-Key: is no key of a tenant; set TINKER_API_KEY to a line of the tenant's file")
        return found[0]

    def _allows(self, tenant: str, key: str) -> bool:
        try:
            return KeyFile(self._folder / tenant, _FIELD).allows(f"Bearer {key}")
        except InvalidInput:  # the file is being written
            return False

    def _tenants(self) -> list[str]:
        if not self._folder.is_dir():
            return []
        return sorted(path.name for path in self._folder.iterdir() if path.is_file() and not path.name.startswith("."))
