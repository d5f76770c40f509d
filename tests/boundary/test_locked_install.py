"""An index that serves another package under a locked version: nothing of it is installed."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

from tests.support.system import ROOT

PACKAGE = "lock_probe-1.0"


def index(directory: Path) -> Path:
    """A wheel in a directory that pip takes for an index."""
    directory.mkdir()
    wheel = directory / f"{PACKAGE}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("lock_probe.py", "")
        archive.writestr(f"{PACKAGE}.dist-info/METADATA", "Metadata-Version: 2.1\nName: lock-probe\nVersion: 1.0\n")
        archive.writestr(f"{PACKAGE}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{PACKAGE}.dist-info/RECORD", "")
    return wheel


def lock_of(digest: str) -> str:
    return f"lock-probe==1.0 \\\n    --hash=sha256:{digest}\n"


def test_make_refuses_a_package_whose_digest_is_not_the_locked_one(tmp_path: Path) -> None:
    wheel = index(tmp_path / "index")
    copy = tmp_path / "checkout"
    for name in ("Makefile", "pyproject.toml"):
        copy.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "tools", copy / "tools")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PIP_"))}
    environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent)}

    def made(digest: str) -> tuple[str, str, bool]:
        (copy / "requirements-dev.txt").write_text(lock_of(digest))
        ran = subprocess.run(
            ["make", ".venv/.installed"], cwd=copy, env=environ, capture_output=True, text=True, timeout=300
        )
        # What the lock names is all there is: the project itself cannot be built from it.
        assert ran.returncode != 0 and not (copy / ".venv" / ".installed").exists()
        return ran.stderr, ran.stdout, bool(list((copy / ".venv").glob("lib/*/site-packages/lock_probe.py")))

    right = hashlib.sha256(wheel.read_bytes()).hexdigest()
    said, printed, there = made("0" * 64)
    assert "requirements-dev.txt ... failed\n" in printed
    assert re.search(rf"DO NOT MATCH THE HASHES(?s:.*)Got +{right}", said) and not there, said
    said, printed, there = made(right)
    assert re.search(r"\n  packages         requirements-dev.txt \.\.\. \d+ s, \d+ MB\n", printed), printed
    assert there and "DO NOT MATCH" not in said, said
