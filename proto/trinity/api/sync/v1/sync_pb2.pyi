from trinity.api.explorer.v1 import explorer_pb2 as _explorer_pb2
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
    __slots__ = ("run", "version", "step", "tensors", "files", "offers", "created_at_seconds", "base_model", "delta", "canary", "lora", "ledger_sha256", "parent_sha256")
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    LEDGER_SHA256_FIELD_NUMBER: _ClassVar[int]
    PARENT_SHA256_FIELD_NUMBER: _ClassVar[int]
    run: str
    version: int
    step: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorInfo]
    files: _containers.RepeatedCompositeFieldContainer[File]
    offers: _containers.RepeatedCompositeFieldContainer[Offer]
    created_at_seconds: float
    base_model: str
    delta: Delta
    canary: Canary
    lora: Lora
    ledger_sha256: bytes
    parent_sha256: bytes
    def __init__(self, run: _Optional[str] = ..., version: _Optional[int] = ..., step: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorInfo, _Mapping]]] = ..., files: _Optional[_Iterable[_Union[File, _Mapping]]] = ..., offers: _Optional[_Iterable[_Union[Offer, _Mapping]]] = ..., created_at_seconds: _Optional[float] = ..., base_model: _Optional[str] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., canary: _Optional[_Union[Canary, _Mapping]] = ..., lora: _Optional[_Union[Lora, _Mapping]] = ..., ledger_sha256: _Optional[bytes] = ..., parent_sha256: _Optional[bytes] = ...) -> None: ...

class Lora(_message.Message):
    __slots__ = ("rank", "alpha", "targets")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    alpha: float
    targets: _containers.RepeatedCompositeFieldContainer[LoraTarget]
    def __init__(self, rank: _Optional[int] = ..., alpha: _Optional[float] = ..., targets: _Optional[_Iterable[_Union[LoraTarget, _Mapping]]] = ...) -> None: ...

