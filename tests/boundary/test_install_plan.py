"""What install and uninstall decide, and what they show with --dry-run."""

from __future__ import annotations

import grp
import json
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import metal_agent
import powermetrics_sudo
import pytest
from doctor_support import web

from metal_supervisor import launch
from metal_supervisor.cli import main
from metal_supervisor.cluster.credentials import BadKubeconfig, Login, choose
from metal_supervisor.cluster.kubeconfig_copy import copy
from metal_supervisor.controller import boot
from metal_supervisor.host import root_file
from metal_supervisor.host.commands import Done, run_here
from metal_supervisor.host.launchctl import Launchctl, LaunchdError, LoadedJob
from metal_supervisor.host.launchd import LABEL
from metal_supervisor.host.powermetrics import FRAGMENT
from metal_supervisor.install import install, plan, uninstall, upgrade
from metal_supervisor.install.steps import FileStep, InstallError, Machine
from metal_supervisor.settings.loader import ConfigError, Settings, edited
from tests.support.launchd import Mac, no_pause

GOLDEN = Path(__file__).resolve().parents[1] / "data" / "install"
PEM = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"


def kubeconfig(directory: Path, **user: Any) -> Path:
    """A kubeconfig with two contexts, of which one names files."""
    directory.mkdir(exist_ok=True)
    (directory / "ca.crt").write_text(PEM)
    (directory / "tok").write_text("secret-token\n")
    content = {
        "clusters": [
            {"name": "c", "cluster": {"server": "https://10.0.0.1:6443", "certificate-authority": "ca.crt"}},
            {"name": "other", "cluster": {"server": "https://other"}},
        ],
        "users": [{"name": "u", "user": user or {"tokenFile": "tok"}}, {"name": "o", "user": {"token": "others"}}],
        "contexts": [
            {"name": "mac", "context": {"cluster": "c", "user": "u"}},
            {"name": "other", "context": {"cluster": "other", "user": "o"}},
        ],
        "current-context": "other",
    }
    path = directory / "config"
    path.write_text(json.dumps(content))
    return path


def machine(run: Any, root: Path = Path("/"), home: Path = Path("/Users/anna")) -> Machine:
    return Machine(root, home, "anna", "staff", 501, run, no_pause)


def order(state: str, **more: Any) -> plan.InstallOrder:
    usual: dict[str, Any] = {"kubeconfig": None, "embedded": False, "config": None, "agent": False, "force": False}
    values = {"state_dir": state, **more.pop("values", {})}
    if context := more.pop("context", ""):
        values["context"] = context
    return plan.InstallOrder(**{**usual, "values": values, **more})


def nothing_loaded(argv: Sequence[str], _timeout_s: float) -> Done:
    assert "print" in argv
    return Done(113, "", "Could not find service")


# ── golden files ─────────────────────────────────────────────────────────────────────────────────


def golden(name: str, lines: Sequence[str]) -> None:
    """Compares with the file of that name; METAL_GOLDEN=1 writes it."""
    path = GOLDEN / f"{name}.txt"
    text = "\n".join(lines) + "\n"
    if os.environ.get("METAL_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8")


def test_a_dry_run_shows_every_file_and_command_of_a_daemon() -> None:
    mac = machine(nothing_loaded)
    found = plan.plan(
        order("/Users/anna/.metal-supervisor", embedded=True, values={"memory_fraction": 0.5, "namespace": "llm"}), mac
    )
    said: list[str] = []
    install.show(found, mac, said.append)
    golden("daemon-embedded", said)


def test_a_dry_run_shows_no_credential_of_an_agent_with_a_cluster(tmp_path: Path) -> None:
    mac = machine(nothing_loaded)
    found = plan.plan(
        order("/Users/anna/.metal-supervisor", kubeconfig=kubeconfig(tmp_path / "k"), context="mac", agent=True), mac
    )
    said: list[str] = []
    install.show(found, mac, said.append)
    said += install.summary(found, mac)
    assert "secret-token" not in "".join(said)
    golden("agent-cluster", [line.replace(str(tmp_path), "") for line in said])


