"""Every NATS stream, subject, consumer, bucket and key of Trinity is spelt here and nowhere else.

A run is identified by its run id, a token that is safe in all of them. Streams belong to one run, so that sequences are
contiguous, limits are the run's own, and a run is removed by removing its streams.
"""

import hashlib
import re
from dataclasses import dataclass

VERSIONS_BUCKET = "trinity_versions"
MANIFESTS_BUCKET = "trinity_manifests"
MEMBERS_BUCKET = "trinity_members"
RUNS_BUCKET = "trinity_runs"
ANNOUNCEMENTS_BUCKET = "trinity_announcements"  # of live runs: an entry ends unless its buffer renews it
LIVE_RUNS = "live"  # prefix of the announcements' keys

TASKS_CONSUMER = "explorers"
TASK_LEASE_SECONDS = 30.0

IS_RUN = re.compile(r"[A-Za-z0-9_-]{1,200}")  # the form of a run id
_NUMBER = "(0|[1-9][0-9]{0,18})"  # of 63 bits; an explorer writes any digits into its subjects
_UNSAFE = re.compile(r"[^A-Za-z0-9_]+")


def slug(text: str) -> str:
    """Text as a NATS token: letters, digits and underscores; at most 40 characters, never empty."""
    return _UNSAFE.sub("_", text).strip("_")[:40] or "x"


def run_id(project: str, name: str, group: str = "") -> str:
    """Token for a run. Different names give different ids, also where their slugs agree.

    >>> run_id("quickstart", "arithmetic/rft")
    'quickstart-arithmetic_rft-fe9a0d'
    """
    parts = [project, group, name]
    return "-".join([slug(part) for part in parts if part] + [_digest("\0".join(parts))])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def token(name: str) -> str:
    """A name as one token. Different names give different tokens, also where their slugs agree."""
    return f"{slug(name)}-{_digest(name)}"


def owner_of(explorer_id: str) -> str:
    """Token of the explorer below whose subjects its messages lie.

    Explorers that share a credential are named `<its name>/<anything>` and share these subjects.

    >>> owner_of("pool/host-1") == owner_of("pool")
    True
    """
    return token(explorer_id.partition("/")[0])


class _OfRun:
    """A name that depends only on the run."""

    def __init__(self, form: str) -> None:
        self._form = form

    def __get__(self, names: "RunNames", _: object) -> str:
        return self._form.format(run=names.run)


@dataclass(frozen=True)
class BlobReference:
    """A payload in the stream of blobs. Fields as in common.v1.BlobReference."""

    key: str
    size_bytes: int
    chunks: int
    crc32: int


