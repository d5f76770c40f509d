"""Which faults, at which service or process, when: drawn from a seed and nothing else.

The whole sequence is drawn before the first fault, so one seed is one sequence, whatever the machine does. What a
fault needs (a pid, a port) is looked up when it is due; one that then finds nothing to act upon is reported as such.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

CALM = ("real-calm", "fake-calm")
"""Stream all the while, and nothing is done to them that could excuse a cut."""
PREY = ("real-prey", "fake-one", "fake-two")
FAKE_PREY = ("fake-one", "fake-two")
ANY = (*CALM, *PREY)
EXTRAS = ("fake-new-0", "fake-new-1", "fake-new-2")
ROLES = ("controller", "sidecar", "apiserver", "supervisord")
TERMINATED = ("controller", "sidecar", "apiserver", "gateway", "gateway-holder")
"""Programs that supervisord restarts after a TERM; supervisord itself stops the whole system."""
API_FAULTS = ("500", "409", "hang", "drop-watches", "garbage", "expire", "latency", "503-writes")
ENGINE_FAULTS = ("hang", "html", "never_ready", "ignore_term", "flood_lines_per_s")
CACHES_MIB = ("16", "64", "112", "192", "256", "800")
"""For `--cache-ram`, which is charged whole: with the last, one service alone is more than the budget."""
# Between the boot after a killed supervisord, which knows the survivors, and the launchers that stand in for them, the
# notes must not go: without its note a launcher finds its port taken by nobody it knows, the service moves to another
# port, and a second engine starts. Until launchers ask who holds their port, they are left alone that long.
REST_AFTER_A_BOOT_S = 10.0
RESTING = ("runs",)
# A third crash within ten minutes is held for 20 s, a fourth for 40: right, and too slow to wait for.
MOST_CRASHES = 2


@dataclass(frozen=True)
class Kind:
    """One way to do harm."""

    name: str
    weight: int
    targets: tuple[str, ...]
    lasts_s: tuple[float, float] = (0.0, 0.0)
    """How long until it is undone; (0, 0) if there is nothing to undo."""
    hurts: bool = False
    """Whether its service may be restarted for it, which excuses a cut."""
    crashes: bool = False
    variants: tuple[str, ...] = ("",)


KINDS = (
    Kind("kill", 14, ROLES),
    Kind("term", 8, TERMINATED),
    Kind("freeze", 8, ROLES, (1.0, 4.0)),
    Kind("kill-engine", 6, PREY, hurts=True, crashes=True),
    Kind("freeze-engine", 3, PREY, (1.0, 4.0), hurts=True),
    Kind("exit-engine", 2, FAKE_PREY, hurts=True, crashes=True),
    Kind("engine-fault", 5, FAKE_PREY, (1.5, 4.0), hurts=True, variants=ENGINE_FAULTS),
    Kind("api-fault", 6, ("apiserver",), (1.0, 4.0), variants=API_FAULTS),
    Kind("apply", 9, EXTRAS, hurts=True),
    Kind("delete", 4, EXTRAS, hurts=True),
    Kind("recreate", 2, PREY, (0.5, 4.0), hurts=True),
    Kind("edit-argv", 5, PREY, hurts=True),
    Kind("edit-size", 10, (*PREY, *EXTRAS), hurts=True, variants=CACHES_MIB),
    Kind("edit-priority", 4, (*ANY, *EXTRAS), variants=("low", "normal", "high")),
    Kind("suspend", 3, PREY, (2.0, 6.0), hurts=True),
    Kind("scale-to-zero", 3, PREY, (2.0, 6.0), hurts=True),
    Kind("hide-model", 3, ("loose",), (2.0, 5.0)),
    Kind("ctl-stop", 2, PREY, (2.0, 5.0), hurts=True),
    Kind("ctl-restart", 2, PREY, hurts=True),
    Kind("ctl-remove", 2, PREY, (2.0, 5.0), hurts=True),
    Kind("ctl-update", 2, ("all",)),
    Kind("lose", 5, ANY, variants=("records", "observed")),
    Kind("corrupt", 5, ANY, variants=("records", "observed")),
    Kind("lose", 4, PREY, hurts=True, variants=("models.d", "runs", "specs")),
    Kind("corrupt", 4, PREY, hurts=True, variants=("models.d", "runs", "specs")),
    Kind("restore-api", 2, ("apiserver",), (2.0, 6.0)),
    Kind("start-copy", 2, ("state",), (2.0, 5.0)),
    Kind("foreign-file", 2, ("models.d",), variants=("no-header", "binary", "sneaky")),
)


@dataclass(frozen=True)
class Fault:
    """One fault of the sequence."""

    round: int
    at_s: float
    """Seconds since its round began."""
    kind: Kind
    target: str
    variant: str
    lasts_s: float
    """0: not to be undone; inf: stays over the next checkpoint."""

    def __str__(self) -> str:
        what = f" {self.variant}" if self.variant else ""
        text = f"{self.kind.name}{what} {self.target}"
        if self.lasts_s > 1e6:
            return f"{text} until after the checkpoint"
        return f"{text} for {self.lasts_s:.1f} s" if self.lasts_s else text


def sequence(seed: int, seconds: float, every_s: float) -> list[list[Fault]]:
    """The faults of every round, each round at most `every_s` long."""
    draw = random.Random(seed)
    rounds: list[list[Fault]] = []
    crashes = dict.fromkeys(PREY, 0)
    left_s = seconds
    while left_s > 0.5:
        length_s = min(every_s, left_s)
        left_s -= length_s
        rounds.append(_round(draw, len(rounds), length_s, crashes))
    return rounds


def _round(draw: random.Random, number: int, length_s: float, crashes: dict[str, int]) -> list[Fault]:
    found: list[Fault] = []
    at_s, booted_s = 0.0, float("-inf")
    while (at_s := at_s + draw.uniform(0.2, 1.8)) < length_s:
        kind = draw.choices(KINDS, [kind.weight for kind in KINDS])[0]
        target, variant = draw.choice(kind.targets), draw.choice(kind.variants)
        lasts_s = round(draw.uniform(*kind.lasts_s), 1)
        if kind.name in ("suspend", "scale-to-zero") and draw.random() < 0.25:
            lasts_s = float("inf")
        if (kind.name, target) == ("kill", "supervisord"):
            booted_s = at_s
        elif variant in RESTING and at_s - booted_s < REST_AFTER_A_BOOT_S:
            continue
        if kind.crashes:
            if crashes[target] >= MOST_CRASHES:
                continue
            crashes[target] += 1
        elif kind.name == "recreate":
            crashes[target] = 0  # a new spec forgets them as well, but an edit may have to wait for memory
        found.append(Fault(number, round(at_s, 2), kind, target, variant, lasts_s))
    return found