def test_a_dry_run_of_uninstall_shows_what_goes_and_what_stays(tmp_path: Path) -> None:
    root, home = tmp_path / "root", tmp_path / "home"
    state = home / ".metal-supervisor"
    for path in ("records/default.tiny.json", "specs/x.json", "models/m/file.gguf", "cluster/token", "log/a.log"):
        (state / path).parent.mkdir(parents=True, exist_ok=True)
        (state / path).write_bytes(b"x" * 5_000_000)
    (state / "metal-supervisor.toml").write_text(plan.HEADER)
    (state / "of-somebody-else").write_text("")
    for path in (root / "Library/LaunchDaemons/dev.metal-supervisor.plist", root / "usr/local/bin/supervisorctl"):
        path.parent.mkdir(parents=True)
        path.write_text(plan.MARK)
    (root / "usr/local/bin/metal-supervisor").write_text("somebody else's")
    rule = root / FRAGMENT.lstrip("/")
    rule.parent.mkdir(parents=True)
    rule.write_text("anna ALL=(root) NOPASSWD: /usr/bin/powermetrics")
    mac = machine(nothing_loaded, root, home)
    for purge in (False, True):
        said: list[str] = []
        uninstall.show(uninstall.find(mac, state), mac, purge, said.append)
        golden(f"uninstall{'-purge' if purge else ''}", [line.replace(str(tmp_path), "") for line in said])


def test_uninstall_removes_nothing_from_a_directory_that_is_no_state_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    strangers = tmp_path / "project"
    for path in ("app/main.py", "records/a.json", "current/b", "log/build.log"):
        (strangers / path).parent.mkdir(parents=True, exist_ok=True)
        (strangers / path).write_text("mine")
    (strangers / "supervisord.conf").write_text("[supervisord]\n")
    (strangers / "metal-supervisor.toml").write_text("port = 9090\n")
    (strangers / "overrides.json").write_text("[]")
    before = sorted(strangers.rglob("*"))
    mac = machine(nothing_loaded, tmp_path / "root", tmp_path / "home")
    with pytest.raises(InstallError, match=r"project is not a state directory .* app, current, log, .*--state-dir"):
        uninstall.find(mac, strangers)
    monkeypatch.chdir(strangers)
    with pytest.raises(SystemExit, match="2"):
        main.main(["uninstall", "--dry-run", "--state-dir", ""])
    assert "--state-dir: must not be empty" in capsys.readouterr().err
    assert sorted(strangers.rglob("*")) == before
    (tmp_path / "empty").mkdir()
    assert not uninstall.find(mac, tmp_path / "empty").ours


@pytest.mark.parametrize(
    "files",
    [
        {"overrides.json": '{"config": "", "values": {}}'},
        {"supervisord.conf": "command = /v/bin/python -m metal_supervisor sidecar"},
        {"metal-supervisor.toml": plan.HEADER + "port = 9090\n"},
        {"node": "mac-0123abcd\n", "log/controller.log": ""},
        {"metal-supervisor.toml": "port = 9090\n", "log/controller.log": ""},
    ],
)
def test_a_state_directory_is_known_by_any_file_that_only_a_system_leaves(
    tmp_path: Path, files: dict[str, str]
) -> None:
    state = tmp_path / "s"
    for name, text in {**files, "records/a.json": "{}"}.items():
        (state / name).parent.mkdir(parents=True, exist_ok=True)
        (state / name).write_text(text)
    assert uninstall.find(machine(nothing_loaded, tmp_path / "root", tmp_path / "home"), state).ours


def test_uninstall_leaves_no_file_of_the_gateway_nor_of_a_daemon_and_keeps_what_the_settings_name(
    tmp_path: Path,
) -> None:
    state = tmp_path / "s"
    files = ("ollama/.ollama/id_ed25519", "ollama.made", "gateway.json", "gateway.bell", "gateway.keys", "use/x.json")
    mine = Settings(state_dir=str(state), ollama_models=f"{state}/ollama/models", gateway_keys=f"{state}/gateway.keys")
    for purge in (False, True):
        for name in files:
            (state / name).parent.mkdir(parents=True, exist_ok=True)
            (state / name).write_text("")
        (state / "overrides.json").write_text('{"config": "", "values": {}}')
        going = {path.name for path in uninstall._going(Settings(state_dir=str(state)), purge)}
        kept = set() if purge else {"ollama.made"}  # the user's own Ollama has those models still
        assert going == {*(name.partition("/")[0] for name in files), "overrides.json"} - kept
        assert going - {path.name for path in uninstall._going(mine, purge)} == {"ollama", "gateway.keys"}


def test_uninstall_ends_a_trial_of_a_killed_controller_and_leaves_no_half_written_file(tmp_path: Path) -> None:
    state = tmp_path / "home" / "s"
    state.mkdir(parents=True)
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as engine:
        try:
            of = {"directory": launch.identity(str(state))}
            note = {"pid": engine.pid, "started": launch.start_time(engine.pid), **of}
            (state / f"trial-{engine.pid}.json").write_text(json.dumps(note))
            (state / "overrides.json").write_text('{"config": "", "values": {}}')
            for name in (".controller.json.4711.tmp", ".metal-supervisor.toml.4711.tmp"):
                (state / name).write_text("{")
            mac = machine(nothing_loaded, tmp_path / "root", tmp_path / "home")
            uninstall.uninstall(uninstall.find(mac, state), mac, True, lambda _: None)
            assert engine.wait(10) == -signal.SIGKILL
            assert not state.exists(), list(state.iterdir())
        finally:
            engine.kill()


