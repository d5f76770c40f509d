"""Repositories that bring code: named in spec.files, under the name of a tokenizer, or named in a configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from metal_supervisor.models.download_job import DownloadJob
from metal_supervisor.models.listing import Unusable
from metal_supervisor.models.remote.source_policy import SourcePolicy
from metal_supervisor.models.repository import NAMES_CODE, READ_BY_ENGINES, directory
from metal_supervisor.models.store_context import StoreContext, Terms
from metal_supervisor.spec.sources import Artifact
from metal_supervisor.spec.types import ModelFile
from tests.support import mlx
from tests.support.hub import Hub

CODE = (
    "model.py",
    "model.PY",
    "model.pyc",
    "model.pyo",
    "model.pyd",
    "model.so",
    "model.cpython-311-darwin.so",
    "libggml.dylib",
    "x.dll",
    "x.pth",
    "x.egg-link",
    "sitecustomize.py",
    "usercustomize.py",
    "__init__.py",
    "sub/__init__.py",
    "x.bin",
    "x.pt",
    "x.pkl",
    "x.pickle",
    "x.ckpt",
    "x.h5",
    "x.joblib",
    "x.npy",
    "x.zip",
    "x.whl",
    "x.sh",
    "x.metallib",
    "x.metal",
    "Makefile",
    "x",
    "config.json.py",
    "model.safetensors.so",
    "x.bundle",
    "x.app",
)
"""Files that something loads as code, or that are none of an MLX model."""
PROGRAM_FILES = {
    "ELF": b"\x7fELF\x02\x01\x01",
    "Mach-O, 64 bits": b"\xcf\xfa\xed\xfe\x0c\x00\x00\x01",
    "Mach-O, 32 bits": b"\xce\xfa\xed\xfe",
    "Mach-O, other byte order": b"\xfe\xed\xfa\xcf",
    "Mach-O, universal": b"\xca\xfe\xba\xbe\x00\x00\x00\x02",
    "Mach-O, universal, 64 bits": b"\xca\xfe\xba\xbf",
    "PE": b"MZ\x90\x00",
    "archive": b"!<arch>\n",
    "script": b"#!/bin/sh\n",
}
DISGUISES = ("tokenizer.model", "vocab.txt", "template.jinja", "qwen.tiktoken", "model.safetensors", "deep/x.model")
NAMING_CODE = {
    "model_file": {"model_file": "model.py"},
    "compiled": {"model_file": "model.pyc"},
    "elsewhere": {"model_file": "/Users/Shared/x.py"},
    "climbing": {"model_file": "../../x.py"},
    "empty": {"model_file": ""},
    "a list": {"model_file": ["x.py"]},
    "deeper": {"text_config": {"model_file": "x.py"}},
    "model_type that is a path": {"model_type": "/tmp/x"},
    "model_type that climbs": {"model_type": "..x"},
    "model_type with a slash": {"model_type": "llama/x"},
    "model_type with a line": {"model_type": "llama\nx"},
}
IN_TOKENIZERS = {
    "tool_parser_type": {"tool_parser_type": "../x"},
    "chat_template_type": {"chat_template_type": "/x"},
}
CONFIG = {"model_type": "llama", "auto_map": {"AutoModel": "modeling.Evil"}}
"""auto_map stays: it is what --trust-remote-code would run, and that flag is refused."""
GOOD = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": b"weights", "modeling.py": b"evil"}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def fetched(store: Path, files: Mapping[str, bytes], **more: object) -> ModelFile:
    """A repository with these files, as the store's own job fetches it. Raises Unusable."""
    with Hub({"o/r": dict(files)}) as hub:
        terms = Terms(SourcePolicy(private=("127.0.0.0/8",)), hub=hub.url)
        artifact = Artifact("hf://o/r@main", directory=True, **more)  # type: ignore[arg-type]
        return DownloadJob(artifact, StoreContext(store, terms), lambda _: None, lambda *_: None).ready()


def refused(store: Path, files: Mapping[str, bytes]) -> str:
    with pytest.raises(Unusable) as caught:
        fetched(store, files)
    assert caught.value.reason == "InvalidModelFile"
    return str(caught.value)