@dataclass(frozen=True)
class RunNames:
    """Streams, subjects and keys of one run."""

    run: str

    tasks_stream = _OfRun("TRINITY_TASKS_{run}")
    evaluation_tasks_stream = _OfRun("TRINITY_EVALUATION_TASKS_{run}")
    experiences_stream = _OfRun("TRINITY_EXPERIENCES_{run}")
    evaluations_stream = _OfRun("TRINITY_EVALUATIONS_{run}")
    batches_stream = _OfRun("TRINITY_BATCHES_{run}")
    cursors_stream = _OfRun("TRINITY_CURSORS_{run}")
    dead_letters_stream = _OfRun("TRINITY_DEADLETTERS_{run}")
    turns_stream = _OfRun("TRINITY_TURNS_{run}")  # of unfinished episodes
    traffic_stream = _OfRun("TRINITY_TRAFFIC_{run}")  # of plain calls at the endpoint, and their rewards
    lines_stream = _OfRun("TRINITY_LINES_{run}")  # of the log lines of the run's services
    blobs_stream = _OfRun("TRINITY_BLOBS_{run}")
    weights_stream = _OfRun("TRINITY_WEIGHTS_{run}")
    commands_stream = _OfRun("TRINITY_COMMANDS_{run}")  # of tenants that train adapters
    passes_stream = _OfRun("TRINITY_PASSES_{run}")  # bodies of those commands that are passes
    results_stream = _OfRun("TRINITY_RESULTS_{run}")  # of their commands

    control = _OfRun("trinity.{run}.experiences.control")  # the buffer's own log entries: requeued tasks and fences
    cursor = _OfRun("trinity.{run}.cursors.window")
    skips = _OfRun("trinity.{run}.batches.skip.*")  # all of them, for a filter
    groups = _OfRun("trinity.{run}.experiences.group.>")  # all stored groups: a filter
    call_rewards = _OfRun("trinity.{run}.traffic.reward.*")  # all of them: a filter
    blob_entries = _OfRun("trinity.{run}.experiences.group.*.*.*.blob")  # log entries that refer to a blob: a filter

    live_key = _OfRun("{run}.live")
    claim_key = _OfRun("{run}.claim")  # of the trainer that has the run
    candidate_key = _OfRun("{run}.candidate")  # of the version whose canary an explorer computes
    epoch_key = _OfRun("{run}.epoch")  # of the newest collective group
    platform_key = _OfRun("{run}.platform")  # on which all explorers of a reproducible run sample
    members = _OfRun("{run}.member")  # prefix of every member's key, before a dot
    commit_key = _OfRun("{run}.commit")
    announcement_key = _OfRun(f"{LIVE_RUNS}.{{run}}")
    job_key = _OfRun("{run}.job")  # of a job (a run, or the run of all its stages): what runs now, and where

    def task(self, taskset: str, ordinal: int) -> str:
        return f"trinity.{self.run}.tasks.{slug(taskset)}.{ordinal}"

    def evaluation_task(self, taskset: str) -> str:
        return f"trinity.{self.run}.evaluation_tasks.{slug(taskset)}"

    # `owner` is the token of an explorer (owner_of): an explorer publishes below its token only.

    def experience(self, owner: str, version: int, taskset: str, *, blob: bool = False) -> str:
        """Subject of a stored group; `version` is the oldest weight version that sampled it."""
        return f"trinity.{self.run}.experiences.group.{owner}.v{version}.{slug(taskset)}{'.blob' if blob else ''}"

    def failure(self, owner: str, taskset: str) -> str:
        """Subject of a failed attempt. In the same stream as the groups, so that the log orders both."""
        return f"trinity.{self.run}.experiences.failed.{owner}.{slug(taskset)}"

    @property
    def log_subjects(self) -> tuple[str, ...]:
        """All subjects of the experience log."""
        kinds = f"trinity.{self.run}.experiences"
        return f"{kinds}.group.*.*.>", f"{kinds}.failed.*.*", self.control

    def evaluation(self, owner: str, taskset: str) -> str:
        return f"trinity.{self.run}.evaluations.{owner}.{slug(taskset)}"

    def owner_in(self, subject: str) -> str:
        """Owner of a group, failure or evaluation by its subject; empty for what no explorer stores."""
        kinds = r"experiences\.group|experiences\.failed|evaluations"
        found = re.match(rf"trinity\.{re.escape(self.run)}\.(?:{kinds})\.([^.]+)\.", subject)
        return found[1] if found else ""

    def batch(self, step: int) -> str:
        return f"trinity.{self.run}.batches.{step}"

    def skip(self, step: int) -> str:
        """Subject of an operator's skip of a step, in the stream of batches."""
        return f"trinity.{self.run}.batches.skip.{step}"

    def dead_letter(self, ordinal: int) -> str:
        return f"trinity.{self.run}.deadletters.{ordinal}"

    def blob(self, owner: str, key: str, chunk: int) -> str:
        return f"trinity.{self.run}.blobs.{owner}.{key}.{chunk}"

    def blob_chunks(self, owner: str, key: str) -> str:
        """All chunks of a blob, for a filter."""
        return f"trinity.{self.run}.blobs.{owner}.{key}.*"

    def turn(self, ordinal: int, attempt: int, owner: str) -> str:
        """Subject of the turns of one attempt at a task."""
        return f"trinity.{self.run}.turns.{ordinal}.{attempt}.{owner}"

    def turns(self, ordinal: int) -> str:
        """All turns of a task, for a filter."""
        return f"trinity.{self.run}.turns.{ordinal}.>"

    def turn_of(self, subject: str) -> tuple[int, int, str]:
        """Ordinal, attempt and owner by the subject of a turn; (0, 0, "") for any other."""
        found = re.fullmatch(rf"trinity\.{re.escape(self.run)}\.turns\.{_NUMBER}\.{_NUMBER}\.([^.]+)", subject)
        return (int(found[1]), int(found[2]), found[3]) if found else (0, 0, "")

    def call(self, call_id: str, owner: str) -> str:
        """Subject of a recorded call; `call_id` is the response's, a token."""
        return f"trinity.{self.run}.traffic.call.{call_id}.{owner}"

    def call_reward(self, call_id: str) -> str:
        """Subject of a call's reward, the same for every explorer: JetStream stores the first one only."""
        return f"trinity.{self.run}.traffic.reward.{call_id}"

    def line(self, service: str, owner: str) -> str:
        """Subject of a log line; `owner` is the token of the process (owner_of)."""
        return f"trinity.{self.run}.lines.{service}.{owner}"

    def command(self, model: str) -> str:
        """Subject of the commands of a tenant's model, or of a session."""
        return f"trinity.{self.run}.commands.{token(model)}"

    def body_of_pass(self, model: str) -> str:
        """Subject of the bodies of a model's passes."""
        return f"trinity.{self.run}.passes.{token(model)}"

    def result(self, model: str) -> str:
        """Subject of the results of these commands."""
        return f"trinity.{self.run}.results.{token(model)}"

    def weights_part(self, prefix: str, file: str, part: int | str) -> str:
        """Subject of a part of a file; `prefix` is the version's, a token."""
        return f"trinity.{self.run}.weights.{prefix}.{token(file)}.{part}"

    def weights_parts(self, prefix: str, file: str = "") -> str:
        """All parts of a file, or of all files of a version, for a filter."""
        return self.weights_part(prefix, file, "*") if file else f"trinity.{self.run}.weights.{prefix}.>"

    def subjects(self, kind: str) -> str:
        """All subjects of one kind, for a stream's filter: `tasks`, `experiences`, ..."""
        return f"trinity.{self.run}.{kind}.>"

    def version_key(self, version: int) -> str:
        return f"{self.run}.version.{version}"

    def manifest_key(self, version: int, digest: str) -> str:
        return f"{self.run}.{version}.{digest}"

    def member_key(self, explorer_id: str) -> str:
        return f"{self.members}.{token(explorer_id)}"
