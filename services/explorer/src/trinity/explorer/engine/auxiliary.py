"""Auxiliary models, on engines of their own: judges that write, and reward models that rate.

Their weights stay, or those of a judge follow the checkpoints of another run, as an opponent's that learns, too.
"""

import asyncio
import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from trinity.config.names import auxiliary_name, rates
from trinity.config.schema.explorer import AuxiliaryModelConfig
from trinity.config.schema.model import ModelConfig
from trinity.data.experience import SamplingParams
from trinity.explorer.chat import ChatTokenizer, Message
from trinity.explorer.engine.external import ExternalJudge
from trinity.explorer.engine.folder import FolderFollower
from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.engine.start import start_vllm
from trinity.explorer.types import EngineFailed, EngineOptions, Taught
from trinity.runtime.errors import InvalidInput

log = structlog.get_logger(__name__)


class Judge:
    """A model that writes text."""

    def __init__(self, pool: EnginePool, tokenizer: ChatTokenizer) -> None:
        self._pool = pool
        self._tokenizer = tokenizer
        self._follower: FolderFollower | None = None
        self._following: asyncio.Task[None] | None = None

    async def follow(self, folder: Path) -> None:
        """Load the newest checkpoint of a job folder, if it has one, and from now on each that comes."""
        self._follower = FolderFollower(folder, self._pool)
        await self._follower.load_newest()
        log.info("explorer.auxiliary.follows", folder=str(folder), step=self._follower.version)
        self._following = asyncio.create_task(self._follower.run())

    @property
    def step(self) -> int | None:
        """The step of the checkpoint in the engines, 0 before the first; None if the weights stay."""
        return None if self._follower is None else self._follower.version

    async def chat(self, messages: Sequence[Message], sampling: SamplingParams) -> list[str]:
        completions = await self._pool.generate(self._tokenizer.prompt(messages), sampling)
        return [self._tokenizer.reply(completion.token_ids) for completion in completions]

    async def teach(self, token_ids: Sequence[int], prompt_length: int, top: int = 0) -> Taught:
        """Log-probabilities of the tokens after the prompt, at temperature 1, and `top` tokens in each place.

        Raises InvalidInput, EngineFailed.
        """
        limit, tokens = self._pool.engines[0].options.max_model_len - 1, self._tokenizer.vocabulary_size
        if len(token_ids) > limit:
            raise InvalidInput("token_ids", f"are {len(token_ids)}, the auxiliary model takes {limit}")
        if max(token_ids) >= tokens:
            what = f"has {max(token_ids)}, the auxiliary model knows {tokens}: a teacher needs the policy's tokenizer"
            raise InvalidInput("token_ids", what)
        return await self._pool.teach(token_ids, prompt_length, top)

    async def check(self) -> None:
        """Raises EngineFailed if an engine is gone, or no longer follows its run."""
        await self._pool.check()
        if self._following is not None and self._following.done():
            raise EngineFailed(f"an auxiliary model could not load a checkpoint: {self._following.exception()}")

    def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
        self._pool.close()


class RewardModel:
    """A sequence classifier with one output, which rates conversations."""

    def __init__(self, engines: Sequence[Any], tokenizer: ChatTokenizer, max_model_len: int) -> None:
        self._engines = list(engines)
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._next = 0

    async def rate(self, conversations: Sequence[Sequence[Message]]) -> list[float]:
        """The raw output for each conversation, without softmax or sigmoid."""
        return list(await asyncio.gather(*(self._rate(conversation) for conversation in conversations)))

    async def _rate(self, conversation: Sequence[Message]) -> float:
        from vllm import PoolingParams, TokensPrompt

        tokens = self._tokenizer.conversation(conversation)
        if len(tokens) > self._max_model_len:
            raise InvalidInput(
                "conversation", f"has {len(tokens)} tokens, the reward model takes {self._max_model_len}"
            )
        engine = self._engines[self._next % len(self._engines)]
        self._next += 1
        params = PoolingParams(task="classify", use_activation=False)
        prompt = TokensPrompt(prompt_token_ids=tokens)
        try:
            outputs = [output async for output in engine.encode(prompt, params, uuid.uuid4().hex)]
        except Exception as error:  # vLLM's own errors share no base class
            raise EngineFailed(f"the reward model failed: {type(error).__name__}: {error}") from error
        values = outputs[-1].outputs.data.flatten().tolist()
        if len(values) != 1:
            raise EngineFailed(f"the reward model has {len(values)} outputs; one is needed")
        return float(values[0])

    async def check(self) -> None:
        """Raises EngineFailed if one of its engines is gone."""
        for engine in self._engines:
            try:
                await engine.check_health()
            except Exception as error:
                raise EngineFailed(f"the reward model is not healthy: {error}") from error

    def close(self) -> None:
        for engine in self._engines:
            engine.shutdown()


