"""The NATS subjects of each role: what its user may publish and subscribe. The counterpart of METHODS in roles.py.

JetStream's own API is subjects too: a stream is created, read and purged by publishing below `$JS.API`, a message is
acknowledged below `$JS.ACK`, and a KV entry is written below `$KV`. Answers come to an inbox of the user's own.

NATS checks no reply subject. Only the buffer's users are in the account that has the streams; every other role has an
account that imports the subjects of its grants as services. NATS delivers the answers to them in the role's account,
where no stream listens, whatever reply subject a user asks for.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from trinity.runtime import names
from trinity.runtime.errors import InvalidInput
from trinity.runtime.names import IS_RUN, RunNames, owner_of, token
from trinity.runtime.trust.roles import Role

_API = "$JS.API"
ALL_RUNS = "*"
_ANY = "<any>"  # stands for a run or an owner where wildcards are made
# The record of a job, which is read before its runs are known.
_JOB_RECORDS = RunNames("*").job_key
# Which runs live, for a command that is given a name.
_LIVE_RUNS = RunNames("*").announcement_key


@dataclass(frozen=True)
class Grants:
    """Subjects, with wildcards, that a user may publish on and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def inbox(role: str, name: str) -> str:
    """The prefix of a user's inboxes."""
    return f"_INBOX_{role}_{token(name)}"


def grants(role: Role, run: str, name: str) -> Grants:
    """The subjects of a role in a run, for the user `name`: an explorer's is its name in the run.

    The run is its id, or ALL_RUNS for sync, which serves every run of an account. InvalidInput for a role without NATS.
    """
    if role not in _GRANTS:
        raise InvalidInput("role", f"{role} does not use NATS; {', '.join(_GRANTS)} do")
    if not run or (run == ALL_RUNS and role is not Role.SYNC):
        raise InvalidInput("run", f"is {run!r}; the credentials of role {role} are of one run: give its id")
    if run != ALL_RUNS and not IS_RUN.fullmatch(run):  # a wildcard would be of other runs too
        raise InvalidInput("run", f"is {run[:200]!r}, must be the id of a run: 1 to 200 letters, digits, `_` or `-`")
    return _granted(role, run, owner_of(name), inbox(role, name))


def table() -> dict[Role, Grants]:
    """The subjects of every role, for the documentation: of a run `<run>` and an explorer `<explorer>`."""
    return {role: _granted(role, "<run>", "<explorer>", f"_INBOX_{role}_<name>") for role in _GRANTS}


def imports(role: Role) -> tuple[str, ...]:
    """Subjects that the account of a role imports: those of the grants, with a wildcard for each run and user."""
    granted = _granted(role, _ANY, _ANY, "").publish
    return outermost(".".join("*" if _ANY in part else part for part in subject.split(".")) for subject in granted)


def outermost(patterns: Iterable[str]) -> tuple[str, ...]:
    """Drops patterns that another pattern contains: NATS sends a request to every import that matches."""
    found = sorted(set(patterns))
    return tuple(one for one in found if not any(other != one and matches(other, one) for other in found))


def _granted(role: Role, run: str, owner: str, own_inbox: str) -> Grants:
    publish, subscribe = _GRANTS[role](RunNames(run), owner)
    return Grants((f"{_API}.INFO", *dict.fromkeys(publish)), (f"{own_inbox}.>", *subscribe))


def matches(pattern: str, subject: str) -> bool:
    """Returns True if a pattern matches a subject without wildcards, as NATS does."""
    wanted, found = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, found = wanted[:-1], found[: len(wanted) - 1] if len(found) >= len(wanted) else []
    return len(wanted) == len(found) and all(w in ("*", f) for w, f in zip(wanted, found, strict=True))


_Parts = tuple[Iterable[str], Iterable[str]]


