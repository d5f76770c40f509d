"""One name of a model means the same to `serve`, `fit`, `pull` and `chat`: real commands, and a mirror on the disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from metal_supervisor.cli import chat, main
from metal_supervisor.cli.terminal import CommandError
from metal_supervisor.models import headers
from metal_supervisor.models.headers import read_file
from metal_supervisor.settings.loader import Settings
from tests.support.system import tiny_gguf

Typed = Callable[..., tuple[int, str, str]]
IN_MIRROR = (
    "Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf",
    "o/several/m-Q4_K_M.gguf",
    "o/several/m-Q8_0.gguf",
    "o/several/mtp-m.gguf",
    "o/one/m-UD-Q4_K_XL.gguf",
    "o/one/m-imatrix.gguf",
)


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    for name in IN_MIRROR:
        path = tmp_path / "mirror" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        tiny_gguf.write_tiny_gguf(path)
    return tmp_path / "mirror"


@pytest.fixture
def typed(mirror: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Typed:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def run(*words: str) -> tuple[int, str, str]:
        code = main.main([*words, "--state-dir", str(tmp_path / "state"), "--hf-endpoint", str(mirror)])
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("qwen3-8b", "mirror/Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf"),
        ("o/several", "mirror/o/several/m-Q4_K_M.gguf"),
        ("o/several:Q8_0", "mirror/o/several/m-Q8_0.gguf"),
        ("hf://o/several@main:Q8_0", "mirror/o/several/m-Q8_0.gguf"),
        ("o/one", "mirror/o/one/m-UD-Q4_K_XL.gguf"),
        ("https://huggingface.co/o/several", "mirror/o/several/m-Q4_K_M.gguf"),
        ("hf://o/several/m-Q8_0.gguf", "mirror/o/several/m-Q8_0.gguf"),
        ("mirror/o/one/m-UD-Q4_K_XL.gguf", "mirror/o/one/m-UD-Q4_K_XL.gguf"),
        ("~/mirror/o/one/m-UD-Q4_K_XL.gguf", "mirror/o/one/m-UD-Q4_K_XL.gguf"),
        ("./linked.gguf", "linked.gguf"),
    ],
)
def test_fit_and_pull_know_each_name_that_serve_knows(name: str, file: str, typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "linked.gguf").symlink_to(tmp_path / "mirror/o/one/m-UD-Q4_K_XL.gguf")
    code, out, err = typed("fit", name)
    assert (code, out.partition(":")[0]) == (0, file.rpartition("/")[2]), err
    code, out, err = typed("pull", name)
    assert (code, out) == (0, f"{tmp_path / file}\n"), err
    code, out, err = typed("serve", name, "--print")
    assert code == 0 and "format: gguf" in out, err


@pytest.mark.parametrize("command", ["serve", "fit", "pull"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3-9b", "did you mean qwen3-8b?"),
        ("./none.gguf", "./none.gguf: there is no such file"),
        ("o/several:Q5_K_M", "it has m-Q4_K_M.gguf, m-Q8_0.gguf; name another: "),
        ("", "SOURCE is empty"),
    ],
)
def test_a_name_that_means_nothing_is_answered_alike(command: str, name: str, text: str, typed: Typed) -> None:
    code, out, err = typed(command, name)
    if (command, name) == ("pull", "o/several:Q5_K_M"):
        text = text.replace("name another: ", "correct --quantization (or the end of SOURCE)")
    assert code in (1, 2) and text in err and "spec." not in err and not out


def test_a_model_of_ollama_is_judged_from_its_library(
    typed: Typed, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def library(source: str, _registry: str) -> headers.Reading:
        asked.append(source)
        return read_file(mirror / IN_MIRROR[0])

    monkeypatch.setattr(headers, "read_library", library)
    code, out, err = typed("fit", "ollama://phi3:mini")
    assert (code, asked, out.partition(" ")[0]) == (0, ["https://ollama.com/library/phi3:mini"], "phi3:mini:"), err


@pytest.mark.parametrize("name", ["m-ud-q4-k-xl", "mirror/o/one/m-UD-Q4_K_XL.gguf", "~/mirror/o/one/m-UD-Q4_K_XL.gguf"])
def test_chat_finds_the_service_by_what_was_served(
    name: str, typed: Typed, mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del typed
    served = {"metadata": {"namespace": "default", "name": "m-ud-q4-k-xl"}, "status": {"phase": "Ready"}}

    def named(asked: str) -> object:
        if asked != "m-ud-q4-k-xl":
            raise CommandError(f"there is no service {asked}")
        return served

    monkeypatch.setattr(chat, "ServiceClient", lambda _: SimpleNamespace(named=named, close=lambda: None, api=None))
    monkeypatch.setattr(chat, "own_url", lambda *_: "http://127.0.0.1:1/v1")
    settings = Settings(state_dir=str(tmp_path / "state"), hf_endpoint=str(mirror))
    assert chat.partner_of(settings, name).model.endswith("m-ud-q4-k-xl")
    with pytest.raises(CommandError, match="there is no service nothing"):
        chat.partner_of(settings, "nothing")
