"""Who may change the code of a plugin folder besides the user that runs it.

Every user of the machine: the folder is refused. The members of a group, or an owner that is neither this user nor
root: it is said, since containers run as root with folders of the host's user, and teams share folders. The group that
a distribution gives to each user (umask 002) is the user's own.
"""

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

ALLOWED = "TRINITY_ALLOW_WRITABLE_PLUGINS"
_MOST_FILES = 10_000  # of a folder that are looked at


def writable_by_everyone(folder: Path) -> str:
    """Returns the problem of a folder that every user may change; empty for others."""
    if os.environ.get(ALLOWED, "").lower() in ("1", "true"):
        return ""
    for path in _code(folder):
        if (mode := _mode(path)) & stat.S_IWOTH and not _read_only(path):
            fix = f"`chmod -R o-w {folder}`, or set {ALLOWED}=true where no other user has an account"
            problem = f"{path} (mode {stat.S_IMODE(mode):04o}) may be changed by every user of this machine"
            return f"{problem}, and the run executes it; {fix}"
    return ""


def changeable_by_others(folder: Path) -> str:
    """Returns who else may change a folder's code, with the first file as an example; empty for nobody."""
    me = os.geteuid()
    for path in folder.parents:  # in a folder as /tmp only the owner of an entry may rename it
        if (mode := _mode(path)) & stat.S_IWOTH and not mode & stat.S_ISVTX and not _read_only(path):
            return (
                f"every user of this machine may put another folder in its place, in {path}; `chmod o-w {path}` ends it"
            )
    for path in _code(folder):
        try:
            found = path.stat()
        except OSError:
            continue
        if _read_only(path):
            continue
        if found.st_uid not in (me, 0):
            return f"{path} belongs to {_user(found.st_uid)}, who may change what runs as {_user(me)}"
        if found.st_mode & stat.S_IWGRP and not _is_own(found.st_gid):
            return f"{path} may be changed by group {_group(found.st_gid)}; `chmod -R g-w {folder}` ends it"
    return ""


def _code(folder: Path) -> Iterator[Path]:
    """The folder, its modules and its packages, and the folders that linked ones lie in."""
    yield folder
    looked_at = 0
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in [*folders, *(file for file in files if file.endswith((".py", ".pyc", ".so")))]:
            looked_at += 1
            if looked_at > _MOST_FILES:
                return
            path = Path(place, name)
            yield path
            if path.is_symlink():
                yield path.resolve().parent


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError:
        return 0


def _read_only(path: Path) -> bool:
    """Returns True on a mount that nobody writes, such as a ConfigMap's."""
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def _is_own(gid: int) -> bool:
    """Returns True for root's group as root, and for the group of this user alone."""
    if os.geteuid() == 0 and gid == 0:
        return True
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
