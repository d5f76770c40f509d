"""Models that a shared daemon serves, seen like engines of their own: by their attendants, and by the daemon.

supervisord knows a model's attendant, and what answers is the daemon. So a model lives while both do, is ready once its
attendant has it loaded and the daemon says so too, and holds its share of the daemon's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from metal_supervisor.memory.machine_memory import Held
from metal_supervisor.sidecar.probes import ProbeFinding
from metal_supervisor.spec.attachment import Attachment, Phase
from metal_supervisor.spec.types import Observed, Record

UNREACHABLE = "DaemonUnreachable: "


def pids_with_daemons(records: Mapping[str, Record], pids: Mapping[str, int]) -> dict[str, int]:
    """Pids by program; a model whose daemon is gone is gone, whatever its attendant does. A user's own is not seen."""
    gone = {name for name, record in records.items() if record.is_daemon and record.spec_file and not pids[name]}
    return {name: 0 if records[name].daemon in gone else pid for name, pid in pids.items()}


def is_asked(record: Record, attachment: Attachment | None, pid: int) -> bool:
    """Whether a model's daemon may be asked for it: before it is attached, that would load whatever has its name."""
    return not record.daemon or (
        attachment is not None and attachment.pid == pid and attachment.phase is Phase.ATTACHED
    )


def judged(
    record: Record, finding: ProbeFinding, attachment: Attachment | None, pid: int, daemon: Observed | None
) -> ProbeFinding:
    """What is found of a model: ready only while its attendant has it attached, and never hung by itself.

    `daemon`: what was seen of a daemon of ours, which is known to be whoever answers at its port.
    """
    if daemon is not None and not daemon.ready:
        return replace(finding, ready=False, message=f"{record.daemon}: {daemon.message or 'it is not up'}", hung="")
    if not is_asked(record, attachment, pid):
        ours = attachment if attachment is not None and attachment.pid == pid else None
        why = ours.message if ours is not None else "its attendant is starting"
        return replace(finding, ready=False, message=why, hung="")
    return replace(finding, hung="")


def share(record: Record, held: Held | None, records: Iterable[Record]) -> Held | None:
    """A model's share of what its daemon holds, as it was estimated."""
    if held is None or not record.daemon:
        return held
    total = sum(each.reserved_bytes for each in records if each.daemon == record.daemon and each.runs)
    part = record.reserved_bytes / total if total else 0.0
    return replace(held, charged_bytes=int(held.charged_bytes * part), rss_bytes=int(held.rss_bytes * part))
