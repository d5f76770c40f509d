"""The check of confinement: engines under the profile their services get, and what the profile refuses llama-server.

On a Mac this tries Seatbelt, which nothing else can; on Linux the very same code tries Landlock and seccomp.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from metal_supervisor import launch
from metal_supervisor.confinement import probe
from metal_supervisor.confinement.access import Access
from metal_supervisor.controller.prerequisites.confinement_policies import Confinement
from metal_supervisor.runtimes import RUNTIMES
from metal_supervisor.runtimes.builds import Builds, homes_of
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.types import Probe
from metal_supervisor.state.directory import StateDir
from tests.support.mac.mac_kit import Kit, eventually, found_on_path, free_port
from tests.support.mac.mac_report import Sheet

ENDS_S = 60.0


def confinement(kit: Kit, sheet: Sheet) -> None:
    """A trial as the controller makes it, then what else the profile has to allow or refuse."""
    program, launcher, base = kit.llama_server(), Path(launch.__file__), kit.scratch.resolve()
    port, shipped = free_port(), probe.GGUF.resolve()
    access = Access((str(program),), homes_of(program, ""), (str(shipped),), bind=(port,))

    def trial(scratch: Path, at: int, model: Path = shipped) -> probe.Trial:
        argv = (str(program), "-m", str(model), "--host", "127.0.0.1", "--port", str(at), "-c", "256")
        held = replace(access, read=(str(model),), write=(str(scratch),), bind=(at,))
        asked = Probe(first_path="/completion", first_body='{"prompt":"x","n_predict":1}')
        return probe.Trial(argv, (), asked, held, at)

    verdict = probe.try_out(trial, launcher)
    sheet.claim(verdict.works, f"a confined llama-server serves, and its policy holds: {verdict.why or 'yes'}")

    shutil.copyfile(probe.GGUF, base / "tiny.gguf")
    if (base / "TINY.gguf").exists():  # on a disk that does not tell the two apart
        verdict = probe.try_out(lambda scratch, at: trial(scratch, at, base / "TINY.gguf"), launcher)
        sheet.claim(verdict.works, f"so does one whose model is named in another case: {verdict.why or 'yes'}")

    for name in ("specs", "runs", "scratch"):
        (base / name).mkdir(mode=0o700, exist_ok=True)
    (base / "secret").write_text("must not be read")
    held = replace(access, write=(str(base / "scratch"),))

    def ends(*arguments: str) -> tuple[int, str]:
        argv = (str(program), *arguments)
        command = probe.launcher_command(base, launcher, argv, {}, held)
        done = subprocess.run(command, capture_output=True, text=True, timeout=ENDS_S, check=False)
        return done.returncode, done.stdout + done.stderr

    served = ("-m", str(shipped), "--host", "127.0.0.1", "-c", "256")
    code, said = ends("--list-devices")
    sheet.show("--list-devices, confined", said[-2000:])
    sheet.claim(code == 0 and ("MTL" in said or sys.platform != "darwin"), "it finds its Metal device, confined")
    code, said = ends(*served, "--port", str(port), "--chat-template-file", str(base / "secret"))
    sheet.claim(code != 0 and "must not be read" not in said, "it cannot read a foreign file")
    code, said = ends(*served, "--port", str(free_port()))
    sheet.claim(code != 0, "it cannot listen on another port")
    for daemon in ("omlx", "ollama"):
        _daemon(kit, sheet, daemon)


def _daemon(kit: Kit, sheet: Sheet, name: str) -> None:
    """The controller's own trial of a shared daemon, which has to load the shipped model."""
    program = found_on_path(name)
    if program is None:
        sheet.show(name, "not installed, so its profile was not tried")
        return
    state, settings = StateDir(kit.scratch / name), replace(Settings(), **{name: str(program)}, confinement="on")
    state.create()
    builds, policies = Builds(settings, lambda: None), Confinement(settings, state, lambda: None)
    found = []

    def tried() -> bool:
        binary = builds.look(RUNTIMES[name].executables)
        found[:] = [binary and policies.daemon(name, binary, free_port(), [], [])]
        return found[0] is not None

    eventually(tried, ENDS_S, f"the trial of {name}")
    sheet.claim(not found[0].why, f"a confined {name} loads a model and answers: {found[0].why or 'yes'}")
