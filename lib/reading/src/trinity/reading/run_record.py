"""The record of a run for others and for later versions: on NATS, and in <job>/version.json."""

import contextlib
import os
from pathlib import Path
from typing import Any

import pydantic_core
from pydantic import ValidationError

from trinity.config.run_record import Addresses, RunRecord, announcement
from trinity.reading import job as jobs
from trinity.reading.client import Watcher
from trinity.reading.errors import RunError
from trinity.reading.job import Job, identify
from trinity.reading.nats import NatsAccess
from trinity.reading.render import visible
from trinity.runtime import files, names
from trinity.runtime.broker import ABSENT, Broker, Bucket, Entry
from trinity.runtime.errors import Unavailable
from trinity.runtime.trust import identity
from trinity.runtime.version import installed_version

_VERSION_FILE = "version.json"
_NATS_SECONDS = 20.0


def this_version() -> str:
    return installed_version("trinity-cli")


def refuse_other_version(begun: Any, what: str) -> None:
    """Raises RunError unless `begun` and this version differ in the last number at most.

    Versions before 0.3 recorded none: `begun` is None.
    """
    ours = this_version()
    if not isinstance(begun, str) or begun.split(".")[:2] != ours.split(".")[:2]:
        named = visible(begun[:40]) if isinstance(begun, str) else "0.2.0 or older (it recorded no version)"
        raise RunError(
            f"{what} was begun with Trinity {named}, and this is {ours}: use that version to continue it, or begin "
            "again under another name (continue_from_checkpoint: false makes one)",
            code=2,
        )


def check_folder(folder: Path) -> None:
    """Raises RunError if an incompatible version began a run in a job folder."""
    if jobs.is_job(folder):
        found = files.read_json(folder / _VERSION_FILE)
        refuse_other_version(found.get("version") if isinstance(found, dict) else None, f"the run in {folder}")


def mark_folder(folder: Path) -> None:
    """Writes the version that begins a run in a folder, once."""
    if not (folder / _VERSION_FILE).exists():
        files.write_json(folder / _VERSION_FILE, {"version": this_version()})


def parse(value: bytes, where: str) -> RunRecord:
    """Parses the record in a KV entry. Raises RunError if no run of this version wrote it."""
    try:
        found = pydantic_core.from_json(value)
        _check_version(found, where)
        return RunRecord.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc'])) or 'its content'}: {first['msg']}"
    except ValueError as error:
        problem = str(error)
    problem = visible(problem)[:300]
    raise RunError(f"{where} is no record of a run ({problem}); `trinity run` with the run's YAML writes it again")


def _check_version(found: Any, where: str) -> None:
    if isinstance(found, dict) and "run" in found:
        refuse_other_version(found.get("version"), f"{where}: the run")


async def _entry(broker: Broker, token: str) -> tuple[bytes | None, str]:
    key = names.RunNames(token).job_key
    bucket = await Bucket.find(broker, names.RUNS_BUCKET)  # who joins before the first run may not make it
    entry = await bucket.get(key) if bucket is not None else ABSENT
    return entry.value if entry.revision else None, f"KV entry {names.RUNS_BUCKET}/{key}"


async def read(broker: Broker, token: str) -> RunRecord | None:
    """Returns the record of a job; None if there is none. Raises RunError as `parse`."""
    value, where = await _entry(broker, token)
    return parse(value, where) if value is not None else None


async def read_announced(broker: Broker, token: str) -> RunRecord | None:
    """Returns the record that the buffer of a live run announces; None if there is none. Raises RunError as `parse`."""
    key = names.RunNames(token).announcement_key
    bucket = await Bucket.find(broker, names.ANNOUNCEMENTS_BUCKET)
    entry = await bucket.get(key) if bucket is not None else ABSENT
    return _announced(key, entry) if entry.revision else None


async def live_runs(broker: Broker) -> tuple[list[RunRecord], list[str]]:
    """Returns the records that buffers of live runs announce, and the problems of unreadable ones."""
    bucket = await Bucket.find(broker, names.ANNOUNCEMENTS_BUCKET)
    records, problems = [], []
    for key, entry in (await bucket.entries(names.LIVE_RUNS) if bucket is not None else {}).items():
        try:
            records.append(_announced(key, entry))
        except RunError as error:
            problems.append(str(error))
    return records, problems


def _announced(key: str, entry: Entry) -> RunRecord:
    where = f"KV entry {names.ANNOUNCEMENTS_BUCKET}/{key}"
    about = parse(entry.value, where)
    config = about.config
    if key != names.RunNames(names.run_id(config.project, config.name, config.group)).announcement_key:
        raise RunError(f"{visible(where)} is the record of another run")
    return about


async def check(broker: Broker, token: str) -> None:
    """Raises RunError if another version began the job on this NATS.

    The next run replaces an entry that no run wrote.
    """
    value, where = await _entry(broker, token)
    with contextlib.suppress(ValueError):
        _check_version(pydantic_core.from_json(value or b"null"), where)


async def write(broker: Broker, token: str, record: RunRecord) -> None:
    """Publishes a record, with the part of the configuration that explorers may read."""
    bucket = await Bucket.open(broker, names.RUNS_BUCKET, purges=False)
    await bucket.update(names.RunNames(token).job_key, lambda _: announcement(record))


async def look_for_run(job: Job, *, offline: bool = False) -> tuple[NatsAccess, RunRecord | None]:
    """Returns NATS and record of the job's live run; None if there is none, or without `offline` if none explores.

    Raises RunError for a record of another version, or a record that no run wrote.
    """
    main = job.records().get("main") or job.elsewhere()
    identify(job.folder)  # the run may have begun since
    nats = main.nats() if main is not None else NatsAccess(os.environ.get("TRINITY_NATS_URL", ""))
    if not nats.url:
        return nats, None
    with contextlib.suppress(Unavailable):
        async with await nats.connect("trinity-join", job.token, wait_seconds=_NATS_SECONDS) as broker:
            for reads in (read, read_announced):
                about = await reads(broker, job.token)
                if about is not None and (about.online or offline) and await _answers(job, about):
                    return nats, about
    return nats, None


async def _answers(job: Job, about: RunRecord) -> bool:
    """Returns True if the run's buffer answers and has work: the record of a finished run stays on its NATS."""
    watcher = Watcher(about.run, Addresses(buffer=local_addresses(job, about).buffer))
    try:
        view = await watcher.refresh()
        watcher.raise_if_refused()
    finally:
        await watcher.close()
    return view.buffer is not None and not view.finished


def local_addresses(job: Job, about: RunRecord) -> Addresses:
    """Returns the addresses of the run's services: from the job folder if the run lives here, else from the record.

    Raises InvalidInput if the record names an address to which this command would send its token unencrypted.
    """
    main = job.records().get("main")
    if main is None or main.run != about.run:
        own = identity.own()
        for service, address in vars(about.addresses).items():
            if own is not None and address:
                own.check_address(address, f"address of {service} in the run's record")
        return about.addresses
    found = {process.service: process.address for process in main.processes}
    return Addresses(**{name: found.get(name, "") for name in Addresses.__dataclass_fields__})
