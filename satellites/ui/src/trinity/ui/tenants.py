"""Tenants of the services for tinker clients: what they used of the devices, and how many of their commands wait."""

import asyncio
from typing import Any

from trinity.plugins import satellites
from trinity.ui.places import Places


async def used(places: Places) -> dict[str, Any]:
    """Returns the services below the folder of runs, each with its tenants. Files are read, no service is called."""
    tenants = satellites.find("tenants")
    folders = tenants.services(places.root) if tenants and places.root is not None else []
    found = await asyncio.to_thread(lambda: [tenants.collect(folder) | {"folder": folder} for folder in folders])
    return {"services": found, "command": "trinity cost --job FOLDER --tenant NAME"}
