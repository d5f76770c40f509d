"""The wheel and the sdist, as `make dist` builds them: what is in them, and that what is installed from them works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from metal_supervisor import __version__
from tests.support import parts
from tests.support.finders import find_clients

REPOSITORY = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".run", "build", "dist", ".*_cache", "__pycache__", ".hypothesis")
NAME = f"metal_supervisor-{__version__}"


def done(*words: object, cwd: Path) -> str:
    """What a command prints, without this environment's ways to find our package."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ran = subprocess.run(list(map(str, words)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def build(source: Path, *what: str) -> Path:
    """Builds from a directory into its dist/."""
    done(sys.executable, "-m", "build", "--no-isolation", *what, source, cwd=source)
    return source / "dist"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this repository with its dist/."""
    source = tmp_path_factory.mktemp("dist") / "source"
    shutil.copytree(REPOSITORY, source, ignore=LEFT_OUT)
    (source / "launchd").mkdir(exist_ok=True)
    (source / "launchd" / "probe.plist").write_text("<plist/>\n")
    build(source)
    return source


@pytest.fixture(scope="module")
def home(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel; what it depends on is borrowed from the one that runs."""
    home = tmp_path_factory.mktemp("installed") / "venv"
    done(sys.executable, "-m", "venv", "--without-pip", home, cwd=built)
    (wheel,) = (built / "dist").glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", home / "bin" / "python", "--disable-pip-version-check")
    done(*pip, "install", "--no-deps", "--no-index", wheel, cwd=built)
    (packages,) = home.glob("lib/python*/site-packages")
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "borrowed.pth").write_text("".join(f"{each}\n" for each in sorted(borrowed)))
    return home


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_what_runs_and_nothing_else(built: Path) -> None:
    (wheel,) = (built / "dist").glob("*.whl")
    found = contents(wheel)
    assert {name.split("/")[0] for name in found} == {"metal_supervisor", f"{NAME}.dist-info"}
    for kind, inside in (("conf", "_conf"), ("launchd", "_launchd")):
        there = {str(path.relative_to(built / kind)) for path in (built / kind).rglob("*") if path.is_file()}
        assert there == {name.split("/", 2)[2] for name in found if name.startswith(f"metal_supervisor/{inside}/")}
    for name in (
        "_conf/crds/models.yaml",
        "_conf/crds/inferenceservices.yaml",
        "controller/templates/supervisord.conf",
        "launch.py",
        *(f"sidecar/http/templates/page.{kind}" for kind in ("html", "css", "js")),
    ):
        assert f"metal_supervisor/{name}" in found
    assert found[f"{NAME}.dist-info/licenses/LICENSE"] == (REPOSITORY / "LICENSE").read_bytes()
    assert not [name for name in found if "__pycache__" in name or name.endswith((".pyc", ".orig"))]


def test_the_sdist_has_it_all_and_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (archive,) = (built / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
        file.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # type: ignore[arg-type]
    for name in (
        "LICENSE",
        "README.md",
        "Makefile",
        "pyproject.toml",
        "requirements.txt",
        "conf/crds/models.yaml",
        "docs/models.md",
        "launchd/probe.plist",
        "tests/boundary/test_dist.py",
        "tools/make_run.py",
    ):
        assert name in names, name
    (again,) = build(tmp_path / NAME, "--wheel").glob("*.whl")
    done(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path / "direct", built, cwd=built)
    (direct,) = (tmp_path / "direct").glob("*.whl")
    assert contents(again) == contents(direct)


def test_an_index_would_take_them(built: Path) -> None:
    files = sorted((built / "dist").glob("metal_supervisor*"))
    said = done(parts.found(find_clients.find), "-m", "twine", "--no-color", "check", "--strict", *files, cwd=built)
    assert said.count("PASSED") == len(files) == 2


def test_what_is_installed_says_its_version_and_finds_its_files(home: Path, tmp_path: Path) -> None:
    command = home / "bin" / "metal-supervisor"
    assert done(command, "--version", cwd=tmp_path) == f"metal-supervisor {__version__}\n"
    assert json.loads(done(command, "version", "--json", cwd=tmp_path))["version"] == __version__
    assert "--model-store" in done(command, "boot", "--help-all", cwd=tmp_path)
    text = "from metal_supervisor.settings import loader; "
    text += "print(loader.__file__, loader.conf_dir(), loader.launchd_dir(), sep='\\n')"
    module, conf, launchd = done(home / "bin" / "python", "-c", text, cwd=tmp_path).splitlines()
    (packages,) = home.glob("lib/python*/site-packages")
    inside = packages / "metal_supervisor"
    assert Path(module).parent == inside / "settings"
    assert (Path(conf), Path(launchd)) == (inside / "_conf", inside / "_launchd")
    assert (Path(launchd) / "probe.plist").read_text() == "<plist/>\n"
