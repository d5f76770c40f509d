"""Installations of other releases, beside this one and on the packages of its environment."""

from __future__ import annotations

import sys
import sysconfig
import venv
from pathlib import Path


def install(base: Path) -> Path:
    """The python of an environment in `base` that runs the packages in `base/lib`."""
    venv.create(base / "venv", with_pip=False, symlinks=True)
    tag = f"python{sys.version_info.major}.{sys.version_info.minor}"
    paths = f"{base / 'lib'}\n{sysconfig.get_paths()['purelib']}\n"
    (base / "venv" / "lib" / tag / "site-packages" / "release.pth").write_text(paths)
    return base / "venv" / "bin" / "python"
