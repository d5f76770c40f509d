"""`make install-metal-agent`: from this checkout onto this Mac, in an environment of its own.

What is installed must not depend on a checkout that its owner moves or edits, so the wheel goes into a fresh directory
below the state directory, named after what is in it. The one before stays until the next install: programs may still
run from it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from locked import CHECKED

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "requirements.txt"
STAMP = "complete"


def wheel() -> Path:
    """The wheel that `make dist` built last."""
    found = sorted((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit("there is no wheel in dist/; run: make dist")
    return found[-1]


def place(apps: Path, built: Path) -> Path:
    """The directory of a wheel and of the packages that it runs with."""
    digest = hashlib.sha256(built.read_bytes() + PACKAGES.read_bytes()).hexdigest()
    return apps / f"{built.name.split('-')[1]}-{digest[:8]}"


def unpack(apps: Path, built: Path) -> Path:
    """An environment with the wheel in it; made anew if it is not whole. Returns its Python."""
    app = place(apps, built)
    if not (app / STAMP).exists():
        shutil.rmtree(app, ignore_errors=True)
        print(f"installing {built.name} into {app}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(app)], check=True)
        pip = [str(app / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *CHECKED, "-r", str(PACKAGES)], check=True)
        subprocess.run([*pip, "--no-index", "--no-deps", str(built)], check=True)
        (app / STAMP).touch()
    os.utime(app)
    return app / "bin" / "python"


def in_use(state: Path) -> str:
    """What names the environments that something runs from: the way in, and how supervisord was started."""
    named = ""
    with contextlib.suppress(OSError):
        named = (state / "current" / "metal-supervisor").read_text("utf-8")
    with contextlib.suppress(OSError, ValueError):
        pid = int((state / "supervisord.pid").read_text("utf-8"))
        # With its variables: a Mac's Python replaces its path by that of a bundle, and keeps it in one of them.
        show = "-Eww" if sys.platform == "darwin" else "eww"
        named += subprocess.run(["ps", show, "-o", "args=", "-p", str(pid)], capture_output=True).stdout.decode(
            "utf-8", "replace"
        )
    return named


def forget_old(apps: Path, named: str) -> None:
    """Removes all but the two that were installed last, and what is named."""
    found = sorted((path for path in apps.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in found[:-2]:
        if f"{path}/" not in named:
            shutil.rmtree(path)


def flags(environ: Mapping[str, str]) -> list[str]:
    """What make's variables say, as flags; EMBEDDED=0 is a no."""
    named = (("METAL_KUBECONFIG", "--cluster"), ("METAL_KUBE_CONTEXT", "--context"))
    found = [word for name, flag in named if environ.get(name) for word in (flag, environ[name])]
    return [*found, "--embedded"] if environ.get("EMBEDDED", "") not in ("", "0") else found


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
    rest += flags(os.environ)
    install = ["-I", "-m", "metal_supervisor", "install", "--state-dir", str(state), *rest]
    if "--dry-run" in rest:
        return subprocess.call([str(ROOT / ".venv" / "bin" / "python"), *install])
    apps = state / "app"
    apps.mkdir(mode=0o700, parents=True, exist_ok=True)
    code = subprocess.call([str(unpack(apps, wheel())), *install])
    if code == 0:
        forget_old(apps, in_use(state))
    return code


if __name__ == "__main__":
    sys.exit(main())
