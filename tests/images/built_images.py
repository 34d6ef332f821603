"""Images built with buildah, and their processes: the image's user and environment, its root mounted read-only.

Needs root, buildah and debootstrap, no container registry: the base is Debian's Python 3.11. Packages come from the
indexes of this machine's pip and uv configurations, only at build time.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BASE = "localhost/trinity-test-base"
_PACKAGES = "ca-certificates,netbase,tzdata,python3.11,python3.11-venv,python3-distutils,libpython3.11-dev"
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_BUILD_SECONDS = 3600.0

# Mounts only for the process; $1 is the image's root, then pairs of folders to bind, "--" and the command.
_ENTER = """
set -e
root=$1; shift
for file in hosts resolv.conf; do [ ! -e $root/etc/$file ] || mount --bind /etc/$file $root/etc/$file; done
mount --bind $root $root
mount -o remount,bind,ro $root
mount -t tmpfs tmpfs $root/tmp
mount --rbind /dev $root/dev
mount --rbind /proc $root/proc
mount --bind /sys $root/sys
mount -o remount,bind,ro $root/sys
while [ "$1" != -- ]; do mount --bind "$1" "$root$2"; shift 2; done
shift
user=$1; shift
exec setpriv --no-new-privs chroot --userspec=$user $root "$@"
"""


def missing() -> str:
    """Why images cannot be built here; empty if they can."""
    if os.geteuid() != 0:
        return "images are built as root"
    absent = [tool for tool in ("buildah", "debootstrap", "unshare", "setpriv") if shutil.which(tool) is None]
    return f"not installed: {', '.join(absent)} (apt-get install buildah debootstrap)" if absent else ""


class Images:
    """A store of images in a folder. `close` removes the mounts; the folder stays the caller's."""

    def __init__(self, repository: Path, folder: Path) -> None:
        self._repository = repository
        self._folder = folder
        self._containers: list[str] = []
        self._roots: dict[str, Path] = {}
        folder.mkdir(parents=True, exist_ok=True)
        store = ("--root", str(folder / "store"), "--runroot", str(folder / "run"), "--storage-driver", "overlay")
        self._buildah = ("buildah", *store)

    def _call(self, *arguments: str, seconds: float = 600.0) -> str:
        command = [*self._buildah, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=self._repository)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout.strip()

    def has(self, name: str) -> bool:
        return subprocess.run([*self._buildah, "inspect", "--type", "image", name], capture_output=True).returncode == 0

    def make_base(self) -> None:
        """Debian with Python 3.11, as `python3`: what the official image is, without a registry."""
        if self.has(BASE):
            return
        container = self._call("from", "scratch")
        root = self._call("mount", container)
        command = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", root]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS)
        assert done.returncode == 0, done.stdout[-4000:]
        for folder in ("var/cache/apt", "var/lib/apt/lists"):
            shutil.rmtree(Path(root) / folder)
        (Path(root) / "usr/local/bin/python3").symlink_to("/usr/bin/python3.11")
        self._call("umount", container)
        self._call("commit", "--quiet", "--rm", container, BASE, seconds=_BUILD_SECONDS)

    def build(self, name: str, dockerfile: str, **arguments: str) -> None:
        """`docker build -f dockerfile -t name`, with build arguments."""
        given = {"BASE_IMAGE": BASE, **arguments}
        options = [option for key, value in given.items() for option in ("--build-arg", f"{key}={value}")]
        mounts = [option for mount in self._index() for option in ("--volume", mount)]
        options += ["--isolation", "chroot", "--pull-never", "--layers", *mounts]
        self._call("bud", *options, "-f", dockerfile, "-t", name, ".", seconds=_BUILD_SECONDS)

    def _index(self) -> list[str]:
        """Mounts that let pip and uv in a build find packages where this machine's pip finds them."""
        shown = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
        settings = dict(line.split("=", 1) for line in shown.stdout.splitlines() if "=" in line)
        values = {key.rpartition(".")[2]: value.strip("'").split() for key, value in settings.items()}
        folders = [place for place in values.get("find-links", []) if Path(place).is_dir()]
        pip, uv = self._folder / "pip.conf", self._folder / "uv.toml"
        index = [f"index-url = {url}" for url in values.get("index-url", [])]
        pip.write_text("\n".join(["[global]", *index, f"cert = {_CERTIFICATES}"]) + "\n")
        index = [f"index-url = {json.dumps(url)}" for url in values.get("index-url", [])]
        uv.write_text("\n".join([*index, "system-certs = true", f"find-links = {json.dumps(folders)}"]) + "\n")
        places = {str(pip): "/etc/pip.conf", str(uv): "/etc/uv/uv.toml", str(_CERTIFICATES): str(_CERTIFICATES)}
        places |= {folder: folder for folder in folders}
        return [f"{here}:{there}:ro" for here, there in places.items()]

    def config(self, name: str) -> dict[str, Any]:
        """User, Env, Entrypoint, Cmd, WorkingDir, Labels, as the image has them."""
        described: dict[str, Any] = json.loads(self._call("inspect", "--type", "image", name))
        return described["OCIv1"]["config"]  # type: ignore[no-any-return]

    def root_of(self, name: str) -> Path:
        """A folder with the files of an image."""
        if name not in self._roots:
            container = self._call("from", "--pull-never", name)
            self._containers.append(container)
            self._roots[name] = Path(self._call("mount", container))
        return self._roots[name]

    def mebibytes(self, name: str) -> float:
        """Size of an image's files on disk."""
        command = ["du", "-sxk", str(self.root_of(name))]
        counted = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        return int(counted.stdout.split()[0]) / 1024

    def close(self) -> None:
        for container in self._containers:
            self._call("rm", container)
        self._containers.clear()
        self._roots.clear()


def contained(
    images: Images, name: str, *command: str, mounts: Mapping[Path, str], environment: Mapping[str, str] | None = None
) -> list[str]:
    """The command line of a process of an image; without `command` its own. The process keeps the caller's network.

    Its root is read-only but for /tmp and for `mounts`: folders here, and where the process finds them.
    """
    config = images.config(name)
    given = [*config["Env"], *(f"{key}={value}" for key, value in (environment or {}).items())]
    inside = command or [*config.get("Entrypoint", []), *config["Cmd"]]
    binds = [part for here, there in mounts.items() for part in (str(here), there)]
    enter = ["unshare", "--mount", "sh", "-c", _ENTER, "sh", str(images.root_of(name)), *binds, "--", config["User"]]
    return [*enter, "env", "-i", "-C", config["WorkingDir"], *given, *inside]
