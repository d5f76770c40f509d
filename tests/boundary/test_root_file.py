"""Files of root's, put in place by the real command through a real sudo."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from powermetrics_sudo import sudoers

from metal_supervisor.host import root_file
from tests.support.sudo import Room

SUDO = ("/usr/bin/sudo", "-n")
TOOLS = "cat", "chmod", "chown", "find", "id", "mkdir", "mktemp", "mv", "rm", "sha256sum"
RULE = sudoers("mac.user")
MODE = 0o440
USER = 1000


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Room, Path]:
    """A root directory in which the user may run all by sudo, and where it is."""
    root = tmp_path_factory.mktemp("room") / "root"
    tools = [str(shutil.which(each)) for each in TOOLS]
    return Room(root, "mac.user ALL=(root) NOPASSWD: ALL\n", tools), root


@pytest.fixture
def fragments(place: tuple[Room, Path]) -> Path:
    """The directory of sudoers' fragments, empty."""
    directory = place[1] / "etc" / "sudoers.d"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o755)
    return directory


def put(
    room: Room, content: str = RULE, sent: str | None = None, target: str = "/etc/sudoers.d/ours"
) -> tuple[int, str]:
    """(exit code, message) of handing a content over; `sent`: what arrives of it."""
    argv = root_file.command(target, MODE, content.encode(), sudoers=True)
    done = room.run("mac.user", *SUDO, *argv, content=content if sent is None else sent)
    return done.returncode, done.stderr


def test_a_real_sudo_puts_a_rule_in_place_and_replaces_it(place: tuple[Room, Path], fragments: Path) -> None:
    for content in (RULE, f"# again\n{RULE}"):
        assert put(place[0], content)[0] == 0
        (made,) = fragments.iterdir()
        found = made.stat()
        assert made.read_text() == content
        assert (found.st_uid, found.st_gid, found.st_mode & 0o7777) == (0, 0, MODE)


@pytest.mark.parametrize(
    "content, sent, why",
    [
        (RULE, RULE[:-20], "what arrived for /etc/sudoers.d/ours is not what was sent"),
        (RULE, "", "what arrived for /etc/sudoers.d/ours is not what was sent"),
        (RULE, "mac.user ALL=(ALL) NOPASSWD: ALL\n", "what arrived for /etc/sudoers.d/ours is not what was sent"),
        ("no rule\n", None, "visudo refuses it; nothing was changed"),
    ],
)
def test_what_is_cut_off_changed_or_no_rule_changes_nothing(
    place: tuple[Room, Path], fragments: Path, content: str, sent: str | None, why: str
) -> None:
    (fragments / "ours").write_text("# before\n")
    code, said = put(place[0], content, sent)
    assert code == 1 and why in said
    assert [(each.name, each.read_text()) for each in fragments.iterdir()] == [("ours", "# before\n")]


@pytest.mark.parametrize("what", ["owner", "group", "others", "above", "directory", "link"])
def test_a_place_that_others_can_change_is_refused(place: tuple[Room, Path], fragments: Path, what: str) -> None:
    room, root = place
    elsewhere = root / "elsewhere"
    shutil.rmtree(elsewhere, ignore_errors=True)
    (elsewhere / "etc").mkdir(parents=True, mode=0o755)
    directory, target = elsewhere / "etc", "/elsewhere/etc/ours"
    if what == "owner":
        shutil.chown(directory, USER)
    elif what in ("group", "others"):
        directory.chmod(0o775 if what == "group" else 0o1777)
    elif what == "above":
        shutil.chown(elsewhere, USER)
    elif what == "directory":
        (directory / "ours").mkdir()
    else:
        (directory / "ours").symlink_to("/etc/sudoers.d")
    code, said = put(room, target=target)
    assert code == 1
    assert ("is a directory" if what in ("directory", "link") else "can be changed by others than root") in said
    assert list(elsewhere.rglob("ours/*")) == list(fragments.iterdir()) == [] and not (directory / "ours").is_file()


def test_a_sticky_directory_further_up_does_no_harm(place: tuple[Room, Path]) -> None:
    room, root = place
    inside = root / "tmp" / "of-root"
    inside.mkdir(mode=0o755)
    (root / "tmp").chmod(0o1777)
    assert put(room, target="/tmp/of-root/ours")[0] == 0 and (inside / "ours").read_text() == RULE


def test_a_missing_directory_is_made_for_all_to_read(place: tuple[Room, Path]) -> None:
    room, root = place
    target = root / "usr-local" / "bin" / "ours"
    assert put(room, target="/usr-local/bin/ours")[0] == 0 and target.read_text() == RULE
    assert [each.stat().st_mode & 0o7777 for each in (target.parent, target.parent.parent)] == [0o755, 0o755]
