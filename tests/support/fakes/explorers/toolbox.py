"""A toolbox for workflows without engines: a policy that is a function of text, environments that are coroutines' game.

Every character is a token. Each role has a token that begins it, and `END` ends a turn, as in chat templates. An image
is PLACES times the token IMAGE. In a text, SAMPLED stands for this token.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from support.fakes.data.experience import make_task
from trinity.config.schema.buffer import FormatConfig
from trinity.data.experience import Experience, SamplingParams, Task, VersionSpan
from trinity.data.images import PlacedImage
from trinity.explorer.types import Completion, Taught
from trinity.explorer.workflows.environments import EnvironmentWorkflow
from trinity.sdk.contract import Answer, Response, Score

ROLES = ("system", "user", "assistant", "tool")
END, IMAGE, PLACES, SAMPLED = 5, 6, 4, "\ue000"
FIRST_CHARACTER = 10


def encode(text: str) -> list[int]:
    return [IMAGE if character == SAMPLED else ord(character) + FIRST_CHARACTER for character in text]


def split_reply(prompt: Sequence[int]) -> tuple[list[int], list[int]]:
    """A prompt up to the beginning of the reply, and the tokens of it that are known."""
    begin = len(prompt) - [*reversed(prompt)].index(1 + ROLES.index("assistant"))
    return list(prompt[:begin]), list(prompt[begin:])


def decode(tokens: Sequence[int]) -> str:
    return "".join(chr(token - FIRST_CHARACTER) for token in tokens if token >= FIRST_CHARACTER)


def render(messages: Sequence[dict[str, Any]]) -> list[int]:
    return [t for m in messages for t in (1 + ROLES.index(m["role"]), *encode_content(m["content"]), END)]


def encode_content(content: Any) -> list[int]:
    if not isinstance(content, list):
        return encode(str(content))
    return [t for part in content for t in (encode(part["text"]) if part["type"] == "text" else [IMAGE] * PLACES)]


def turns(tokens: Sequence[int]) -> list[tuple[str, str]]:
    """(role, text) of each turn in a sequence, the unfinished last one included."""
    found: list[tuple[str, list[int]]] = []
    for token in tokens:
        if 1 <= token <= len(ROLES):
            found.append((ROLES[token - 1], []))
        elif token != END:
            found = found or [("user", [])]  # a text without roles
            found[-1][1].append(token)
    return [(role, decode(text)) for role, text in found]


class Corridor:
    """Walk `length` steps to the right. `left` goes back; anything else is refused; 8 steps at most."""

    deterministic, snapshots = True, False

    def __init__(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> None:
        self.length, self.seed, self.args, self.at, self.steps = task.get("length", 2), seed, args, 0, 0
        self.closed = False

    async def __aenter__(self) -> "Corridor":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.closed = True

    async def reset(self, keep_states: bool = False) -> Answer:
        info = {"instructions": "Walk to the end.", "available_actions": ["left", "right"]}
        return Answer(f"Walk to the end.\n\nYou are at {self.at} of {self.length}.", info_json=json.dumps(info))

    async def step(self, action: str) -> Answer:
        self.steps += 1
        self.at = max(0, self.at + {"right": 1, "left": -1}.get(action, 0))
        won = self.at >= self.length
        metrics = {"success": float(won), "steps": float(self.steps)}
        return Answer(f"You are at {self.at} of {self.length}.", float(won), won or self.steps >= 8, "", metrics)


class Toolbox:
    """`policy` gets the turns so far and gives the next reply; `judged` and `rated` likewise for auxiliary models."""

    def __init__(
        self,
        policy: Callable[[list[tuple[str, str]]], str],
        environments: dict[str, Any] | None = None,
        judged: Callable[[list[dict[str, Any]]], str] | None = None,
        scored: Callable[[str, Response], Score] | None = None,
        max_model_tokens: int = 4000,
        history_problem: str = "",
        opened: str = "",
    ) -> None:
        self._policy, self._environments = policy, environments or {"corridor": Corridor}
        self._judged, self._scored = judged, scored
        self.judged_step: int | None = None
        self.max_prompt_tokens = self.max_model_tokens = max_model_tokens
        self.history_problem, self.opened = history_problem, opened
        self.model_path = "model"
        self.prompts: list[list[int]] = []
        self.shown: list[Sequence[PlacedImage]] = []
        self.episodes: list[Any] = []
        self.schemas: list[Any] = []
        self.taught: list[tuple[str, list[int]]] = []  # models, and the prompts that they read
        self.version = self.teacher_top = 0
        self.olders: dict[int, Toolbox] = {}  # older versions that play seats

    def prompt(
        self, messages: Any, reply_prefix: str | None = None, tools: Any = None, images: Sequence[bytes] = ()
    ) -> list[int]:
        self.schemas.append(tools)
        return [*render(messages), 1 + ROLES.index("assistant"), *encode(reply_prefix or "")]

    def next_turn(self, messages: Any, images: Sequence[bytes] = ()) -> list[int]:
        return [END, *render(messages), 1 + ROLES.index("assistant")]

    def placed(self, token_ids: Sequence[int], images: Sequence[bytes]) -> tuple[PlacedImage, ...]:
        tokens, found = list(token_ids), []
        for image in images:
            found.append(PlacedImage(tokens.index(IMAGE), image))
            tokens[found[-1].start : found[-1].start + PLACES] = [0] * PLACES
        assert IMAGE not in tokens
        return tuple(found)

    def observed(self, text: str) -> str:
        return text.replace(SAMPLED, "?")

    def tokens(self, text: str) -> list[int]:
        return encode(text)

    async def policy_logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        return np.array([-token / 1000 for token in token_ids[1:]], np.float32)

    def text(self, token_ids: Any) -> str:
        return decode([int(token) for token in token_ids])

    def reply(self, token_ids: Any) -> str:
        return self.opened + self.text(token_ids)

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> list[Completion]:
        self.prompts.append(list(prompt_token_ids))
        self.shown.append(images)
        made = []
        for _ in range(sampling.n):
            tokens = [*encode(self._policy(turns(prompt_token_ids))), END]
            cut = len(tokens) > sampling.max_tokens
            ids = np.array(tokens[: sampling.max_tokens], np.int32)
            spans = (VersionSpan(self.version, 0, len(ids)),)
            made.append(Completion(ids, np.full(len(ids), -0.5, np.float32), spans, "length" if cut else "stop"))
        return made

    async def older(self, key: str) -> "tuple[int, Toolbox]":
        names = sorted(self.olders)
        version = names[len(key) % len(names)]
        return version, self.olders[version]

    @property
    def judges(self) -> list[str]:
        return ["judge"] if self._judged is not None else []

    async def judge(self, messages: Any, sampling: SamplingParams, model: str = "") -> list[str]:
        assert self._judged is not None
        return [self._judged(list(messages)) for _ in range(sampling.n)]

    def judge_step(self, model: str = "") -> int | None:
        return self.judged_step

    async def rate(self, conversations: Any, model: str = "") -> list[float]:
        return [float(len(conversation)) for conversation in conversations]

    async def teach(self, token_ids: Sequence[int], prompt_length: int, model: str = "") -> Taught:
        self.taught.append((model, list(token_ids[:prompt_length])))
        tokens = token_ids[prompt_length:]
        return Taught.of(tokens, [{token: -token / 1000, token + 1: -9.0} for token in tokens], self.teacher_top)

    async def score(self, scorer: str, answers: Sequence[Response], task: Any, args: Any) -> list[Score]:
        assert self._scored is not None
        return [self._scored(scorer, answer) for answer in answers]

    def journal(self) -> Any:
        return None

    def episode(self, environment: str, task: dict[str, Any], args: dict[str, Any], seed: int) -> Any:
        self.episodes.append(self._environments[environment](task, args, seed))
        return self.episodes[-1]


def make_episode_task(workflow_args_json: str = "{}", n: int = 2, **changes: Any) -> Task:
    form = FormatConfig(**changes.pop("format", {})).model_dump_json()
    sampling = SamplingParams(max_tokens=changes.pop("max_tokens", 40), n=n)
    values = {"row_json": "{}", "repeat_times": n, "format_json": form, "sampling": sampling, **changes}
    return make_task(workflow_args_json=workflow_args_json, **values)


async def play(tools: Toolbox, task: Task | None = None, n: int = 2, **args: Any) -> list[Experience]:
    """The experiences of one task of the corridor, each checked."""
    task = task or make_episode_task(json.dumps({"environment": "corridor", **args}), n)
    made = await EnvironmentWorkflow(task, tools).run()
    for index, experience in enumerate(made):
        experience.check(f"experience {index}")
    return made


def right(_: object) -> str:
    return "right"
