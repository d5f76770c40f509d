"""What sources are: models of Ollama's library, files, repositories, each with one spelling; and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from metal_supervisor.spec.fields import Bad
from metal_supervisor.spec.model_resource import read_artifact
from metal_supervisor.spec.sources import (
    beside,
    canonical,
    hub_parts,
    is_file,
    library_model,
    shown,
    without_quantization,
)
from tests.support.effort import cases


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("https://ollama.com/library/phi4-mini:3.8b", "phi4-mini:3.8b"),
        ("https://ollama.com/library/phi4-mini", "phi4-mini:latest"),
        ("https://ollama.com/library/phi4-mini/", "phi4-mini:latest"),
        ("http://www.ollama.com/library/llama3.2:1b-instruct-q4_K_M", "llama3.2:1b-instruct-q4_K_M"),
        ("https://registry.ollama.ai/library/tiny:1b", "tiny:1b"),
        ("https://ollama.com/someone/model_x.y:Q4", "someone/model_x.y:Q4"),
        ("https://ollama.com/phi4-mini", "phi4-mini:latest"),
    ],
)
def test_a_page_of_the_library_is_a_model(source: str, name: str) -> None:
    assert library_model(source) == name


@pytest.mark.parametrize(
    "source",
    [
        "",
        "phi4-mini",
        "ollama.com/library/phi4-mini",
        "https://ollama.com/",
        "https://ollama.com/library/phi4-mini:",
        "https://ollama.com/library/../phi4-mini",
        "https://ollama.com/a/b/c",
        "https://ollama.com/library/phi4?tag=1b",
        "https://ollama.com/library/phi4#1b",
        "https://ollama.com/library/phi 4",
        "https://ollama.com/library/phi4\n",
        "https://ollama.com/library/-phi4",
        "https://ollama.com/library/phi4:-1",
        "https://ollama.com.evil.example/library/phi4",
        "https://evil.example/ollama.com/library/phi4",
        "https://user@ollama.com/library/phi4",
        "https://ollama.com:8443/library/phi4",
        "https://ollama.com/library/phi4:" + "x" * 129,
        "ftp://ollama.com/library/phi4",
    ],
)
def test_anything_else_is_none(source: str) -> None:
    assert library_model(source) == ""


# ── one spelling ─────────────────────────────────────────────────────────────────────────────────

EQUAL = [
    {
        "hf://O/R@main/q/m.gguf",
        "hf://O/R/q/m.gguf",
        "hf://models/O/R/q/m.gguf",
        "hf://O/R@main/q%2Fm.gguf",
        "https://huggingface.co/O/R/resolve/main/q/m.gguf",
        "https://huggingface.co/O/R/blob/main/q/m.gguf?download=true",
        "HTTPS://HuggingFace.co/O/R/resolve/main/q/m.gguf",
        "https://huggingface.co:443/O/R/raw/main/q/m.gguf#L1",
        "http://hf.co/O/R/resolve/main/q/m.gguf",
        "https://www.huggingface.co/O/R/resolve/main/q/m.gguf/",
    },
    {"O/R", "hf://O/R", "hf://O/R@main", "hf://O/R/", "https://huggingface.co/O/R", "https://hf.co/O/R/tree/main/"},
    {"hf://O/R@refs/pr/1/m.gguf", "hf://O/R@refs%2Fpr%2F1/m.gguf", "https://hf.co/O/R/blob/refs%2Fpr%2F1/m.gguf"},
    {"http://h/a/m.gguf", "http://H/a/m.gguf", "http://h:80/a/m.gguf", "HTTP://h:/a/m.gguf", "http://h/a/m.gguf#x"},
    {"http://[::1]/m.gguf", "http://[::1]:80/m.gguf"},
    {"/a/m.gguf", "file:///a/m.gguf", "file://localhost/a/m.gguf", "FILE:///a/%6d.gguf"},
    {"/a/b #1?.gguf", "file:///a/b #1?.gguf", "file:///a/b%20%231%3f.gguf", "file://localhost/a/b #1?.gguf"},
    {"http://h/m-00001-of-00003.gguf", "http://h/m-00003-of-00003.gguf"},
    {"s3://bucket/m-00001-of-00002.gguf", "s3://bucket/m-00002-of-00002.gguf"},
    {"https://ollama.com/x", "https://ollama.com/library/x:latest", "https://www.ollama.com/library/x/"},
]
UNEQUAL = [
    "http://h/m",
    "https://h/m",
    "http://h:8080/m",
    "https://h:80/m",
    "http://h/M",
    "http://h/m?v=1",
    "http://h/m?v=2",
    "hf://O/R@main/m",
    "hf://O/R@v1/m",
    "hf://o/R@main/m",
    "hf://O/R@main",
    "s3://bucket/m",
    "/m",
]


@pytest.mark.parametrize("spellings", EQUAL, ids=min)
def test_equal_spellings_are_one(spellings: set[str]) -> None:
    assert len({canonical(each) for each in spellings}) == 1


def test_what_is_another_file_stays_another() -> None:
    assert len({canonical(each) for each in UNEQUAL}) == len(UNEQUAL)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("", "InvalidModel"),
        ("m.gguf", "UnsupportedSource"),
        ("a/b.gguf", "UnsupportedSource"),
        ("./m.gguf", "UnsupportedSource"),
        ("~/m.gguf", "UnsupportedSource"),
        ("pvc://claim/m", "UnsupportedSource"),
        ("PVC://claim/m", "UnsupportedSource"),
        ("ftp://h/m", "UnsupportedSource"),
        ("oci://h/m", "UnsupportedSource"),
        ("data:text/plain,GGUF", "UnsupportedSource"),
        ("javascript://x", "UnsupportedSource"),
        ("file://", "InvalidModel"),
        ("file://host/m", "InvalidModel"),
        ("file://[x/m", "InvalidModel"),
        ("file:///a%00b", "InvalidSpec"),
        ("/a\0b", "InvalidSpec"),
        ("/\ud800", "InvalidSpec"),
        ("http://", "InvalidModel"),
        ("http:///m", "InvalidModel"),
        ("http://[::1/m", "InvalidModel"),
        ("http://h:99999/m", "InvalidModel"),
        ("http://h:x/m", "InvalidModel"),
        ("http://u:p@h/m", "InvalidModel"),
        ("http://token@h/m", "InvalidModel"),
        ("http://h/\x1b[31m", "InvalidModel"),
        ("http://h/a\nb", "InvalidModel"),
        ("hf://O", "InvalidModel"),
        ("hf://datasets/x", "InvalidModel"),
        ("hf://buckets/o/r", "InvalidModel"),
        ("datasets/x", "InvalidModel"),
        ("hf://O/R@/m", "InvalidModel"),
        ("hf://O/R/../../m", "InvalidSpec"),
        ("hf://O/R/%2e%2e%2fm", "InvalidSpec"),
        ("hf://../R", "InvalidModel"),
        ("s3://B/m", "InvalidModel"),
        ("s3://bucket", "InvalidModel"),
    ],
)
def test_what_cannot_be_fetched_is_refused_by_its_field(written: str, reason: str) -> None:
    with pytest.raises(Bad) as caught:
        canonical(written, "spec.draft")
    assert caught.value.reason == reason
    assert "spec.draft" in caught.value.message and caught.value.message.isprintable()


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("~/m.gguf", "begins with ~"),
        ("~user/m.gguf", "begins with ~"),
        ("C:\\models\\m.gguf", "Windows path"),
        ("C:/models/m.gguf", "Windows path"),
        ("\\\\server\\share\\m.gguf", "Windows path"),
        ("models\\m.gguf", "Windows"),
    ],
)
def test_a_path_that_no_mac_has_is_named(written: str, says: str) -> None:
    with pytest.raises(Bad) as caught:
        canonical(written)
    assert caught.value.reason == "UnsupportedSource" and says in caught.value.message


@pytest.mark.parametrize(
    "name",
    [
        "X.gguf.part1of2",
        "X.gguf.part-a",
        "X.gguf.partaa",
        "X.gguf-split-a",
        "X.gguf.001",
        "X.gguf.part2",
        "X.GGUF.01",
    ],
)
@pytest.mark.parametrize("where", ["/a b/", "file:///a/", "hf://O/R/", "https://h/", "s3://bucket/"])
def test_the_pieces_of_a_file_are_to_be_joined(name: str, where: str) -> None:
    with pytest.raises(Bad) as caught:
        canonical(where + name)
    whole = name[: len("X.gguf")]
    assert f"is a piece of {whole}; join the pieces in their order: cat {name} … > {whole}" in caught.value.message


@pytest.mark.parametrize("name", ["X.gguf.bak", "X.gguf.part", "X.Q4.gguf", "X.part1.gguf", "x-001", "X.gguf.partial"])
def test_what_is_no_piece_is_not_taken_for_one(name: str) -> None:
    assert canonical(f"/a/{name}") == f"/a/{name}"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("hf://O/R:Q4_K_M", ("hf://O/R", "Q4_K_M")),
        ("hf://O/R@v1:IQ2_XS", ("hf://O/R@v1", "IQ2_XS")),
        ("O/R:Q8_0", ("O/R", "Q8_0")),
        ("hf://O/R/m.gguf", ("hf://O/R/m.gguf", "")),
        ("hf://O/R/a:b", ("hf://O/R/a:b", "")),
        ("hf://O/R:", ("hf://O/R:", "")),
        ("hf://O/R:../x", ("hf://O/R:../x", "")),
        ("http://h:80", ("http://h:80", "")),
    ],
)
def test_a_repository_may_name_its_quantization(written: str, expected: tuple[str, str]) -> None:
    assert without_quantization(written) == expected


def test_a_quantization_in_other_letters_is_the_same_files() -> None:
    spelt = [read_artifact({"spec": {"source": "hf://O/R", "quantization": each}}) for each in ("Q4_K_M", "q4_k_m")]
    spelt.append(read_artifact({"spec": {"source": "hf://O/R:q4_K_m"}}))
    assert len(set(spelt)) == len({each.slot for each in spelt}) == 1


def test_a_named_quantization_is_that_of_the_field() -> None:
    named = read_artifact({"spec": {"source": "hf://O/R:Q4_K_M"}})
    field = read_artifact({"spec": {"source": "hf://O/R", "quantization": "Q4_K_M"}})
    assert named == field == read_artifact({"spec": {"source": "hf://O/R:Q4_K_M", "quantization": "q4_k_m"}})


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"quantization": "Q8_0"}, "spec.quantization 'Q8_0'; remove one"),
        ({"files": ["m.gguf"]}, "beside spec.files; remove it"),
        ({"format": "mlx"}, "beside a spec.format that is a directory; remove it"),
    ],
)
def test_a_named_quantization_beside_what_contradicts_it_is_refused(more: dict[str, object], says: str) -> None:
    with pytest.raises(Bad) as caught:
        read_artifact({"spec": {"source": "hf://O/R:Q4_K_M", **more}})
    assert "spec.source" in caught.value.message and says in caught.value.message


@pytest.mark.parametrize("written", ["http://user:hunter2@h/m?sig=hunter2", "http://[hunter2/m?sig=hunter2"])
def test_no_secret_of_a_url_is_in_a_refusal(written: str) -> None:
    with pytest.raises(Bad) as caught:
        canonical(written)
    assert "sig=" not in caught.value.message
    assert "user" not in written or "hunter2" not in caught.value.message


PARTS = st.sampled_from(
    [
        "http://",
        "https://",
        "hf://",
        "s3://",
        "file://",
        "HTTP://",
        "pvc://",
        "/",
        "//",
        "huggingface.co",
        "hf.co/",
        "h",
        ":80",
        ":443",
        ":",
        "@",
        "@main",
        "O",
        "R",
        "O/R",
        "models/",
        "datasets/",
        "spaces/",
        "resolve/",
        "blob/",
        "tree/",
        "main/",
        "refs/pr/1/",
        "m.gguf",
        "m-00002-of-00003.gguf",
        "%2F",
        "%2e%2e",
        "..",
        ".",
        "%",
        "%00",
        "%25",
        "%ff",
        "?",
        "#",
        "a=b",
        "[",
        "]",
        "[::1]",
        "\\",
        " ",
        "\n",
        "\t",
        "\0",
        "\x1b",
        "\u202e",
        "ü",
        "\ud800",
        "🦙",
        "ollama.com/",
        "library/",
        "x:latest",
        "localhost",
        "bucket",
    ]
)


@settings(max_examples=cases(2000))
@example("http://ollama.com/huggingface.co?")
@given(st.one_of(st.lists(PARTS, max_size=9).map("".join), st.text(max_size=40)))
def test_a_spelling_is_its_own_spelling_and_nothing_raises_but_a_refusal(written: str) -> None:
    try:
        once = canonical(written)
    except Bad as bad:
        assert bad.message and bad.reason
        return
    assert canonical(once) == once
    assert is_file(once) in (True, False) and shown(once) is not None
    if parts := hub_parts(once):
        assert ".." not in parts[2].split("/") or canonical(once)


@settings(max_examples=500)
@given(
    st.sampled_from(["/d/m.gguf", "hf://O/R@main/q/m.gguf", "http://h/d/m.gguf?x=1", "s3://bucket/d/m.gguf"]),
    st.one_of(st.lists(PARTS, max_size=5).map("".join), st.text(max_size=20)),
)
def test_what_is_beside_a_source_stays_there(source: str, name: str) -> None:
    try:
        found = beside(source, name, "spec.mmproj")
    except Bad as bad:
        assert bad.message
        return
    if parts := hub_parts(source):
        found_parts = hub_parts(found)
        assert found_parts is not None and found_parts[:2] == parts[:2]
    else:
        assert found.startswith(source[: source.rindex("/") + 1])


def test_a_name_beside_a_file_of_the_hub_is_taken_as_it_is() -> None:
    found = hub_parts(beside("hf://O/R@a%252Fb/m.gguf", "100%25.gguf", "spec.mmproj"))
    assert found == ("O/R", "a%2Fb", "100%25.gguf")
