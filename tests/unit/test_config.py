"""Settings: where a value comes from, which one wins, and what is said about a wrong one."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from settings_page import sample

from metal_supervisor.cli import changes, chat, main
from metal_supervisor.settings import loader
from metal_supervisor.settings.checks import listed
from metal_supervisor.settings.loader import (
    FIELDS,
    ConfigError,
    Overrides,
    Settings,
    add_flags,
    flag_of,
    load,
    load_saved,
    overrides_from,
    read_env,
    read_toml,
    save_overrides,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROPERTY = settings(max_examples=100, database=None, derandomize=True)
REPOSITORY = Path(__file__).resolve().parents[2]


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser)
    return parser.parse_args(flags)


def found(toml: str = "", env: dict[str, str] | None = None, *flags: str, directory: Path) -> Settings:
    path = directory / "ms.toml"
    path.write_text(toml, "utf-8")
    return load(overrides_from(parsed("--config", str(path), *flags), env or {}))


# ── precedence ───────────────────────────────────────────────────────────────────────────────────


def test_a_command_finds_the_system_that_it_is_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag, the environment, the TOML file, ./.run, the home directory: the first that says."""
    monkeypatch.chdir(tmp_path)
    here, said = tmp_path / ".run", tmp_path / "said"

    def of(*flags: str, **environ: str) -> Path:
        return loader.settings_of(parsed(*flags), environ).state_path

    assert of() == Settings().state_path
    here.mkdir()
    assert of() == Settings().state_path, "nothing was started in it yet"
    save_overrides(here, Overrides("", {"port": 9191}))
    assert of() == here.resolve() and loader.settings_of(parsed(), {}).port == 9191
    (tmp_path / "ms.toml").write_text(f'state_dir = "{said}"\n')
    assert of("--config", "ms.toml") == said
    assert of(METAL_SUPERVISOR_STATE_DIR=str(said)) == said
    assert of("--state-dir", str(tmp_path / "flag"), METAL_SUPERVISOR_STATE_DIR=str(said)) == tmp_path / "flag"
    assert loader.usual_state_dir({}) == Settings().state_dir, "what is installed or removed is not that of a terminal"


def test_a_command_outside_the_checkout_finds_the_running_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`./.run` and the default come first if they run; several others are named with the flag that chooses."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    running: list[Path] = []
    monkeypatch.setattr(loader, "running_systems", lambda: running)
    here, usual, one, two = (tmp_path / name for name in (".run", "home/.metal-supervisor", "a b/.run", "z/.run"))

    def of(*flags: str, **environ: str) -> Path:
        return loader.settings_of(parsed(*flags), environ).state_path

    for path in (here, usual, one):
        path.mkdir(parents=True)
        save_overrides(path, Overrides("", {"port": 9191}))
    assert of() == here, "none runs"
    running[:] = [one]
    assert of() == one and loader.settings_of(parsed(), {}).port == 9191
    assert of("--state-dir", str(two)) == two and of(METAL_SUPERVISOR_STATE_DIR=str(two)) == two
    running[:] = [one, two]
    with pytest.raises(ConfigError, match=rf"2 systems run: '{one}', {two}; choose one with --state-dir"):
        of()
    assert of("--state-dir", str(one)) == one
    (tmp_path / "ms.toml").write_text(f'state_dir = "{two}"\n')
    assert of("--config", "ms.toml") == two
    running[:] = [usual, one]
    assert of() == usual, "the installed one"
    running[:] = [here, usual]
    assert of() == here


