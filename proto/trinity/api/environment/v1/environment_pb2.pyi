from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProviderHealth(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROVIDER_HEALTH_UNSPECIFIED: _ClassVar[ProviderHealth]
    PROVIDER_HEALTH_SERVING: _ClassVar[ProviderHealth]
    PROVIDER_HEALTH_FAILING: _ClassVar[ProviderHealth]
    PROVIDER_HEALTH_AWAY: _ClassVar[ProviderHealth]
PROVIDER_HEALTH_UNSPECIFIED: ProviderHealth
PROVIDER_HEALTH_SERVING: ProviderHealth
PROVIDER_HEALTH_FAILING: ProviderHealth
PROVIDER_HEALTH_AWAY: ProviderHealth

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("environments", "scorers", "protocol_version", "providers")
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    SCORERS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROVIDERS_FIELD_NUMBER: _ClassVar[int]
    environments: _containers.RepeatedCompositeFieldContainer[EnvironmentDescription]
    scorers: _containers.RepeatedScalarFieldContainer[str]
    protocol_version: int
    providers: _containers.RepeatedCompositeFieldContainer[AttachedProvider]
    def __init__(self, environments: _Optional[_Iterable[_Union[EnvironmentDescription, _Mapping]]] = ..., scorers: _Optional[_Iterable[str]] = ..., protocol_version: _Optional[int] = ..., providers: _Optional[_Iterable[_Union[AttachedProvider, _Mapping]]] = ...) -> None: ...

class AttachedProvider(_message.Message):
    __slots__ = ("provider", "health", "since_seconds", "reason", "environments", "scorers", "open")
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    SINCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    SCORERS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    provider: str
    health: ProviderHealth
    since_seconds: float
    reason: str
    environments: _containers.RepeatedScalarFieldContainer[str]
    scorers: _containers.RepeatedScalarFieldContainer[str]
    open: int
    def __init__(self, provider: _Optional[str] = ..., health: _Optional[_Union[ProviderHealth, str]] = ..., since_seconds: _Optional[float] = ..., reason: _Optional[str] = ..., environments: _Optional[_Iterable[str]] = ..., scorers: _Optional[_Iterable[str]] = ..., open: _Optional[int] = ...) -> None: ...

class EnvironmentDescription(_message.Message):
    __slots__ = ("name", "summary", "max_parallel_episodes", "step_timeout_seconds", "reset_timeout_seconds", "deterministic", "snapshots", "images", "players")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    MAX_PARALLEL_EPISODES_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESET_TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    PLAYERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    summary: str
    max_parallel_episodes: int
    step_timeout_seconds: float
    reset_timeout_seconds: float
    deterministic: bool
    snapshots: bool
    images: bool
    players: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., summary: _Optional[str] = ..., max_parallel_episodes: _Optional[int] = ..., step_timeout_seconds: _Optional[float] = ..., reset_timeout_seconds: _Optional[float] = ..., deterministic: bool = ..., snapshots: bool = ..., images: bool = ..., players: _Optional[_Iterable[str]] = ...) -> None: ...

class EpisodeRequest(_message.Message):
    __slots__ = ("reset", "action")
    RESET_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    reset: Reset
    action: Action
    def __init__(self, reset: _Optional[_Union[Reset, _Mapping]] = ..., action: _Optional[_Union[Action, _Mapping]] = ...) -> None: ...

class Reset(_message.Message):
    __slots__ = ("environment", "task_json", "args_json", "seed", "keep_states", "state", "turn", "images", "reward_bound")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    TASK_JSON_FIELD_NUMBER: _ClassVar[int]
    ARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    KEEP_STATES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    REWARD_BOUND_FIELD_NUMBER: _ClassVar[int]
    environment: str
    task_json: str
    args_json: str
    seed: int
    keep_states: bool
    state: bytes
    turn: int
    images: bool
    reward_bound: float
    def __init__(self, environment: _Optional[str] = ..., task_json: _Optional[str] = ..., args_json: _Optional[str] = ..., seed: _Optional[int] = ..., keep_states: bool = ..., state: _Optional[bytes] = ..., turn: _Optional[int] = ..., images: bool = ..., reward_bound: _Optional[float] = ...) -> None: ...

class Action(_message.Message):
    __slots__ = ("text", "turn")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    text: str
    turn: int
    def __init__(self, text: _Optional[str] = ..., turn: _Optional[int] = ...) -> None: ...

