"""What each of our processes loads: a package that one does not need costs memory and time at each start of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from metal_supervisor.controller import boot

STARTED = """
import json, sys
from metal_supervisor.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
# tomli: the TOML of Python 3.10; sitecustomize: what a distribution, like Debian, adds to its Python
known = sys.stdlib_module_names | {"metal_supervisor", "__mp_main__", "tomli", "sitecustomize"}
packages = {each.split(".")[0] for each in sys.modules} - known
ours = {each.split(".")[1] for each in sys.modules if each.startswith("metal_supervisor.")}
print("loaded", json.dumps([sorted(each for each in packages if not each.startswith("_")), sorted(ours),
                            sorted({"asyncio", "multiprocessing", "sqlite3", "ssl", "xmlrpc"} & sys.modules.keys())]))
"""
"""Each of them loads what it needs before it looks for its state directory, and ends because there is none."""
KUBE = {"psutil", "urllib3"}
FLASK = {"blinker", "click", "flask", "itsdangerous", "jinja2", "markupsafe", "waitress", "werkzeug"}
AIOHTTP = {
    "aiohappyeyeballs",
    "aiohttp",
    "aiosignal",
    "attr",
    "cython_runtime",
    "frozenlist",
    "idna",
    "multidict",
    "propcache",
    "yarl",
    *(("typing_extensions",) if sys.version_info < (3, 13) else ()),
    *(("async_timeout",) if sys.version_info < (3, 11) else ()),
}
PACKAGES = {
    "controller": KUBE,
    "sidecar": KUBE | FLASK | {"prometheus_client"},
    "gateway": AIOHTTP | {"psutil"},
    "gateway-holder": set(),
    "apiserver": {"cython_runtime", "yaml"},
    "power": set(),
}
NOT_THEIRS = {
    "controller": {"sidecar", "apiserver", "doctor"},
    "sidecar": {"controller", "apiserver", "doctor"},
    "gateway": {"controller", "sidecar", "apiserver", "doctor", "placement", "supervisord"},
    **dict.fromkeys(
        ("gateway-holder", "apiserver", "power"),
        frozenset(
            {
                "controller",
                "sidecar",
                "doctor",
                "cluster",
                "placement",
                "supervisord",
                "runtimes",
                "memory",
                "models",
                "confinement",
            }
        ),
    ),
}
"""Rooms that a process does without."""
STANDARD = {
    "controller": ["ssl", "xmlrpc"],
    "sidecar": ["ssl", "xmlrpc"],
    "gateway": ["asyncio", "ssl"],
}


def loaded(tmp_path: Path, program: str) -> tuple[set[str], set[str], list[str]]:
    """(packages of others, our rooms, large parts of the standard library) that a program of ours loads."""
    command = [sys.executable, "-I", "-c", STARTED, program, "--state-dir", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = [each for each in done.stdout.splitlines() if each.startswith("loaded ")]
    assert len(lines) == 1, done.stderr
    packages, rooms, standard = json.loads(lines[0].removeprefix("loaded "))
    return set(packages), set(rooms), standard


@pytest.mark.parametrize("program", PACKAGES)
def test_a_process_loads_the_packages_that_it_needs_and_no_other(tmp_path: Path, program: str) -> None:
    packages, rooms, standard = loaded(tmp_path, program)
    assert packages == PACKAGES[program]
    assert not rooms & NOT_THEIRS[program]
    if program in STANDARD:
        assert standard == STANDARD[program]


def test_a_kubeconfig_that_we_wrote_is_read_without_yaml(tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(boot.kubeconfig("http://127.0.0.1:1/k"))
    program = """
import pathlib, sys
from metal_supervisor.cluster import credentials
print(credentials.choose(pathlib.Path(sys.argv[1])).context, "yaml" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-I", "-c", program, file], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["embedded", "False"], done.stderr


def test_supervisord_loads_no_client_of_itself_and_no_dataclasses() -> None:
    program = "import sys, metal_supervisor.supervisord.daemon; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=60)
    loaded = set(done.stdout.split())
    assert "supervisor.supervisord" in loaded, done.stderr
    assert not loaded & {"metal_supervisor.supervisord.client", "dataclasses"}
