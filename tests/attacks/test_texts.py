"""Control sequences in what model files, engines and servers write: none reaches a terminal through kubectl."""

from __future__ import annotations

import struct
import unicodedata
from pathlib import Path

import pytest
import tiny_gguf
from hypothesis import given
from hypothesis import strategies as st

from metal_supervisor.cluster.manifests import event_object, model_status, own_status, status
from metal_supervisor.cluster.report import Happening, report
from metal_supervisor.models.headers import read_file
from metal_supervisor.spec.processes import Observed
from metal_supervisor.spec.record import Record, Verdict
from metal_supervisor.spec.types import Json, ModelFile, Standing
from tests.support.records import a_record

AT = "2026-01-01T00:00:00Z"
SEQUENCES = (
    "\x1b]0;title\x07",
    "\x1b[2J\x1b[31m",
    "\x9b31m",
    "\u202egnp.exe",
    "\u2066hidden\u2069",
    "line\r\nagain",
    "\x00\x7f",
)
HOSTILE = st.text(st.characters() | st.sampled_from("\x1b\x07\x9b\u202e\r\n\x00"), max_size=40) | st.sampled_from(
    SEQUENCES
)


def texts(item: object) -> list[str]:
    """Every text in a JSON value."""
    if isinstance(item, dict):
        return [text for each in item.values() for text in texts(each)]
    if isinstance(item, list):
        return [text for each in item for text in texts(each)]
    return [item] if isinstance(item, str) else []


def harmless(body: Json) -> bool:
    """True if no text of an object has a control character besides a line's end, nor a mark of direction."""
    return all(char == "\n" or unicodedata.category(char) not in ("Cc", "Cf") for text in texts(body) for char in text)


@pytest.mark.parametrize("standing", Standing)
@given(text=HOSTILE)
def test_no_condition_and_no_event_has_a_control_sequence(standing: Standing, text: str) -> None:
    record: Record = a_record(
        verdict=Verdict(standing, "Reason", text, 1.0),
        warning=("Reason", text),
        pressure=("Warning", text),
        evicted_why=text,
        unconfined=text,
    )
    seen = Observed(record.program, 7, False, 1.0, "RUNNING")
    for observed in (None, seen):
        told = report(record, observed)
        assert harmless(status(record, told, {}, AT))
        assert harmless(own_status(record, told, {}, AT, text))
    assert harmless(event_object(record, Happening("Warning", "Crashed", text), "mac", AT))
    assert harmless(model_status(ModelFile("Failed", reason="Reason", message=text), "x", 1, {}, AT))


@pytest.mark.parametrize("text", [*SEQUENCES, "LLaMA", "two words", "x" * 65, ""], ids=ascii)
def test_an_architecture_is_a_plain_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.gguf"
    tiny_gguf.write_tiny_gguf(path)
    data, key = path.read_bytes(), b"general.architecture"
    start = data.index(key) + len(key) + 4
    (size,) = struct.unpack_from("<Q", data, start)
    raw = text.encode()
    path.write_bytes(data[:start] + struct.pack("<Q", len(raw)) + raw + data[start + 8 + size :])
    error = read_file(path).problem
    assert "general.architecture must be a name" in error and harmless({"error": error})