# ── deciding ─────────────────────────────────────────────────────────────────────────────────────


def planned(tmp_path: Path, **more: Any) -> plan.InstallPlan:
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    return plan.plan(order(str(home / ".metal-supervisor"), **more), machine(nothing_loaded, tmp_path, home))


def content(found: plan.InstallPlan, name: str) -> str:
    return next(
        step.content.decode() for step in found.steps if isinstance(step.content, bytes) and step.path.name == name
    )


def test_without_a_word_about_the_cluster_the_first_time_it_asks(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="--cluster KUBECONFIG, or --embedded"):
        planned(tmp_path)


def test_a_file_of_settings_says_which_cluster(tmp_path: Path) -> None:
    given = tmp_path / "mine.toml"
    given.write_text(f'# mine\nkubeconfig = "{kubeconfig(tmp_path / "k")}" # theirs\nmemory_fraction = 0.4\n')
    found = planned(tmp_path, config=given, values={"state_dir": str(tmp_path / "s"), "log_level": "debug"})
    text = content(found, "metal-supervisor.toml")
    assert text.startswith("# mine\n") and "memory_fraction = 0.4" in text and 'log_level = "debug"' in text
    assert f'kubeconfig = "{tmp_path}/s/cluster/kubeconfig"' in text
    assert found.settings.memory_fraction == 0.4 and not found.settings.embedded
    assert json.loads(content(found, "kubeconfig"))["current-context"] == "other"


def test_settings_that_are_replaced_by_a_file_are_kept_beside_it(tmp_path: Path) -> None:
    state = tmp_path / "s"
    state.mkdir()
    (state / "metal-supervisor.toml").write_text('kubeconfig = ""\nnamespace = "by-hand"\n')
    given = tmp_path / "mine.toml"
    given.write_text('kubeconfig = ""\n')
    found = planned(tmp_path, config=given, values={"state_dir": str(state)})
    assert "by-hand" in content(found, "metal-supervisor.toml.before")
    assert "by-hand" not in content(found, "metal-supervisor.toml")


def test_a_setting_that_is_wrong_is_named(tmp_path: Path) -> None:
    given = tmp_path / "mine.toml"
    given.write_text('kubeconfig = ""\nmemory_fractoin = 0.4\n')
    with pytest.raises(ConfigError, match=r"memory_fractoin.*did you mean memory_fraction"):
        planned(tmp_path, config=given)


def test_relative_paths_of_a_settings_file_stay_what_they_were_where_it_is_copied_from(tmp_path: Path) -> None:
    given = tmp_path / "mine" / "ms.toml"
    given.parent.mkdir()
    given.write_text('kubeconfig = ""\nmodel_store = "models"  # beside it\nollama_models = "~/o"\n')
    found = planned(tmp_path, config=given, embedded=True, values={"state_dir": str(tmp_path / "s")})
    assert found.settings.model_store == str(given.parent / "models") and found.settings.ollama_models == "~/o"
    assert f'model_store = "{given.parent}/models"  # beside it' in content(found, "metal-supervisor.toml")


def test_another_state_directory_in_the_settings_is_not_overlooked(tmp_path: Path) -> None:
    given = tmp_path / "mine.toml"
    given.write_text('kubeconfig = ""\nstate_dir = "/elsewhere"\n')
    with pytest.raises(InstallError, match="state_dir in the settings is not"):
        planned(tmp_path, config=given)


def test_commands_of_that_name_that_are_somebody_elses_stay(tmp_path: Path) -> None:
    theirs = tmp_path / "usr/local/bin/supervisorctl"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("#!/bin/sh\n")
    found = planned(tmp_path, embedded=True)
    assert all(step.path != theirs for step in found.steps)
    assert f"{theirs} is not ours and stays; ours is" in found.notes[0]


def test_a_renewed_token_survives_an_install_with_the_kubeconfig_of_before(tmp_path: Path) -> None:
    source = kubeconfig(tmp_path / "k")
    carried_out(tmp_path, kubeconfig=source, context="mac")
    token = tmp_path / "home/.metal-supervisor/cluster/token"
    assert (token.read_text(), token.stat().st_mode & 0o777) == ("secret-token\n", 0o600)
    token.write_text("renewed\n")
    again = planned(tmp_path, kubeconfig=source, context="mac")
    assert all(step.path != token for step in again.steps)
    (tmp_path / "k" / "tok").write_text("a-new-one\n")
    assert content(planned(tmp_path, kubeconfig=source, context="mac"), "token") == "a-new-one\n"
    assert "cluster/kubeconfig" in content(planned(tmp_path), "metal-supervisor.toml"), "nothing said: it stays"


