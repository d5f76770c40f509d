"""Detection of hung engines: one that does not answer may only be busy, and no answer may be cut short on suspicion.

An engine is hung once it has been silent for a whole timeout in which it either did no work at all, or had no client.
Work is processor time and bytes read and written: it shows on a slow disk, on an overloaded machine and during a long
prompt, but not where the GPU does it all (a Mac). There, and where the server itself still answers, an engine with a
client gets the benefit of the doubt for as long as loading may take. While it loads, an engine has the loading timeout;
then the same applies. Its first answer gets that time once more, as kernels may be compiled for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FAILURES = 3
GAP_S = 15.0
SIGNS_EVERY_S = 1.0
WORKING_SHARE = 0.01
WORKING_BYTES_PER_S = 65536.0


@dataclass(frozen=True)
class HangLimits:
    """Timeouts of an engine."""

    loading_s: float
    """Time that an engine may take to load."""
    silent_s: float
    """Time without an answer and without any sign of work before it counts as hung; 0: unlimited."""


@dataclass(frozen=True)
class LivenessSigns:
    """Signs of work that the system shows of an engine that does not answer."""

    cpu_s: float
    """Processor time that it and its children have used."""
    io_bytes: int
    """Bytes that they have read and written, 0 where the system does not tell."""
    clients: bool
    """It has clients other than us; True when that cannot be seen."""
    halted: bool
    """Stopped by a signal (SIGSTOP, a debugger)."""
    blind: bool = False
    """It may work where that cannot be seen, as on a Mac's GPU."""


@dataclass(frozen=True)
class ProbeResult:
    """Result of one probe of an engine."""

    at: float
    """Seconds of a clock that only goes forward."""
    answers: bool
    """It reports that it can serve, and it is the right engine."""
    turns: bool
    """Its work loop accepts requests; True where that cannot be asked."""
    message: str
    """The problem, "" if there is none."""
    signs: LivenessSigns | None = None
    """None when they were not looked for."""
    asked: bool = False
    """All that is missing is its first answer."""


@dataclass(frozen=True)
class Pulse:
    """Probe history of one engine process."""

    born: float
    ready: bool = False
    served: bool = False
    """It has been ready before."""
    message: str = ""
    failures: int = 0
    """Consecutive probes that found a problem."""
    silent_since: float = 0.0
    moved_at: float = 0.0
    """Time of the latest probe that showed work, or did not look for it."""
    alone_since: float | None = None
    """Time since which it has had no client, None while it has one."""
    signs: LivenessSigns | None = None
    """The latest ones since it fell silent."""
    signs_at: float = 0.0
    last_at: float = 0.0
    answers: bool = False
    """Its server answered the latest probe, though its work loop did not."""
    hung: str = ""
    """Reason why it should be restarted, "" if it should not."""
    asked_at: float | None = None
    """Time from which only its first answer was missing."""

    @property
    def loading_since(self) -> float:
        """Start of its loading timeout."""
        return self.born if self.asked_at is None else self.asked_at


def wants_signs(pulse: Pulse, at: float, limits: HangLimits) -> bool:
    """True if a probe that finds a problem should also look for signs of work, which costs more."""
    matters = pulse.served or at - pulse.loading_since >= limits.loading_s - 2 * limits.silent_s
    return matters and at - pulse.signs_at >= SIGNS_EVERY_S


def heard(pulse: Pulse, look: ProbeResult, limits: HangLimits) -> Pulse:
    """The pulse after one more probe."""
    if look.answers and look.turns:
        return Pulse(pulse.born, ready=True, served=True, last_at=look.at)
    if not pulse.failures:
        pulse = replace(pulse, silent_since=look.at, moved_at=look.at)
    elif (gap := look.at - pulse.last_at - GAP_S) > 0:  # it was not probed meanwhile, so it was not silent
        pulse = _later(pulse, gap)
    if look.asked and pulse.asked_at is None:
        pulse = replace(pulse, asked_at=look.at)
    pulse = replace(pulse, message=look.message, failures=pulse.failures + 1, last_at=look.at, answers=look.answers)
    pulse = replace(pulse, moved_at=look.at) if look.signs is None and pulse.signs is None else pulse
    pulse = _seen(pulse, look.signs, look.at) if look.signs is not None else pulse
    # A work loop may be deep in a long prompt while the server itself answers: that takes longer to doubt.
    lost = look.at - pulse.silent_since >= limits.silent_s / 3 if look.answers else pulse.failures >= FAILURES
    hung = _hung(pulse, limits)
    return replace(pulse, ready=pulse.ready and not (_halted(pulse) or lost or hung), hung=hung)


def _halted(pulse: Pulse) -> bool:
    return pulse.signs is not None and pulse.signs.halted


def _later(pulse: Pulse, gap_s: float) -> Pulse:
    alone = None if pulse.alone_since is None else pulse.alone_since + gap_s
    return replace(
        pulse, silent_since=pulse.silent_since + gap_s, moved_at=pulse.moved_at + gap_s, alone_since=alone, signs=None
    )


def _seen(pulse: Pulse, signs: LivenessSigns, at: float) -> Pulse:
    """The pulse with new signs."""
    before, passed_s = pulse.signs, at - pulse.signs_at
    works = before is None or (
        signs.cpu_s - before.cpu_s >= WORKING_SHARE * passed_s
        or signs.io_bytes - before.io_bytes >= WORKING_BYTES_PER_S * passed_s
    )
    since = at if pulse.alone_since is None else pulse.alone_since
    alone = None if signs.clients else since
    return replace(pulse, signs=signs, signs_at=at, moved_at=at if works else pulse.moved_at, alone_since=alone)


def _hung(pulse: Pulse, limits: HangLimits) -> str:
    if not limits.silent_s:
        return ""
    patient_s = limits.silent_s
    if not pulse.served and pulse.last_at - pulse.loading_since < limits.loading_s:
        return ""
    silent_s = pulse.last_at - pulse.silent_since
    idle_s = pulse.last_at - pulse.moved_at
    alone_s = pulse.last_at - pulse.alone_since if pulse.alone_since is not None else 0.0
    unseen = pulse.served and not _halted(pulse) and (pulse.answers or (pulse.signs is not None and pulse.signs.blind))
    idle = idle_s >= (max(patient_s, limits.loading_s) if unseen else patient_s)
    alone = pulse.served and alone_s >= patient_s
    if silent_s < patient_s or not (idle or alone):
        return ""
    why = "no client is connected to it" if alone else "it does no work"
    if pulse.served:
        return f"{pulse.message} for {silent_s:.0f} s, and {why}"
    return f"not ready {pulse.last_at - pulse.born:.0f} s after its start ({pulse.message}), and {why}"
