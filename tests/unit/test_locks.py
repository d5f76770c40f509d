"""Lock files: what they hold is all that is installed, and it is what pyproject.toml asks for."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


import locked

from tests.support.finders import lock

ROOT = Path(__file__).resolve().parents[2]

PATHS = [each.path for each in lock.FILES]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PLATFORMS = {"linux": ("Linux", "x86_64"), "darwin": ("Darwin", "arm64")}
MACHINES = [(python, platform) for python in PYTHONS for platform in PLATFORMS]
PINNED = re.compile(
    r"([a-z0-9-]+==[a-z0-9.+!-]+(?: ; [a-z0-9_.'<>=!*() -]+)?) \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+",
    re.IGNORECASE,
)


def machine(python: str, platform: str, extra: str = "") -> dict[str, str]:
    """The values of markers on a machine."""
    system, processor = PLATFORMS[platform]
    return {
        "python_version": python,
        "python_full_version": f"{python}.7",
        "sys_platform": platform,
        "os_name": "posix",
        "platform_system": system,
        "platform_machine": processor,
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
        "extra": extra,
    }


def pinned(text: str) -> list[Requirement]:
    """The requirements of a lock file, in which nothing else may be: no index, no URL, no line without a digest."""
    assert PINNED.sub("", text) == ""
    return [Requirement(found[1]) for found in PINNED.finditer(text)]


def versions(path: str, environment: dict[str, str]) -> dict[str, str]:
    """Name -> version of what a lock file installs on a machine."""
    found: dict[str, str] = {}
    for each in pinned((ROOT / path).read_text("utf-8")):
        if each.marker is None or each.marker.evaluate(environment):
            name = canonicalize_name(each.name)
            assert name not in found, f"{path} has {name} twice"
            (found[name],) = (one.version for one in each.specifier)
    return found


def unmet(requirements: list[str], locked: dict[str, str], environment: dict[str, str]) -> list[str]:
    """The requirements that a lock leaves open."""
    asked = [Requirement(each) for each in requirements]
    return [
        str(each)
        for each in asked
        if (each.marker is None or each.marker.evaluate(environment))
        and (
            canonicalize_name(each.name) not in locked
            or not each.specifier.contains(locked[canonicalize_name(each.name)], prereleases=True)
        )
    ]


@pytest.mark.parametrize("path", PATHS)
def test_a_lock_has_versions_and_digests_and_nothing_else(path: str) -> None:
    assert pinned((ROOT / path).read_text("utf-8"))


@pytest.mark.parametrize(
    "line",
    ["flask==3.1.3\n", "--index-url https://example.com\n", "flask @ https://example.com/f.whl \\\n", "flask>=3 \\\n"],
)
def test_any_other_line_is_noticed(line: str) -> None:
    with pytest.raises(AssertionError):
        pinned(line + f"    --hash=sha256:{'0' * 64}\n")


def test_pip_installs_packages_of_an_index_from_locks_alone() -> None:
    """Each call of pip in make and the tools has a lock and its digests, or no index."""
    sources = [ROOT / "Makefile", *(ROOT / "tools").glob("*.py"), *(ROOT / "tests" / "support").rglob("*.py")]
    calls = re.compile(r"""(-m", "pip", (?:"--python", .+, )?"(?:install|download)"|-m pip install)""")
    found = {path.name: path.read_text("utf-8") for path in sources if calls.search(path.read_text("utf-8"))}
    finders = ["find_llama_server.py", "find_mlx.py", "find_ollama.py"]
    assert sorted(found) == [*finders, "formula.py", "lock.py", "metal_agent.py", "set_up.py"]
    for name, text in found.items():
        assert len(calls.findall(text)) == 1, f"{name}: one place"
        assert "CHECKED" in text or "--require-hashes" in text, name


def test_each_lock_file_is_one_that_make_lock_writes() -> None:
    there = [*ROOT.glob("requirements*.txt"), *(ROOT / locked.LOCKS).iterdir()]
    assert sorted(PATHS) == sorted(str(path.relative_to(ROOT)) for path in there)


@pytest.mark.parametrize("python, platform", MACHINES)
def test_the_locks_meet_pyproject_on_every_machine(python: str, platform: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    run, dev = project["project"]["dependencies"], project["project"]["optional-dependencies"]["dev"]
    environment = machine(python, platform)
    installed = versions("requirements.txt", environment)
    assert unmet(run, installed, environment) == []
    here = versions("requirements-dev.txt", environment)
    assert unmet([*run, *dev, *project["build-system"]["requires"]], here, environment) == []
    assert installed.items() <= here.items(), "tests run what users run"
    assert unmet(["flask>=99", "absent"], installed, environment) == ["flask>=99", "absent"]


@pytest.mark.parametrize("each", lock.FILES, ids=lambda each: each.path)
def test_a_lock_of_engines_holds_the_versions_that_are_asked_for(each: lock.Lock) -> None:
    for python, platform in MACHINES:
        environment = machine(python, platform)
        asked = [*each.requirements, *each.alone]
        if tuple(map(int, python.split("."))) >= tuple(map(int, each.python.split("."))):
            assert unmet(asked, versions(each.path, environment), environment) == []


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.y*ml")), ids=lambda path: path.name)
def test_a_workflow_names_its_actions_by_commit(path: Path) -> None:
    used = [line for line in path.read_text("utf-8").splitlines() if re.search(r"\buses\s*:", line)]
    pinned_action = re.compile(r" +(- )?uses: [\w.-]+/[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+")
    assert used and [line for line in used if not pinned_action.fullmatch(line)] == []