class EpisodeResponse(_message.Message):
    __slots__ = ("observation", "reward", "done", "info_json", "metrics", "turn", "state", "images", "player", "rewards")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class RewardsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    INFO_JSON_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    PLAYER_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    observation: str
    reward: float
    done: bool
    info_json: str
    metrics: _containers.ScalarMap[str, float]
    turn: int
    state: bytes
    images: _containers.RepeatedScalarFieldContainer[bytes]
    player: str
    rewards: _containers.ScalarMap[str, float]
    def __init__(self, observation: _Optional[str] = ..., reward: _Optional[float] = ..., done: bool = ..., info_json: _Optional[str] = ..., metrics: _Optional[_Mapping[str, float]] = ..., turn: _Optional[int] = ..., state: _Optional[bytes] = ..., images: _Optional[_Iterable[bytes]] = ..., player: _Optional[str] = ..., rewards: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("scorer", "items", "args_json", "reward_bound")
    SCORER_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    ARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    REWARD_BOUND_FIELD_NUMBER: _ClassVar[int]
    scorer: str
    items: _containers.RepeatedCompositeFieldContainer[ScoreItem]
    args_json: str
    reward_bound: float
    def __init__(self, scorer: _Optional[str] = ..., items: _Optional[_Iterable[_Union[ScoreItem, _Mapping]]] = ..., args_json: _Optional[str] = ..., reward_bound: _Optional[float] = ...) -> None: ...

class ScoreItem(_message.Message):
    __slots__ = ("prompt", "response", "truth", "task_json", "truncated", "response_tokens", "response_token_ids")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    TRUTH_FIELD_NUMBER: _ClassVar[int]
    TASK_JSON_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    response: str
    truth: str
    task_json: str
    truncated: bool
    response_tokens: int
    response_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prompt: _Optional[str] = ..., response: _Optional[str] = ..., truth: _Optional[str] = ..., task_json: _Optional[str] = ..., truncated: bool = ..., response_tokens: _Optional[int] = ..., response_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("scores",)
    SCORES_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedCompositeFieldContainer[Score]
    def __init__(self, scores: _Optional[_Iterable[_Union[Score, _Mapping]]] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("reward", "metrics", "error")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REWARD_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    reward: float
    metrics: _containers.ScalarMap[str, float]
    error: str
    def __init__(self, reward: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., error: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("offer", "replies")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    offer: Offer
    replies: _containers.RepeatedCompositeFieldContainer[ProviderReply]
    def __init__(self, offer: _Optional[_Union[Offer, _Mapping]] = ..., replies: _Optional[_Iterable[_Union[ProviderReply, _Mapping]]] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("protocol_version", "token", "provider", "instance", "environments", "scorers")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    SCORERS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    token: str
    provider: str
    instance: str
    environments: _containers.RepeatedCompositeFieldContainer[EnvironmentDescription]
    scorers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., token: _Optional[str] = ..., provider: _Optional[str] = ..., instance: _Optional[str] = ..., environments: _Optional[_Iterable[_Union[EnvironmentDescription, _Mapping]]] = ..., scorers: _Optional[_Iterable[str]] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("accepted", "calls")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    calls: _containers.RepeatedCompositeFieldContainer[ProviderCall]
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., calls: _Optional[_Iterable[_Union[ProviderCall, _Mapping]]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("protocol_version",)
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    def __init__(self, protocol_version: _Optional[int] = ...) -> None: ...

class ProviderCall(_message.Message):
    __slots__ = ("id", "reset", "action", "score", "close")
    ID_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    id: int
    reset: Reset
    action: Action
    score: ScoreRequest
    close: Close
    def __init__(self, id: _Optional[int] = ..., reset: _Optional[_Union[Reset, _Mapping]] = ..., action: _Optional[_Union[Action, _Mapping]] = ..., score: _Optional[_Union[ScoreRequest, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProviderReply(_message.Message):
    __slots__ = ("id", "response", "scores", "failure")
    ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    id: int
    response: EpisodeResponse
    scores: ScoreResponse
    failure: Failure
    def __init__(self, id: _Optional[int] = ..., response: _Optional[_Union[EpisodeResponse, _Mapping]] = ..., scores: _Optional[_Union[ScoreResponse, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...