def test_each_command_on_an_existing_system_looks_for_a_running_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No command advises to start a second one, and none guesses between two."""
    monkeypatch.chdir(tmp_path)
    for name in (
        "status",
        "list",
        "explain x",
        "logs x",
        "doctor",
        "cordon",
        "drain",
        "uncordon",
        "upgrade",
        "stop x",
        "rm x",
        "chat x",
        "log-level info",
        "models ls",
        "key list",
        "serve o/r --print",
    ):
        monkeypatch.setattr(loader, "running_systems", lambda: [tmp_path / "a", tmp_path / "b"])
        assert main.main(name.split()) == ConfigError.code, name
        said = capsys.readouterr()
        assert f"2 systems run: {tmp_path / 'a'}, {tmp_path / 'b'}; choose one with --state-dir" in said.err, name


def test_the_command_that_is_told_starts_that_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` leaves out the ./.run that `list` finds: told that alone, it starts another system, without the models."""
    monkeypatch.delenv("METAL_SUPERVISOR_STATE_DIR", raising=False)
    here = tmp_path / ".run"
    assert loader.start_command(Settings().state_path) == "metal-supervisor run"
    assert loader.start_command(here) == f"metal-supervisor run --state-dir {here}"
    assert loader.start_command(tmp_path / "a b") == f"metal-supervisor run --state-dir '{tmp_path / 'a b'}'"
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "make_run.py").touch()
    assert loader.start_command(here) == "make run"
    assert loader.start_command(here / "cluster-1") == "make run CLUSTER=…"
    monkeypatch.setenv("METAL_SUPERVISOR_STATE_DIR", str(here))
    assert loader.start_command(here) == "metal-supervisor run"


def test_a_state_directory_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unreadable ./.run is another user's, and no reason for any command to fail."""
    look = os.stat

    def refused(path: Any, **more: Any) -> Any:
        if ".run" in str(path) or "private" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return look(path, **more)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(os, "stat", refused)
    assert loader.found_state_dir({}) == Settings().state_dir
    assert main.main(["version"]) == 0
    for words in (["status"], ["explain", "x"], ["logs", "x"], ["list"], ["key", "list"]):
        for place, why in ((tmp_path / "private", "Permission denied"), (tmp_path / "file", "Not a directory")):
            capsys.readouterr()
            assert main.main([*words, "--state-dir", str(place)]) == 78
            said = capsys.readouterr().err
            assert f"state directory {place} cannot be read: {why}; " in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.EACCES, "Permission denied; run this as its owner"),
        (errno.EISDIR, "Is a directory; move what is in the way, or"),
        (errno.ELOOP, "move what is in the way"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_not_a_traceback(
    tmp_path: Path, number: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number), "/private/x")

    monkeypatch.setattr(loader, "load", refuse)
    assert main.main(["run", "--state-dir", str(tmp_path)]) == 78
    said = capsys.readouterr().err
    assert says in said and "/private/x: " in said and said.count("\n") == 1


@pytest.mark.parametrize("words", [["run", "--state-dir"], ["run", "--apply"], ["run", "--kubeconfig"], ["serve"]])
def test_a_path_that_is_too_long_is_one_line_and_not_a_traceback(tmp_path: Path, words: list[str]) -> None:
    """In a process of its own, whose signals and umask `run` may set."""
    name, state = "x" * 5000, tmp_path / "state"
    command = [sys.executable, "-I", "-m", "metal_supervisor", *words, str(tmp_path / name)]
    environment = {**os.environ, "METAL_SUPERVISOR_STATE_DIR": str(state)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and not state.exists()
    assert name in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_an_empty_state_directory_is_never_the_current_one(tmp_path: Path) -> None:
    """An empty variable is one that a script was not given; an empty flag or line is a mistake."""
    empty = {"METAL_SUPERVISOR_STATE_DIR": ""}
    assert read_env(empty) == {}
    assert load(overrides_from(parsed(), empty)) == Settings()
    with pytest.raises(ConfigError, match="--state-dir: state_dir must not be empty"):
        overrides_from(parsed("--state-dir", ""), {})
    with pytest.raises(ConfigError, match=r"x\.toml: state_dir must not be empty"):
        read_toml(written(tmp_path, 'state_dir = ""'))


def test_the_key_that_chat_asks_for_is_no_setting() -> None:
    assert read_env({chat.KEY_VARIABLE: "msk-secret"}) == {}


def test_without_anything_said_the_defaults_hold() -> None:
    assert load(overrides_from(parsed(), {"PATH": "/bin", "METAL_SUPERVISORY": "x"})) == Settings()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("port", (9091, 9092, 9093)),
        ("log_level", ("debug", "warning", "error")),
        ("memory_fraction", (0.1, 0.2, 0.3)),
        ("namespace", ("a", "b", "c")),
    ],
)
def test_the_file_gives_way_to_the_environment_and_that_to_the_flags(
    tmp_path: Path, name: str, values: tuple[Any, Any, Any]
) -> None:
    toml = f"{name} = {json.dumps(values[0])}\n"
    env = {f"METAL_SUPERVISOR_{name.upper()}": str(values[1])}
    flags = (flag_of(name), str(values[2]))
    assert getattr(found(toml, directory=tmp_path), name) == values[0]
    assert getattr(found(toml, env, directory=tmp_path), name) == values[1]
    assert getattr(found(toml, env, *flags, directory=tmp_path), name) == values[2]
    assert getattr(found("", env, directory=tmp_path), name) == values[1]