class LoraTarget(_message.Message):
    __slots__ = ("name", "shape", "transposed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    TRANSPOSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    transposed: bool
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., transposed: bool = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("base_version", "files")
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    base_version: int
    files: _containers.RepeatedCompositeFieldContainer[File]
    def __init__(self, base_version: _Optional[int] = ..., files: _Optional[_Iterable[_Union[File, _Mapping]]] = ...) -> None: ...

class Canary(_message.Message):
    __slots__ = ("probes", "mean_tolerance", "max_tolerance", "quantized_factor")
    PROBES_FIELD_NUMBER: _ClassVar[int]
    MEAN_TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOLERANCE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZED_FACTOR_FIELD_NUMBER: _ClassVar[int]
    probes: _containers.RepeatedCompositeFieldContainer[Probe]
    mean_tolerance: float
    max_tolerance: float
    quantized_factor: float
    def __init__(self, probes: _Optional[_Iterable[_Union[Probe, _Mapping]]] = ..., mean_tolerance: _Optional[float] = ..., max_tolerance: _Optional[float] = ..., quantized_factor: _Optional[float] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("token_ids", "logprobs", "images")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    images: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., images: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CanaryReport(_message.Message):
    __slots__ = ("version", "mean_error", "max_error", "expected", "computed", "explorer_id")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEAN_ERROR_FIELD_NUMBER: _ClassVar[int]
    MAX_ERROR_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    EXPLORER_ID_FIELD_NUMBER: _ClassVar[int]
    version: int
    mean_error: float
    max_error: float
    expected: float
    computed: float
    explorer_id: str
    def __init__(self, version: _Optional[int] = ..., mean_error: _Optional[float] = ..., max_error: _Optional[float] = ..., expected: _Optional[float] = ..., computed: _Optional[float] = ..., explorer_id: _Optional[str] = ...) -> None: ...

class TensorInfo(_message.Message):
    __slots__ = ("name", "dtype", "shape", "size_bytes", "file", "checksum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    size_bytes: int
    file: str
    checksum: str
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., size_bytes: _Optional[int] = ..., file: _Optional[str] = ..., checksum: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("folder", "s3", "jetstream", "collective", "delta")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    S3_FIELD_NUMBER: _ClassVar[int]
    JETSTREAM_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    folder: FolderOffer
    s3: S3Offer
    jetstream: JetStreamOffer
    collective: CollectiveOffer
    delta: bool
    def __init__(self, folder: _Optional[_Union[FolderOffer, _Mapping]] = ..., s3: _Optional[_Union[S3Offer, _Mapping]] = ..., jetstream: _Optional[_Union[JetStreamOffer, _Mapping]] = ..., collective: _Optional[_Union[CollectiveOffer, _Mapping]] = ..., delta: bool = ...) -> None: ...

class FolderOffer(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class S3Offer(_message.Message):
    __slots__ = ("bucket", "prefix", "endpoint")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    bucket: str
    prefix: str
    endpoint: str
    def __init__(self, bucket: _Optional[str] = ..., prefix: _Optional[str] = ..., endpoint: _Optional[str] = ...) -> None: ...

class JetStreamOffer(_message.Message):
    __slots__ = ("prefix",)
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    def __init__(self, prefix: _Optional[str] = ...) -> None: ...

class CollectiveOffer(_message.Message):
    __slots__ = ("epoch", "bucket_bytes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    bucket_bytes: int
    def __init__(self, epoch: _Optional[int] = ..., bucket_bytes: _Optional[int] = ...) -> None: ...

class WeightVersion(_message.Message):
    __slots__ = ("manifest", "state", "reason", "holders", "pinned", "measured", "files_gone")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    FILES_GONE_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    state: VersionState
    reason: str
    holders: int
    pinned: bool
    measured: CanaryReport
    files_gone: bool
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., state: _Optional[_Union[VersionState, str]] = ..., reason: _Optional[str] = ..., holders: _Optional[int] = ..., pinned: bool = ..., measured: _Optional[_Union[CanaryReport, _Mapping]] = ..., files_gone: bool = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("transports", "dtype", "tensor_parallel_size", "engines", "zone", "platform")
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    transports: _containers.RepeatedScalarFieldContainer[str]
    dtype: str
    tensor_parallel_size: int
    engines: int
    zone: str
    platform: str
    def __init__(self, transports: _Optional[_Iterable[str]] = ..., dtype: _Optional[str] = ..., tensor_parallel_size: _Optional[int] = ..., engines: _Optional[int] = ..., zone: _Optional[str] = ..., platform: _Optional[str] = ...) -> None: ...

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
    __slots__ = ("live", "gate_step", "candidate", "epoch", "rejected", "problem")
    LIVE_FIELD_NUMBER: _ClassVar[int]
    GATE_STEP_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    live: Manifest
    gate_step: int
    candidate: Manifest
    epoch: Epoch
    rejected: _containers.RepeatedScalarFieldContainer[int]
    problem: str
    def __init__(self, live: _Optional[_Union[Manifest, _Mapping]] = ..., gate_step: _Optional[int] = ..., candidate: _Optional[_Union[Manifest, _Mapping]] = ..., epoch: _Optional[_Union[Epoch, _Mapping]] = ..., rejected: _Optional[_Iterable[int]] = ..., problem: _Optional[str] = ...) -> None: ...

class Epoch(_message.Message):
    __slots__ = ("number", "backend", "store_address", "world_size", "members", "store_secret")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    STORE_SECRET_FIELD_NUMBER: _ClassVar[int]
    number: int
    backend: str
    store_address: str
    world_size: int
    members: _containers.RepeatedCompositeFieldContainer[EpochMember]
    store_secret: str
    def __init__(self, number: _Optional[int] = ..., backend: _Optional[str] = ..., store_address: _Optional[str] = ..., world_size: _Optional[int] = ..., members: _Optional[_Iterable[_Union[EpochMember, _Mapping]]] = ..., store_secret: _Optional[str] = ...) -> None: ...

class EpochMember(_message.Message):
    __slots__ = ("explorer_id", "first_rank", "ranks")
    EXPLORER_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    explorer_id: str
    first_rank: int
    ranks: int
    def __init__(self, explorer_id: _Optional[str] = ..., first_rank: _Optional[int] = ..., ranks: _Optional[int] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("run", "lease_id", "version", "state", "tokens_per_second", "last_pause_seconds", "tokens_generated", "failed_version", "failure", "canaries", "transport", "failure_is_passing")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LAST_PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    FAILED_VERSION_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    CANARIES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_IS_PASSING_FIELD_NUMBER: _ClassVar[int]
    run: str
    lease_id: str
    version: int
    state: _explorer_pb2.ExplorerState
    tokens_per_second: float
    last_pause_seconds: float
    tokens_generated: int
    failed_version: int
    failure: str
    canaries: _containers.RepeatedCompositeFieldContainer[CanaryReport]
    transport: str
    failure_is_passing: bool
    def __init__(self, run: _Optional[str] = ..., lease_id: _Optional[str] = ..., version: _Optional[int] = ..., state: _Optional[_Union[_explorer_pb2.ExplorerState, str]] = ..., tokens_per_second: _Optional[float] = ..., last_pause_seconds: _Optional[float] = ..., tokens_generated: _Optional[int] = ..., failed_version: _Optional[int] = ..., failure: _Optional[str] = ..., canaries: _Optional[_Iterable[_Union[CanaryReport, _Mapping]]] = ..., transport: _Optional[str] = ..., failure_is_passing: bool = ...) -> None: ...

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

class PublishRequest(_message.Message):
    __slots__ = ("manifest", "lease_id", "rollback", "versions_to_keep")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_TO_KEEP_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    lease_id: str
    rollback: int
    versions_to_keep: int
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., lease_id: _Optional[str] = ..., rollback: _Optional[int] = ..., versions_to_keep: _Optional[int] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("state", "collectable")
    STATE_FIELD_NUMBER: _ClassVar[int]
    COLLECTABLE_FIELD_NUMBER: _ClassVar[int]
    state: VersionState
    collectable: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, state: _Optional[_Union[VersionState, str]] = ..., collectable: _Optional[_Iterable[int]] = ...) -> None: ...

class ClaimRequest(_message.Message):
    __slots__ = ("run", "trainer_id", "pid", "host", "lease_id")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TRAINER_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    run: str
    trainer_id: str
    pid: int
    host: str
    lease_id: str
    def __init__(self, run: _Optional[str] = ..., trainer_id: _Optional[str] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class ClaimResponse(_message.Message):
    __slots__ = ("lease_id", "lease_seconds", "rollback", "unreadable")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    UNREADABLE_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    lease_seconds: float
    rollback: RollbackRecord
    unreadable: int
    def __init__(self, lease_id: _Optional[str] = ..., lease_seconds: _Optional[float] = ..., rollback: _Optional[_Union[RollbackRecord, _Mapping]] = ..., unreadable: _Optional[int] = ...) -> None: ...

class RollbackRecord(_message.Message):
    __slots__ = ("number", "version", "withdrawn", "keep_experience", "reason", "at_seconds", "newest_step", "newest_version")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    KEEP_EXPERIENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NEWEST_STEP_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    number: int
    version: int
    withdrawn: _containers.RepeatedScalarFieldContainer[int]
    keep_experience: bool
    reason: str
    at_seconds: float
    newest_step: int
    newest_version: int
    def __init__(self, number: _Optional[int] = ..., version: _Optional[int] = ..., withdrawn: _Optional[_Iterable[int]] = ..., keep_experience: bool = ..., reason: _Optional[str] = ..., at_seconds: _Optional[float] = ..., newest_step: _Optional[int] = ..., newest_version: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("run", "lease_id")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    run: str
    lease_id: str
    def __init__(self, run: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetVersionRequest(_message.Message):
    __slots__ = ("run", "version")
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    run: str
    version: int
    def __init__(self, run: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class GetVersionResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: WeightVersion
    def __init__(self, version: _Optional[_Union[WeightVersion, _Mapping]] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("run", "version", "pinned")
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    run: str
    version: int
    pinned: bool
    def __init__(self, run: _Optional[str] = ..., version: _Optional[int] = ..., pinned: bool = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("run", "version", "keep_experience", "reason")
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KEEP_EXPERIENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run: str
    version: int
    keep_experience: bool
    reason: str
    def __init__(self, run: _Optional[str] = ..., version: _Optional[int] = ..., keep_experience: bool = ..., reason: _Optional[str] = ...) -> None: ...

class RollbackResponse(_message.Message):
    __slots__ = ("rollback",)
    ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    rollback: RollbackRecord
    def __init__(self, rollback: _Optional[_Union[RollbackRecord, _Mapping]] = ...) -> None: ...

class FormEpochRequest(_message.Message):
    __slots__ = ("run", "lease_id", "backend", "store_address", "excluded", "renew", "store_secret")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    STORE_SECRET_FIELD_NUMBER: _ClassVar[int]
    run: str
    lease_id: str
    backend: str
    store_address: str
    excluded: _containers.RepeatedScalarFieldContainer[str]
    renew: bool
    store_secret: str
    def __init__(self, run: _Optional[str] = ..., lease_id: _Optional[str] = ..., backend: _Optional[str] = ..., store_address: _Optional[str] = ..., excluded: _Optional[_Iterable[str]] = ..., renew: bool = ..., store_secret: _Optional[str] = ...) -> None: ...

class FormEpochResponse(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: Epoch
    def __init__(self, epoch: _Optional[_Union[Epoch, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("explorer_id", "capabilities", "pid", "host", "address", "version", "lag", "state", "tokens_per_second", "seconds_since_report", "tokens_generated", "transport", "last_pause_seconds", "failure", "canary_max_error")
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
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    LAST_PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    CANARY_MAX_ERROR_FIELD_NUMBER: _ClassVar[int]
    explorer_id: str
    capabilities: Capabilities
    pid: int
    host: str
    address: str
    version: int
    lag: int
    state: _explorer_pb2.ExplorerState
    tokens_per_second: float
    seconds_since_report: float
    tokens_generated: int
    transport: str
    last_pause_seconds: float
    failure: str
    canary_max_error: float
    def __init__(self, explorer_id: _Optional[str] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., address: _Optional[str] = ..., version: _Optional[int] = ..., lag: _Optional[int] = ..., state: _Optional[_Union[_explorer_pb2.ExplorerState, str]] = ..., tokens_per_second: _Optional[float] = ..., seconds_since_report: _Optional[float] = ..., tokens_generated: _Optional[int] = ..., transport: _Optional[str] = ..., last_pause_seconds: _Optional[float] = ..., failure: _Optional[str] = ..., canary_max_error: _Optional[float] = ...) -> None: ...

class ListMembersResponse(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...
