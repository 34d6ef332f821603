"""Limits of a sandbox, within those of the environment service's operator."""

import os
from dataclasses import dataclass

from trinity.environments.arguments import Arguments
from trinity.runtime.errors import InvalidInput
from trinity.runtime.leases import most_mib

NETWORK_VARIABLE = "TRINITY_ENVIRONMENT_SANDBOX_NETWORK"
MIB = 1024**2


@dataclass(frozen=True)
class Limits:
    """memory_mib: of all processes together, without files. disk_mib: of each folder that can be written.

    output_bytes: of a command's output that is kept. ttl_seconds: after it everything in the sandbox ends.
    """

    memory_mib: int = 512
    disk_mib: int = 64
    processes: int = 64
    output_bytes: int = 10_000
    command_seconds: float = 20.0
    ttl_seconds: float = 1800.0
    network: bool = False

    @classmethod
    def read(cls, args: Arguments) -> "Limits":
        """Reads the limits out of an environment's arguments. Raises InvalidInput for a limit above the operator's."""
        most = most_mib()
        limits = cls(
            memory_mib=args.integer("memory_mib", cls.memory_mib, low=32, high=most),
            disk_mib=args.integer("disk_mib", cls.disk_mib, low=1, high=most),
            processes=args.integer("processes", cls.processes, low=4, high=4096),
            output_bytes=args.integer("output_bytes", cls.output_bytes, low=100, high=MIB),
            command_seconds=args.number("command_seconds", cls.command_seconds, low=0.1, high=110),
            ttl_seconds=args.number("ttl_seconds", cls.ttl_seconds, low=1, high=86_400),
            network=args.boolean("network", False),
        )
        if limits.network and os.environ.get(NETWORK_VARIABLE, "").lower() not in ("1", "true", "yes", "on"):
            what = f"the operator of the environment service allows no network; it sets {NETWORK_VARIABLE}=true"
            raise InvalidInput("args.network", f"is true, but {what}")
        return limits