def test_every_setting_can_be_given_in_each_of_the_three_ways(tmp_path: Path) -> None:
    good = {
        "port": "9999",
        "ports": "2000-2001",
        "runtime": "llama-server",
        "memory_fraction": "0.5",
        "log_level": "debug",
        "confinement": "required",
        "log_format": "json",
        "runtimes": "llama-server",
        "llama_server_startup_timeout": "5",
        "drain_timeout": "5",
        "hang_timeout": "5",
        "stop_timeout": "5",
        "log_size": "5",
        "log_files": "5",
        "host_ip": "10.0.0.1",
        "bind": "::",
        "metrics_listen": "10.0.0.1:9091",
        "gateway": "[::1]:9101",
        "gateway_insecure": "true",
        "gateway_keys_secret": "team-a/keys",
        "gateway_origins": "http://localhost:3000",
        "on_demand": "true",
        "idle_ttl": "60",
        "node_name": "mac-a",
        "node_labels": "zone=attic,gpu=",
        "claims": "off",
        "lease_duration": "5",
        "fleet_node": "on",
        "replicas_per_mac": "2",
        "parallel_starts": "3",
        "status_mode": "operator",
        "memory_check_mode": "warn",
        "preemption": "true",
        "eviction_enabled": "true",
        "memory_watchdog_interval": "5",
        "apple_power_enabled": "true",
        "memory_pressure_warning": "0.5",
        "memory_pressure_critical": "0.5",
        "memory_recovery": "5",
        "downloads": "3",
        "stall_timeout": "5",
        "allowed_hosts": "huggingface.co, hf.co,10.0.0.1,::1",
        "private_hosts": "nas.local,192.168.1.0/24",
        "hf_endpoint": "https://mirror.example.com/hub",
        "allow_extra_args": " --tools",
        "allow_env": "A",
        "shared_daemons": "a,b",
        "ollama_url": "http://localhost:11434",
        "ollama_registry": "https://mirror",
        "service_types": "ClusterIP",
        "namespace_priority": "team-a=normal",
        "namespace_protection": "team-a",
        "namespace": "llm",
    }
    for name in FIELDS:
        value = good.get(name, "/some/text")
        by_env = read_env({f"METAL_SUPERVISOR_{name.upper()}": value})
        by_flag = overrides_from(parsed(flag_of(name), value), {}).values
        by_file = read_toml(written(tmp_path, f"{name} = {value if name in NUMBERS else json.dumps(value)}"))
        assert by_env == by_flag == by_file
        assert list(by_env) == [name] and type(by_env[name]) is type(FIELDS[name].default)


