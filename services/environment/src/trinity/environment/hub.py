"""The attached providers: admission, and the choice of a provider for the next episode."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import structlog

from trinity.environment.attached import AttachedPlayer, Attachment
from trinity.runtime.errors import AlreadyExists, Conflict, InvalidInput, Unauthenticated
from trinity.runtime.trust.attach_tokens import AttachToken, AttachTokens
from trinity.sdk.arena import Arena
from trinity.sdk.contract import PROTOCOL_VERSION, Offer, Score, ScoreRequest, description_problem
from trinity.sdk.environment import Description
from trinity.sdk.errors import Full, Unavailable

log = structlog.get_logger(__name__)

_MAX_NAMES = 1000
_MAX_AWAY = 100
_TOKEN = "TRINITY_ENVIRONMENT_ATTACH_TOKEN"
_FOLLOW_SECONDS = 1.0


@dataclass(frozen=True)
class Departure:
    """A provider that detached. `since_seconds`: Unix time."""

    provider: str
    since_seconds: float
    reason: str
    environments: tuple[str, ...]
    scorers: tuple[str, ...]


class AttachedSource:
    """One environment. The attached provider with the fewest open episodes of it plays the next one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.attachments: list[Attachment] = []
        self.open = 0

    @property
    def description(self) -> Description:
        """Merges the providers' announcements: slots are summed, time limits are the slowest's, `deterministic` and
        `snapshots` hold if they hold for all, `images` if it holds for any."""
        each = [attachment.environments[self.name] for attachment in self.attachments]
        if not each:
            return Description(self.name)
        rooms = [one.max_parallel_episodes for one in each]
        return Description(
            self.name,
            each[0].summary,
            sum(rooms) if all(rooms) else 0,
            max(one.step_timeout_seconds for one in each),
            max(one.reset_timeout_seconds for one in each),
            all(one.deterministic for one in each),
            all(one.snapshots for one in each),
            any(one.images for one in each),
            each[0].players,  # those of all: see `_check`
        )

    def player(self) -> AttachedPlayer:
        roomy = [one for one in _here(self.attachments, self.name) if one.has_room(self.name)]
        if not roomy:
            raise Full(f"{self.name} plays {self.open} episodes, the limit of its attached providers; try again later")
        player = AttachedPlayer(choose(roomy, self.name), self.name, self._release)
        self.open += 1
        return player

    def _release(self) -> None:
        self.open -= 1

    async def close(self) -> None:
        """Does nothing: the streams end with the server."""


