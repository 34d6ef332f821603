"""Finds the runs of the pages: the given one, or all below the folder of runs. Each stage is a run here."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trinity.config import load
from trinity.reading import job as jobs
from trinity.reading.find import AnnouncedRun, jobs_here, jobs_root
from trinity.reading.reader import JobStage, announced_stage, stage_configs
from trinity.ui.source import UNREADABLE, Source, look

_MOST = 200  # stages that are listed
_LOOK_SECONDS = 5.0  # between two looks at an announcement


@dataclass(frozen=True)
class Unreadable:
    """A job folder that cannot be shown, and the reason."""

    folder: Path
    problem: str


class Places:
    """`place`: a job folder, a run that its NATS knows, or None for all runs below `root`, else of this machine."""

    def __init__(self, place: Path | AnnouncedRun | None, root: Path | None = None) -> None:
        self._place, self._root = place, root
        self._sources: dict[str, Source] = {}
        self._looked = time.monotonic()
        self.unreadable: list[Unreadable] = []

    @property
    def root(self) -> Path | None:
        """The folder of all runs that are shown; None if one run is."""
        return (self._root or jobs_root()).absolute() if self._place is None else None

    def find(self) -> dict[str, Source]:
        """Returns the stages by their key in addresses, newest run first. Reads the folders again."""
        if isinstance(self._place, AnnouncedRun):
            about = self._place.about
            if not self._sources:
                self._sources[about.run] = Source(announced_stage(self._place))
            return self._sources
        self.unreadable = []
        found: dict[str, Source] = {}
        for folder in dict.fromkeys([self._place] if self._place is not None else jobs_here(self._root)):
            for config in self._stages(folder.absolute()):
                key = _key(config.parent, (self._root or jobs_root()).absolute())
                source = self._sources.get(key) or self._open(folder.absolute(), config)
                if source is not None and len(found) < _MOST:
                    found[key] = source
        self._sources = found
        return found

    async def look(self) -> None:
        """Asks the NATS of an announced run again which stage is live, and where, at most every _LOOK_SECONDS."""
        if not isinstance(self._place, AnnouncedRun) or time.monotonic() < self._looked + _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        about = await look(self._place)
        for run, source in self.find().items():
            await source.follow(about if about is not None and about.run == run else None)
        if about is not None and about.run not in self._sources:
            self._place = AnnouncedRun(self._place.nats_url, about)
            self._sources = {about.run: Source(announced_stage(self._place)), **self._sources}

    def get(self, key: str) -> Source | None:
        return self._sources.get(key) or self.find().get(key)

    def _stages(self, folder: Path) -> Iterator[Path]:
        configs = stage_configs(folder)
        if not configs:
            self.unreadable.append(Unreadable(folder, "no stage has begun: no config.json with a log folder"))
        yield from reversed(configs)

    def _open(self, folder: Path, config: Path) -> Source | None:
        try:
            stage = config.parent.name if config.parent != folder else ""
            jobs.read_records(folder)  # of another version: it is said once, here
            return Source(JobStage(stage, load(config, plugins_loaded=False), (folder, config.parent)))
        except UNREADABLE as error:
            self.unreadable.append(Unreadable(config.parent, str(error)))
            return None

    async def close(self) -> None:
        for source in self._sources.values():
            await source.close()


def _key(folder: Path, root: Path) -> str:
    """Returns the path of a stage below the folder of runs, or its last two names."""
    parts = folder.relative_to(root).parts if folder.is_relative_to(root) else folder.parts[-2:]
    return "~".join(parts)
