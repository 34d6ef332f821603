"""Requests for samples, in memory: the gateway checks them, hands them to the explorer, and keeps the answers.

The answer of a request that this gateway does not know is Gone, upon which the client asks for the samples again.
"""

import asyncio
import hashlib
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from trinity.data.experience import SamplingParams
from trinity.runtime.errors import Conflict, Full, InvalidInput, NotFound, TrinityError
from trinity.tinker.commands.checks import Base, check_tokens
from trinity.tinker.commands.log import canonical, sampler_id_of, session_of
from trinity.tinker.commands.samples import Sample
from trinity.tinker.gateway import shapes
from trinity.tinker.gateway.client import SamplerClient
from trinity.tinker.gateway.journal import Journal, Sampler
from trinity.tinker.gateway.results import Results

_KEPT_SECONDS, _KEPT_BYTES = 600.0, 256 * 2**20


class Gone(TrinityError):
    """The answer of a request is not there, and the request has to be made again."""


class Failed(TrinityError):
    """The request failed. `by_user`: as every repetition of it would."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.by_user = isinstance(error, InvalidInput | NotFound)


@dataclass(eq=False)
class Asked:
    """A request whose samples are made, or were made."""

    digest: bytes
    task: asyncio.Task[bytes]


class Sampling:
    """Sampling sessions and requests of all tenants."""

    def __init__(
        self, journal: Journal, results: Results, sampler: SamplerClient, base: Base, most_waiting: int
    ) -> None:
        """most_waiting: sequences of one tenant that wait for samples."""
        self._journal, self._results, self._sampler, self._base = journal, results, sampler, base
        self._most_waiting = most_waiting
        self._asked: dict[str, Asked] = {}
        self._waiting: Counter[str] = Counter()
        self._answered: deque[tuple[float, str, int]] = deque()  # time, request, bytes
        self._bytes = 0

    async def open(self, tenant: str, values: shapes.CreateSampler) -> str:
        """Makes a sampling session and returns its id. Raises InvalidInput for a model that cannot be sampled."""
        self._journal.check_session(tenant, values.session_id, takes_models=True)
        if values.model_path is None and values.base_model is None:
            raise InvalidInput("model_path", "and base_model are missing; give one of them")
        if values.base_model is not None:
            self._base.check(values.base_model)
        if values.model_path is not None:
            self._journal.saved(tenant, values.model_path)
        sampler_id = sampler_id_of(values.session_id, values.sampling_session_seq_id)
        await self._journal.open_sampler(sampler_id, Sampler(tenant, values.model_path or ""))
        return sampler_id

    def about(self, tenant: str, sampler_id: str) -> dict[str, Any]:
        """Returns the model of a sampling session. Raises NotFound."""
        path = self._journal.sampler(tenant, sampler_id).path
        return {"sampler_id": sampler_id, "base_model": self._base.name, "model_path": path or None}

    def submit(self, tenant: str, raw: dict[str, Any]) -> dict[str, Any]:
        """Starts to sample; returns the promise. The same request again has the same promise.

        Raises NotFound for an unknown sampling session, InvalidInput, Full for a tenant with too many requests.
        """
        values = shapes.read(shapes.AskSamples, raw)
        sampler = self._journal.sampler(tenant, values.sampling_session_id)
        sample = self._sample(tenant, values, self._version(tenant, sampler))
        request_id = f"{values.sampling_session_id}:{values.seq_id}"
        digest = hashlib.sha256(canonical(raw)).digest()
        if (asked := self._asked.get(request_id)) is None:
            self._forget()
            if self._waiting[tenant] + values.num_samples > max(self._most_waiting, values.num_samples):
                raise Full(f"this tenant waits for {self._waiting[tenant]} sequences; at most {self._most_waiting}")
            self._start(tenant, request_id, digest, sample)
        elif asked.digest != digest:
            raise Conflict(f"seq_id: is {values.seq_id}, which holds another request of {values.sampling_session_id}")
        sequences = [f"{request_id}:{index}" for index in range(values.num_samples)]
        return {"request_id": request_id, "sample_sequence_ids": sequences}

    def cancel(self, tenant: str, request_id: str) -> None:
        """Ends an abandoned request. Raises NotFound for another tenant's."""
        self._journal.sampler(tenant, request_id.rpartition(":")[0])
        if (asked := self._asked.get(request_id)) is not None:
            asked.task.cancel()

    def end(self, session_id: str) -> None:
        """Ends the requests of an ended session."""
        for request_id, asked in self._asked.items():
            if session_of(request_id) == session_id:
                asked.task.cancel()

    async def retrieve(self, tenant: str, request_id: str, seconds: float) -> bytes | None:
        """Returns the body of an answer, or None if it is not there after the time.

        Raises Failed, NotFound for another tenant's request, and Gone if the client must make it again.
        """
        self._journal.sampler(tenant, request_id.rpartition(":")[0])
        if (asked := self._asked.get(request_id)) is None:
            raise Gone(f"the answer of {request_id[:200]} is not kept; ask for the samples again")
        await asyncio.wait([asked.task], timeout=seconds)
        if not asked.task.done():
            return None
        if asked.task.cancelled():
            raise Gone(f"{request_id[:200]} was cancelled; ask for the samples again")
        try:
            return asked.task.result()
        except Exception as error:
            raise Failed(error) from error

    @property
    def pauses(self) -> bool:
        """True while no explorer answers."""
        return not self._sampler.is_there

    def _version(self, tenant: str, sampler: Sampler) -> int:
        """Returns the position of the command that saved the adapters of a sampling session; 0 for the base model."""
        if not sampler.path:
            return 0
        for saved in self._journal.inflight(sampler.path) if sampler.inflight else ():
            if self._results.has_worked(saved) and not self._journal.saves.lack(saved):
                return saved.position
        position = self._journal.saved(tenant, sampler.path).position
        if position != sampler.position:
            problem = f"is {sampler.path[:200]!r}, whose adapters were saved again after this sampling session began"
            raise InvalidInput("model_path", f"{problem}; create another sampling client")
        return position

    def _sample(self, tenant: str, values: shapes.AskSamples, version: int) -> Sample:
        tokens, settings = [token for chunk in values.prompt.chunks for token in chunk.tokens], values.sampling_params
        check_tokens("prompt", tokens, self._base)
        rated = values.prompt_logprobs or values.topk_prompt_logprobs
        only_rated = (
            bool(rated) and settings.max_tokens == 1
        )  # compute_logprobs asks for one token, and does not use it
        room = self._base.longest - len(tokens) + only_rated
        if not tokens or room < 1 or (settings.max_tokens or 1) > room:
            wanted = f" and max_tokens is {settings.max_tokens}" if settings.max_tokens else ""
            most = f"both together are at most {self._base.longest}"
            raise InvalidInput("prompt", f"has {len(tokens)} tokens{wanted}; each must be at least 1, and {most}")
        last = values.prompt_logprobs_last_n or 0
        if last and not (values.prompt_logprobs and last < len(tokens)):
            problem = f"is {last}; must be below {len(tokens)}, the prompt's tokens, and come with prompt_logprobs"
            raise InvalidInput("prompt_logprobs_last_n", problem)
        if values.record_stability_info:
            problem = "is True; it serves loss_fn='stable_reinforce', whose formula is not public"
            raise InvalidInput("record_stability_info", f"{problem}; choose 'importance_sampling', 'ppo' or 'cispo'")
        stop = [settings.stop] if isinstance(settings.stop, str) else settings.stop or []
        ids = [one for one in stop if isinstance(one, int)]
        check_tokens("sampling_params.stop", ids, self._base)
        sampling = SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_tokens=settings.max_tokens or room,
            n=values.num_samples,
            stop=tuple(one for one in stop if isinstance(one, str)),
            ignore_eos=settings.stop is not None and not stop,
            seed=settings.seed,
        )
        return Sample(
            version, tuple(tokens), sampling, tuple(ids), bool(values.prompt_logprobs),
            values.topk_prompt_logprobs, values.topk_sample_logprobs, last, tenant,
        )  # fmt: skip

    def _start(self, tenant: str, request_id: str, digest: bytes, sample: Sample) -> None:
        task = asyncio.create_task(self._sampler.sample(sample))
        self._asked[request_id] = Asked(digest, task)
        self._waiting[tenant] += sample.sampling.n

        def done(ended: asyncio.Task[bytes]) -> None:
            self._waiting[tenant] -= sample.sampling.n
            size = 0 if ended.cancelled() or ended.exception() is not None else len(ended.result())
            self._bytes += size
            self._answered.append((time.monotonic(), request_id, size))

        task.add_done_callback(done)

    def _forget(self) -> None:
        """Forgets the oldest answers, which the client has fetched or will ask for again."""
        while self._answered and (self._bytes > _KEPT_BYTES or self._answered[0][0] < time.monotonic() - _KEPT_SECONDS):
            _, request_id, size = self._answered.popleft()
            self._bytes -= size
            del self._asked[request_id]
