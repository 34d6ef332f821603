from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VersionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERSION_STATE_UNSPECIFIED: _ClassVar[VersionState]
    VERSION_STATE_STAGED: _ClassVar[VersionState]
    VERSION_STATE_VERIFIED: _ClassVar[VersionState]
    VERSION_STATE_LIVE: _ClassVar[VersionState]
    VERSION_STATE_RETIRED: _ClassVar[VersionState]
    VERSION_STATE_REJECTED: _ClassVar[VersionState]
VERSION_STATE_UNSPECIFIED: VersionState
VERSION_STATE_STAGED: VersionState
VERSION_STATE_VERIFIED: VersionState
VERSION_STATE_LIVE: VersionState
VERSION_STATE_RETIRED: VersionState
VERSION_STATE_REJECTED: VersionState

class Manifest(_message.Message):
    __slots__ = ("run", "version", "step", "tensors", "files", "offers", "created_at_seconds", "base_model")
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    run: str
    version: int
    step: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorInfo]
    files: _containers.RepeatedCompositeFieldContainer[File]
    offers: _containers.RepeatedCompositeFieldContainer[Offer]
    created_at_seconds: float
    base_model: str
    def __init__(self, run: _Optional[str] = ..., version: _Optional[int] = ..., step: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorInfo, _Mapping]]] = ..., files: _Optional[_Iterable[_Union[File, _Mapping]]] = ..., offers: _Optional[_Iterable[_Union[Offer, _Mapping]]] = ..., created_at_seconds: _Optional[float] = ..., base_model: _Optional[str] = ...) -> None: ...

class TensorInfo(_message.Message):
    __slots__ = ("name", "dtype", "shape", "size_bytes", "file")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    size_bytes: int
    file: str
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., size_bytes: _Optional[int] = ..., file: _Optional[str] = ...) -> None: ...

class File(_message.Message):
    __slots__ = ("name", "size_bytes", "checksum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    size_bytes: int
    checksum: str
    def __init__(self, name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., checksum: _Optional[str] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("folder",)
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    folder: FolderOffer
    def __init__(self, folder: _Optional[_Union[FolderOffer, _Mapping]] = ...) -> None: ...

class FolderOffer(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class WeightVersion(_message.Message):
    __slots__ = ("manifest", "state", "reason", "holders")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    state: VersionState
    reason: str
    holders: int
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., state: _Optional[_Union[VersionState, str]] = ..., reason: _Optional[str] = ..., holders: _Optional[int] = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("transports", "dtype", "tensor_parallel_size", "engines", "zone")
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    transports: _containers.RepeatedScalarFieldContainer[str]
    dtype: str
    tensor_parallel_size: int
    engines: int
    zone: str
    def __init__(self, transports: _Optional[_Iterable[str]] = ..., dtype: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ..., engines: _Optional[int] = ..., zone: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("run", "explorer_id", "capabilities", "pid", "host", "address", "base_model")
    RUN_FIELD_NUMBER: _ClassVar[int]
    EXPLORER_ID_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    run: str
    explorer_id: str
    capabilities: Capabilities
    pid: int
    host: str
    address: str
    base_model: str
    def __init__(self, run: _Optional[str] = ..., explorer_id: _Optional[str] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., address: _Optional[str] = ..., base_model: _Optional[str] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("lease_id", "lease_seconds")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    lease_seconds: float
    def __init__(self, lease_id: _Optional[str] = ..., lease_seconds: _Optional[float] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("run", "lease_id")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    run: str
    lease_id: str
    def __init__(self, run: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("live",)
    LIVE_FIELD_NUMBER: _ClassVar[int]
    live: Manifest
    def __init__(self, live: _Optional[_Union[Manifest, _Mapping]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("run", "lease_id", "version", "state", "tokens_per_second", "last_pause_seconds", "tokens_generated", "failed_version", "failure")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LAST_PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    FAILED_VERSION_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    run: str
    lease_id: str
    version: int
    state: str
    tokens_per_second: float
    last_pause_seconds: float
    tokens_generated: int
    failed_version: int
    failure: str
    def __init__(self, run: _Optional[str] = ..., lease_id: _Optional[str] = ..., version: _Optional[int] = ..., state: _Optional[str] = ..., tokens_per_second: _Optional[float] = ..., last_pause_seconds: _Optional[float] = ..., tokens_generated: _Optional[int] = ..., failed_version: _Optional[int] = ..., failure: _Optional[str] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("lease_seconds",)
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    def __init__(self, lease_seconds: _Optional[float] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("run", "lease_id")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    run: str
    lease_id: str
    def __init__(self, run: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StageRequest(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ...) -> None: ...

class StageResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: VersionState
    def __init__(self, state: _Optional[_Union[VersionState, str]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("run", "version")
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    run: str
    version: int
    def __init__(self, run: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("collectable",)
    COLLECTABLE_FIELD_NUMBER: _ClassVar[int]
    collectable: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, collectable: _Optional[_Iterable[int]] = ...) -> None: ...

class ListVersionsRequest(_message.Message):
    __slots__ = ("run", "limit")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    run: str
    limit: int
    def __init__(self, run: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListVersionsResponse(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[WeightVersion]
    def __init__(self, versions: _Optional[_Iterable[_Union[WeightVersion, _Mapping]]] = ...) -> None: ...

class ListMembersRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("explorer_id", "capabilities", "pid", "host", "address", "version", "lag", "state", "tokens_per_second", "seconds_since_report", "tokens_generated")
    EXPLORER_ID_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_REPORT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    explorer_id: str
    capabilities: Capabilities
    pid: int
    host: str
    address: str
    version: int
    lag: int
    state: str
    tokens_per_second: float
    seconds_since_report: float
    tokens_generated: int
    def __init__(self, explorer_id: _Optional[str] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., address: _Optional[str] = ..., version: _Optional[int] = ..., lag: _Optional[int] = ..., state: _Optional[str] = ..., tokens_per_second: _Optional[float] = ..., seconds_since_report: _Optional[float] = ..., tokens_generated: _Optional[int] = ...) -> None: ...

class ListMembersResponse(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...