class AttachedScorer:
    """One scoring function. The attached provider with the fewest open calls of it scores the next one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.attachments: list[Attachment] = []

    async def __call__(self, request: ScoreRequest) -> Sequence[Score]:
        return await choose(_here(self.attachments, self.name), self.name).score(request)


class Hub:
    """Admits providers into an arena, and removes them again."""

    def __init__(self, arena: Arena, tokens: AttachTokens) -> None:
        self._arena = arena
        self._tokens = tokens
        self._built_in = frozenset(arena.sources), frozenset(arena.scorers)
        self._sources: dict[str, AttachedSource] = {}
        self._scorers: dict[str, AttachedScorer] = {}
        self.attachments: dict[str, Attachment] = {}
        self.away: dict[str, Departure] = {}

    @property
    def open(self) -> int:
        """Returns the open episodes and scorings of all attached providers."""
        return sum(attachment.open.total() for attachment in self.attachments.values())

    async def admit(self, offer: Offer) -> Attachment:
        """Admits a provider, or raises Unauthenticated, Conflict (version), InvalidInput or AlreadyExists.

        A provider that answers keeps its name. An unresponsive provider loses it at once to a newcomer with its token.
        """
        token = self._authenticate(offer.token)
        self._check(offer)
        while (earlier := self.attachments.get(offer.provider)) is not None:
            ours = earlier.token == token
            if not ours or await earlier.answers():
                raise AlreadyExists(
                    f"offer.provider: a provider named {offer.provider!r} is attached, and it "
                    f"{'answers' if ours else 'has another token'}; take another name, or end that one first"
                )
            reason = f"the attached provider {offer.provider} does not answer, and another took its name"
            earlier.refusal = AlreadyExists(f"offer.provider: {reason}")
            self.remove(earlier, reason)
        attachment = Attachment(
            offer.provider,
            offer.instance,
            {one.name: one for one in offer.environments},
            frozenset(offer.scorers),
            token,
        )
        self.attachments[offer.provider] = attachment
        self.away.pop(offer.provider, None)
        for name in attachment.environments:
            source = self._sources.setdefault(name, AttachedSource(name))
            source.attachments.append(attachment)
            self._arena.sources[name] = source
        for name in attachment.scorers:
            scorer = self._scorers.setdefault(name, AttachedScorer(name))
            scorer.attachments.append(attachment)
            self._arena.scorers[name] = scorer
        log.info(
            "environment.provider.attached",
            provider=offer.provider,
            instance=offer.instance[:100],
            token=token.name,
            environments=sorted(attachment.environments),
            scorers=sorted(attachment.scorers),
        )
        return attachment

    def remove(self, attachment: Attachment, reason: str) -> None:
        """Detach a provider: its episodes fail. Idempotent."""
        attachment.end(reason)
        if self.attachments.get(attachment.provider) is not attachment:
            return
        del self.attachments[attachment.provider]
        environments, scorers = tuple(sorted(attachment.environments)), tuple(sorted(attachment.scorers))
        gone = Departure(attachment.provider, time.time(), attachment.ended, environments, scorers)
        self.away = dict([*self.away.items(), (gone.provider, gone)][-_MAX_AWAY:])
        for name in attachment.environments:
            self._sources[name].attachments.remove(attachment)
            if not self._sources[name].attachments:
                del self._sources[name], self._arena.sources[name]
        for name in attachment.scorers:
            self._scorers[name].attachments.remove(attachment)
            if not self._scorers[name].attachments:
                del self._scorers[name], self._arena.scorers[name]
        log.warning("environment.provider.detached", provider=attachment.provider, reason=attachment.ended)

    async def follow_tokens(self) -> None:
        """Runs for ever. Ends the streams of providers whose token is revoked or expires."""
        while True:
            for attachment in list(self.attachments.values()):
                if problem := self._tokens.problem(attachment.token):
                    attachment.refusal = Unauthenticated(f"offer.token: {problem}")
                    self.remove(attachment, f"the attached provider {attachment.provider} went away: {problem}")
            await asyncio.sleep(_FOLLOW_SECONDS)

    def _authenticate(self, token: str) -> AttachToken:
        found = self._tokens.find(token)
        if found is not None:
            if problem := self._tokens.problem(found):
                raise Unauthenticated(f"offer.token: {problem}")
            return found
        if self._tokens.empty:
            raise Unauthenticated(f"offer.token: no provider may attach: {_TOKEN} is not set, and no token was created")
        raise Unauthenticated(f"offer.token: is not the service's {_TOKEN}, nor one that was created for it")

    def _check(self, offer: Offer) -> None:
        if offer.protocol_version != PROTOCOL_VERSION:
            found = offer.protocol_version
            raise Conflict(f"offer.protocol_version: is {found}; this service speaks version {PROTOCOL_VERSION}")
        if not 1 <= len(offer.provider) <= 200 or not offer.provider.isprintable():
            raise InvalidInput("offer.provider", f"is {offer.provider[:200]!r}, must be 1 to 200 printable characters")
        for described in offer.environments:
            if problem := description_problem(described):
                raise InvalidInput(f"offer.environments.{described.name[:200]}", problem)
            known = self._sources.get(described.name)
            if known is not None and known.description.players != described.players:
                names = ", ".join(known.description.players) or "none"
                problem = f"are {', '.join(described.players) or 'none'}; attached providers of it announce {names}"
                raise InvalidInput(f"offer.environments.{described.name}.players", problem)
        _check_names([one.name for one in offer.environments], "offer.environments", self._built_in[0])
        _check_names(offer.scorers, "offer.scorers", self._built_in[1])
        if not offer.environments and not offer.scorers:
            raise InvalidInput("offer", "has neither environments nor scorers")


def _check_names(names: Collection[str], field: str, built_in: Collection[str]) -> None:
    if len(names) > _MAX_NAMES:
        raise InvalidInput(field, f"has {len(names)} names, at most {_MAX_NAMES}")
    for name in names:
        if not 1 <= len(name) <= 200 or not name.isprintable():
            raise InvalidInput(field, f"names {name[:200]!r}, must be 1 to 200 printable characters")
        if name in built_in:
            raise AlreadyExists(f"{field}: the name {name!r} is built in; take another one")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise InvalidInput(field, f"names {twice[0]!r} twice")


def _here(attachments: list[Attachment], name: str) -> list[Attachment]:
    """Returns the attachments that have not ended; ended streams may linger. Raises Unavailable if none is left."""
    here = [one for one in attachments if not one.peer.gone]
    if not here:
        raise Unavailable(f"{name}: its attached provider went away")
    return here


def choose(attachments: list[Attachment], name: str) -> Attachment:
    """Returns the least busy provider that is not avoided; else the provider avoided for the shortest time."""
    now = time.monotonic()
    fit = [one for one in attachments if one.avoided_until(name) <= now]
    if not fit:
        return min(attachments, key=lambda one: one.avoided_until(name))
    return min(fit, key=lambda one: (one.open[name], random.random()))