def carried_out(tmp_path: Path, **more: Any) -> plan.InstallPlan:
    """A plan, and what it does within the state directory."""
    found = planned(tmp_path, **more)
    for step in found.steps:
        if step.path.is_relative_to(tmp_path / "home" / ".metal-supervisor"):
            step.do(machine(nothing_loaded))
    return found


def test_a_kubeconfig_given_again_keeps_the_context_that_was_chosen_of_it(tmp_path: Path) -> None:
    source = kubeconfig(tmp_path / "k")
    carried_out(tmp_path, kubeconfig=source, context="mac")
    carried_out(tmp_path, kubeconfig=source)
    kept = tmp_path / "home/.metal-supervisor/cluster/kubeconfig"
    assert json.loads(kept.read_text())["current-context"] == "mac"
    found = planned(tmp_path, kubeconfig=source, context="other")
    assert json.loads(content(found, "kubeconfig"))["current-context"] == "other"
    another = kubeconfig(tmp_path / "k2")
    assert json.loads(content(planned(tmp_path, kubeconfig=another), "kubeconfig"))["current-context"] == "other"


def test_a_context_needs_a_kubeconfig_to_be_looked_up_in(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="--context other needs --cluster KUBECONFIG"):
        planned(tmp_path, context="other", embedded=True)
    carried_out(tmp_path, kubeconfig=kubeconfig(tmp_path / "k"), context="mac")
    with pytest.raises(InstallError, match="--context other needs --cluster KUBECONFIG"):
        planned(tmp_path, context="other")
    assert not planned(tmp_path, context="mac").settings.embedded, "the one that is there needs nothing"


def test_credentials_go_with_what_they_were_for(tmp_path: Path) -> None:
    kept = tmp_path / "home/.metal-supervisor/cluster"
    carried_out(tmp_path, kubeconfig=kubeconfig(tmp_path / "k"), context="mac")
    assert {path.name for path in kept.iterdir()} == {"kubeconfig", "token", "source"}
    carried_out(tmp_path, kubeconfig=tmp_path / "k" / "config", context="other")
    assert {path.name for path in kept.iterdir()} == {"kubeconfig", "source"}
    carried_out(tmp_path, embedded=True)
    assert list(kept.iterdir()) == []


def test_a_file_of_settings_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match=r"--config: .*typo.toml cannot be read: .*No such file"):
        planned(tmp_path, config=tmp_path / "typo.toml", embedded=True)


@pytest.mark.parametrize("domain", ["gui/501", "system"])
def test_the_incumbent_and_we_never_run_at_once(tmp_path: Path, domain: str) -> None:
    def run(argv: Sequence[str], _timeout_s: float) -> Done:
        return (
            Done(0, "x = {\n\tstate = running\n}", "")
            if f"{domain}/com.llmkube.metal-agent" in argv
            else Done(113, "", "")
        )

    mac = machine(run, tmp_path, tmp_path)
    with pytest.raises(InstallError, match=f"launchctl bootout {domain}/com.llmkube.metal-agent"):
        install.install(plan.plan(order(str(tmp_path / "s"), embedded=True), mac), mac, print)
    assert not (tmp_path / "s").exists()


def test_a_place_that_macos_keeps_from_jobs_is_refused(tmp_path: Path) -> None:
    mac = machine(Mac(), tmp_path, tmp_path)
    with pytest.raises(InstallError, match="is in Documents, which macOS keeps from launchd's jobs"):
        install.install(plan.plan(order(str(tmp_path / "Documents/s"), embedded=True), mac), mac, print)


def test_the_running_system_that_doctor_examines_has_to_go_first(tmp_path: Path) -> None:
    mac = machine(Mac(), tmp_path, tmp_path)
    with web(lambda path, body: (200, b'{"stateDirectory": "/Users/u/.run"}')) as url:
        port = int(url.rpartition(":")[2])
        found = plan.plan(order(str(tmp_path / "s"), embedded=True, values={"port": port}), mac)
        with pytest.raises(InstallError, match=f"a system runs in /Users/u/.run, with port {port}; stop"):
            install.install(found, mac, print)
    assert not (tmp_path / "s").exists()


def test_the_other_kind_of_job_has_to_go_first(tmp_path: Path) -> None:
    def run(argv: Sequence[str], _timeout_s: float) -> Done:
        return Done(0, "x = {\n}", "") if "gui/501/dev.metal-supervisor" in argv else Done(113, "", "")

    mac = machine(run, tmp_path, tmp_path)
    with pytest.raises(InstallError, match=r"installed as gui/501/dev.metal-supervisor already.*install with --agent"):
        install.install(plan.plan(order(str(tmp_path / "s"), embedded=True), mac), mac, print)


