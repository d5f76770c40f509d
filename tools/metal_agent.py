"""`make install-metal-agent`: from this checkout onto this Mac, in an environment of its own.

What is installed must not depend on a checkout that its owner moves or edits, so the wheel goes into a fresh directory
below the state directory, named after what is in it. The one before stays until the next install: programs may still
run from it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAMP = "complete"


def wheel() -> Path:
    """The wheel that `make dist` built last."""
    found = sorted((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit("there is no wheel in dist/; run: make dist")
    return found[-1]


def place(apps: Path, built: Path) -> Path:
    """The directory of a wheel."""
    return apps / f"{built.name.split('-')[1]}-{hashlib.sha256(built.read_bytes()).hexdigest()[:8]}"


def unpack(apps: Path, built: Path) -> Path:
    """An environment with the wheel in it; made anew if it is not whole. Returns its Python."""
    app = place(apps, built)
    if not (app / STAMP).exists():
        shutil.rmtree(app, ignore_errors=True)
        print(f"installing {built.name} into {app}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(app)], check=True)
        pip = [str(app / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", str(built)]
        subprocess.run(pip, check=True)
        (app / STAMP).touch()
    os.utime(app)
    return app / "bin" / "python"


def forget_old(apps: Path) -> None:
    """Removes all but the two that were installed last."""
    found = sorted((path for path in apps.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in found[:-2]:
        shutil.rmtree(path)


def main() -> int:
    """Returns the exit code of metal-supervisor's own command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("install", "uninstall"))
    parser.add_argument("--state-dir", default="~/.metal-supervisor")
    arguments, rest = parser.parse_known_args()
    state = Path(arguments.state_dir).expanduser().absolute()
    if arguments.command == "uninstall":
        script = state / "current" / "metal-supervisor"
        if not script.exists():
            raise SystemExit(f"nothing is installed in {state}")
        return subprocess.call([str(script), "uninstall", "--state-dir", str(state), *rest])
    for name, flag in (("METAL_KUBECONFIG", "--cluster"), ("METAL_KUBE_CONTEXT", "--context")):
        if os.environ.get(name):
            rest += [flag, os.environ[name]]
    if os.environ.get("EMBEDDED"):
        rest.append("--embedded")
    install = ["-I", "-m", "metal_supervisor", "install", "--state-dir", str(state), *rest]
    if "--dry-run" in rest:
        return subprocess.call([str(ROOT / ".venv" / "bin" / "python"), *install])
    apps = state / "app"
    apps.mkdir(mode=0o700, parents=True, exist_ok=True)
    code = subprocess.call([str(unpack(apps, wheel())), *install])
    if code == 0:
        forget_old(apps)
    return code


if __name__ == "__main__":
    sys.exit(main())
