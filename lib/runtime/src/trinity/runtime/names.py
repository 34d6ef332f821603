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

TASKS_CONSUMER = "explorers"

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


@dataclass(frozen=True)
class RunNames:
    """Streams, subjects and keys of one run."""

    run: str

    @property
    def tasks_stream(self) -> str:
        return f"TRINITY_TASKS_{self.run}"

    @property
    def evaluation_tasks_stream(self) -> str:
        return f"TRINITY_EVALUATION_TASKS_{self.run}"

    @property
    def experiences_stream(self) -> str:
        return f"TRINITY_EXPERIENCES_{self.run}"

    @property
    def evaluations_stream(self) -> str:
        return f"TRINITY_EVALUATIONS_{self.run}"

    @property
    def batches_stream(self) -> str:
        return f"TRINITY_BATCHES_{self.run}"

    @property
    def cursors_stream(self) -> str:
        return f"TRINITY_CURSORS_{self.run}"

    @property
    def dead_letters_stream(self) -> str:
        return f"TRINITY_DEADLETTERS_{self.run}"

    @property
    def blobs_stream(self) -> str:
        return f"TRINITY_BLOBS_{self.run}"

    def task(self, taskset: str, ordinal: int) -> str:
        return f"trinity.{self.run}.tasks.{slug(taskset)}.{ordinal}"

    def evaluation_task(self, taskset: str) -> str:
        return f"trinity.{self.run}.evaluation_tasks.{slug(taskset)}"

    def experience(self, version: int, taskset: str, *, blob: bool = False) -> str:
        """Subject of a stored group; `version` is the oldest weight version that sampled it."""
        return f"trinity.{self.run}.experiences.v{version}.{slug(taskset)}{'.blob' if blob else ''}"

    def failure(self, taskset: str) -> str:
        """Subject of a failed attempt. In the same stream as the groups, so that the log orders both."""
        return f"trinity.{self.run}.experiences.failed.{slug(taskset)}"

    @property
    def control(self) -> str:
        """Subject of the buffer's own entries in the log: requeued tasks and fences."""
        return f"trinity.{self.run}.experiences.control"

    def evaluation(self, taskset: str) -> str:
        return f"trinity.{self.run}.evaluations.{slug(taskset)}"

    def batch(self, step: int) -> str:
        return f"trinity.{self.run}.batches.{step}"

    def skip(self, step: int) -> str:
        """Subject of an operator's word that a step is passed; in the stream of batches."""
        return f"trinity.{self.run}.batches.skip.{step}"

    @property
    def skips(self) -> str:
        """All of them, for a filter."""
        return f"trinity.{self.run}.batches.skip.*"

    @property
    def cursor(self) -> str:
        return f"trinity.{self.run}.cursors.window"

    def dead_letter(self, ordinal: int) -> str:
        return f"trinity.{self.run}.deadletters.{ordinal}"

    def blob(self, key: str, chunk: int) -> str:
        return f"trinity.{self.run}.blobs.{key}.{chunk}"

    def blob_chunks(self, key: str) -> str:
        """All chunks of a blob, for a filter."""
        return f"trinity.{self.run}.blobs.{key}.*"

    @property
    def weights_stream(self) -> str:
        return f"TRINITY_WEIGHTS_{self.run}"

    def weights_part(self, prefix: str, file: str, part: int | str) -> str:
        """Subject of a part of a file; `prefix` is the version's, a token."""
        return f"trinity.{self.run}.weights.{prefix}.{slug(file)}-{_digest(file)}.{part}"

    def weights_parts(self, prefix: str, file: str = "") -> str:
        """All parts of a file, or of all files of a version, for a filter."""
        return self.weights_part(prefix, file, "*") if file else f"trinity.{self.run}.weights.{prefix}.>"

    @property
    def blob_entries(self) -> str:
        """Log entries that refer to a blob, for a filter."""
        return f"trinity.{self.run}.experiences.*.*.blob"

    def subjects(self, kind: str) -> str:
        """All subjects of one kind, for a stream's filter: `tasks`, `experiences`, ..."""
        return f"trinity.{self.run}.{kind}.>"

    def version_key(self, version: int) -> str:
        return f"{self.run}.version.{version}"

    def manifest_key(self, version: int, digest: str) -> str:
        return f"{self.run}.{version}.{digest}"

    @property
    def live_key(self) -> str:
        return f"{self.run}.live"

    @property
    def claim_key(self) -> str:
        """Of the trainer that has the run."""
        return f"{self.run}.claim"

    @property
    def candidate_key(self) -> str:
        """Of the version whose canary an explorer computes."""
        return f"{self.run}.candidate"

    @property
    def epoch_key(self) -> str:
        """Of the newest collective group."""
        return f"{self.run}.epoch"

    @property
    def members(self) -> str:
        """What every member's key begins with, before a dot."""
        return f"{self.run}.member"

    def member_key(self, explorer_id: str) -> str:
        return f"{self.members}.{slug(explorer_id)}-{_digest(explorer_id)}"

    @property
    def commit_key(self) -> str:
        return f"{self.run}.commit"

    @property
    def job_key(self) -> str:
        """Of a job (a run, or the run of all its stages): what runs now, and where. Read by processes that join."""
        return f"{self.run}.job"