NUMBERS = {name for name, item in FIELDS.items() if isinstance(item.default, (int, float))}


def written(directory: Path, text: str) -> Path:
    path = directory / "x.toml"
    path.write_text(text, "utf-8")
    return path


def test_the_file_may_be_named_by_the_environment_and_a_flag_wins_over_that(tmp_path: Path) -> None:
    first, second = tmp_path / "1.toml", tmp_path / "2.toml"
    first.write_text("port = 1111\n")
    second.write_text("port = 2222\n")
    env = {"METAL_SUPERVISOR_CONFIG": str(first)}
    assert load(overrides_from(parsed(), env)).port == 1111
    assert load(overrides_from(parsed("--config", str(second)), env)).port == 2222


def test_llmkubes_flag_names_are_ours() -> None:
    flags = {flag_of(name) for name in FIELDS}
    assert {
        "--namespace",
        "--model-store",
        "--host-ip",
        "--port",
        "--memory-fraction",
        "--runtime",
        "--log-level",
        "--llama-server-startup-timeout",
        "--inference-service-allowlist",
        "--memory-check-mode",
        "--memory-watchdog-interval",
        "--memory-pressure-warning",
        "--memory-pressure-critical",
        "--eviction-enabled",
    } <= flags


def test_a_switch_may_stand_alone_or_with_its_value() -> None:
    for words in (["--eviction-enabled"], ["--eviction-enabled=true"], ["--eviction-enabled", "on"]):
        assert overrides_from(parsed(*words), {}).values == {"eviction_enabled": True}
    assert overrides_from(parsed("--eviction-enabled=false"), {}).values == {"eviction_enabled": False}
    with pytest.raises(ConfigError, match="eviction_enabled must be true or false, not 'perhaps'"):
        overrides_from(parsed("--eviction-enabled=perhaps"), {})


@pytest.mark.parametrize("said, seconds", [("10s", 10.0), ("1m30s", 90.0), ("500ms", 0.5), ("7", 7.0), ("1h", 3600.0)])
def test_seconds_may_be_written_as_llmkubes_agent_takes_them(said: str, seconds: float) -> None:
    found = overrides_from(parsed("--memory-watchdog-interval", said), {}).values
    assert found == {"memory_watchdog_interval": seconds}


# ── what is wrong is named ───────────────────────────────────────────────────────────────────────


