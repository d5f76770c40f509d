"""The memory ledger as a picture: a bar as long as the budget, with a piece for each service that is charged to it.

Only numbers and names leave here: how it looks is the page's business. More services than a person can tell apart by
colour are drawn as one piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from metal_supervisor.sidecar.board import Board, Row
from metal_supervisor.spec.types import Json

LENGTH = 1000
"""Of the bar, in the units of the drawing."""
MOST_PIECES = 8


@dataclass(frozen=True)
class BarPiece:
    """A part of the bar."""

    name: str
    services: int
    """How many it stands for; 0: not for a service."""
    charged_bytes: int
    measured_bytes: int
    start: float = 0.0
    """Where it begins in the bar."""
    width: float = 0.0
    measured_width: float = 0.0
    """Of that, what is held by measurement."""


@dataclass(frozen=True)
class Picture:
    """The whole bar."""

    budget_bytes: int
    charged_bytes: int
    measured_bytes: int
    left_bytes: int
    """Negative if more is charged than there is."""
    limit: float
    """Where in the bar the budget ends."""
    pieces: tuple[BarPiece, ...]


def charge_bytes(row: Row) -> int:
    """What a service counts for: as the ledger has it, 0 for one that neither runs nor may."""
    record, observed = row.record, row.observed
    return max(record.room_bytes, observed.memory_bytes) if record.runs or observed.pid else 0


def picture(board: Board) -> Picture | None:
    """The picture of a board, None while the controller has told of no budget."""
    told = board.controller.get("memory")
    budget = _bytes(told, "budget")
    if not budget:
        return None
    pieces = _pieces(board.rows)
    charged = max(_bytes(told, "charged"), sum(each.charged_bytes for each in pieces))
    if beside := charged - sum(each.charged_bytes for each in pieces):
        pieces.append(BarPiece("charged beside them", 0, beside, 0))
    scale = LENGTH / max(budget, charged)
    measured = sum(each.measured_bytes for each in pieces)
    return Picture(budget, charged, measured, budget - charged, budget * scale, tuple(_placed(pieces, scale)))


def _bytes(told: object, name: str) -> int:
    """A number of a report that may be of another version."""
    value = told.get(name) if isinstance(told, dict) else 0
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _pieces(rows: Iterable[Row]) -> list[BarPiece]:
    """The largest first, and one for all that are too many."""
    found = [
        BarPiece(f"{row.record.namespace}/{row.record.key[1]}", 1, charge_bytes(row), row.observed.memory_bytes)
        for row in rows
        if charge_bytes(row)
    ]
    found.sort(key=lambda piece: (-piece.charged_bytes, piece.name))
    if len(found) <= MOST_PIECES:
        return found
    shown, rest = found[: MOST_PIECES - 1], found[MOST_PIECES - 1 :]
    charged, measured = sum(each.charged_bytes for each in rest), sum(each.measured_bytes for each in rest)
    return [*shown, BarPiece(f"{len(rest)} others", len(rest), charged, measured)]


def _placed(pieces: Iterable[BarPiece], scale: float) -> Iterable[BarPiece]:
    start = 0.0
    for each in pieces:
        width = each.charged_bytes * scale
        measured = min(each.measured_bytes, each.charged_bytes) * scale
        yield BarPiece(each.name, each.services, each.charged_bytes, each.measured_bytes, start, width, measured)
        start += width


def pressure(board: Board) -> Json:
    """What the controller says of the machine's memory, {} if nothing."""
    told = board.controller.get("memory")
    return told if isinstance(told, dict) else {}