def test_the_other_kind_that_starts_at_the_next_boot_has_to_go_first_too(tmp_path: Path) -> None:
    mac = machine(nothing_loaded, tmp_path, tmp_path)
    there = plan.places(mac, tmp_path / "s", agent=True).plist
    there.parent.mkdir(parents=True)
    there.write_bytes(b"")
    with pytest.raises(InstallError, match=r"installed as gui/501/dev.metal-supervisor already"):
        install.install(plan.plan(order(str(tmp_path / "s"), embedded=True), mac), mac, print)


def test_a_job_of_another_state_directory_is_neither_taken_over_nor_taken_out(tmp_path: Path) -> None:
    mac = machine(Loaded(), tmp_path, tmp_path)
    installed = plan.plan(order(str(tmp_path / "theirs"), embedded=True), mac)
    installed.places.plist.parent.mkdir(parents=True)
    installed.places.plist.write_bytes(installed.plist)
    match = f"of another state directory, {tmp_path}/theirs; end that one first.*--state-dir {tmp_path}/theirs"
    with pytest.raises(InstallError, match=match):
        install.install(plan.plan(order(str(tmp_path / "ours"), embedded=True), mac), mac, print)
    with pytest.raises(InstallError, match=match):
        uninstall.find(mac, tmp_path / "ours")
    assert uninstall.find(mac, tmp_path / "theirs").places == (installed.places,)


def test_an_install_after_uninstall_asks_for_the_cluster_whose_copy_is_gone(tmp_path: Path) -> None:
    first = planned(tmp_path, kubeconfig=kubeconfig(tmp_path / "k"), context="mac")
    for step in first.steps:
        if not step.root:
            step.do(machine(nothing_loaded, tmp_path, tmp_path / "home"))
    assert planned(tmp_path).settings.kubeconfig == str(first.places.kubeconfig)
    first.places.kubeconfig.unlink()
    with pytest.raises(InstallError, match="say which cluster: --cluster KUBECONFIG, or --embedded"):
        planned(tmp_path)


def test_a_kubeconfig_that_is_not_there_is_named_by_the_flag_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="--cluster /none: there is no such file; name the kubeconfig"):
        planned(tmp_path, kubeconfig=Path("/none"))
    with pytest.raises(BadKubeconfig, match="/none does not exist; check --kubeconfig"):
        planned(tmp_path, values={"kubeconfig": "/none"})


def test_settings_that_are_not_text_are_named(tmp_path: Path) -> None:
    file = tmp_path / "home" / ".metal-supervisor" / "metal-supervisor.toml"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"namespace = '\xff'")
    with pytest.raises(InstallError, match=r"metal-supervisor\.toml cannot be read: .*; write it in UTF-8"):
        planned(tmp_path, embedded=True)


@pytest.mark.parametrize("name", ["documents/s", "link/s"])
def test_a_place_that_macos_keeps_from_jobs_is_known_however_it_is_spelled(tmp_path: Path, name: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "Desktop")
    mac = machine(nothing_loaded, tmp_path, tmp_path)
    with pytest.raises(InstallError, match=r"the state directory, .*, which macOS keeps from launchd's jobs"):
        install.install(plan.plan(order(str(tmp_path / name), embedded=True), mac), mac, print)
    values = {"state_dir": str(tmp_path / "s"), "model_store": str(tmp_path / name)}
    with pytest.raises(InstallError, match=r"the model store, .*, which macOS keeps from launchd's jobs"):
        install.install(plan.plan(order("", embedded=True, values=values), mac), mac, print)
    assert not (tmp_path / "s").exists()


# ── exchanging a job ─────────────────────────────────────────────────────────────────────────────


class Loaded:
    """A launchd that has our job, and does at once what it is told. `meanwhile`: what a test wants done at a verb."""

    def __init__(self, **meanwhile: Any) -> None:
        self.loaded, self.meanwhile = True, meanwhile
        self.asked: list[str] = []

    def __call__(self, argv: Sequence[str], _timeout_s: float, content: bytes = b"") -> Done:
        words = [word for word in argv if word not in ("/usr/bin/sudo", "-n", "-v")]
        if words[:1] == [root_file.SHELL]:
            if words[4].endswith(".plist") and "install" in self.meanwhile:
                return cast(Done, self.meanwhile["install"]())
            return run_here(words, 30.0, content)
        if words[:1] != ["/bin/launchctl"]:
            return Done(0, "", "")
        verb = words[1]
        if verb == "print":
            return Done(0, "x = {\n}", "") if self.loaded and words[2] == f"system/{LABEL}" else Done(113, "", "")
        self.asked.append(verb)
        done = self.meanwhile.get(verb, lambda: None)()
        done = done if isinstance(done, Done) else Done(0, "", "")
        if done.ok:
            self.loaded = verb == "bootstrap" or (self.loaded and verb != "bootout")
        return done