def _buffer(run: RunNames, _: str) -> _Parts:
    tailed = (run.experiences_stream, run.evaluations_stream)
    queues = (run.tasks_stream, run.evaluation_tasks_stream)
    acks = [f"$JS.ACK.{stream}.{names.TASKS_CONSUMER}.>" for stream in queues]  # hears them, and returns tasks
    publish = [
        run.control,
        run.groups,  # of a fork's parent
        run.subjects("blobs"),
        run.line(Role.BUFFER, "*"),
        *(run.subjects(kind) for kind in ("tasks", "evaluation_tasks", "batches", "cursors", "deadletters")),
        *(f"{_API}.STREAM.{verb}.{stream}" for stream in _streams(run) for verb in ("INFO", "CREATE", "UPDATE")),
        *(subject for stream in _streams(run) for subject in _reads(stream)),
        *(
            f"{_API}.STREAM.PURGE.{stream}"
            for stream in (
                run.experiences_stream,
                run.blobs_stream,
                run.tasks_stream,
                run.cursors_stream,
                run.turns_stream,
                run.evaluations_stream,
                run.evaluation_tasks_stream,
            )
        ),
        *(f"{_API}.STREAM.MSG.DELETE.{stream}" for stream in (run.tasks_stream, run.dead_letters_stream)),
        *(f"{_API}.CONSUMER.{verb}.{stream}{rest}" for stream in tailed for verb, rest in _TAIL),
        *(f"{_API}.CONSUMER.DURABLE.CREATE.{stream}.{names.TASKS_CONSUMER}" for stream in queues),
        *(f"{_API}.CONSUMER.INFO.{stream}.{names.TASKS_CONSUMER}" for stream in queues),
        *acks,
        # Who may change a stream can have it republish to any subject: the trainer does not.
        *_weights(run, "INFO", "CREATE", "UPDATE"),
        *_bucket(names.VERSIONS_BUCKET, f"{run.run}.>"),
        *_bucket(names.RUNS_BUCKET, run.commit_key),
        f"$KV.{names.RUNS_BUCKET}.{run.commit_key}",
        *_makes(names.ANNOUNCEMENTS_BUCKET),
        f"$KV.{names.ANNOUNCEMENTS_BUCKET}.{run.announcement_key}",
    ]
    return publish, [f"$KV.{names.VERSIONS_BUCKET}.{run.live_key}", *acks]


def _explorer(run: RunNames, owner: str) -> _Parts:
    prefix = f"trinity.{run.run}"
    queues = [f"{stream}.{names.TASKS_CONSUMER}" for stream in (run.tasks_stream, run.evaluation_tasks_stream)]
    publish = [
        f"{prefix}.experiences.group.{owner}.>",
        f"{prefix}.experiences.failed.{owner}.*",
        f"{prefix}.evaluations.{owner}.*",
        f"{prefix}.blobs.{owner}.>",
        f"{prefix}.turns.*.*.{owner}",
        run.call("*", owner),
        run.call_rewards,
        *(subject for stream in (run.turns_stream, run.traffic_stream) for subject in _reads(stream)),
        f"{_API}.STREAM.MSG.DELETE.{run.traffic_stream}",  # as a client asks
        f"{_API}.DIRECT.GET.{run.tasks_stream}",  # whether a task that it has leased is still there
        run.line(Role.EXPLORER, owner),
        *(f"{_API}.CONSUMER.{verb}.{queue}" for queue in queues for verb in ("INFO", "MSG.NEXT")),
        *(f"$JS.ACK.{queue}.>" for queue in queues),
        *_weights(run, "INFO"),
        *_looks(names.RUNS_BUCKET, _JOB_RECORDS),
        *_looks(names.ANNOUNCEMENTS_BUCKET, run.announcement_key),
    ]
    return publish, []


def _trainer(run: RunNames, _: str) -> _Parts:
    lines = run.line(Role.TRAINER, "*")
    record = [*_looks(names.RUNS_BUCKET, _JOB_RECORDS), *_looks(names.ANNOUNCEMENTS_BUCKET, run.announcement_key)]
    return [run.subjects("weights"), lines, *_weights(run, "INFO", "PURGE"), *record], []


def _environment(run: RunNames, _: str) -> _Parts:
    return [run.line(Role.ENVIRONMENT, "*")], []


