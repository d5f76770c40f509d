"""docs/quickstart.md's recording, made again on a pseudo terminal: the same lines, whatever their seconds are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support import parts, ports
from tests.support.finders import find_gemma
from tests.support.pages import quickstart
from tests.support.system import ROOT, System, free_ports

PAGE = (ROOT / "docs" / "quickstart.md").read_text("utf-8")


@pytest.fixture
def settings() -> Iterator[Mapping[str, str]]:
    """Ports that no other test has: the page's are the default ones."""
    http, gateway = free_ports(2)
    engines = ports.Range()
    yield {
        "METAL_SUPERVISOR_PORT": str(http),
        "METAL_SUPERVISOR_GATEWAY": f"127.0.0.1:{gateway}",
        "METAL_SUPERVISOR_PORTS": f"{engines.first}-{engines.last}",
    }
    engines.release()


def outline(text: str) -> set[str]:
    """The lines of a recording without what differs from run to run: seconds, process ids, ports, waiting.

    Without their order: on a slow machine the commands that need no model are told before it is Ready, and an
    InferenceService may be seen before its Model, or without it for a moment when both are removed.
    """
    recording = text.partition(quickstart.BEGIN)[2].partition(quickstart.END)[0].partition("```\n\n")[0]
    lines = re.sub(r"(?<=:)\d{4,5}\b|(?<=pid )\d+|\d+\.\d+(?=s )", "N", recording).splitlines()
    kept = [line for line in lines if not re.search(r" (Pending|Creating) |, trained for | Model not found: ", line)]
    return {line.strip().removeprefix("try   ") for line in kept}


@pytest.mark.parametrize("real", [False, True], ids=["tiny", "gemma"])
def test_the_recording_is_what_happens(real: bool, settings: Mapping[str, str], tmp_path: Path) -> None:
    """From a file to the first token and back, and the page that is written from it."""
    model = parts.found(find_gemma.find) if real else System(tmp_path).tiny
    with quickstart.home(model) as base:
        lap = quickstart.lap(base, settings)
    assert lap.answer.strip()
    assert real == ("gemma3, 241 MiB, trained for 32768 tokens" in lap.text)
    made = quickstart.page(PAGE, [lap])
    assert outline(made) == outline(PAGE) and len(outline(PAGE)) > 15
    for part in (0, 2):
        kept = [re.split(f"{quickstart.BEGIN}|{quickstart.END}", each)[part] for each in (made, PAGE)]
        assert kept[0] == kept[1], "the rest of the page stays"