def noted(found: plan.InstallPlan) -> bytes:
    """The note of a job that was loaded as planned, and did not come up."""
    return json.dumps({"plist": install._note(found)["plist"]}).encode()


def to_exchange(tmp_path: Path, mac: Machine, **values: Any) -> plan.InstallPlan:
    """A job that is loaded with another property list than the one to be."""
    state = tmp_path / "s"
    before = plan.plan(order(str(state), embedded=True), mac)
    for path, text in ((before.places.plist, before.plist), (before.places.note, noted(before))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return plan.plan(order("", embedded=True, values={"state_dir": str(state), "stop_timeout": 99.0}), mac)


def test_a_marker_left_by_an_exchange_that_was_killed_does_not_let_the_job_start_during_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "UP_WAIT_S", 0.0)
    marker, ages_s = tmp_path / "s" / boot.HANDOVER_FILE, []
    run = Loaded(kill=lambda: ages_s.append(time.time() - marker.stat().st_mtime))
    mac = machine(run, tmp_path, tmp_path)
    found = to_exchange(tmp_path, mac)
    marker.write_text("")
    os.utime(marker, (time.time() - 3600,) * 2)
    install.install(found, mac, print)
    assert run.asked == ["kill", "bootout", "bootstrap"] and not marker.exists()
    assert ages_s[0] < boot.HANDOVER_S

    # The same where it was killed between taking out and loading: the job must not wait for it.
    marker.write_text("")
    run.loaded, run.meanwhile["bootstrap"] = False, lambda: ages_s.append(marker.exists())
    install.install(found, mac, print)
    assert ages_s[1] is False


def test_a_terminal_that_is_closed_halfway_leaves_no_mac_without_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "UP_WAIT_S", 0.0)
    heard: list[int] = []
    before = {each: signal.signal(each, lambda signum, _frame: heard.append(signum)) for each in install.ENDING}
    try:
        run = Loaded(bootout=lambda: [os.kill(os.getpid(), each) for each in install.ENDING])
        mac = machine(run, tmp_path, tmp_path)
        install.install(to_exchange(tmp_path, mac), mac, print)
        assert run.asked == ["kill", "bootout", "bootstrap"] and heard == []
        os.kill(os.getpid(), signal.SIGHUP)
        assert heard == [signal.SIGHUP], "afterwards it is heard again"
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_what_an_interrupted_install_wrote_was_edited_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "UP_WAIT_S", 0.0)
    run = Loaded(install=lambda: Done(1, "", "sudo: timed out"))
    mac = machine(run, tmp_path, tmp_path)
    found = to_exchange(tmp_path, mac)
    with pytest.raises(InstallError, match="sudo: timed out"):
        install.install(found, mac, print)

    def again(stop_timeout: float) -> plan.InstallPlan:
        values = {"state_dir": str(tmp_path / "s"), "stop_timeout": stop_timeout}
        return plan.plan(order("", embedded=True, values=values), mac)

    assert again(99.0).notes == () and again(98.0).notes == ()
    run.meanwhile = {"bootstrap": lambda: Done(1, "", "no")}
    run.loaded = True
    with pytest.raises(LaunchdError):
        install.install(found, mac, print)
    assert found.places.plist.read_bytes() == found.plist, "placed, and not loaded"
    assert again(98.0).notes == ()


class Killed(BaseException):
    """The end of an install."""


@pytest.mark.parametrize("installed", [False, True])
def test_an_install_that_is_killed_between_any_two_steps_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr(install, "UP_WAIT_S", 0.0)

    def killed_after(steps: int, call: Any) -> bool:
        """Make a call, and raise Killed in it instead of the step of that number; True if it came so far."""
        left = count(steps, -1)

        def limited(step: Any) -> Any:
            def limited_step(*arguments: Any) -> Any:
                if next(left) == 0:
                    raise Killed
                return step(*arguments)

            return limited_step

        with monkeypatch.context() as patch:
            for owner, name in ((FileStep, "do"), (Launchctl, "enable"), (Launchctl, "load"), (Launchctl, "unload")):
                patch.setattr(owner, name, limited(getattr(owner, name)))
            try:
                call()
            except Killed:
                return True
        return False

    for steps in count():
        run = Loaded()
        run.loaded = False
        here = tmp_path / str(steps)
        mac = machine(run, here, here)

        def carry_out(stop_timeout: float, mac: Machine = mac, here: Path = here) -> plan.InstallPlan:
            values = {"state_dir": str(here / "s"), "stop_timeout": stop_timeout}
            found = plan.plan(order("", embedded=True, values=values), mac)
            install.install(found, mac, print)
            return found

        if installed:
            carry_out(20.0)
        killed = killed_after(steps, lambda carry_out=carry_out: carry_out(25.0))
        if (here / "Library/LaunchDaemons" / f"{LABEL}.plist").exists():
            assert (here / "s/current/metal-supervisor").exists(), "the job can start at the next boot of the Mac"
        for stop_timeout in (25.0, 30.0):
            found = carry_out(stop_timeout)
            assert run.loaded and found.places.plist.read_bytes() == found.plist and found.due() == found.notes == ()
            assert not (here / "s" / boot.HANDOVER_FILE).exists()
        if not killed:
            assert steps == (4 if installed else 7)
            break


