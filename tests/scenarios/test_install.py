"""An installation on a Mac whose launchd is a stand-in (tests/support/launchd.py): all else in it is real.

It is installed, changed in every way there is and taken out again, while a model answers.
"""

from __future__ import annotations

import os
import plistlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from metal_supervisor.cluster.kube import Kube
from metal_supervisor.controller import boot
from metal_supervisor.host.launchd import LABEL
from metal_supervisor.install import install, plan, uninstall, upgrade
from metal_supervisor.install.plan import SETTINGS_FILE
from metal_supervisor.install.steps import InstallError, Machine
from metal_supervisor.placement import leases
from metal_supervisor.settings.schema import Settings
from metal_supervisor.spec.processes import State
from metal_supervisor.state import own_processes
from metal_supervisor.state.directory import StateDir
from tests.support import launchd
from tests.support.faults import Figure, fault
from tests.support.launchd import no_pause
from tests.support.macs import LEASES, Mac, embedded_cluster
from tests.support.system import System, eventually, service

NODE_LEASE = leases.node_lease_object("default", "studio", 1.0, {}, "")["metadata"]["name"]


class Home:
    """One Mac with one user."""

    def __init__(self, base: Path, system: System | None = None) -> None:
        self.root, self.home = base / "root", base / "home"
        self.home.mkdir()
        (self.root / "Library" / "LaunchDaemons").mkdir(parents=True)
        self.mac = launchd.Mac()
        self.machine = Machine(self.root, self.home, "anna", "staff", os.getuid(), self.mac, no_pause)
        self.state = self.home / ".metal-supervisor"
        self.system = system or System(base, state=self.state)
        flags = self.system.settings()
        self.values: dict[str, object] = {name[2:].replace("-", "_"): value for name, value in flags.items()}
        self.values |= {name: int(str(self.values[name])) for name in ("port", "parallel_starts")}
        self.kubeconfig = Path(str(self.values.pop("kubeconfig"))) if "kubeconfig" in self.values else None
        self.values["caffeinate"] = ""
        self.said: list[str] = []

    def order(self, **more: object) -> plan.InstallOrder:
        agent, force = bool(more.pop("agent", False)), bool(more.pop("force", False))
        values = {"state_dir": str(self.state), **self.values, **more}
        return plan.InstallOrder(self.kubeconfig, self.kubeconfig is None, values, None, agent, force)

    def install(self, **more: object) -> list[str]:
        """Installs; returns the commands that changed something."""
        before = len(self.mac.asked)
        self.said.clear()
        found = plan.plan(self.order(**more), self.machine)
        assert install.install(found, self.machine, self.said.append) == 0, self.said
        return self.mac.asked[before:]

    def supervisorctl(self, *arguments: str) -> str:
        """As a user types it, with nothing but the usual PATH."""
        done = subprocess.run(
            ["supervisorctl", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": f"{self.root}/usr/local/bin:{os.environ['PATH']}", "HOME": str(self.home)},
        )
        return done.stdout + done.stderr


@pytest.fixture
def mac(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path)
    yield home
    home.mac.close()
    own_processes.end_all(own_processes.left_over(home.system.files))
    home.system.close()


@fault(
    "H5",
    "the job of launchd is exchanged under a streaming chat, for a setting, an edit by hand, and back",
    happens="a new supervisord stands in for the engine, which goes on",
    sees="what was done, line by line",
    bound="0 bytes lost, the same pid",
)
def test_a_mac_is_installed_changed_in_every_way_and_left_while_a_model_answers(mac: Home, figure: Figure) -> None:
    system = mac.system
    mac.mac.too_early = 2
    commands = mac.install()
    assert [each.split()[2] for each in commands if "launchctl" in each][-1] == "bootstrap"
    assert "loaded    system/dev.metal-supervisor" in mac.said
    assert {path.stat().st_mode & 0o777 for path in mac.state.glob("*.toml")} == {0o600}
    system.apply(system.tiny_model(), service())
    engine = system.ready()
    eventually(lambda: system.rpc.table()["default.tiny"].state is State.RUNNING, 20, "it to run")
    assert "RUNNING" in mac.supervisorctl("status", "default.tiny")
    assert "RUNNING" in mac.supervisorctl("-c", str(mac.state / "supervisord.conf"), "status", "default.tiny")
    assert "RUNNING" in mac.supervisorctl("-s", f"unix://{system.files.socket}", "status", "default.tiny")
    stream = system.stream(tokens=200, slow=False)

    # Twice: nothing is done.
    started = system.own_pid("controller"), system.own_pid("sidecar"), system.supervisord_pid()
    assert mac.install() == []
    assert mac.said == ["nothing to do: all of it is as it should be"]
    assert started == (system.own_pid("controller"), system.own_pid("sidecar"), system.supervisord_pid())

    # A setting: controller and sidecar start anew.
    assert mac.install(memory_fraction=0.5) == []
    assert system.supervisord_pid() == started[2]
    assert started[0] != system.own_pid("controller") and started[1] != system.own_pid("sidecar")
    assert "memory_fraction = 0.5" in (mac.state / "metal-supervisor.toml").read_text()
    assert mac.install() == [], "what was said once need not be said again"
    assert "memory_fraction = 0.5" in (mac.state / "metal-supervisor.toml").read_text()

    # One that launchd has to know: the job is exchanged around the engine.
    stream.goes_on()
    with figure.timed("exchange of the job"):
        commands = mac.install(stop_timeout=30.0)
    verbs = [each.split("launchctl ")[1].split()[0] for each in commands if "launchctl" in each]
    assert (verbs[0], verbs[-1], set(verbs)) == ("kill", "bootstrap", {"kill", "bootout", "bootstrap"})
    assert plistlib.loads((mac.root / "Library/LaunchDaemons" / f"{LABEL}.plist").read_bytes())["ExitTimeOut"] == 130
    assert system.supervisord_pid() != started[2]
    eventually(lambda: system.pid() == engine, 30, "the engine to be stood in for")
    system.ready()

    # An edit of launchd's own file by hand stays, and counts.
    plist = mac.root / "Library" / "LaunchDaemons" / f"{LABEL}.plist"
    plist.write_bytes(plist.read_bytes().replace(b"<integer>15</integer>", b"<integer>20</integer>"))
    supervisord = system.supervisord_pid()
    stream.goes_on()
    with figure.timed("exchange of the job"):
        mac.install()
    assert mac.said[0] == f"note      {plist} was edited by hand and stays; --force writes ours"
    assert mac.mac.jobs[f"system/{LABEL}"].content["ThrottleInterval"] == 20
    assert system.supervisord_pid() != supervisord
    stream.goes_on()
    with figure.timed("exchange of the job"):
        mac.install(force=True)
    assert mac.mac.jobs[f"system/{LABEL}"].content["ThrottleInterval"] == 15
    eventually(lambda: system.pid() == engine, 30, "the engine to be stood in for")
    system.ready()
    assert stream.completed(), stream.error
    figure.add("answers cut", 0, "")

    # And out of it again.
    store = mac.state / "models" / "some" / "model.gguf"
    store.parent.mkdir(parents=True, exist_ok=True)
    store.write_bytes(b"x" * 3_000_000)
    mac.said.clear()
    found = uninstall.find(mac.machine, mac.state)
    uninstall.uninstall(found, mac.machine, False, mac.said.append)
    assert mac.mac.jobs == {} and not plist.exists() and not list((mac.root / "usr/local/bin").iterdir())
    assert system.processes() == []
    assert sorted(path.name for path in mac.state.iterdir()) == [
        "apiserver.db",
        "hub",
        "log",
        "metal-supervisor.toml",
        "models",
        "node",
    ]
    weights = "left      3 MiB of models in ~/.metal-supervisor/models; remove them with: rm -r "
    assert any(line.startswith(weights) for line in mac.said), mac.said

    # Coming back, all is there again.
    mac.install()
    assert "memory_fraction = 0.5" in (mac.state / "metal-supervisor.toml").read_text()
    system.forget()
    system.ready()
    uninstall.uninstall(uninstall.find(mac.machine, mac.state), mac.machine, True, mac.said.append)
    assert [path.name for path in mac.state.iterdir()] == ["models"]


def test_what_runs_in_a_terminal_is_not_installed_over(mac: Home) -> None:
    mac.system.start()
    with pytest.raises(InstallError, match="stop it first with Ctrl-C"):
        mac.install()
    found = uninstall.find(mac.machine, mac.state)
    with pytest.raises(InstallError, match="stop it first with Ctrl-C"):
        uninstall.uninstall(found, mac.machine, True, mac.said.append)
    assert mac.mac.asked == [] and (mac.state / "supervisord.conf").exists()


def test_a_job_that_cannot_start_is_told_with_its_last_words(mac: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "UP_WAIT_S", 4.0)
    found = plan.plan(mac.order(), mac.machine)
    broken = mac.state / "supervisord.conf" / "in-the-way"
    broken.mkdir(parents=True)
    (mac.state / "models.d").mkdir()  # as where one ran before
    assert install.install(found, mac.machine, mac.said.append) == 1
    assert any(line.startswith("it does not come up: launchd says ") for line in mac.said)
    assert mac.said[-1] == "see also: metal-supervisor doctor"
    assert "version" not in (mac.state / plan.NOTE_FILE).read_text(), "the next install tries it again"
    assert any("supervisord.conf" in line for line in mac.said), mac.said


def test_a_mac_of_a_cluster_leaves_nothing_behind_in_it(tmp_path: Path) -> None:
    with embedded_cluster(tmp_path) as kubeconfig:
        there = Mac(tmp_path / "mac", "studio", kubeconfig, 11, state=tmp_path / "mac" / "home" / ".metal-supervisor")
        home = Home(tmp_path / "mac", there)
        try:
            home.install(agent=True)
            assert f"loaded    gui/{os.getuid()}/{LABEL}" in home.said
            there.apply(there.tiny_model(), service())
            there.ready()
            assert there.slice_ready() and there.maybe(f"{LEASES}/{NODE_LEASE}")
            kept = home.state / "cluster" / "kubeconfig"
            assert kept.stat().st_mode & 0o777 == 0o600 and str(kept) in (home.state / SETTINGS_FILE).read_text()
            found = uninstall.find(home.machine, home.state)
            uninstall.uninstall(found, home.machine, False, home.said.append)
            assert "deleted   this Mac's endpoints in default" in home.said
            assert there.slice() is None and not there.maybe(f"{LEASES}/{NODE_LEASE}")
            assert not kept.exists() and there.processes() == []
        finally:
            home.mac.close()
            there.close()


def test_a_mac_that_never_served_takes_its_lease_along(tmp_path: Path) -> None:
    with embedded_cluster(tmp_path) as kubeconfig:
        kube = Kube(kubeconfig)
        lease = leases.node_lease_object("default", "studio", 40.0, {}, "2026-01-01T00:00:00.000000Z")
        kube.request("POST", LEASES, body=lease)
        directory = StateDir(tmp_path / "state")
        directory.create()
        settings = Settings(state_dir=str(directory.path), kubeconfig=str(kubeconfig), node_name="studio")
        assert list(uninstall._leave_cluster(directory, settings)) == ["deleted   this Mac's endpoints in default"]
        assert kube.request("GET", LEASES)["items"] == []
        kube.close()


def test_a_mac_leaves_its_cluster_for_the_embedded_api_without_a_new_supervisord(tmp_path: Path) -> None:
    cluster = tmp_path / "away"
    cluster.write_text(boot.kubeconfig("http://127.0.0.1:1/k-nobody"))
    there = Mac(tmp_path / "mac", "studio", cluster, 11, state=tmp_path / "mac" / "home" / ".metal-supervisor")
    home = Home(tmp_path / "mac", there)
    try:
        home.install()
        supervisord = there.supervisord_pid()
        home.kubeconfig = None
        home.install()
        assert there.supervisord_pid() == supervisord
        kube = Kube(home.state / "kubeconfig")
        eventually(lambda: kube.request("GET", "/version"), 20, "the embedded API to answer")
        kube.close()
        assert list((home.state / "cluster").iterdir()) == []
        access = own_processes.saved_access(there.files)

        # Settings that are wrong are said, and change nothing.
        with (home.state / SETTINGS_FILE).open("a") as file:
            file.write("memory_fractoin = 0.5\n")
        home.said.clear()
        assert upgrade.upgrade(home.state, home.said.append) == 1
        assert "those on file are wrong: " in home.said[-1] and "memory_fractoin" in home.said[-1]
        assert own_processes.saved_access(there.files) == access, "an API that lives is not moved"
    finally:
        home.mac.close()
        own_processes.end_all(own_processes.left_over(there.files))
        there.close()
