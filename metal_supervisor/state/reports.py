"""Readers of the small JSON files that other processes keep in the state directory, first of all the controller's."""

from __future__ import annotations

import json
from pathlib import Path

from metal_supervisor.spec.document import Json

CONTROLLER_REPORT = "controller.json"


def read_object(path: Path) -> Json:
    """The JSON object in a file, {} if it cannot be read."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def controller_report(state: Path) -> Json:
    """The controller's report, {} without one."""
    return read_object(state / CONTROLLER_REPORT)