def test_what_did_not_come_up_is_no_success_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mac = machine(Loaded(), tmp_path, tmp_path)
    to_exchange(tmp_path, mac)
    again = plan.plan(order(str(tmp_path / "s"), embedded=True), mac)
    tried: list[Path] = []
    monkeypatch.setattr(upgrade, "upgrade", lambda state, _say: tried.append(state) or 1)
    assert [install.install(again, mac, print) for _ in range(2)] == [1, 1]
    assert tried == [tmp_path / "s"] * 2


@pytest.mark.parametrize(("last_exit", "told"), [("78: EX_CONFIG", True), ("178", False), ("Killed: 9", False)])
def test_only_launchds_own_exit_code_is_told_as_launchds(tmp_path: Path, last_exit: str, told: bool) -> None:
    job = LoadedJob("spawn scheduled", 0, 3, last_exit, None, "", "")
    found = SimpleNamespace(places=SimpleNamespace(label=LABEL, state=tmp_path))
    said: list[str] = []
    install._say_what_failed(cast(Any, found), cast(Any, SimpleNamespace(job=lambda _: job)), said.append)
    assert any("launchd's own" in line for line in said) is told, said


def test_the_fake_disk_is_never_the_real_one() -> None:
    assert not Path("/Library/LaunchDaemons").exists()


def test_without_sudo_nothing_is_touched(tmp_path: Path) -> None:
    mac = Mac()
    mac.sudo = False
    here = machine(mac, tmp_path, tmp_path)
    with pytest.raises(InstallError, match="sudo refused; run this in a terminal"):
        install.install(plan.plan(order(str(tmp_path / "s"), embedded=True), here), here, print)
    assert not (tmp_path / "s").exists()


def test_on_a_machine_that_is_no_mac_only_the_dry_run_works(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    state = str(tmp_path / "s")
    assert main.main(["install", "--embedded", "--state-dir", state]) == 1
    assert "launchd is only on a Mac" in capsys.readouterr().err
    assert main.main(["install", "--embedded", "--dry-run", "--state-dir", state]) == 0
    assert "launchctl bootstrap system" in capsys.readouterr().out
    assert main.main(["uninstall", "--dry-run", "--state-dir", state]) == 0
    assert "there is nothing to uninstall" in capsys.readouterr().err


def test_a_job_runs_as_who_installs_it_whatever_the_shell_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "mallory")
    assert main.main(["install", "--embedded", "--dry-run", "--state-dir", str(tmp_path / "s")]) == 0
    account = pwd.getpwuid(os.getuid())
    said = capsys.readouterr().out
    assert f"<string>{account.pw_name}</string>" in said and "mallory" not in said
    assert f"<string>{grp.getgrgid(account.pw_gid).gr_name}</string>" in said
    monkeypatch.delenv("SUDO_USER", raising=False)
    if os.getuid():
        assert powermetrics_sudo.user_of(None) == account.pw_name
    else:
        with pytest.raises(powermetrics_sudo.Refused, match="root needs no permission"):
            powermetrics_sudo.user_of(None)


def test_root_is_handed_the_rule_for_powermetrics_and_reads_no_file_of_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[list[str], bytes]] = []
    monkeypatch.setattr(powermetrics_sudo, "check", lambda _text: None)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(
        powermetrics_sudo.subprocess,
        "run",
        lambda argv, input: asked.append((argv, input)) or subprocess.CompletedProcess(argv, 0),
    )
    powermetrics_sudo.install("a rule\n", Path("/"))
    ((argv, content),) = asked
    assert content == b"a rule\n"
    assert argv[-len(root_file.command("", 0, b"")) :] == root_file.command(FRAGMENT, 0o440, content, sudoers=True)


# ── from a checkout ──────────────────────────────────────────────────────────────────────────────


