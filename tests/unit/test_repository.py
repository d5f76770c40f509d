"""Which files of a repository are a model: by names as people give them, and by names that a hostile server gives."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_supervisor.models.listing import Unusable
from metal_supervisor.models.repository import MOST_FILES, Ambiguous, contents, directory, gguf, is_safe, usual

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
        (["g-UD-Q4_K_XL.gguf", "mtp-g.gguf", "MTP/g-Q8_0-MTP.gguf", "MTP/g-F16-MTP.gguf"], "", "g-UD-Q4_K_XL.gguf"),
        (["Mtp-27B-Q6_K.gguf", "mtp-Mtp-27B-Q6_K.gguf"], "Q6_K", "Mtp-27B-Q6_K.gguf"),
        (["mtp-9b-Q4_0.gguf", "mtp-9b-Q8_0.gguf", "mtp-mtp-9b-Q8_0.gguf"], "Q8_0", "mtp-9b-Q8_0.gguf"),
        (["g-MTP-Q4_0.gguf", "g-MTP-Q8_0.gguf"], "Q8_0", "g-MTP-Q8_0.gguf"),
        (["g-MTP-Q4_K_M.gguf", "MTP-g-Q8_0.gguf"], "", "g-MTP-Q4_K_M.gguf"),
        (["One-Q4_K_M.gguf", "One-imatrix.gguf", "imatrix_unsloth.gguf"], "", "One-Q4_K_M.gguf"),
        (["g-Q4_0-imatrix.gguf", "g-Q8_0-imatrix.gguf"], "Q8_0", "g-Q8_0-imatrix.gguf"),
        (["g-Q8_0.gguf", "g-eagle3-Q8_0.gguf", "EAGLE-g.gguf"], "Q8_0", "g-Q8_0.gguf"),
        (["g-Q8_0.gguf", "g-DFlash-b16-Q8_0.gguf", "g-dspark.gguf"], "Q8_0", "g-Q8_0.gguf"),
        (["g-Q8_0.gguf", "g-assistant-Q8_0.gguf", "draft/g-Q8_0.gguf"], "Q8_0", "g-Q8_0.gguf"),
        (["g-Q8_0.gguf", "g-lora-Q8_0.gguf"], "Q8_0", "g-Q8_0.gguf"),
        (["Eagle-7B-Q4_0.gguf", "Eagle-7B-Q8_0.gguf", "Eagle-7B.imatrix.gguf"], "Q8_0", "Eagle-7B-Q8_0.gguf"),
        (["m.i1-Q6_K.gguf", "m.i1-IQ3_XXS.gguf"], "i1-Q6_K", "m.i1-Q6_K.gguf"),
        (["m-MXFP4_MOE.gguf", "m-Q8_0.gguf"], "MXFP4", "m-MXFP4_MOE.gguf"),
        (["m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf"], "Q4_K_M", "m-Q4_K_M.gguf"),
        (["m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf"], "UD-Q4_K_M", "m-UD-Q4_K_M.gguf"),
        (["m-UD-IQ2_XXS.gguf", "m-UD-IQ2_M.gguf"], "IQ2_M", "m-UD-IQ2_M.gguf"),
        (["Q4_K_M/model.gguf", "Q8_0/model.gguf"], "Q8_0", "Q8_0/model.gguf"),
    ],
)
def test_the_gguf_file_that_is_meant(names: list[str], quantization: str, wanted: str) -> None:
    assert gguf(names, quantization, "o/r") == wanted


def test_a_file_in_pieces_is_said_to_be_in_pieces() -> None:
    reason, text = refused("gguf", ["q/X.i1-Q6_K.gguf.part1of2", "q/X.i1-Q6_K.gguf.part2of2"], "Q6_K", "o/r")
    assert reason == "InvalidModelFile" and "cat X.i1-Q6_K.gguf.part1of2 … > X.i1-Q6_K.gguf, and name" in text


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["a.gguf", "b.gguf"], "it has GGUF files (a.gguf, b.gguf)"),
        (["pytorch_model.bin", "config.json"], "PyTorch"),
        (["README.md"], "it has README.md"),
        ([], "it is empty"),
        ([".git"], "it is empty"),
    ],
)
def test_a_directory_without_weights_is_said_to_hold_what_it_holds(names: list[str], says: str) -> None:
    assert says in contents(names)


def test_the_quantization_of_a_draft_head_is_not_that_of_the_model() -> None:
    reason, text = refused("gguf", ["g-UD-Q4_K_XL.gguf", "MTP/g-Q8_0-MTP.gguf"], "Q8_0", "o/r")
    assert reason == "InvalidModel" and "'Q8_0'; it has g-UD-Q4_K_XL.gguf;" in text


def test_a_header_tells_companions_apart_that_names_do_not() -> None:
    names = ["g-Q8_0.gguf", "small/g-Q8_0.gguf"]
    assert gguf(names, "Q8_0", "o/r", lambda name: name.startswith("small")) == "g-Q8_0.gguf"
    with pytest.raises(Ambiguous, match="2 GGUF files") as caught:
        gguf(names, "Q8_0", "o/r", lambda _: True)
    assert caught.value.names == tuple(names)


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (["m-F16.gguf", "m-Q2_K.gguf", "m-Q8_0.gguf", "m-Q4_0.gguf", "m-Q4_K_M.gguf"], "Q4_K_M Q2_K Q8_0"),
        (["m-UD-Q4_K_XL.gguf", "m-UD-IQ1_S.gguf", "m-UD-Q3_K_XL.gguf"], "UD-Q4_K_XL UD-Q3_K_XL UD-IQ1_S"),
        (["m.i1-IQ4_XS.gguf", "m.i1-Q5_K_M.gguf", "m.i1-IQ2_M.gguf"], "i1-IQ4_XS i1-IQ2_M i1-Q5_K_M"),
        (["Q3-4B-MXFP4_MOE.gguf", "Q3-4B-Q6_K.gguf", "Q3-4B-BF16.gguf"], "MXFP4_MOE Q6_K"),
        (["m-NVFP4.gguf", "m-TQ1_0.gguf"], "NVFP4 TQ1_0"),
        (["UD-Q4_K_XL/m-00001-of-00002.gguf", "Q8_0/m.gguf"], "UD-Q4_K_XL Q8_0"),
        (["a.gguf", "b.gguf"], ""),
    ],
)
def test_the_usual_quantizations_come_first(names: list[str], order: str) -> None:
    found = usual(names)
    assert len(found) == len(order.split())
    assert all(word in name for word, name in zip(order.split(), found, strict=True))


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
        "README.md",
        "LICENSE.txt",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "consolidated.safetensors",
        "consolidated.safetensors.index.json",
        "modeling.py",
        "m.gguf",
        "pytorch_model.bin",
        "config.json",
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "sub/deep/vocab.jsonl",
        ".git/config.json",
        ".eval.json",
        "sub/.x/y.json",
        "qwen.tiktoken",
        "weights.npz",
        "x.pt",
        "original/config.json",
        "original/model.safetensors",
    ]
    assert directory(names, (), "o/r") == (
        "config.json",
        "chat_template.jinja",
        "merges.txt",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "qwen.tiktoken",
        "sub/deep/vocab.jsonl",
        "tokenizer.json",
        "tokenizer.model",
        "weights.npz",
    )


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


HOSTILE = [
    "..",
    "../a.json",
    "a/../b.json",
    "/etc/passwd",
    "a//b",
    "a/",
    "",
    ".",
    "a/./b",
    "a\\b",
    "a\nb",
    "a\0b",
    "a\x7fb",
    "a\x9bb",
    "\ud800.json",
    "a\u2028b",
    "a\u202eb",
    "x" * 256,
    "/".join(["y" * 100] * 10),
]


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
