"""`trinity ui`: pages on runs, on a port of this machine that only its user can open."""

import asyncio
import contextlib
import secrets
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer
import uvicorn

from trinity.commands import JobOption, NatsOption, RunName, RunOption, command, group, use_given_identity
from trinity.reading.errors import RunError
from trinity.reading.find import find_run
from trinity.reading.reader import find_job_stage
from trinity.runtime import logs
from trinity.ui.app import make_app
from trinity.ui.bundle import write
from trinity.ui.demo import unpacked
from trinity.ui.places import Places

app = group()
image = group("The pages in an image that has no `trinity`: `trinity-ui ui`.")

_HOST = "127.0.0.1"


@image.callback()
def _root() -> None:
    use_given_identity()


@command(image, "ui")
@command(app, "ui")
def ui(
    config: RunOption = None,
    job: JobOption = None,
    nats: NatsOption = "",
    run: RunName = "",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Else a free one")] = 0,
    demo: Annotated[bool, typer.Option("--demo", help="Two recorded runs of the quickstart")] = False,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", help="Write the run's pages into this folder, to open from disk")
    ] = None,
    pages: Annotated[int, typer.Option("--pages", min=1, help="The most pages of a bundle")] = 2000,
    writes: Annotated[
        bool, typer.Option("--writes", help="Forms that change dead letters, pins and notes, as the run's operator")
    ] = False,
) -> int:
    """Show runs on a page: the ledger, groups, samples. Without options: all runs here, and nothing is written."""
    if writes and (demo or bundle is not None):
        raise RunError("--writes: recorded pages have no buttons", 2)
    if demo and (config or job or nats or run):
        raise RunError("--demo shows recorded runs; leave --config, --job, --nats and --run out", 2)
    logs.configure("look", level="ERROR")
    with unpacked() if demo else contextlib.nullcontext() as root:
        place = find_run(config, job, nats, run) if config or job or nats or run else None
        places = Places(place.absolute() if isinstance(place, Path) else place, root)
        if bundle is not None:
            first = find_job_stage(job=place).folder if isinstance(place, Path) else None
            if root is not None:
                first = next(iter(places.find().values())).folder
            print(asyncio.run(_write_bundle(places, first, bundle, pages)))
        else:
            serve(places, port, writes)
    return 0


async def _write_bundle(places: Places, stage: Path | None, folder: Path, most: int) -> str:
    """Writes the pages of the run. Raises RunError unless the folder is empty and there is one run.

    `stage`: folder of the live or last stage of a job.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"--bundle {folder}: is no empty folder; name another one", 2)
    found = [key for key, source in places.find().items() if stage in (None, source.folder)]
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise RunError(f"--bundle needs one run, and there are: {names}; name its folder by --job", 2)
    first, key = f"/run/{found[0]}", ("trinity_ui", secrets.token_urlsafe(16))
    try:
        count = await write(make_app(places, key[1], key[0]), key, first, folder, most)
    finally:
        await places.close()
    return f"{folder}{first}/index.html\n{count} pages"


def serve(places: Places, port: int, writes: bool = False) -> None:
    """Serves until SIGINT or SIGTERM. Raises RunError for a port that is taken."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((_HOST, port))
            listening.listen()
        except OSError as error:
            raise RunError(f"--port {port}: {error.strerror}; another one, or none for a free one", 2) from None
        port = listening.getsockname()[1]
        key = secrets.token_urlsafe(16)
        made = make_app(places, key, f"trinity_ui_{port}", writes)
        found = places.find()
        first = f"run/{next(iter(found))}" if len(found) == 1 else ""
        print(f"http://{_HOST}:{port}/{first}?key={key}", flush=True)
        print("Ctrl-C ends it", file=sys.stderr)
        server = uvicorn.Server(uvicorn.Config(made, log_level="warning", access_log=False, server_header=False))
        try:
            server.run(sockets=[listening])
        except KeyboardInterrupt:
            return