def _tinker(run: RunNames, _: str) -> _Parts:
    streams = (run.commands_stream, run.passes_stream, run.results_stream)
    publish = [
        run.subjects("commands"),
        run.subjects("passes"),
        f"{_API}.STREAM.PURGE.{run.passes_stream}",
        run.subjects("results"),
        run.line(Role.TINKER, "*"),
        run.line("tenants", "*"),
        *(f"{_API}.STREAM.{verb}.{stream}" for stream in streams for verb in ("INFO", "CREATE", "UPDATE")),
        *(subject for stream in streams for subject in _reads(stream)),
        *(f"{_API}.CONSUMER.{verb}.{stream}{rest}" for stream in streams for verb, rest in _TAIL),
    ]
    return publish, []


def _sync(run: RunNames, _: str) -> _Parts:
    buckets = (names.VERSIONS_BUCKET, names.MANIFESTS_BUCKET, names.MEMBERS_BUCKET)
    keys = [f"$KV.{bucket}.{run.run}.>" for bucket in buckets]
    # A bucket's changes are read by sequence, of all runs: this subject names no key.
    changes = [f"{_API}.DIRECT.GET.KV_{bucket}" for bucket in buckets]
    reads = (one for bucket in buckets for one in _bucket(bucket, f"{run.run}.>"))
    return [*keys, *changes, *reads, run.line(Role.SYNC, "*")], keys


def _reader(run: RunNames, _: str) -> _Parts:
    publish = [
        *(f"{_API}.STREAM.INFO.{stream}" for stream in _streams(run)),
        *(subject for stream in _streams(run) for subject in _reads(stream)),
        *_weights(run, "INFO"),
        *_looks(names.VERSIONS_BUCKET, f"{run.run}.>"),
        *_looks(names.RUNS_BUCKET, run.commit_key),
        *_looks(names.RUNS_BUCKET, _JOB_RECORDS),
        *_looks(names.ANNOUNCEMENTS_BUCKET, _LIVE_RUNS),
    ]
    return publish, []


def _operator(run: RunNames, owner: str) -> _Parts:
    records = [*_bucket(names.RUNS_BUCKET, _JOB_RECORDS), f"$KV.{names.RUNS_BUCKET}.{_JOB_RECORDS}"]
    return [*_reader(run, owner)[0], *records, run.skips], []


_GRANTS = {
    Role.BUFFER: _buffer,
    Role.EXPLORER: _explorer,
    Role.TRAINER: _trainer,
    Role.SYNC: _sync,
    Role.TINKER: _tinker,
    Role.ENVIRONMENT: _environment,
    Role.OPERATOR: _operator,
    Role.READER: _reader,
}

# The consumer verbs of a reader that tails a stream.
_TAIL = (("CREATE", ""), ("MSG.NEXT", ".*"), ("DELETE", ".*"))


def _streams(run: RunNames) -> tuple[str, ...]:
    """Those of the buffer."""
    return (
        run.experiences_stream,
        run.blobs_stream,
        run.tasks_stream,
        run.evaluation_tasks_stream,
        run.evaluations_stream,
        run.batches_stream,
        run.cursors_stream,
        run.dead_letters_stream,
        run.turns_stream,
        run.traffic_stream,
        run.lines_stream,
    )


def _reads(stream: str) -> tuple[str, str]:
    """By sequence, and the newest under a subject."""
    return f"{_API}.DIRECT.GET.{stream}", f"{_API}.DIRECT.GET.{stream}.>"


def _looks(bucket: str, keys: str) -> tuple[str, str]:
    return f"{_API}.STREAM.INFO.KV_{bucket}", f"{_API}.DIRECT.GET.KV_{bucket}.$KV.{bucket}.{keys}"


def _makes(bucket: str) -> tuple[str, str]:
    return f"{_API}.STREAM.INFO.KV_{bucket}", f"{_API}.STREAM.CREATE.KV_{bucket}"


def _bucket(bucket: str, keys: str) -> tuple[str, ...]:
    return (*_looks(bucket, keys), f"{_API}.STREAM.CREATE.KV_{bucket}")


def _weights(run: RunNames, *verbs: str) -> list[str]:
    """Weights on JetStream: only `storage: [jetstream]` uses them."""
    stream = run.weights_stream
    return [*(f"{_API}.STREAM.{verb}.{stream}" for verb in verbs), f"{_API}.DIRECT.GET.{stream}.>"]