def test_an_unknown_key_names_the_nearest_in_the_file_and_in_the_environment(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x\.toml: unknown setting 'nampespace' \(did you mean namespace\?\)"):
        read_toml(written(tmp_path, "nampespace = 'x'"))
    with pytest.raises(ConfigError, match=r"'METAL_SUPERVISOR_PROT' \(did you mean METAL_SUPERVISOR_PORT"):
        read_env({"METAL_SUPERVISOR_PROT": "1"})


def test_a_key_like_no_other_is_told_where_they_all_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'zzzzqqqq'; docs/settings\.md has them all"):
        read_toml(written(tmp_path, "zzzzqqqq = 1"))


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("port", "ninety", "a whole number"),
        ("port", "9090.5", "a whole number"),
        ("port", "", "a whole number"),
        ("port", "0", "between 1 and 65535"),
        ("port", "65536", "between 1 and 65535"),
        ("memory_fraction", "half", "a number"),
        ("memory_fraction", "1.1", "between 0 and 1"),
        ("memory_fraction", "nan", "between 0 and 1"),
        ("memory_fraction", "-0.1", "between 0 and 1"),
        ("llama_server_startup_timeout", "inf", "between 1 and 86400"),
        ("runtime", "vllm", "must be one of llama-server"),
        ("log_level", "loud", "must be one of debug"),
        ("log_format", "xml", "must be one of auto, text, json"),
        ("host_ip", "my-mac.local", "must be an IP address"),
        ("bind", "*", "must be an IP address"),
        ("metrics_listen", "9091", "must look like"),
        ("metrics_listen", "mac.local:9091", "must look like"),
        ("metrics_listen", "10.0.0.1:0", "must look like"),
        ("metrics_listen", "10.0.0.1:70000", "must look like"),
        ("metrics_listen", "10.0.0.256:9091", "must look"),
        ("metrics_listen", "[]:9091", "must look like"),
        ("metrics_listen", "::1:9091", "must look like"),
        ("metrics_listen", "10.0.0.1:9091/x", "must look like"),
        ("ports", "18100", "must look like"),
        ("ports", "80-90", "must look like"),
        ("ports", "3000-2000", "must look"),
        ("ports", "2000-70000", "must look like"),
        ("ports", "-", "must look like"),
        ("ports", "", "must look like"),
        ("ports", "2000 - 2001", "must look like"),
        ("ports", "²000-²001", "must look like"),
        ("hf_endpoint", "https://mirror.example.com:70000", "must have a port between 1 and 65535"),
        ("ollama_registry", "https://mirror.example.com:0", "must have a port between 1 and 65535"),
        ("ollama_url", "http://127.0.0.1:99999", "must have a port between 1 and 65535"),
        ("allowed_hosts", "huggingface.co,10.0.0.0/8", "must name hosts, without scheme or port"),
        ("namespace", "../../x", "must be the name of a name"),
        ("namespace", "a,b", "must be the name of a name"),
        ("private_hosts", "https://nas.local", "must name hosts, without scheme or port, or networks"),
    ],
)
def test_a_wrong_value_names_the_setting_the_origin_and_the_rule(
    tmp_path: Path, name: str, value: str, why: str
) -> None:
    variable = f"METAL_SUPERVISOR_{name.upper()}"
    with pytest.raises(ConfigError) as by_env:
        read_env({variable: value})
    with pytest.raises(ConfigError) as by_flag:
        overrides_from(parsed(f"{flag_of(name)}={value}"), {})
    with pytest.raises(ConfigError) as by_file:
        read_toml(written(tmp_path, f"{name} = {json.dumps(value, ensure_ascii=False)}"))
    for caught, origin in ((by_env, f"environment {variable}"), (by_flag, flag_of(name)), (by_file, "x.toml")):
        text = str(caught.value)
        assert origin in text and name in text and why in text and repr(value) in text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("port = true", "a whole number"),
        ("port = 1.5", "a whole number"),
        ("port = [1]", "a whole number"),
        ("memory_fraction = false", "a number"),
        ("namespace = 5", "text"),
        ("namespace = ['a']", "text"),
        ("namespace = true", "text"),
        ("ports = 18100", "text"),
        ("[port]\nx = 1", "a whole number"),
        ("[namespace]", "text"),
        (f"idle_ttl = 1{'0' * 400}", "a number"),
    ],
)
def test_a_value_of_another_type_in_the_file_is_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_toml(written(tmp_path, text))


