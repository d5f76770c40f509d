"""Completions, asked of the shells themselves."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from metal_supervisor.cli import completion
from metal_supervisor.cli.command_parser import GROUPS
from tests.support.system import eventually
from tests.support.typed import typed

Shell = Callable[[str], str]


def shell_of(name: str, *flags: str) -> Shell:
    """Runs a script in a real shell, without anybody's own settings."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed; apt-get install {name}, or brew install {name}")

    def run(script: str) -> str:
        done = subprocess.run([path, *flags, "-c", script], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """Shell -> its completions, as our command prints them."""
    return {name: typed("completion", name).stdout for name in completion.SHELLS}


@pytest.fixture
def scripts(tmp_path: Path, printed: dict[str, str]) -> Path:
    """A directory with the completions of each shell."""
    for name, text in printed.items():
        (tmp_path / f"_{name}").write_text(text)
    (tmp_path / "work" / "key.d").mkdir(parents=True)
    (tmp_path / "work" / "key.toml").touch()
    return tmp_path


@pytest.mark.parametrize("unbuffered", ["1", ""])
@pytest.mark.parametrize("arguments", [["completion", "zsh"], ["version"]])
def test_a_reader_that_has_seen_enough_ends_a_command_without_a_word(arguments: list[str], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "metal_supervisor", *arguments]
        environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, env=environ)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


CASES = [
    (["mo"], {"models"}),
    (["comp"], {"completion"}),
    (["models", "v"], {"verify"}),
    (["fit", "--k"], {"--kv-type", "--kubeconfig"}),
    (["run", "--config", "key"], {"key.toml", "key.d"}),
    (["run", "--kubeconfig", "key"], {"key.toml", "key.d"}),
    (["run", "--state-dir", "key"], {"key.d"}),
    (["install", "--cluster", "key"], {"key.toml", "key.d"}),
    (["pull", "--format", "m"], {"mlx"}),
    (["completion", "z"], {"zsh"}),
]


@pytest.mark.parametrize(("words", "candidates"), CASES, ids=[" ".join(words) for words, _ in CASES])
def test_bash_offers_what_fits(scripts: Path, words: list[str], candidates: set[str]) -> None:
    bash = shell_of("bash", "--norc", "--noprofile")
    line = ["metal-supervisor", *words]
    found = bash(f"""
        cd {scripts}/work
        source {scripts}/_bash
        COMP_WORDS=({" ".join(line)}) COMP_CWORD={len(words)}
        said=($(complete -p metal-supervisor))
        for at in "${{!said[@]}}"; do [ "${{said[at]}}" = -F ] && asked="${{said[at + 1]}}"; done
        "$asked" metal-supervisor {line[-1]} {line[-2]}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """)
    assert set(found.split()) == candidates


@pytest.mark.parametrize(("words", "candidates"), CASES, ids=[" ".join(words) for words, _ in CASES])
def test_fish_offers_what_fits(
    scripts: Path, words: list[str], candidates: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(scripts))
    fish = shell_of("fish", "--no-config")
    line = " ".join(["metal-supervisor", *words])
    found = fish(f"cd {scripts}/work; source {scripts}/_fish; complete -C '{line}'")
    assert {each.partition("\t")[0].rstrip("/") for each in found.splitlines()} == candidates


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("metal-supervisor mo", "metal-supervisor models "),
        ("metal-supervisor fit --kv", "metal-supervisor fit --kv-type "),
        ("metal-supervisor run --config key.t", "metal-supervisor run --config key.toml "),
        ("metal-supervisor completion z", "metal-supervisor completion zsh "),
    ],
)
def test_zsh_completes_what_is_typed(scripts: Path, line: str, completed: str) -> None:
    zsh = shell_of("zsh", "-f")
    zsh(f"zsh -n {scripts}/_zsh")
    (scripts / "_zsh").rename(scripts / "_metal-supervisor")  # the name by which zsh finds it
    told = scripts / "told"
    (scripts / "setup").write_text(f"""
        fpath=({scripts} $fpath); autoload -U compinit; compinit -u -D
        tell() {{ print -rn -- $BUFFER > {told}.new; mv {told}.new {told} }}
        zle -N tell; bindkey '^G' tell; cd {scripts}/work
    """)
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "dumb"}
    typing = subprocess.Popen(
        [shutil.which("zsh") or "zsh", "-f", "-i"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        start_new_session=True,
    )
    os.close(slave)
    try:
        os.write(master, f"source {scripts}/setup\n{line}\t\a".encode())
        eventually(lambda: drained(master) or told.exists(), 30, "zsh to tell what is in its line")
        assert told.read_text() == completed
    finally:
        typing.kill()
        typing.wait()
        os.close(master)


def drained(master: int) -> bool:
    """Reads what a terminal shows, so that whoever writes there is not held up; always False."""
    while select.select([master], [], [], 0)[0]:
        os.read(master, 1 << 16)
    return False


def test_every_script_has_the_public_commands_and_no_internal_one(scripts: Path) -> None:
    public = {name for names in GROUPS.values() for name in names}
    for shell in completion.SHELLS:
        text = (scripts / f"_{shell}").read_text()
        assert [name for name in public if name not in text] == []
        assert "gateway-holder" not in text
