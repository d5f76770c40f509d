"""Models on a shared daemon, observed like engines of their own: by their attachers, and by the daemon.

supervisord runs a model's attacher, and the daemon answers requests. So a model lives while both do, is ready once its
attacher has it loaded and the daemon confirms that, and is charged its share of the daemon's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from metal_supervisor.memory.machine_memory import Held
from metal_supervisor.sidecar.probes import ProbeFinding
from metal_supervisor.spec.attachment import Attachment, Phase
from metal_supervisor.spec.processes import Observed
from metal_supervisor.spec.record import Record

UNREACHABLE = "DaemonUnreachable: "


def pids_with_daemons(records: Mapping[str, Record], pids: Mapping[str, int]) -> dict[str, int]:
    """Pids by program; 0 for a model whose supervised daemon is gone, whatever its attacher does.

    A daemon that the user runs is not supervised, and has no pid here.
    """
    gone = {name for name, record in records.items() if record.is_daemon and record.edition and not pids[name]}
    return {name: 0 if records[name].daemon in gone else pid for name, pid in pids.items()}


def is_asked(record: Record, attachment: Attachment | None, pid: int) -> bool:
    """True if the model may be probed: on a daemon only once attached, or the probe would load any model so named."""
    return not record.daemon or (
        attachment is not None and attachment.pid == pid and attachment.phase is Phase.ATTACHED
    )


def judged(
    record: Record, finding: ProbeFinding, attachment: Attachment | None, pid: int, daemon: Observed | None
) -> ProbeFinding:
    """The finding for a model: ready only while its attacher has it attached, and never hung by itself.

    `daemon`: observation of a supervised daemon, which is known to hold its port; None if the user runs the daemon.
    """
    if daemon is not None and not daemon.ready:
        return replace(finding, ready=False, message=f"{record.daemon}: {daemon.message or 'it is not up'}", hung="")
    if not is_asked(record, attachment, pid):
        ours = attachment if attachment is not None and attachment.pid == pid else None
        why = ours.message if ours is not None else "its attacher is starting"
        return replace(finding, ready=False, message=why, hung="")
    return replace(finding, hung="")


def share(record: Record, held: Held | None, records: Iterable[Record]) -> Held | None:
    """A model's share of its daemon's footprint, in proportion to the reservations; `held` itself for other engines."""
    if held is None or not record.daemon:
        return held
    total = sum(each.reserved_bytes for each in records if each.daemon == record.daemon and each.runs)
    part = record.reserved_bytes / total if total else 0.0
    return replace(held, charged_bytes=int(held.charged_bytes * part), rss_bytes=int(held.rss_bytes * part))
