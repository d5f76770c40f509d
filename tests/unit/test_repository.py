"""Which files of a repository are a model: by names as people give them, and by names that a hostile server gives."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_supervisor.models.listing import Unusable
from metal_supervisor.models.repository import MOST_FILES, directory, gguf, is_safe

MLX = ("config.json", "model.safetensors")


def refused(call: str, *given: object) -> tuple[str, str]:
    with pytest.raises(Unusable) as caught:
        {"gguf": gguf, "directory": directory}[call](*given)  # type: ignore[operator]
    return caught.value.reason, str(caught.value)


@pytest.mark.parametrize(
    ("names", "quantization", "wanted"),
    [
        (["README.md", "m.gguf"], "", "m.gguf"),
        (["m.gguf", "mmproj-m-f16.gguf", "sub/MMPROJ.gguf"], "", "m.gguf"),
        (["a/m-00002-of-00002.gguf", "a/m-00001-of-00002.gguf"], "", "a/m-00001-of-00002.gguf"),
        (["m-Q4_K_M.gguf", "m-IQ4_K_M.gguf"], "Q4_K_M", "m-Q4_K_M.gguf"),
        (["m-Q4_K_M.gguf", "m-Q8_0.gguf"], "q4_k_m", "m-Q4_K_M.gguf"),
        (["m.Q4_K.gguf", "m.Q4_K_M.gguf"], "Q4_K", "m.Q4_K.gguf"),
        (["m.Q4_K_M.gguf", "m.Q8_0.gguf"], "Q4_K", "m.Q4_K_M.gguf"),
        (["m-F16.gguf", "m-BF16.gguf"], "f16", "m-F16.gguf"),
        (["m_Q4_0.gguf", "m_Q4_0_4_4.gguf"], "Q4_0", "m_Q4_0.gguf"),
        (["Q8_0/m-Q4_0.gguf", "m-Q8_0.gguf"], "Q8_0", "m-Q8_0.gguf"),
        (["m-Q4_K_M-00002-of-00002.gguf", "m-Q4_K_M-00001-of-00002.gguf"], "Q4_K_M", "m-Q4_K_M-00001-of-00002.gguf"),
        ([".hidden/m.gguf", "m.gguf"], "", "m.gguf"),
    ],
)  # fmt: skip
def test_the_gguf_file_that_is_meant(names: list[str], quantization: str, wanted: str) -> None:
    assert gguf(names, quantization, "o/r") == wanted


def test_of_several_gguf_files_the_first_eight_are_named() -> None:
    names = [f"m-{number:02d}.gguf" for number in range(11)]
    reason, text = refused("gguf", names, "", "o/r")
    assert reason == "AmbiguousSource"
    assert "o/r has 11 GGUF files (m-00.gguf, m-01.gguf" in text and "m-07.gguf and 3 more)" in text
    assert text.endswith("set spec.files to one of them, or spec.quantization") and "m-08" not in text


def test_a_quantization_that_several_have_is_ambiguous() -> None:
    reason, text = refused("gguf", ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0.gguf"], "Q4_K", "o/r")
    assert reason == "AmbiguousSource" and "Q8_0" not in text


def test_no_gguf_file_says_what_there_is() -> None:
    assert refused("gguf", ["m.safetensors", "mmproj.gguf"], "", "o/r")[0] == "InvalidModel"
    reason, text = refused("gguf", ["m-Q8_0.gguf"], "Q4_K_M", "o/r")
    assert reason == "InvalidModel" and "'Q4_K_M'; it has m-Q8_0.gguf" in text and "spec.quantization" in text
    # A pattern is only a name here.
    assert refused("gguf", ["m-Q8_0.gguf"], ".*", "o/r")[0] == "InvalidModel"


def test_of_a_directory_what_engines_read_and_config_first() -> None:
    names = [
        "README.md", "LICENSE.txt", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json", "consolidated.safetensors", "consolidated.safetensors.index.json",
        "modeling.py", "m.gguf", "pytorch_model.bin", "config.json", "tokenizer.json", "tokenizer.model",
        "merges.txt", "chat_template.jinja", "sub/deep/vocab.jsonl", ".git/config.json", ".eval.json",
        "sub/.x/y.json", "qwen.tiktoken", "weights.npz", "x.pt", "original/config.json", "original/model.safetensors",
    ]  # fmt: skip
    assert directory(names, (), "o/r") == (
        "config.json", "chat_template.jinja", "merges.txt", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors", "model.safetensors.index.json", "qwen.tiktoken", "sub/deep/vocab.jsonl",
        "tokenizer.json", "tokenizer.model", "weights.npz",
    )  # fmt: skip


def test_consolidated_weights_are_read_where_there_are_no_others() -> None:
    assert directory(["config.json", "consolidated.safetensors"], (), "o/r")[1] == "consolidated.safetensors"


def test_files_that_are_named_are_exactly_what_is_wanted() -> None:
    names = [*MLX, "a.txt", "tokenizer.json"]
    assert directory(names, ("a.txt", *MLX), "o/r") == ("config.json", "a.txt", "model.safetensors")
    gone = ("config.json", "gone.json")
    assert "spec.files[1] 'gone.json' is not in o/r" in refused("directory", names, gone, "o/r")[1]
    program = refused("directory", [*names, "run.PY"], ("run.PY",), "o/r")[1]
    assert "spec.files[0] 'run.PY' is no file that engines read" in program
    assert "spec.files leaves out config.json" in refused("directory", names, ("model.safetensors",), "o/r")[1]


@pytest.mark.parametrize(
    ("names", "lacks"),
    [
        (["model.safetensors"], "config.json"),
        (["config.json"], "*.safetensors"),
        (["sub/config.json", "model.safetensors"], "config.json"),
        (["config.json", "sub/model.safetensors"], "*.safetensors"),
    ],
)
def test_what_a_directory_lacks_is_named(names: list[str], lacks: str) -> None:
    reason, text = refused("directory", names, (), "o/r")
    assert reason == "InvalidModelFile" and f"no {lacks} at its top" in text


def test_names_that_are_one_file_on_a_mac_are_refused() -> None:
    for one, other in (("A.json", "a.json"), ("u\u0308.json", "ü.json")):
        assert f"{one!r} and {other!r}" in refused("directory", [*MLX, one, other], (), "o/r")[1]
    text = refused("directory", [*MLX, "a.json", "A.json/b.json"], (), "o/r")[1]
    assert "'a.json' as a file and as a directory" in text


def test_more_files_than_any_model_has_are_refused() -> None:
    names = [*MLX, *(f"{number}.json" for number in range(MOST_FILES))]
    assert "spec.files" in refused("directory", names, (), "o/r")[1]


HOSTILE = ["..", "../a.json", "a/../b.json", "/etc/passwd", "a//b", "a/", "", ".", "a/./b", "a\\b", "a\nb",
           "a\0b", "a\x7fb", "a\x9bb", "\ud800.json", "a\u2028b", "a\u202eb", "x" * 256,
           "/".join(["y" * 100] * 10)]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_names_that_lead_out_or_cannot_be_kept(name: str) -> None:
    assert not is_safe(name)


@pytest.mark.parametrize("name", ["a", "a/b.json", "..a", "a..b/c", "…/ü.json", "a b@1#?.gguf", "-x", "~root"])
def test_names_that_are_only_unusual(name: str) -> None:
    assert is_safe(name)


@given(st.lists(st.one_of(st.sampled_from(["..", ".", "", "/", "a", "a\\", "\x1b["]), st.text(max_size=6)), max_size=6))
def test_a_safe_name_stays_below_its_directory(parts: list[str]) -> None:
    name = "/".join(parts)
    if is_safe(name):
        path = posixpath.normpath(posixpath.join("/base", name))
        assert path == f"/base/{name}" and path.isprintable()
        path.encode()
