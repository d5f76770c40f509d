"""`metal-supervisor import-launchd`, from a plist on the disk to a settings file that we accept."""

from __future__ import annotations

import plistlib
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_supervisor.cli import import_launchd, main
from metal_supervisor.install.go_agent import FLAGS, GoAgentJob, translate
from metal_supervisor.settings import loader

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

AGENT = "/usr/local/bin/llmkube-metal-agent"
SHIPPED = [
    AGENT, "--namespace", "default", "--model-store", "/tmp/llmkube-models", "--llama-server",
    "/opt/homebrew/bin/llama-server", "--port", "9090", "--log-level", "info",
]  # fmt: skip
"""The command line of the agent's own plist."""


def plist(directory: Path, words: Any = SHIPPED, form: Any = plistlib.FMT_XML, **more: Any) -> Path:
    path = directory / "com.llmkube.metal-agent.plist"
    content = {"Label": "com.llmkube.metal-agent", "ProgramArguments": words, "RunAtLoad": True, **more}
    path.write_bytes(plistlib.dumps(content, fmt=form))
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main.main(["import-launchd", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("form", [plistlib.FMT_XML, plistlib.FMT_BINARY], ids=["xml", "binary"])
def test_the_shipped_plist_becomes_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: Any) -> None:
    environment = {"PATH": "/opt/homebrew/bin:/usr/bin", "GGML_METAL_ENABLE": "1"}
    path = plist(tmp_path, form=form, EnvironmentVariables=environment, WorkingDirectory="/tmp", Nice=-5)
    code, out, err = run(capsys, path)
    assert code == 0
    assert tomllib.loads(out) == {
        "namespace": "default", "model_store": "/tmp/llmkube-models", "llama_server": "/opt/homebrew/bin/llama-server",
        "port": 9090, "log_level": "info", "kubeconfig": "~/.kube/config",
    }  # fmt: skip
    assert "# from --model-store: " in out and "#   environment PATH: " in out
    assert err.startswith("metal-supervisor: warning: --model-store: macOS empties") and err.count("\n") == 1


def test_the_file_is_for_its_users_eyes_and_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = plist(tmp_path), tmp_path / "settings.toml"
    assert run(capsys, path, "--output", output)[:2] == (0, "")
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    assert loader.read_toml(output)["port"] == 9090
    output.write_text("port = 1\n")
    output.chmod(0o644)
    code, _, err = run(capsys, path, "--output", output)
    assert (code, output.read_text()) == (2, "port = 1\n") and "overwrite it with --force" in err
    assert run(capsys, path, "--output", output, "--force")[0] == 0
    assert loader.read_toml(output)["port"] == 9090 and stat.S_IMODE(output.stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert run(capsys, path, "--output", tmp_path / "link")[0] == 2
    code, _, err = run(capsys, path, "--output", tmp_path / "no" / "such.toml")
    assert code == 2 and "cannot write" in err


def test_what_is_refused_is_named_in_the_file_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [AGENT, "--memory-fraction=1.5", "--runtime=tensorfold", "--client-port=9999", "--port=9091"]
    path = plist(tmp_path, words)
    code, out, err = run(capsys, path)
    assert code == 1 and tomllib.loads(out) == {"port": 9091, "kubeconfig": "~/.kube/config"}
    for line in (
        "--memory-fraction: memory_fraction must be between 0 and 1, not 1.5",
        "--runtime: runtime must be one of ",
        "--client-port: no request passes through us",
    ):
        assert f"#   {line}" in out and f"refused: {line}" in err


def test_what_a_user_wrote_stays_within_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "x\nport = 1\r\u2028\u0085# \\\"'"
    words = [f"--{evil}", f"--namespace={evil}", f"--log-level={evil}", f"--port={evil}", "é☃😀\n", "--port=7"]
    path = plist(tmp_path, [AGENT, "--model-store=/é☃😀/\\\"'#", *words])
    code, out, err = run(capsys, path)
    assert code == 1 and tomllib.loads(out) == {"model_store": "/é☃😀/\\\"'#", "kubeconfig": "~/.kube/config"}
    assert len(err.splitlines()) == err.count("\n") == 5


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is not a plist that can be read"),
        (b"<plist><dict>", "is not a plist that can be read"),
        (b"<plist version='1.0'><dict><key>a</key></dict></plist>", "is not a plist that can be read"),
        (b"<plist version='1.0'><dict><key>a</key><integer>x</integer></dict></plist>", "is not a plist"),
        (b"bplist00" + b"\xff" * 40, "is not a plist that can be read"),
        (b"bplist00", "is not a plist that can be read"),
        (b"<!DOCTYPE x [<!ENTITY a 'b'>]><plist version='1.0'><string>&a;</string></plist>", "is not a plist"),
        (b" " * (import_launchd.PLIST_BYTES + 1), "is larger than 1048576 bytes"),
        (plistlib.dumps(["a"]), "must hold a dictionary of launchd's keys, not an array"),
        (plistlib.dumps({"Label": "x"}), "has no ProgramArguments"),
        (plistlib.dumps({"ProgramArguments": AGENT}), "ProgramArguments must be an array of strings, not a string"),
        (plistlib.dumps({"ProgramArguments": []}), "ProgramArguments is empty"),
        (plistlib.dumps({"ProgramArguments": [AGENT, 9090]}), r"ProgramArguments\[1\] must be a string, not a number"),
        (plistlib.dumps({"ProgramArguments": ["/bin/sh", "-c", "x"]}), r"ProgramArguments\[0\] is '/bin/sh', not LLM"),
        (plistlib.dumps({"ProgramArguments": [AGENT, "__HOME__/models"]}), r"ProgramArguments\[1\] holds __HOME__"),
        (plistlib.dumps({"ProgramArguments": [AGENT], "EnvironmentVariables": ["A"]}), "EnvironmentVariables must be"),
        (plistlib.dumps({"ProgramArguments": [AGENT], "EnvironmentVariables": {"A": True}}),
         r"EnvironmentVariables\['A'\] must be a string, not a boolean"),
        (plistlib.dumps({"ProgramArguments": [AGENT], "WorkingDirectory": 1}), "WorkingDirectory must be a string"),
    ],
)  # fmt: skip
def test_a_broken_plist_is_told_by_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, text: str
) -> None:
    path = tmp_path / "x.plist"
    path.write_bytes(content)
    assert main.main(["import-launchd", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"metal-supervisor: {path}: ") and re.search(text, said)


def test_a_plist_that_is_not_there_is_said_to_be_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, tmp_path / "x")[0] == 2 and run(capsys, tmp_path)[0] == 2


