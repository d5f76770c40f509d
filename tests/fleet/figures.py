"""Figures of a fleet, as a table with the aims beside them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Span:
    """What a span of time cost."""

    seconds: float = 0.0
    macs: int = 1
    requests: Counter[str] = field(default_factory=Counter)
    """Answered requests of all Macs, by verb and resource."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """Process -> CPU seconds."""

    @property
    def minutes(self) -> float:
        return self.seconds / 60

    def a_mac(self, count: float) -> float:
        """So many requests, per Mac and minute."""
        return count / self.macs / self.minutes

    def percent(self, process: str) -> float:
        """Share of a core that a process took."""
        return 100 * self.cpu_s.get(process, 0.0) / self.seconds

    def cpu(self) -> str:
        """Shares of a core, for people."""
        return ", ".join(f"{name} {self.percent(name):.1f} %" for name in self.cpu_s)


@dataclass
class Figures:
    """All of them, of one run."""

    macs: int
    services: int
    namespaces: int
    lease_s: float
    claimed_s: float = 0.0
    """From the start of the first Mac until each slot had been claimed once."""
    ready_s: float = 0.0
    """Until all statuses said Ready."""
    cold: Span = field(default_factory=Span)
    """Until all were claimed."""
    claims: int = 0
    """Changes of a slot's holder until all were Ready."""
    refused_claims: int = 0
    rest: Span = field(default_factory=Span)
    restart: Span = field(default_factory=Span)
    restart_worst: tuple[int, int] = (0, 0)
    restart_moves: int = 0
    edit_s: float = 0.0
    edit: Span = field(default_factory=Span)
    moved_s: float = 0.0
    withdrawn_s: float = 0.0
    vanished: int = 0
    lost_slots: int = 0
    vanish: Span = field(default_factory=Span)
    vanish_worst: tuple[int, int] = (0, 0)
    cold_worst: tuple[int, int] = (0, 0)
    living_moves: int = 0
    """Slots of living Macs that moved when others vanished."""
    overlaps: list[str] = field(default_factory=list)
    """Slots that two living Macs held at once."""
    errors: list[str] = field(default_factory=list)
    """Passes that failed."""
    passes_a_minute: float = 0.0
    """Passes of a Mac at rest."""

    @property
    def heartbeats(self) -> int:
        """Requests at rest that write a slice: one for each service and minute is LLMKube's contract."""
        return self.rest.requests["patch endpointslices"]

    @property
    def beside_heartbeats(self) -> float:
        """Requests per Mac and minute at rest, without the heartbeats."""
        return self.rest.a_mac(sum(self.rest.requests.values()) - self.heartbeats)

    def heartbeats_a_minute(self) -> float:
        """Per service."""
        return self.heartbeats / self.services / self.rest.minutes

    def lines(self) -> list[tuple[str, str, str]]:
        """(what, figure, aim)."""
        term = f"{self.lease_s + 10:.0f} s"
        single, together = self.restart_worst
        cold_single, cold_together = self.cold_worst
        return [
            ("cold start: all claimed", f"{self.claimed_s:.1f} s", "30 s"),
            ("  all Ready", f"{self.ready_s:.1f} s", ""),
            ("  requests until all claimed, per service", f"{_sum(self.cold) / self.services:.1f}", ""),
            ("  claims that another Mac had made first", f"{self.refused_claims}", ""),
            ("  worst second: one Mac; mean of all", f"{cold_single}; {cold_together / self.macs:.1f}", ""),
            ("  CPU", self.cold.cpu(), ""),
            ("rest: requests per Mac and minute, without heartbeats", f"{self.beside_heartbeats:.2f}", "10"),
            ("  heartbeats per service and minute", f"{self.heartbeats_a_minute():.2f}", "1"),
            ("  passes per Mac and minute", f"{self.passes_a_minute:.0f}", ""),
            ("  CPU", self.rest.cpu(), ""),
            ("API server restarts: worst second: one Mac; mean of all", f"{single}; {together / self.macs:.1f}", "20"),
            ("  requests per Mac within a minute", f"{_sum(self.restart) / self.restart.macs:.1f}", ""),
            ("  slots that moved", str(self.restart_moves), "0"),
            ("  CPU", self.restart.cpu(), ""),
            (f"{self.services} Models edited: written within", f"{self.edit_s:.1f} s", ""),
            ("  requests per Mac, without rest", f"{self._beyond_rest(self.edit):.1f}", ""),
            ("  CPU", self.edit.cpu(), ""),
            (f"{self.vanished} Macs vanish: their {self.lost_slots} slots moved", f"{self.moved_s:.1f} s", term),
            ("  their endpoints withdrawn", f"{self.withdrawn_s:.1f} s", ""),
            ("  requests per living Mac, without rest", f"{self._beyond_rest(self.vanish):.1f}", ""),
            (
                "  worst second: one Mac; mean of all",
                f"{self.vanish_worst[0]}; {self.vanish_worst[1] / self.vanish.macs:.1f}",
                "",
            ),
            ("  CPU", self.vanish.cpu(), ""),
            ("  slots of living Macs that moved", str(self.living_moves), "0"),
            ("slots held by two living Macs at once", str(len(self.overlaps)), "0"),
            ("passes that failed", str(len(self.errors)), "0"),
        ]

    def _beyond_rest(self, span: Span) -> float:
        """Requests per Mac in a span, without those that rest would have cost."""
        at_rest = _sum(self.rest) / self.rest.macs / self.rest.seconds * span.seconds if self.rest.seconds else 0.0
        return _sum(span) / span.macs - at_rest

    def table(self) -> str:
        """All of it, for people."""
        head = f"{self.macs} Macs, {self.services} services in {self.namespaces} namespaces, term {self.lease_s:.0f} s"
        rows = [f"{what:<58} {figure:<28} {aim and 'aim ' + aim}".rstrip() for what, figure, aim in self.lines()]
        return "\n".join([head, *rows, "", *self._by_resource()])

    def _by_resource(self) -> list[str]:
        """Requests by verb and resource: per Mac and minute at rest, else per Mac."""
        spans = {
            "cold": self.cold,
            "rest/min": self.rest,
            "restart": self.restart,
            "edit": self.edit,
            "vanish": self.vanish,
        }
        names = sorted({name for span in spans.values() for name in span.requests})
        head = f"{'requests of a Mac':<34}" + "".join(f"{name:>10}" for name in spans)
        rows = []
        for name in names:
            values = [
                span.requests[name] / span.macs / (span.minutes if at == "rest/min" else 1) if span.seconds else 0.0
                for at, span in spans.items()
            ]
            rows.append(f"{name:<34}" + "".join(f"{value:>10.2f}" for value in values))
        return [head, *rows]


def _sum(span: Span) -> int:
    return sum(span.requests.values())
