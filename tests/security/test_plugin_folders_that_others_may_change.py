"""A plugin folder that every user may change is refused; who else may change one, a group or its owner, is named."""

import grp
import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from trinity import plugins
from trinity.plugins import PluginError, trust
from trinity.plugins.trust import changeable_by_others, writable_by_everyone

pytestmark = pytest.mark.core


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "mine" / "helpers_of_mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package.parent / "rewards_of_mine.py").write_text("")
    for path in (package.parent, package, *package.parent.rglob("*.py")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return package.parent


@pytest.mark.parametrize("place", ["", "rewards_of_mine.py", "helpers_of_mine", "helpers_of_mine/__init__.py"])
def test_what_every_user_may_change_is_refused(folder: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert writable_by_everyone(folder) == ""
    path = folder / place
    path.chmod(path.stat().st_mode | 0o002)
    with pytest.raises(
        PluginError, match=rf"{path} \(mode 0[67][45][67]\) may be changed by every user .*`chmod -R o-w"
    ):
        plugins.load([folder])
    monkeypatch.setenv(trust.ALLOWED, "true")
    assert writable_by_everyone(folder) == ""


def test_a_link_leads_to_a_folder_that_every_user_may_change(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "linked.py").write_text("")
    (folder / "linked.py").symlink_to(elsewhere / "linked.py")
    elsewhere.chmod(0o777)
    assert f"{elsewhere} (mode 0777)" in writable_by_everyone(folder)


def test_a_folder_of_a_group_is_named_and_that_of_the_users_own_group_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, me = folder / "rewards_of_mine.py", os.geteuid()
    file.chmod(0o664)
    gid = file.stat().st_gid
    members: list[str] = []
    monkeypatch.setattr(trust.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="ada", pw_gid=gid))
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name="ada", gr_mem=members))
    monkeypatch.setattr(trust, "_code", lambda _: iter([file]))
    stat = file.stat()
    owned = SimpleNamespace(st_uid=1000, st_gid=gid, st_mode=stat.st_mode)
    monkeypatch.setattr(Path, "stat", lambda path, **_: owned if path == file else os.stat(path))
    assert changeable_by_others(folder) == "", "umask 002: the group is the user's own"
    members.append("bob")
    assert f"{file} may be changed by group ada; `chmod -R g-w {folder}`" in changeable_by_others(folder)
    owned.st_uid, owned.st_mode = 0, 0o100644
    assert changeable_by_others(folder) == "", "root may change everything anyway"
    owned.st_uid = 1234 if me != 1234 else 1235
    assert f"{file} belongs to " in changeable_by_others(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_root_is_told_of_a_folder_of_the_hosts_user(folder: Path) -> None:
    assert not [notice for notice in plugins.load([folder]) if "may change" in notice]
    os.chown(folder / "helpers_of_mine", 1234, 1234)
    (notice,) = plugins.load([folder])
    assert f"{folder / 'helpers_of_mine'} belongs to user 1234, who may change what runs as root" in notice


def test_the_place_of_a_folder_may_not_be_everyones(folder: Path) -> None:
    folder.parent.chmod(0o777)
    assert f"put another folder in its place, in {folder.parent}" in changeable_by_others(folder)
    folder.parent.chmod(0o1777)
    assert changeable_by_others(folder) == ""
