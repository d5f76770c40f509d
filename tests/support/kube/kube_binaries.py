#!/usr/bin/env python3
"""Some tests need a real Kubernetes API server, and no package registry has one ready to run.

Prints the directory that holds `etcd`, `kube-apiserver` and `kube-controller-manager`. The first of:

1. `$KUBEBUILDER_ASSETS`, if set; then nothing else is tried (kube-controller-manager may be missing there);
2. the cache, `$METAL_SUPERVISOR_CACHE`, else `~/.cache/metal-supervisor`;
3. a build from their Go modules, with versions and checksums of `tests/support/kube/module/`: some minutes, once.

Go's own caches of such a build would be gigabytes that nobody needs again, so it has its own and deletes them.
Several callers at once are safe (one builds, the others wait), and so is killing it: the directory appears whole
or not at all, and the next one removes what was left.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.kube.kube_guard import Guard

MODULE = Path(__file__).resolve().parent / "module"
NEEDED = ("etcd", "kube-apiserver")
PROGRAMS = (*NEEDED, "kube-controller-manager")
SOURCES = ("./etcd", "k8s.io/kubernetes/cmd/kube-apiserver", "k8s.io/kubernetes/cmd/kube-controller-manager")
BUILD_TIMEOUT_S = 3000.0
HOW = "install Go {go} or newer, or set KUBEBUILDER_ASSETS to a directory with etcd and kube-apiserver"


class NotAvailable(Exception):
    """There are no binaries and no way to build them here; the text says what to do."""


class BuildFailed(Exception):
    """There is a way, and it failed; the text is Go's."""


def say(text: str) -> None:
    print(f"kube: {text}", file=sys.stderr, flush=True)


def pinned(pattern: str) -> str:
    """What go.mod says: the first group of a pattern that must be in it."""
    found = re.search(pattern, (MODULE / "go.mod").read_text("utf-8"), re.MULTILINE)
    if not found:
        raise BuildFailed(f"{MODULE / 'go.mod'}: no {pattern}")
    return found.group(1)


def kubernetes_version() -> str:
    """E.g. `v1.36.3`."""
    return pinned(r"^\s*k8s\.io/kubernetes (v\S+)")


def final() -> Path:
    """Where a build ends up: another directory for other versions."""
    digest = hashlib.sha256()
    for name in ("go.mod", "go.sum", "etcd/main.go"):
        digest.update((MODULE / name).read_bytes())
    cache = Path(os.environ.get("METAL_SUPERVISOR_CACHE") or "~/.cache/metal-supervisor").expanduser().absolute()
    return cache / f"kube-{kubernetes_version()}-{digest.hexdigest()[:8]}"


def complete(directory: Path, programs: tuple[str, ...] = PROGRAMS) -> bool:
    """Whether all these programs are there."""
    return all(os.access(directory / name, os.X_OK) for name in programs)


def numbers(version: str) -> tuple[int, ...]:
    """`go1.26.8` → (1, 26, 8)."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def check_go() -> None:
    """Raises NotAvailable when there is no Go, or one too old for these modules."""
    wanted = pinned(r"^go (\S+)")
    if not shutil.which("go"):
        raise NotAvailable("there is no Go here: " + HOW.format(go=wanted))
    environment = {**os.environ, "GOTOOLCHAIN": "local"}
    found = subprocess.run(["go", "env", "GOVERSION"], capture_output=True, text=True, env=environment, cwd="/")
    if numbers(found.stdout) < numbers(wanted):
        raise NotAvailable(f"Go here is {found.stdout.strip() or 'broken'}: " + HOW.format(go=wanted))


def find_existing() -> Path | None:
    """Steps 1 and 2. Raises NotAvailable if the variable leads nowhere."""
    if named := os.environ.get("KUBEBUILDER_ASSETS"):
        path = Path(named).expanduser().absolute()
        if not complete(path, NEEDED):
            raise NotAvailable(f"KUBEBUILDER_ASSETS={named} does not hold {' and '.join(NEEDED)}")
        return path
    return final() if complete(final()) else None


def available() -> bool:
    """Whether tests with a real server can be asked for here: binaries have been named or built, or could be built."""
    if os.environ.get("KUBEBUILDER_ASSETS") or complete(final()):
        return True  # named wrongly is a mistake that the tests are to show
    try:
        check_go()
    except NotAvailable as error:
        say(str(error))
        return False
    return True


def find() -> Path:
    """The directory of the binaries, built if need be. Raises NotAvailable and BuildFailed."""
    if found := find_existing():
        return found
    check_go()
    target = final()
    with locked(target.parent):
        return target if complete(target) else build(target)


@contextlib.contextmanager
def locked(cache: Path) -> Iterator[None]:
    """One builder at a time; whatever a killed one left is removed first."""
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / ".kube.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another build")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in cache.glob(".kube-part-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def build(target: Path) -> Path:
    """Builds into `target`, which must not be complete yet; hold the lock."""
    version = kubernetes_version()
    say(f"building kube-apiserver {version} and etcd from their Go modules into {target} (once, some minutes)")
    started_s = time.monotonic()
    part = Path(tempfile.mkdtemp(prefix=".kube-part-", dir=target.parent))
    try:
        major, minor = numbers(version)[:2]
        package = "k8s.io/component-base/version"
        facts = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
        flags = " ".join(["-s", "-w", *(f"-X {package}.{name}={value}" for name, value in facts.items())])
        out = part / "out"
        out.mkdir()
        environment = {
            **os.environ,
            "CGO_ENABLED": "0",
            "GOTOOLCHAIN": "local",
            "GOWORK": "off",
            "GOFLAGS": "-mod=readonly -modcacherw -buildvcs=false",
            "GOCACHE": str(part / "cache"),
            "GOMODCACHE": str(part / "modules"),
            "GOTMPDIR": str(part),
        }
        command = ["go", "build", "-trimpath", "-ldflags", flags, "-o", f"{out}{os.sep}", *SOURCES]
        log = part / "log"  # a line per download: shown only when it fails
        guard = Guard()
        try:
            code = guard.start(command, log, cwd=MODULE, env=environment).wait(BUILD_TIMEOUT_S)
        finally:
            guard.close()
        if code != 0 or not complete(out):
            last = log.read_text("utf-8", "replace").strip().splitlines()[-20:]
            raise BuildFailed("go build failed:\n" + "\n".join(last))
        shutil.rmtree(target, ignore_errors=True)
        out.rename(target)
    except subprocess.TimeoutExpired:
        raise BuildFailed(f"go build took more than {BUILD_TIMEOUT_S:.0f} s") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    size_mib = sum(path.stat().st_size for path in target.iterdir()) >> 20
    say(f"built in {time.monotonic() - started_s:.0f} s, {size_mib} MiB")
    return target


def main() -> int:
    try:
        print(find())
    except (NotAvailable, BuildFailed) as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
