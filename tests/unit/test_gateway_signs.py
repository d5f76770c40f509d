"""Signs of life: events that add nothing to an answer."""

from __future__ import annotations

import json

import pytest

from metal_supervisor.gateway import routing
from metal_supervisor.gateway.signs import sign


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions", "/v1/completions"])
def test_an_event_of_openai_has_one_choice_and_no_text(path: str) -> None:
    event = sign(path, "4f", "tiny").decode()
    assert event.startswith("data: ") and event.endswith("\n\n")
    said = json.loads(event[6:])
    (choice,) = said["choices"]
    assert not choice.get("text") and not choice.get("delta") and choice["finish_reason"] is None
    assert (said["id"], said["model"]) == ("4f", "tiny")


def test_one_of_anthropic_is_a_ping() -> None:
    assert sign("/v1/messages", "4f", "tiny") == b'event: ping\ndata: {"type": "ping"}\n\n'


def test_other_paths_have_none() -> None:
    known = {"/v1/chat/completions", "/chat/completions", "/v1/completions", "/v1/messages"}
    assert {path for path in routing.PATHS if sign(path, "4f", "tiny")} == known
