"""Seats of games of several players: who plays them, and what older versions of the policy need."""

from collections.abc import Iterator

from trinity.config.errors import Problem, did_you_mean
from trinity.config.names import auxiliary_name
from trinity.config.plan import make_plan
from trinity.config.schema import Config
from trinity.config.workflows import EPISODE_WORKFLOWS, OLDER, POLICY, GameRules

_OLDER_KEY = "explorer.older_versions"


def plays_older(config: Config) -> bool:
    """Tells if a seat of a taskset is played by older versions. An endpoint plays no games."""
    return config.mode != "serve" and any(seat == OLDER for _, seats in seats_of(config) for seat in seats.values())


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
    if config.mode == "bench":
        yield Problem("mode", f"is bench, which holds no older versions; seat no {OLDER}")
    if config.mode not in ("both", "train"):  # an explorer takes the other keys from the run that it joins
        return
    interval = make_plan(config).staleness.interval
    if older.every % interval:
        problem = f"is {older.every}, and versions come every {interval} steps; give a multiple of {interval}"
        yield Problem(f"{_OLDER_KEY}.every", problem)
    needed = older.every * older.keep // interval + 2
    if sync.versions_to_keep < needed:
        problem = f"is {sync.versions_to_keep}; {_OLDER_KEY} plays versions up to {older.every * older.keep} steps old"
        yield Problem("synchronizer.versions_to_keep", f"{problem}: at least {needed}")


def players_advice(config: Config) -> Iterator[str]:
    """Yields a remark if the versions that evaluations compare have too few opponents in common to be rated."""
    older, interval = config.explorer.older_versions, config.explorer.eval_interval
    rated = any(OLDER in seats.values() for place, seats in seats_of(config) if ".eval_taskset" in place)
    if rated and interval > older.every * (older.keep - 1):
        remark = f"is {interval}, and versions play those of {older.every * older.keep} steps before them: only the"
        most = f"{older.every * (older.keep - 1) or older.every} or less"
        yield f"explorer.eval_interval: {remark} first evaluations have a rating; evaluate every {most}"


def seats_of(config: Config) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields place and seats of each taskset whose workflow plays games of several players."""
    source = config.buffer.explorer_input
    for key, taskset in source.by_key():
        if isinstance(EPISODE_WORKFLOWS.get(source.workflow_of(taskset, key.startswith("eval"))), GameRules):
            seats = taskset.workflow_args.get("seats")
            place = f"buffer.explorer_input.{key}.workflow_args.seats"
            yield place, dict(seats) if isinstance(seats, dict) else {}
