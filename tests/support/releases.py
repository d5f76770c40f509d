"""Installations of other releases, beside this one and on the packages of its environment."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.support.system import ROOT

LAST = "310cd01"
"""Commit of the last release before manifests were judged by allow-lists and engines were confined."""


def install(base: Path) -> Path:
    """The python of an environment in `base` that runs the packages in `base/lib`."""
    venv.create(base / "venv", with_pip=False, symlinks=True)
    tag = f"python{sys.version_info.major}.{sys.version_info.minor}"
    paths = f"{base / 'lib'}\n{sysconfig.get_paths()['purelib']}\n"
    (base / "venv" / "lib" / tag / "site-packages" / "release.pth").write_text(paths)
    return base / "venv" / "bin" / "python"


def last_release(base: Path) -> Path:
    """The python of an installation of the last release; needs the history of the checkout."""
    lib = base / "lib"
    lib.mkdir()
    parts = "metal_supervisor", "conf", "launchd"
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", LAST, *parts], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(lib)], input=archive.stdout, check=True)
    return install(base)
