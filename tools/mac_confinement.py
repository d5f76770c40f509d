"""The check of confinement: llama-server under the profile its services get, and what the profile refuses it.

On a Mac this tries Seatbelt, which nothing else can; on Linux the very same code tries Landlock and seccomp.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from mac_kit import Kit, free_port
from mac_report import Sheet

from metal_supervisor import launch
from metal_supervisor.confinement import probe
from metal_supervisor.confinement.access import Access
from metal_supervisor.runtimes.builds import homes_of
from metal_supervisor.spec.types import Probe

ENDS_S = 60.0


def confinement(kit: Kit, sheet: Sheet) -> None:
    """A trial as the controller makes it, then five things that the profile has to allow or refuse."""
    program, launcher, base = kit.llama_server(), Path(launch.__file__), kit.scratch.resolve()
    port = free_port()
    access = Access((str(program),), homes_of(program, ""), (str(probe.GGUF.resolve()),), bind=(port,))

    def trial(scratch: Path, at: int) -> probe.Trial:
        argv = (str(program), "-m", str(probe.GGUF.resolve()), "--host", "127.0.0.1", "--port", str(at), "-c", "256")
        held = replace(access, write=(str(scratch),), bind=(at,))
        asked = Probe(first_path="/completion", first_body='{"prompt":"x","n_predict":1}')
        return probe.Trial(argv, (), asked, held, at)

    verdict = probe.try_out(trial, launcher)
    sheet.claim(verdict.works, f"a confined llama-server serves, and its policy holds: {verdict.why or 'yes'}")

    for name in ("specs", "runs", "scratch"):
        (base / name).mkdir(mode=0o700, exist_ok=True)
    (base / "secret").write_text("must not be read")
    held = replace(access, write=(str(base / "scratch"),))

    def ends(*arguments: str) -> tuple[int, str]:
        argv = (str(program), *arguments)
        command = probe.launcher_command(base, launcher, argv, {}, held)
        done = subprocess.run(command, capture_output=True, text=True, timeout=ENDS_S, check=False)
        return done.returncode, done.stdout + done.stderr

    served = ("-m", str(probe.GGUF.resolve()), "--host", "127.0.0.1", "-c", "256")
    code, said = ends("--list-devices")
    sheet.show("--list-devices, confined", said[-2000:])
    sheet.claim(code == 0 and ("MTL" in said or sys.platform != "darwin"), "it finds its Metal device, confined")
    code, said = ends(*served, "--port", str(port), "--chat-template-file", str(base / "secret"))
    sheet.claim(code != 0 and "must not be read" not in said, "it cannot read a foreign file")
    code, said = ends(*served, "--port", str(free_port()))
    sheet.claim(code != 0, "it cannot listen on another port")
