from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("run", "state", "step", "last_step", "version", "checkpoint_step", "tokens_trained", "metrics", "world_size", "waiting_for", "nodes")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TRAINED_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    run: str
    state: str
    step: int
    last_step: int
    version: int
    checkpoint_step: int
    tokens_trained: int
    metrics: _containers.ScalarMap[str, float]
    world_size: int
    waiting_for: str
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    def __init__(self, run: _Optional[str] = ..., state: _Optional[str] = ..., step: _Optional[int] = ..., last_step: _Optional[int] = ..., version: _Optional[int] = ..., checkpoint_step: _Optional[int] = ..., tokens_trained: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., world_size: _Optional[int] = ..., waiting_for: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("name", "ranks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    ranks: int
    def __init__(self, name: _Optional[str] = ..., ranks: _Optional[int] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckpointResponse(_message.Message):
    __slots__ = ("step", "path")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    step: int
    path: str
    def __init__(self, step: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class JoinNodeRequest(_message.Message):
    __slots__ = ("node", "beat", "rank_ended", "leaving")
    NODE_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    RANK_ENDED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    node: Node
    beat: NodeBeat
    rank_ended: RankEnded
    leaving: NodeLeaving
    def __init__(self, node: _Optional[_Union[Node, _Mapping]] = ..., beat: _Optional[_Union[NodeBeat, _Mapping]] = ..., rank_ended: _Optional[_Union[RankEnded, _Mapping]] = ..., leaving: _Optional[_Union[NodeLeaving, _Mapping]] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("run", "name", "process", "ranks", "device", "versions", "config")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class ConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    run: str
    name: str
    process: str
    ranks: int
    device: str
    versions: _containers.ScalarMap[str, str]
    config: _containers.ScalarMap[str, str]
    def __init__(self, run: _Optional[str] = ..., name: _Optional[str] = ..., process: _Optional[str] = ..., ranks: _Optional[int] = ..., device: _Optional[str] = ..., versions: _Optional[_Mapping[str, str]] = ..., config: _Optional[_Mapping[str, str]] = ...) -> None: ...

class NodeBeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankEnded(_message.Message):
    __slots__ = ("rank", "code")
    RANK_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    code: int
    def __init__(self, rank: _Optional[int] = ..., code: _Optional[int] = ...) -> None: ...

class NodeLeaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JoinNodeResponse(_message.Message):
    __slots__ = ("beat", "waiting", "group", "finished")
    BEAT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    beat: NodeBeat
    waiting: str
    group: RankGroup
    finished: NodeFinished
    def __init__(self, beat: _Optional[_Union[NodeBeat, _Mapping]] = ..., waiting: _Optional[str] = ..., group: _Optional[_Union[RankGroup, _Mapping]] = ..., finished: _Optional[_Union[NodeFinished, _Mapping]] = ...) -> None: ...

class RankGroup(_message.Message):
    __slots__ = ("first_rank", "world_size", "store_port", "store_secret")
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    STORE_SECRET_FIELD_NUMBER: _ClassVar[int]
    first_rank: int
    world_size: int
    store_port: int
    store_secret: str
    def __init__(self, first_rank: _Optional[int] = ..., world_size: _Optional[int] = ..., store_port: _Optional[int] = ..., store_secret: _Optional[str] = ...) -> None: ...

class NodeFinished(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
