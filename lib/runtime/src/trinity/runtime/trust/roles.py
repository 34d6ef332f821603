"""The roles of a run, and the table of gRPC methods that each may call.

A process has one role. A caller's role comes from its token or certificate, never from what a message says.
"""

from collections.abc import Mapping
from enum import StrEnum


class Role(StrEnum):
    """The role of a process. A service has the role of its name, unless its settings give another."""

    BUFFER = "buffer"
    EXPLORER = "explorer"
    TRAINER = "trainer"
    SYNC = "sync"
    ENVIRONMENT = "environment"
    TINKER = "tinker"  # the gateway of tinker clients, the executor of their commands, and the explorer that samples
    PROVIDER = "provider"  # of environments, which attaches them; of agents, which opens sessions at explorers
    OPERATOR = "operator"  # the command line
    READER = "reader"  # dashboards, and commands that only look


_ALL = frozenset(Role)
_LOOKS = frozenset({Role.OPERATOR, Role.READER})
_OPERATOR = frozenset({Role.OPERATOR})
_TRAINER = frozenset({Role.TRAINER})
_EXPLORER = frozenset({Role.EXPLORER})
_PROVIDER = frozenset({Role.PROVIDER})

_SERVICES: Mapping[str, Mapping[str, frozenset[Role]]] = {
    "trinity.api.buffer.v1.BufferService": {
        "PublishTasks": _OPERATOR,
        "StreamBatches": _LOOKS | _TRAINER,
        "CommitStep": _TRAINER,
        "Rewind": _TRAINER | _OPERATOR,  # `trinity replay` asks it of the read-only buffer that it starts
        "GetLedgerEntry": _LOOKS,
        "Fork": _LOOKS,
        "SkipStep": _OPERATOR,
        "Stats": _LOOKS | _EXPLORER | _TRAINER,  # whether the run is finished
        "ListDeadLetters": _LOOKS,
        "RetryDeadLetters": _OPERATOR,
        "DropDeadLetters": _OPERATOR,
        "Fence": _OPERATOR,
    },
    "trinity.api.environment.v1.EnvironmentService": {
        "Describe": _LOOKS | _EXPLORER,
        "Episode": _EXPLORER,
        "Score": _EXPLORER,
        "Attach": _PROVIDER,
    },
    "trinity.api.explorer.v1.ExplorerService": {
        "Generate": _OPERATOR,
        "Chat": _OPERATOR,
        "OpenSession": _OPERATOR | _PROVIDER,
        "CloseSession": _OPERATOR | _PROVIDER,
        "AbandonSession": _OPERATOR | _PROVIDER,
        "Drain": _OPERATOR,
        "Status": _LOOKS,
    },
    "trinity.api.explorer.v1.SamplerService": {
        "Sample": frozenset({Role.TINKER}),
    },
    "trinity.api.sync.v1.SyncService": {
        "Join": _EXPLORER,
        "Watch": _EXPLORER,
        "Report": _EXPLORER,
        "Leave": _EXPLORER,
        "Claim": _TRAINER,
        "Release": _TRAINER,
        "Publish": _TRAINER | _OPERATOR,  # mode bench; while a trainer has the run, sync takes versions only from it
        "GetVersion": _LOOKS | _TRAINER | _EXPLORER,
        "Pin": _OPERATOR,
        "Rollback": _OPERATOR | {Role.BUFFER},  # explorer.traffic.guard
        "FormEpoch": _TRAINER,
        "ListVersions": _LOOKS | _TRAINER,
        "ListMembers": _LOOKS | _TRAINER,
    },
    "trinity.api.trainer.v1.TrainerService": {
        "Status": _LOOKS | _TRAINER,  # a further node shows the step
        "Pause": _OPERATOR,
        "Resume": _OPERATOR,
        "Checkpoint": _OPERATOR,
        "JoinNode": _TRAINER,
    },
    "grpc.health.v1.Health": {"Check": _ALL, "List": _ALL, "Watch": _ALL},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": _LOOKS},
}

# Roles that may call each method, by its full name as gRPC spells it: "/package.Service/Method".
METHODS: Mapping[str, frozenset[Role]] = {
    f"/{service}/{method}": roles for service, methods in _SERVICES.items() for method, roles in methods.items()
}

# Reached without an identity as well: the offer in its first message has a provider's token, which the service checks.
CHECKED_BY_SERVICE = frozenset({"/trinity.api.environment.v1.EnvironmentService/Attach"})
