"""Geometry of the page's memory bar: as long as the budget, with a piece for each service charged to it.

Only numbers and names; the page decides how it looks. Services beyond the number of distinguishable colours share one
piece.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from metal_supervisor.sidecar.board import Board, Row
from metal_supervisor.spec.document import mapping, whole

LENGTH = 1000
"""Length of the bar, in units of the drawing."""
MOST_PIECES = 8


@dataclass(frozen=True)
class BarPiece:
    """A part of the bar."""

    name: str
    services: int
    """Number of services in the piece; 0: charged to none."""
    charged_bytes: int
    measured_bytes: int
    start: float = 0.0
    """Position in the bar."""
    width: float = 0.0
    measured_width: float = 0.0
    """The part of `width` that the measured footprint fills."""


@dataclass(frozen=True)
class Picture:
    """The whole bar."""

    budget_bytes: int
    charged_bytes: int
    measured_bytes: int
    left_bytes: int
    """Negative if more is charged than the budget."""
    limit: float
    """Position in the bar at which the budget ends."""
    pieces: tuple[BarPiece, ...]


def charge_bytes(row: Row) -> int:
    """Bytes charged to a service, as in the ledger: 0 for one that neither runs nor may run."""
    record, observed = row.record, row.observed
    return max(record.reserved_bytes, observed.memory_bytes) if record.runs or observed.pid else 0


def picture(board: Board) -> Picture | None:
    """The bar for a board, None while the controller has reported no budget."""
    told = mapping(board.controller, "memory")
    budget = whole(told, "budget")
    if not budget:
        return None
    pieces = _pieces(board.rows)
    of_services = sum(each.charged_bytes for each in pieces)
    charged = max(whole(told, "charged"), of_services)
    if beside := charged - of_services:
        pieces.append(BarPiece("charged beside them", 0, beside, 0))
    scale = LENGTH / max(budget, charged)
    measured = sum(each.measured_bytes for each in pieces)
    return Picture(budget, charged, measured, budget - charged, budget * scale, tuple(_placed(pieces, scale)))


def _pieces(rows: Iterable[Row]) -> list[BarPiece]:
    """One piece per charged service, the largest first; those beyond MOST_PIECES share the last one."""
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
        yield replace(each, start=start, width=width, measured_width=measured)
        start += width