def test_a_file_that_is_no_toml_or_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x\.toml: not valid TOML: .*line 2"):
        read_toml(written(tmp_path, "port = 1\nport = =\n"))
    (tmp_path / "bytes.toml").write_bytes(b"namespace = '\xff'")
    with pytest.raises(ConfigError, match=r"bytes\.toml: not valid TOML"):
        read_toml(tmp_path / "bytes.toml")
    for bad in (tmp_path / "gone.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            read_toml(bad)
    with pytest.raises(ConfigError, match=r"x\.toml: not valid TOML: it is nested too deeply"):
        loader.read_toml(written(tmp_path, "ports = " + "[" * 100_000))
    assert loader.read_toml(written(tmp_path, "\ufeffport = 9191\r\n")) == {"port": 9191}, "as some editors write it"


@pytest.mark.parametrize("char", ["\n", "\r", "\t", "\0", "\x1b", "\x7f", "\x85"])
def test_control_characters_are_refused_because_paths_end_up_in_line_based_files(char: str) -> None:
    with pytest.raises(ConfigError, match=r"METAL_SUPERVISOR_STATE_DIR.*control"):
        read_env({"METAL_SUPERVISOR_STATE_DIR": f"/a{char}b"})


@pytest.mark.parametrize("path", ["~nobody-of-that-name/x", "circle/x"])
def test_a_path_that_leads_nowhere_is_refused_with_its_origin(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python raises a RuntimeError for either, and for a circle of links only some of its versions do."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "circle").symlink_to("circle")
    if path.startswith("circle") and sys.version_info >= (3, 13):
        pytest.skip("this Python takes such a path as it is")
    for name in ("state_dir", "model_store", "kubeconfig", "gateway_keys"):
        with pytest.raises(ConfigError, match=rf"{flag_of(name)}: {name} must not"):
            overrides_from(parsed(flag_of(name), path), {})
        with pytest.raises(ConfigError, match=rf"ms\.toml: {name} must not"):
            found(f'{name} = "{path}"', directory=tmp_path)
    with pytest.raises(ConfigError, match="--config: must not"):
        overrides_from(parsed("--config", path), {})
    state = ["--state-dir", str(tmp_path)]
    for words in (
        ["upgrade", "--state-dir", path],
        ["cordon", "--state-dir", path],
        ["uninstall", "--state-dir", path],
        ["key", "list", "--file", path, *state],
        ["install", "--dry-run", "--cluster", path],
        ["kubeconfig", "--service-account", "a", "--output", path],
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit, match="2"):
            main.main(words)
        assert "must not" in capsys.readouterr().err
    if path.startswith("~"):
        assert main.main(["serve", path, *state]) == 2 and "SOURCE must not" in capsys.readouterr().err
        with pytest.raises(ConfigError, match="allowed_roots must not"):
            overrides_from(parsed("--allowed-roots", f"/models,{path}"), {})


def test_in_a_directory_that_was_removed_only_a_relative_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert overrides_from(parsed("--state-dir", str(tmp_path)), {}).values == {"state_dir": str(tmp_path)}
    assert changes.shown(tmp_path) == str(tmp_path)
    for flag in ("--state-dir", "--config"):
        with pytest.raises(ConfigError, match=f"{flag}: .*must be absolute"):
            overrides_from(parsed(flag, "x"), {})


@PROPERTY
@given(st.sampled_from(sorted(FIELDS)), st.text(max_size=12) | st.from_regex(r"\A\d{1,5}-\d{1,5}\Z"))
def test_no_text_in_any_setting_raises_anything_but_a_config_error(name: str, value: str) -> None:
    try:
        given_values = read_env({f"METAL_SUPERVISOR_{name.upper()}": value})
    except ConfigError:
        return
    made = Settings(**given_values)
    assert len(made.port_range) >= 1
    assert "" not in listed(made.inference_service_allowlist)


# ── what follows from settings ───────────────────────────────────────────────────────────────────


def test_the_port_range_holds_both_its_ends() -> None:
    assert (Settings().port_range[0], Settings().port_range[-1]) == (18100, 18999)
    assert list(Settings(ports="2000-2000").port_range) == [2000]


def test_no_engine_gets_a_port_of_our_own() -> None:
    made = Settings(port=18100, gateway="127.0.0.1:18101", metrics_listen="0.0.0.0:18102")
    assert made.own_ports == {18100, 18101, 18102}
    assert Settings(kubeconfig="k").own_ports == {9090}


def test_ports_from_1024_to_65535_may_be_given_and_none_beyond() -> None:
    assert read_env({"METAL_SUPERVISOR_PORTS": "1024-65535"}) == {"ports": "1024-65535"}
    for bad in ("1023-2000", "2000-65536"):
        with pytest.raises(ConfigError, match=r"ports must look like"):
            read_env({"METAL_SUPERVISOR_PORTS": bad})


def test_lists_are_split_at_commas_and_an_empty_text_has_nothing() -> None:
    assert listed(Settings().inference_service_allowlist) == listed(Settings().allow_extra_args) == ()
    assert listed(" a, b ,,") == ("a", "b")
    assert listed(" --tools, -lcd,,") == ("--tools", "-lcd")


def test_engines_listen_on_loopback_without_a_cluster_and_everywhere_with_one() -> None:
    assert (Settings().embedded, Settings().bind_address) == (True, "127.0.0.1")
    cluster = Settings(kubeconfig="/k")
    assert (cluster.embedded, cluster.bind_address) == (False, "0.0.0.0")
    assert Settings(kubeconfig="/k", bind="10.0.0.1").bind_address == "10.0.0.1"
    assert Settings(metrics_listen="0.0.0.0:9091").metrics_address == ("0.0.0.0", 9091)
    assert Settings(metrics_listen="[fd00::1]:9091").metrics_address == ("fd00::1", 9091)


def test_paths_begin_at_home_and_the_store_is_in_the_state_unless_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert Settings().state_path == Path("/home/somebody/.metal-supervisor")
    assert Settings().store_path == Path("/home/somebody/.metal-supervisor/models")
    assert Settings(model_store="~/m").store_path == Path("/home/somebody/m")


@pytest.mark.parametrize("value", ["--port", "--tools, -m", "tools", "--a b", "--x=1"])
def test_no_flag_of_ours_can_be_allowed_and_nothing_that_is_none(value: str) -> None:
    with pytest.raises(ConfigError, match="allow_extra_args must"):
        read_env({"METAL_SUPERVISOR_ALLOW_EXTRA_ARGS": value})


# ── the sample file ──────────────────────────────────────────────────────────────────────────────


def test_the_shipped_file_is_the_generated_one() -> None:
    assert (REPOSITORY / "conf" / "metal-supervisor.toml").read_text("utf-8") == sample()


def test_the_sample_uncommented_is_exactly_the_defaults(tmp_path: Path) -> None:
    assert tomllib.loads(sample()) == {}
    lines = [line.removeprefix("# ") for line in sample().splitlines() if line.split(" = ")[0][2:] in FIELDS]
    assert len(lines) == len(FIELDS)
    assert Settings(**read_toml(written(tmp_path, "\n".join(lines)))) == Settings()


def test_every_setting_and_flag_explains_itself() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = " ".join(parser.format_help().split())
    for name, item in FIELDS.items():
        assert flag_of(name) in text
        assert len(item.metadata["help"]) > 15 and item.metadata["help"].endswith(".")


def test_the_shipped_configuration_is_found() -> None:
    assert (loader.conf_dir() / "metal-supervisor.toml").is_file()


# ── what the programs of a running system see ────────────────────────────────────────────────────


def test_saved_overrides_are_read_back_by_the_programs(tmp_path: Path) -> None:
    toml = written(tmp_path, "port = 1111\nlog_level = 'debug'\ncontext = 'file'\n")
    env = {"METAL_SUPERVISOR_LOG_LEVEL": "error"}
    said = overrides_from(parsed("--config", str(toml), "--context", "é🦙"), env)
    state = tmp_path / "state"
    state.mkdir()
    save_overrides(state, said)
    kept = load_saved(state)
    assert kept == dataclasses.replace(load(said), state_dir=str(state))
    assert (kept.port, kept.log_level, kept.context) == (1111, "error", "é🦙")
    assert [each.name for each in state.iterdir()] == ["overrides.json"]
    assert (state / "overrides.json").stat().st_mode & 0o777 == 0o600


def test_an_edit_of_the_file_reaches_the_programs_but_not_over_a_flag(tmp_path: Path) -> None:
    toml = written(tmp_path, "port = 1111\nnamespace = 'old'\n")
    save_overrides(tmp_path, overrides_from(parsed("--config", str(toml), "--port", "2222"), {}))
    toml.write_text("port = 3333\nnamespace = 'new'\n")
    kept = load_saved(tmp_path)
    assert (kept.port, kept.namespace) == (2222, "new")


def test_a_relative_config_file_is_still_found_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "port = 1111\n")
    monkeypatch.chdir(tmp_path)
    save_overrides(tmp_path, overrides_from(parsed("--config", "x.toml"), {}))
    monkeypatch.chdir("/")
    assert load_saved(tmp_path).port == 1111


def test_a_relative_path_in_the_file_is_relative_to_the_file_for_every_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf").mkdir()
    text = 'model_store = "models"\nkubeconfig = "../k"\nollama_models = "~/o"\nllama_server = ""\nomlx = "/bin/omlx"\n'
    (tmp_path / "conf" / "ms.toml").write_text(text)
    for directory, said in ((tmp_path, "conf/ms.toml"), (tmp_path / "conf", "ms.toml"), (Path("/"), "")):
        monkeypatch.chdir(directory)
        found = load(overrides_from(parsed("--config", said or str(tmp_path / "conf" / "ms.toml")), {}))
        assert found.store_path == tmp_path / "conf" / "models"
        assert Path(found.kubeconfig).resolve() == tmp_path.resolve() / "k"
        assert (found.ollama_models, found.llama_server, found.omlx) == ("~/o", "", "/bin/omlx")


@pytest.mark.parametrize("name", ["model_store", "kubeconfig", "llama_server"])
def test_a_relative_path_means_the_same_to_the_programs_which_run_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save_overrides(tmp_path, overrides_from(parsed(flag_of(name), "here/x"), {}))
    monkeypatch.chdir("/")  # as every program section of ours says
    kept = load_saved(tmp_path)
    assert Path(getattr(kept, name)).expanduser().absolute() == tmp_path / "here" / "x"


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"config": ""}',
        '{"config": "", "values": null}',
        '{"config": "", "values": {"setting_of_the_future": 1}}',
        '{"config": 5, "values": {}}',
        '{"config": "", "values": {"port": "x"}}',
        '{"config": "/no/such.toml", "values": {}}',
        pytest.param("[" * 200_000, id="deep"),
    ],
)
def test_saved_overrides_that_cannot_be_used_are_a_config_error_that_names_a_file(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "overrides.json").write_text(content)
    with pytest.raises(ConfigError, match=r"overrides\.json|such\.toml") as caught:
        load_saved(tmp_path)
    if content in (None, "", "{", "[]", "null", "{}"):
        assert f"start the system with: metal-supervisor run --state-dir {tmp_path}" in str(caught.value)


def test_a_kept_file_that_this_release_refuses_does_not_hide_what_is_wrong_on_file(tmp_path: Path) -> None:
    save_overrides(tmp_path, Overrides(str(written(tmp_path, "port = 0\n")), {}))
    for kept in (json.dumps({"port": 0}), "[" * 200_000):
        (tmp_path / "settings.json").write_text(kept)
        with pytest.raises(ConfigError, match=r"x\.toml: port must be between"):
            loader.load_good(tmp_path)


def test_a_full_disk_leaves_no_half_written_settings_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_overrides(tmp_path, Overrides())
    monkeypatch.setattr(Path, "replace", refuse)
    assert loader.load_good(tmp_path)[1] == ""
    with pytest.raises(OSError, match="No space left"):
        save_overrides(tmp_path, Overrides("", {"port": 5000}))
    assert [each.name for each in tmp_path.iterdir()] == ["overrides.json"]


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_overrides_without_a_file_need_none() -> None:
    assert load(Overrides("", {"port": 5000})).port == 5000


def test_a_user_without_a_home_directory_is_told_to_set_home(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert main.main(["status"]) == loader.ConfigError.code
    assert "set HOME" in capsys.readouterr().err