@settings(max_examples=150, database=None, derandomize=True)
@given(st.binary(max_size=300), st.integers(0, 3))
def test_no_bytes_bring_it_down(tmp_path_factory: pytest.TempPathFactory, noise: bytes, form: int) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.plist"
    whole = plistlib.dumps({"ProgramArguments": SHIPPED}, fmt=plistlib.FMT_BINARY)
    path.write_bytes((noise, b"bplist00" + noise, whole[: len(noise)] + noise, noise + whole)[form])
    try:
        import_launchd.read(path)
    except import_launchd.BadPlist as error:
        assert str(error)


@settings(max_examples=150, database=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(sorted(FLAGS)), st.text(max_size=20) | st.sampled_from(["1", "true", "5s"]))))
def test_what_is_printed_is_always_a_settings_file_that_we_accept(said: list[tuple[str, str]]) -> None:
    found = import_launchd.checked(translate(GoAgentJob((AGENT, *(f"--{name}={text}" for name, text in said)))))
    content = tomllib.loads(import_launchd.text_of(found))
    assert content == {name: loader.checked(name, value, "") for name, value in content.items()}
    named = {origin for each in found.settings.values() for origin in each.origins}
    named |= {part for each in [*found.refused, *found.unneeded] for part in each.subject.split(" and ")}
    assert {f"--{name}" for name, _ in said} <= named | {"--kubeconfig", "--model-store"}, "no flag is lost"
