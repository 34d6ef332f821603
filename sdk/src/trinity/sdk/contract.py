"""The contract of trinity/api/environment/v1 without protobuf: its messages, its limits, and checks against them."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trinity.sdk.environment import Description

PROTOCOL_VERSION = 2
MAX_TEXT_BYTES = 1024 * 1024
MAX_STATE_BYTES = 1024 * 1024
MAX_METRICS = 100
# Names that all answers of an episode, or one score, may have: workflows add metrics of their own.
MAX_METRIC_NAMES = 900
MAX_METRIC_NAME = 256
# Rewards and metrics fit into float32.
LARGEST_NUMBER = 3.4e38
MAX_PLAYERS = 8
MAX_PLAYER_NAME = 64
# Limits of the images of one answer together.
MAX_IMAGES = 16
MAX_IMAGES_BYTES = 4 * 1024 * 1024
MAX_IMAGES_PIXELS = 4096 * 4096
MAX_EPISODE_IMAGES_BYTES = 32 * 1024 * 1024
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# Keys of `info` that workflows read: see EpisodeResponse.info_json.
_INFO_KEYS: dict[str, tuple[type, str]] = {
    "success": (bool, "true or false"),
    "instructions": (str, "a string"),
    "task": (str, "a string"),
    "tools": (list, "a list"),
    "problem": (str, "a string"),
    "conversation": (str, "a string"),
    "sampling": (dict, "an object"),
}


@dataclass(frozen=True)
class Reset:
    """Begins an episode, or continues one from `state`. `reward_bound`: of the run; 0: none."""

    environment: str
    task_json: str = ""
    args_json: str = ""
    seed: int = 0
    keep_states: bool = False
    state: bytes = b""
    turn: int = 0
    images: bool = False
    reward_bound: float = 0.0


@dataclass(frozen=True)
class Action:
    """The policy's move. `turn` is 1 for the first of an episode."""

    text: str
    turn: int


@dataclass(frozen=True)
class Answer:
    """The answer to a reset or an action. `reward` is this step's, 0 after reset; `metrics` are the episode's so far.

    `turn` counts the actions before it. `state` can be restored, if the episode keeps states. `images` are files. With
    players, `player` sees the observation and acts next; `rewards` are this step's by player.
    """

    observation: str = ""
    reward: float = 0.0
    done: bool = False
    info_json: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    turn: int = 0
    state: bytes = b""
    images: Sequence[bytes] = ()
    player: str = ""
    rewards: Mapping[str, float] = field(default_factory=dict)

    @property
    def info(self) -> dict[str, Any]:
        """Raises ValueError for an answer that breaks the contract."""
        return json_object(self.info_json)


@dataclass(frozen=True)
class Response:
    """A policy's response to score."""

    prompt: str = ""
    response: str = ""
    truth: str = ""
    task_json: str = ""
    truncated: bool = False
    response_tokens: int = 0
    response_token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class ScoreRequest:
    """`reward_bound`: of the run; 0: none."""

    scorer: str
    items: Sequence[Response] = ()
    args_json: str = ""
    reward_bound: float = 0.0


@dataclass(frozen=True)
class Score:
    """The reward of one response, or the error that prevented it."""

    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Failure:
    """Ends an episode or a scoring. `code` is the number of a gRPC status."""

    code: int
    message: str


@dataclass(frozen=True)
class Close:
    """Ends an episode or a scoring."""


@dataclass(frozen=True)
class Call:
    """A message to an attached provider or a worker process; None: of a kind that this version does not know.

    `id` names the episode or the scoring.
    """

    id: int
    message: Reset | Action | ScoreRequest | Close | None


@dataclass(frozen=True)
class Reply:
    """The answer to a call. A worker process answers its start and a close by None."""

    id: int
    result: Answer | Sequence[Score] | Failure | None


@dataclass(frozen=True)
class Offer:
    """The environments and scorers that a provider attaches with. `instance` stays the same while its process lives."""

    protocol_version: int
    token: str = field(repr=False)
    provider: str
    instance: str
    environments: Sequence[Description]
    scorers: Sequence[str]


