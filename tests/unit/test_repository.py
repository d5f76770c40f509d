"""Which files of a repository are fetched, and that no name of somebody else's leads out of the model's directory."""

from __future__ import annotations

import posixpath
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_supervisor.core.fields import Bad
from metal_supervisor.core.repository import chosen, only_gguf

MODEL = ("config.json", "model.safetensors")


def refusal(names: tuple[str, ...], wanted: tuple[str, ...] = ()) -> Bad:
    with pytest.raises(Bad) as caught:
        chosen(names, wanted)
    return caught.value


def test_what_engines_read_is_chosen_and_nothing_else() -> None:
    read = (
        "added.jsonl", "chat_template.jinja", "config.json", "merges.txt", "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors", "qwen.tiktoken", "sub/tokenizer.json", "tokenizer.model", "weights.npz",
    )  # fmt: skip
    other = (
        ".gitattributes", ".cache/x.json", "README.md", "modeling.py", "pytorch_model.bin", "a.png", "m.gguf",
        "..x.json", "config.json.py",
    )  # fmt: skip
    assert chosen([*other, *reversed(read)]) == read


def test_files_that_are_named_are_all_that_is_fetched_in_their_order() -> None:
    names = (*MODEL, "tokenizer.json", "notes.md")
    assert chosen(names, ("model.safetensors", "config.json", "model.safetensors")) == tuple(reversed(MODEL))
    assert chosen(names, (*MODEL, "notes.md")) == (*MODEL, "notes.md")


@pytest.mark.parametrize(
    ("names", "wanted", "reason", "why"),
    [
        ((), (), "SourceNotFound", "there is no config.json; name a directory"),
        (("config.json",), (), "SourceNotFound", "there are no weights"),
        (("config.json", "sub/model.safetensors"), (), "SourceNotFound", "there are no weights .* beside config.json"),
        (MODEL, ("model.safetensors",), "SourceNotFound", "there is no config.json; add it to spec.files"),
        (MODEL, (*MODEL, "x.json", "y.json"), "SourceNotFound", "there is no 'x.json', 'y.json'; correct spec.files"),
        ((*MODEL, "a.py"), (*MODEL, "a.py"), "InvalidModelFile", "'a.py' is code or a dot-file; leave it out"),
        ((*MODEL, ".a"), (*MODEL, ".a"), "InvalidModelFile", "'.a' is code or a dot-file; leave it out"),
        ((*MODEL, "Config.json"), (), "InvalidModelFile", "'Config.json' and 'config.json' are one file on this Mac"),
        ((*MODEL, "é.json", "e\u0301.json"), (), "InvalidModelFile", "are one file on this Mac"),
        ((*MODEL, "a.json", "A.json/b.json"), (), "InvalidModelFile", "'A.json/b.json' is below what is a file"),
    ],
)
def test_what_cannot_be_a_model_is_refused_by_name(
    names: tuple[str, ...], wanted: tuple[str, ...], reason: str, why: str
) -> None:
    with pytest.raises(Bad, match=why) as caught:
        chosen(names, wanted)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "name",
    [
        "../x.json", "a/../x.json", "/x.json", "a//x.json", "a\\x.json", "a\nx.json", "x\0.json", "./x.json",
        "\u202ex.json", "\ud800.json", "n" * 200 + ".json",
    ],
)  # fmt: skip
def test_a_hostile_name_is_refused_whether_asked_for_or_not(name: str) -> None:
    for wanted in ((), (*MODEL, name)):
        caught = refusal((*MODEL, name), wanted)
        assert caught.reason == "InvalidModelFile" and len(caught.message) < 200 and caught.message.isprintable()


@given(st.lists(st.text(st.sampled_from("a.B/\\\n\u0301é~")) | st.text(), max_size=6), st.booleans())
def test_no_name_leads_out_and_no_two_are_one_file(names: list[str], asked: bool) -> None:
    every = [*MODEL, *(name + ".json" for name in names)]
    try:
        taken = chosen(every, tuple(every) if asked else ())
    except Bad as error:
        assert error.message.isprintable()
        return
    assert set(taken) <= set(every) and not any(name.endswith(".py") for name in taken)
    for name in taken:
        path = posixpath.normpath(posixpath.join("/model", name))
        assert path == f"/model/{name}" and not posixpath.basename(name).startswith(".")
    assert len({unicodedata.normalize("NFC", name).casefold() for name in taken}) == len(taken)


def test_the_only_gguf_is_found_with_its_shards_and_without_its_projector() -> None:
    shards = tuple(f"q/m-{number:05d}-of-00003.gguf" for number in (1, 2, 3))
    assert only_gguf(["a.gguf", "mmproj-F16.gguf", "README.md", ".b.gguf"]) == ("a.gguf",)
    assert only_gguf([*reversed(shards), "config.json"]) == shards
    assert only_gguf(["m-Q4_K_M.gguf", "m-Q8_0.gguf", *shards], "q8_0") == ("m-Q8_0.gguf",)


@pytest.mark.parametrize(
    ("names", "quantization", "reason", "why"),
    [
        ((), "", "SourceNotFound", "there is no GGUF file there; set spec.files, or name a model in GGUF form"),
        (("a-Q8.gguf",), "Q4", "SourceNotFound", "with 'Q4' in its name; set spec.files to one of 'a-Q8.gguf'"),
        (("b.gguf", "a.gguf"), "", "AmbiguousSource", r"several GGUF files \('a.gguf', 'b.gguf'\); set spec.files"),
        (("a-00002-of-00002.gguf",), "", "SourceNotFound", "there is no 'a-00001-of-00002.gguf', but other shards"),
        (("../a.gguf",), "", "InvalidModelFile", "'../a.gguf' cannot be the name of a file"),
        (tuple(f"{n}.gguf" for n in range(30)), "", "AmbiguousSource", "and 22 more"),
    ],
)
def test_what_is_not_one_gguf_is_refused_by_name(
    names: tuple[str, ...], quantization: str, reason: str, why: str
) -> None:
    with pytest.raises(Bad, match=why) as caught:
        only_gguf(names, quantization)
    assert caught.value.reason == reason