def test_an_environment_that_something_runs_from_outlives_what_is_installed_after_it(tmp_path: Path) -> None:
    apps = tmp_path / "app"
    for age, name in enumerate(("gone", "supervisords", "ways-in", "before", "latest")):
        (apps / name / "bin").mkdir(parents=True)
        os.utime(apps / name, (age, age))
    (tmp_path / "current").mkdir()
    assert metal_agent.in_use(tmp_path) == ""
    (tmp_path / "current" / "metal-supervisor").write_text(f"exec {apps}/ways-in/bin/python -I\n")
    python = apps / "supervisords" / "bin" / "python"
    python.symlink_to(sys.executable)
    process = subprocess.Popen([python, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        (tmp_path / "supervisord.pid").write_text(f"{process.pid}\n")
        metal_agent.forget_old(apps, metal_agent.in_use(tmp_path))
    finally:
        process.communicate()
    assert sorted(path.name for path in apps.iterdir()) == ["before", "latest", "supervisords", "ways-in"]


def test_makes_variables_are_flags_and_a_zero_is_a_no() -> None:
    assert metal_agent.flags({"EMBEDDED": "1"}) == ["--embedded"]
    for no in ("0", ""):
        found = metal_agent.flags({"EMBEDDED": no, "METAL_KUBECONFIG": "/k", "METAL_KUBE_CONTEXT": "c"})
        assert found == ["--cluster", "/k", "--context", "c"]


# ── the copy of a kubeconfig ─────────────────────────────────────────────────────────────────────


def test_a_copy_has_one_context_and_needs_no_other_file(tmp_path: Path) -> None:
    found = copy(kubeconfig(tmp_path / "k"), "mac")
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "kubeconfig").write_text(found.kubeconfig)
    (kept / "token").write_text(found.token)
    assert "others" not in found.kubeconfig and "secret-token" not in found.kubeconfig + repr(found)
    (tmp_path / "k" / "ca.crt").unlink()
    (tmp_path / "k" / "tok").unlink()
    login = Login(choose(kept / "kubeconfig")).current()
    assert login.authorization == "Bearer secret-token" and b"MIIB" in login.authority


def test_a_plugin_keeps_its_path_or_has_to_be_found_by_its_name(tmp_path: Path) -> None:
    plugin = tmp_path / "k" / "bin" / "login"
    spec = {"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never"}
    source = kubeconfig(tmp_path / "k", exec={**spec, "command": "./bin/login"})
    plugin.parent.mkdir()
    answer = {"apiVersion": spec["apiVersion"], "kind": "ExecCredential", "status": {"token": "t"}}
    plugin.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    plugin.chmod(0o755)
    found = copy(source, "mac")
    assert json.loads(found.kubeconfig)["users"][0]["user"]["exec"]["command"] == str(plugin)
    assert found.plugin == ""
    source = kubeconfig(tmp_path / "k", exec={**spec, "command": "env", "args": [str(plugin)]})
    assert copy(source, "mac").plugin == "env"
    noted = planned(tmp_path, kubeconfig=source, context="mac").notes
    assert any("the kubeconfig's command env has to be in /opt/homebrew/bin:" in note for note in noted)


def test_what_cannot_be_used_is_not_copied(tmp_path: Path) -> None:
    with pytest.raises(BadKubeconfig, match="has no context"):
        copy(kubeconfig(tmp_path / "k"), "nowhere")
    with pytest.raises(BadKubeconfig, match="does not exist"):
        copy(kubeconfig(tmp_path / "k", tokenFile="gone"), "mac")


# ── settings in a file ───────────────────────────────────────────────────────────────────────────


def test_an_edit_leaves_alone_what_it_does_not_change() -> None:
    text = "# words of mine\nport = 1234   # mine too\n\n[unfinished"
    with pytest.raises(ConfigError, match="not valid TOML"):
        edited(text, {"namespace": "x"}, "f")
    text = '# words of mine\n"port" = 1234\ncontext="a"\n'
    assert edited(text, {"context": 'q"\\é\n'[:-1], "log_size": 3}, "f") == (
        '# words of mine\n"port" = 1234\ncontext = "q\\"\\\\é"\nlog_size = 3\n'
    )
    text = '# mine\nport = 1_234   # as ever\nmodel_store = "a#b" # "a#b" # it is\n'
    assert edited(text, {"port": 1234, "model_store": "a#b"}, "f") == text
    assert edited(text, {"port": 99, "model_store": "c"}, "f") == (
        '# mine\nport = 99   # as ever\nmodel_store = "c" # "a#b" # it is\n'
    )


def test_an_edit_replaces_the_line_of_a_setting() -> None:
    text = '# words of mine\n"port" = 1234\nnamespace="a"\n'
    assert edited(text, {"port": 99}, "f") == '# words of mine\nport = 99\nnamespace="a"\n'


def test_an_edit_that_would_not_say_what_was_meant_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot set namespace in it; write each setting on a line of its own"):
        edited('inference_service_allowlist = """\\\nnamespace = """\nport = 1\n', {"namespace": "x"}, "f")