def answer_problem(answer: Answer, turn: int, described: Description, *, own: bool = False) -> str:
    """Returns an answer's violation of the contract as a sentence; empty if it is sound.

    `described`: the environment's announcement. Images are not decoded here. `own`: the answer was made in this
    process.
    """
    if answer.turn != turn:
        return f"it answers turn {answer.turn} instead of {turn}"
    if not math.isfinite(answer.reward):
        return f"its reward is {answer.reward}; rewards are finite"
    if problem := _players_problem(answer, described.players):
        return problem
    for name, text in (("observation", answer.observation), ("info_json", answer.info_json)):
        if too_long(text):
            return f"its {name} is longer than {MAX_TEXT_BYTES} bytes"
    if len(answer.state) > MAX_STATE_BYTES:
        return f"its state has {len(answer.state)} bytes, at most {MAX_STATE_BYTES}"
    if len(answer.metrics) > MAX_METRICS:
        return f"it has {len(answer.metrics)} metrics, at most {MAX_METRICS}"
    if problem := _metrics_problem(answer.metrics):
        return problem
    if problem := _images_problem(answer.images, described.images):
        return problem
    return "" if own or not answer.info_json else _object_problem(answer.info_json)


def _players_problem(answer: Answer, players: Sequence[str]) -> str:
    if not players:
        if answer.player or answer.rewards:
            return "it names a player, and its description announces none (players)"
        return ""
    known = ", ".join(players)
    if answer.reward:
        return f"its reward is {answer.reward:g}, of no player; give rewards by player ({known})"
    if answer.player not in (("",) if answer.done else players):
        wanted = "must be empty once done" if answer.done else f"must be one of {known}"
        return f"its player is {answer.player[:MAX_PLAYER_NAME]!r}, {wanted}"
    for player, reward in answer.rewards.items():
        if player not in players:
            return f"its rewards have {player[:MAX_PLAYER_NAME]!r}, which is no player; announced: {known}"
        if not math.isfinite(reward):
            return f"the reward of {player} is {reward}; rewards are finite"
    if answer.rewards and not answer.turn:
        return "it has rewards after reset; rewards are those of an action"
    return ""


def _images_problem(images: Sequence[bytes], announced: bool) -> str:
    if images and not announced:
        return f"it has {len(images)} images, and its description announces none (images)"
    if len(images) > MAX_IMAGES:
        return f"it has {len(images)} images, at most {MAX_IMAGES}"
    if (size := sum(map(len, images))) > MAX_IMAGES_BYTES:
        return f"its images have {size} bytes together, at most {MAX_IMAGES_BYTES}"
    for index, image in enumerate(images):
        if not is_image(image):
            return f"its images[{index}] is no PNG, JPEG or WebP file ({len(image)} bytes)"
    return ""


def is_image(file: bytes) -> bool:
    """Returns True if a file begins like a PNG, a JPEG or a WebP."""
    if file[:4] == b"RIFF":
        return file[8:12] == b"WEBP"
    return file.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"))


def info_problem(info: dict[str, Any]) -> str:
    """Returns the violation of the contract by keys that workflows read, as a sentence; empty if they are sound."""
    for key, (kind, wanted) in _INFO_KEYS.items():
        if info.get(key) is not None and not isinstance(info[key], kind):
            return f"its info.{key} is {type(info[key]).__name__}, must be {wanted}"
    if info.get("conversation") not in (None, "new"):
        return f'its info.conversation is {info["conversation"]!r:.100}, must be "new" or left out'
    for tool in info.get("tools") or ():
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or not tool["name"]:
            return f"its info.tools has {tool!r:.100}, must be an object with a name"
    return ""


@dataclass
class Totals:
    """Rewards and metric names of an episode's answers so far. `reward_bound`: of the run; 0: none."""

    reward_bound: float = 0.0
    reward: float = 0.0
    names: set[str] = field(default_factory=set)
    by_player: dict[str, float] = field(default_factory=dict)

    def problem(self, answer: Answer) -> str:
        """Adds a sound answer. Returns the episode's violation of the contract as a sentence; empty if it is sound."""
        if problem := _reward_problem(answer.reward, self.reward_bound):
            return f"its reward {problem}"
        self.reward += answer.reward
        if problem := _reward_problem(self.reward, self.reward_bound):
            return f"the sum of its episode's rewards {problem}"
        for player, reward in answer.rewards.items():
            self.by_player[player] = self.by_player.get(player, 0.0) + reward
            for value, what in ((reward, "the reward"), (self.by_player[player], "the sum of the rewards")):
                if problem := _reward_problem(value, self.reward_bound):
                    return f"{what} of {player} {problem}"
        self.names |= answer.metrics.keys()
        if len(self.names) > MAX_METRIC_NAMES:
            return f"the answers of its episode have {len(self.names)} metrics, at most {MAX_METRIC_NAMES}"
        return ""


