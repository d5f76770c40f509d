"""A runtime is one module and one row: a copy of the package with both added serves a model by it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

import metal_supervisor
from tests.support.system import FAKE_ENGINE, System, eventually, model, service

TOY = '''
    """A toy: a server of GGUF files whose only flags are the address and the model."""

    from metal_supervisor.confinement.access import Access
    from metal_supervisor.models.metadata import Demand
    from metal_supervisor.runtimes.runtime import Executable, Runtime
    from metal_supervisor.spec.types import Engine, Probe


    def refuse(service):
        return ("UnsupportedField", "spec.extraArgs: a toy has no flags") if service.extra_args else None


    def engine(service, binary, place):
        where = "--host", place.host, "--port", str(place.port)
        named = "--alias", service.name, "--model", place.model_path
        argv = binary.interpreter, binary.path, *where, *named
        return Engine(argv, service.env, place.cwd, Probe(identity=service.name))


    RUNTIME = Runtime(
        name="toy",
        executables=(Executable("toy-server", "", "there is none to install", script=True),),
        formats=frozenset({"gguf"}),
        refuse=refuse,
        engine=engine,
        demand=lambda _service, _argv, reading, _reading_of: Demand(reading.size_bytes, text="the size of its file"),
        access=lambda binary, _code: Access((binary.interpreter,), (*binary.homes, binary.path), python=True),
    )
'''
LAST_ROW = "        vllm_swift.RUNTIME,\n"


def installation_with_toy(base: Path) -> Path:
    """Python of an installation whose package has the toy's module, and its row, and no other change."""
    house, root = base / "house", Path(metal_supervisor.__file__).parent
    for folder in (root, root.parent / "conf", root.parent / "launchd"):
        shutil.copytree(folder, house / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    (house / "metal_supervisor/runtimes/toy.py").write_text(textwrap.dedent(TOY))
    table = house / "metal_supervisor/runtimes/__init__.py"
    before = table.read_text()
    assert before.count(LAST_ROW) == 1
    after = before.replace(LAST_ROW, f"{LAST_ROW}        toy.RUNTIME,\n")
    table.write_text(after.replace("import llama_server, ", "import llama_server, toy, "))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(base / "venv")], check=True, timeout=60)
    packages = next((base / "venv").glob("lib/python3*/site-packages"))
    (packages / "house.pth").write_text(f"{house}\n{sysconfig.get_path('purelib')}\n")
    return base / "venv/bin/python"


def test_a_runtime_of_one_module_serves_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python, programs = installation_with_toy(tmp_path), tmp_path / "programs"
    programs.mkdir()
    toy = programs / "toy-server"
    toy.write_text(f"#!{sys.executable}\n" + FAKE_ENGINE.read_text().partition("\n")[2])
    toy.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    system = System(tmp_path, "--runtime", "toy", python=python)
    try:
        system.start()
        system.apply(model(source=str(system.tiny)), service(extraArgs=[]), service("odd", extraArgs=["--x"]))
        assert system.ready() == system.pid()
        assert [str(toy), "--host"] == system.commands()[system.pid()][1:3]
        assert system.chat()
        eventually(lambda: "a toy has no flags" in system.condition("MetalReady", "odd")["message"])
    finally:
        system.close()
