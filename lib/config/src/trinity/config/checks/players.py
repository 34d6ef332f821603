"""Seats of games of several players: who plays them, and what older versions of the policy need."""

from collections.abc import Iterator

from trinity.config.errors import Problem, did_you_mean
from trinity.config.names import auxiliary_name
from trinity.config.plan import make_plan
from trinity.config.schema import Config
from trinity.config.workflows import EPISODE_WORKFLOWS, OLDER, POLICY, GameRules

_OLDER_KEY = "explorer.older_versions"


def plays_older(config: Config) -> bool:
    """Tells if a seat of a taskset is played by older versions."""
    return any(seat == OLDER for _, seats in seats_of(config) for seat in seats.values())


def check_players(config: Config) -> Iterator[Problem]:
    """Yields a problem for each seat without a player, and for older versions that the run could not load."""
    known = [POLICY, OLDER, *(auxiliary_name(model) for model in config.explorer.auxiliary_models)]
    for place, seats in seats_of(config):
        for player, seat in seats.items():
            if isinstance(seat, str) and seat not in known:
                problem = f"is {seat!r}, which plays no seat; {did_you_mean(seat, known)}"
                yield Problem(f"{place}.{player}", f"{problem} (auxiliary models: explorer.auxiliary_models)")
    if not plays_older(config):
        return
    lora, older, sync = config.model.lora, config.explorer.older_versions, config.synchronizer
    if lora is None or lora.merged:
        problem = "has no adapters with merged: false, and engines hold older versions only as such"
        yield Problem("model.lora_configs", f"{problem}; give [{{lora_rank: 32, merged: false}}], or seat no {OLDER}")
    if config.mode in ("bench", "serve"):
        yield Problem("mode", f"is {config.mode}, which holds no older versions; seat no {OLDER}")
        return
    interval = make_plan(config).staleness.interval
    if older.every % interval:
        problem = f"is {older.every}, and versions come every {interval} steps; give a multiple of {interval}"
        yield Problem(f"{_OLDER_KEY}.every", problem)
    needed = older.every * older.keep // interval + 2
    if sync.versions_to_keep < needed:
        problem = f"is {sync.versions_to_keep}; {_OLDER_KEY} plays versions up to {older.every * older.keep} steps old"
        yield Problem("synchronizer.versions_to_keep", f"{problem}: at least {needed}")


def seats_of(config: Config) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields place and seats of each taskset whose workflow plays games of several players."""
    source = config.buffer.explorer_input
    for key, taskset in source.by_key():
        if isinstance(EPISODE_WORKFLOWS.get(source.workflow_of(taskset, key.startswith("eval"))), GameRules):
            seats = taskset.workflow_args.get("seats")
            place = f"buffer.explorer_input.{key}.workflow_args.seats"
            yield place, dict(seats) if isinstance(seats, dict) else {}