def _reward_problem(reward: float, bound: float) -> str:
    bound = bound or LARGEST_NUMBER
    if -bound <= reward <= bound:
        return ""
    fix = "raise explorer.reward_bound" if bound < LARGEST_NUMBER else "it must fit into float32"
    return f"is {reward:g}, must be in [{-bound:g}, {bound:g}]; scale it, or {fix}"


def _metrics_problem(metrics: Mapping[str, float]) -> str:
    for name, value in metrics.items():
        if len(name) > MAX_METRIC_NAME:
            return f"its metric {name[:40]}... has a name of {len(name)} characters, at most {MAX_METRIC_NAME}"
        if not math.isfinite(value):
            return f"its metric {name} is {value}; metrics are finite"
        if not -LARGEST_NUMBER <= value <= LARGEST_NUMBER:
            return f"its metric {name} is {value:g}; metrics fit into float32"
    return ""


def score_problem(items: int, scores: Sequence[Score], reward_bound: float = 0.0) -> str:
    """Returns the violation of the contract by the scores of so many items; empty if they are sound.

    `reward_bound`: of the run; 0: none.
    """
    if len(scores) != items:
        return f"it has {len(scores)} scores for {items} items"
    for score in scores:
        if not score.error and not math.isfinite(score.reward):
            return f"a reward is {score.reward}; rewards are finite"
        if not score.error and (problem := _reward_problem(score.reward, reward_bound)):
            return f"a reward {problem}"
        if len(score.metrics) > MAX_METRIC_NAMES:
            return f"a score has {len(score.metrics)} metrics, at most {MAX_METRIC_NAMES}"
        if problem := _metrics_problem(score.metrics):
            return problem
    return ""


def description_problem(described: Description) -> str:
    """Returns an announcement's violation of the contract; empty if it is sound."""
    if not described.name or len(described.name) > 200 or not described.name.isprintable():
        return f"name: is {described.name[:200]!r}, must be 1 to 200 printable characters"
    if described.max_parallel_episodes < 0:
        return f"max_parallel_episodes: is {described.max_parallel_episodes}, must be 0 (no limit) or more"
    if not (math.isfinite(described.step_timeout_seconds) and described.step_timeout_seconds > 0):
        return f"step_timeout_seconds: is {described.step_timeout_seconds}, must be above 0"
    if not (math.isfinite(described.reset_timeout_seconds) and described.reset_timeout_seconds >= 0):
        return f"reset_timeout_seconds: is {described.reset_timeout_seconds}, must be 0 (as a step) or more"
    players = described.players
    if players and not 2 <= len(set(players)) == len(players) <= MAX_PLAYERS:
        return f"players: are {', '.join(players)[:200]!r}, must be 2 to {MAX_PLAYERS} different names, or none"
    for player in players:
        if not player or len(player) > MAX_PLAYER_NAME or not player.isprintable():
            return f"players: has {player[:200]!r}, must be 1 to {MAX_PLAYER_NAME} printable characters"
    return ""


def json_object(text: str) -> dict[str, Any]:
    """Parses a JSON object; empty text is an empty object. Raises ValueError naming the other type."""
    try:
        value = json.loads(text) if text else {}
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, is {type(value).__name__}")
    return value


def _object_problem(info_json: str) -> str:
    try:
        json_object(info_json)
    except ValueError as error:
        return f"its info_json {error}"
    return ""


def sendable(text: str) -> str:
    """Returns the text with a question mark for each half of a surrogate pair, which no message may contain."""
    return text.encode(errors="replace").decode()


def too_long(text: str) -> bool:
    """Returns True for more than MAX_TEXT_BYTES. Encodes only texts that could be too long."""
    return len(text) * 4 > MAX_TEXT_BYTES and len(text.encode(errors="surrogatepass")) > MAX_TEXT_BYTES
