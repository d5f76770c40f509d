"""A Mac for the doctor: its system calls, what its programs were recorded to say, an engine's file for its chip."""

from __future__ import annotations

import contextlib
import http.server
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mac_memory import DEVICES, GIB, M4_MAX, FakeLibc, u32

from metal_supervisor.doctor.findings import Check, Finding
from metal_supervisor.doctor.registry import CHECKS, examine
from metal_supervisor.doctor.surroundings import Surroundings
from metal_supervisor.host.commands import NOT_FOUND, Done
from metal_supervisor.host.darwin_memory import Mac
from metal_supervisor.settings.loader import Settings
from tests.support.system import free_ports

CHIP = {**M4_MAX, "machdep.cpu.brand_string": b"Apple M4 Max\0", "sysctl.proc_translated": u32(0)}
LOADED = """system/dev.metal-supervisor = {
\tactive count = 1
\tpath = /Library/LaunchDaemons/dev.metal-supervisor.plist
\ttype = LaunchDaemon
\tstate = running

\tprogram = /Users/u/venv/bin/python
\targuments = {
\t\tstate = of an argument
\t}
\tminimum runtime = 15
\texit timeout = 120
\truns = 1
\tpid = 123
\tlast exit code = (never exited)

\tspawn type = interactive (4)
\tjetsam priority = 40
}
"""
NOT_LOADED = Done(113, "", 'Could not find service "x" in domain for system\n')
FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"


class Programs:
    """What small programs say, by how their command line begins; the longest that fits counts."""

    def __init__(self, said: dict[str, Done]) -> None:
        self.said = said
        self.asked: list[str] = []

    def __call__(self, argv: Sequence[str], _timeout_s: float) -> Done:
        line = " ".join(argv)
        self.asked.append(line)
        fitting = [each for each in self.said if line.startswith(each)]
        return self.said[max(fitting, key=len)] if fitting else Done(NOT_FOUND, "", f"{argv[0]}: No such file")


def healthy(engine: Path) -> dict[str, Done]:
    """A Mac mini on which all is well."""
    return {
        "/bin/launchctl print": NOT_LOADED,
        "/bin/launchctl print system/dev.metal-supervisor": Done(0, LOADED, ""),
        "/usr/bin/pmset -g custom": Done(0, "AC Power:\n sleep                0\n displaysleep         10\n", ""),
        "/usr/bin/pmset -g batt": Done(0, "Now drawing from 'AC Power'\n", ""),
        "/usr/bin/file -b": Done(0, "Mach-O 64-bit executable arm64\n", ""),
        "/usr/bin/xattr -p": Done(1, "", "x: No such xattr: com.apple.quarantine\n"),
        f"{FIREWALL} --getglobalstate": Done(0, "Firewall is disabled. (State = 0)\n", ""),
        f"{FIREWALL} --listapps": Done(0, "Total number of apps = 0\n", ""),
        f"{engine} --version": Done(0, "", "version: 7200 (0a1b2c3)\n"),
        f"{engine} --list-devices": Done(0, DEVICES, ""),
    }


def surroundings(tmp_path: Path, programs: dict[str, Done] | None = None, **more: Any) -> Surroundings:
    """A Mac mini; `programs` say something else, `more` are other fields, `settings` other settings."""
    engine, state = tmp_path / "bin" / "llama-server", tmp_path / "state"
    if not engine.exists():
        engine.parent.mkdir()
        engine.touch(0o755)
        (state / "models").mkdir(parents=True)
        state.chmod(0o700)
    port, gateway = free_ports(2)  # the default ones may be in use
    settings = Settings(
        **{
            "state_dir": str(state),
            "llama_server": str(engine),
            "runtimes": "llama-server",
            "port": port,
            "gateway": f"127.0.0.1:{gateway}",
            **more.pop("settings", {}),
        }
    )
    fields: dict[str, Any] = {
        "on_mac": True,
        "mac": Mac(FakeLibc(more.pop("sysctls", CHIP))),
        "run": Programs({**healthy(engine), **(programs or {})}),
        "free_bytes": lambda _: 500 * GIB,
        **more,
    }
    return Surroundings(settings, **fields)


def found(around: Surroundings, *names: str, check_s: float = 60.0) -> dict[str, list[Finding]]:
    """What the checks of these names came to, or all of them."""
    checks: tuple[Check, ...] = tuple(each for each in CHECKS if not names or each.name in names)
    told: dict[str, list[Finding]] = {}
    for each in examine(around, checks, check_s):
        told.setdefault(each.check, []).append(each)
    return told


def shown(findings: Sequence[Finding]) -> str:
    return "\n".join(f"{each.status} {each.text} | {each.fix}" for each in findings)


@contextlib.contextmanager
def web(answer: Callable[[str, bytes], tuple[int, bytes]], behind_s: float = 0.0) -> Iterator[str]:
    """A server that answers (path, body) with (status, body); `behind_s`: how much later than ours its clock is."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # one packet for an answer

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _reply(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, body = answer(self.path.partition("?")[0], sent)
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _reply

        def date_time_string(self, timestamp: Any = None) -> str:
            return super().date_time_string(time.time() + behind_s)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