class AuxiliaryModels:
    """All auxiliary models by name."""

    def __init__(self, models: dict[str, Judge | ExternalJudge | RewardModel]) -> None:
        self._models = models

    @classmethod
    async def start(
        cls,
        configs: Sequence[AuxiliaryModelConfig],
        options: EngineOptions,
        cards: Sequence[str],
        teachers: Collection[str] = (),
    ) -> "AuxiliaryModels":
        """Start all engines, one after the other. `options` are the policy's; `cards` lists the GPUs, in order.

        Raises InvalidInput or Unavailable if an external model does not answer, or is one of the `teachers` and gives
        no log-probabilities.
        """
        devices = iter(cards)
        models: dict[str, Judge | ExternalJudge | RewardModel] = {}
        try:
            for index, config in enumerate(configs):
                if config.external_model:
                    external = ExternalJudge(config, f"explorer.auxiliary_models.{index}")
                    await external.reach()
                    models[auxiliary_name(config)] = external
                else:
                    models[auxiliary_name(config)] = await _start(config, options, devices)
            made = cls(models)
            for name in teachers:
                await made.judge(name).teach([1, 2], 1, options.top)
        except BaseException:
            cls(models).close()
            raise
        return made

    @property
    def judges(self) -> list[str]:
        """Names of the models that write text."""
        return [name for name, model in self._models.items() if isinstance(model, Judge | ExternalJudge)]

    def judge(self, name: str = "") -> Judge | ExternalJudge:
        """The judge of that name, or the first for an empty name. Raises InvalidInput."""
        return self._find(name, Judge | ExternalJudge, "writes")

    def reward_model(self, name: str = "") -> RewardModel:
        """The reward model of that name, or the first for an empty name. Raises InvalidInput."""
        return self._find(name, RewardModel, "rates")

    def _find(self, name: str, kind: Any, what: str) -> Any:
        found = {n: model for n, model in self._models.items() if isinstance(model, kind) and name in ("", n)}
        if not found:
            known = ", ".join(f"{n} ({type(model).__name__})" for n, model in self._models.items()) or "none"
            wanted = f"{name!r} is no model that {what}" if name else f"there is no model that {what}"
            raise InvalidInput("explorer.auxiliary_models", f"{wanted}; there are: {known}")
        return next(iter(found.values()))

    async def check(self) -> None:
        """Raises EngineFailed if an engine of a model is gone."""
        for model in self._models.values():
            await model.check()

    def close(self) -> None:
        for model in self._models.values():
            model.close()


async def _start(config: AuxiliaryModelConfig, policy: EngineOptions, cards: Iterator[str]) -> Judge | RewardModel:
    options, tokenizer = await asyncio.to_thread(prepare, config, policy)
    size = config.tensor_parallel_size
    devices: list[str | None] = [None]
    if policy.device == "cuda":
        devices = [",".join(next(cards) for _ in range(size)) for _ in range(config.engine_num)]
    if options.pooling:
        engines = await asyncio.to_thread(start_vllm, options, devices)
        return RewardModel(engines, tokenizer, options.max_model_len)
    judge = Judge(await EnginePool.start(options, devices), tokenizer)
    if config.follows:
        await judge.follow(Path(config.follows).expanduser())
    return judge


def prepare(config: AuxiliaryModelConfig, policy: EngineOptions) -> tuple[EngineOptions, ChatTokenizer]:
    """The engines' options and the tokenizer of a model that is not external. Raises InvalidInput."""
    model = ModelConfig(
        model_path=config.model_path,
        trust_remote_code=config.trust_remote_code,
        enable_thinking=config.enable_thinking,
    )
    options = EngineOptions.of(
        config,
        model=config.model_path,
        device=policy.device,
        max_model_len=config.max_model_len or policy.max_model_len,
        trust_remote_code=config.trust_remote_code,
        gpu_memory_gib=policy.gpu_memory_gib,
        weights_change=bool(config.follows),
        top=policy.top,
    )
    tokenizer, rates_text = ChatTokenizer(model), _rates(config)
    if rates_text and config.follows:
        what = f"has {auxiliary_name(config)!r}, which rates; only models that write follow a run (follows)"
        raise InvalidInput("explorer.auxiliary_models", what)
    return replace(options, turn_end=tokenizer.turn_end, pooling=rates_text), tokenizer


def _rates(config: AuxiliaryModelConfig) -> bool:
    """True if the model gives a number instead of text."""
    if config.kind != "auto":
        return config.kind == "score"
    from transformers import AutoConfig

    try:
        found = AutoConfig.from_pretrained(config.model_path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        what = f"has {config.model_path!r}, which cannot be loaded: {error}"
        raise InvalidInput("explorer.auxiliary_models", what) from error
    return rates(found.architectures or [])