def in_place(base: Path, files: Mapping[str, bytes]) -> ModelFile:
    """The same files in a directory of this Mac, used where they are. Raises Unusable."""
    model = base / "model"
    for name, content in files.items():
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_bytes(content)
    job = DownloadJob(
        Artifact(str(model), directory=True), StoreContext(base / "store", Terms()), lambda _: None, lambda *_: None
    )
    return job.ready()


def below(store: Path) -> Iterator[Path]:
    return (each for each in store.rglob("*") if each.is_file())


@pytest.mark.parametrize("name", CODE)
def test_no_file_that_could_be_code_is_fetched(name: str) -> None:
    names = [*GOOD, name]
    assert name not in directory(names, (), "o/r")
    with pytest.raises(Unusable) as caught:
        directory(names, ("config.json", "model.safetensors", name), "o/r")
    assert "spec.files[2]" in str(caught.value)


def test_the_code_of_a_good_repository_stays_there(store: Path) -> None:
    path = Path(fetched(store, GOOD).path)
    assert sorted(each.name for each in path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("disguise", DISGUISES)
@pytest.mark.parametrize("kind", PROGRAM_FILES)
def test_no_program_comes_under_another_name(store: Path, kind: str, disguise: str) -> None:
    program = PROGRAM_FILES[kind] + b"\0" * 64
    assert disguise.endswith(READ_BY_ENGINES)
    assert "is a program" in refused(store, {**GOOD, disguise: program})
    assert not any(each.read_bytes().startswith(PROGRAM_FILES[kind]) for each in below(store))


@pytest.mark.parametrize("kind", PROGRAM_FILES)
def test_no_program_is_used_in_place(tmp_path: Path, kind: str) -> None:
    with pytest.raises(Unusable, match="is a program"):
        in_place(tmp_path, {**GOOD, "tokenizer.model": PROGRAM_FILES[kind] + b"\0" * 64})


@pytest.mark.parametrize("name", [*NAMING_CODE, *IN_TOKENIZERS])
def test_no_configuration_names_code(store: Path, tmp_path: Path, name: str) -> None:
    file = "config.json" if name in NAMING_CODE else "tokenizer_config.json"
    content = json.dumps({**CONFIG, **NAMING_CODE.get(name, IN_TOKENIZERS.get(name, {}))}).encode()
    files = {**GOOD, file: content}
    assert "names code to be run" in refused(store, files)
    if file == "config.json":
        assert not list(store.rglob("*.safetensors")), "it is refused before the weights are fetched"
    with pytest.raises(Unusable, match="names code to be run"):
        in_place(tmp_path, files)


@pytest.mark.parametrize(
    "text",
    [
        b'{"model_file": "x.py", "model_file": null}',
        b'{"model_file": null, "model_file": "x.py"}',
        '{"model_file": "x.py"}'.encode("utf-16"),
        b'\xef\xbb\xbf{"model_file": "x.py"}',
        b'{"model_fil\\u0065": "x.py"}',
        b'{"a": ' + b"[" * 100_000,
        b"[]",
        b'{"model_file": "x.py"} {}',
        b" " * (5 << 20) + b'{"model_file": "x.py"}',
    ],
)
def test_no_spelling_of_a_configuration_names_code(store: Path, text: bytes) -> None:
    refused(store, {**GOOD, "config.json": text})


def test_no_engine_takes_code_from_a_key_that_is_not_judged() -> None:
    """The mlx_lm at hand: every module that it imports by a name out of a file of the model."""
    where = mlx.find_mlx.find().parent.parent
    sources = [each for name in ("utils.py", "tokenizer_utils.py") for each in where.rglob(f"mlx_lm/{name}")]
    text = "".join(each.read_text("utf-8") for each in sources)
    imported = set(re.findall(r'import_module\(f"[\w.]*\{(\w+)\}"\)', text))
    assert sources and imported and imported <= set(NAMES_CODE), imported
    assert re.findall(r"spec_from_file_location\(\s*(\"custom_model\"),", text), "what runs model_file"


def test_auto_map_is_let_be_and_used_by_nothing(store: Path) -> None:
    found = fetched(store, GOOD)
    assert found.phase == "Ready" and b"auto_map" in (Path(found.path) / "config.json").read_bytes()
