#!/usr/bin/env python3
"""Random faults on a running system for as long as you like, and what must hold while they come.

One real system with services on a real llama-server and on fake_runtime.py, chats that stream all the while,
and faults drawn from a seed: our own processes killed and frozen, engines killed and made to misbehave, specs edited,
services deleted, files lost and corrupted, supervisorctl typed by hand, an API that fails. Every `--every` seconds the
faults stop, everything must converge to what was asked for, and processes, descriptors and files are counted.
soak_check.py says what must hold; the first violation ends the run with exit code 1, the seed and the logs.

    python -m tests.support.soak.soak [--seconds 3600] [--seed N] [--every 30] [--grace 1.0] [--bound 60] [--preemption]
        [--keep-going]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import tiny_gguf

from tests.support.soak import soak_check, soak_faults, soak_memory, soak_plan, soak_quiet
from tests.support.soak.soak_check import Answer, Checker, Excuses, Resources, Violation
from tests.support.soak.soak_faults import Hand, Nothing, Outcome
from tests.support.soak.soak_watch import Api, ApiError, Chat, Scan, Watcher
from tests.support.system import FAKE_ENGINE, SLICES, System, engine_path, free_ports

ROOT = Path(__file__).resolve().parents[3]

LOG_LINES = 25
LAST_FAULTS = 15
QUEUE_EVERY_S = 0.5
STREAMS = {"real-calm": 1000, "fake-calm": 100, "real-prey": 300, "fake-one": 100}
"""Service -> tokens of an answer: each lasts some seconds."""


class Stop(Exception):
    """A violation, or somebody who has seen enough."""


def wrapper(path: Path) -> Path:
    """An engine that is a real llama-server, or for services named `fake-…` a stand-in; its help names both."""
    fake = f"{shlex.quote(sys.executable)} {shlex.quote(str(FAKE_ENGINE))}"
    path.write_text(
        "#!/bin/sh\n"
        f'case " $* " in *" --alias fake-"*) exec {fake} "$@" ;; esac\n'
        f'[ "$1" != --help ] || {fake} --help | sed -n "s/^\\(--fake-[a-z-]*\\).*/\\1 X/p"\n'
        f'exec {shlex.quote(str(engine_path()))} "$@"\n'
    )
    path.chmod(0o755)
    return path


def digests(directory: Path) -> dict[str, str]:
    """What the model store holds."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.glob("*.gguf"))}


class Soak:
    """One run."""

    def __init__(self, base: Path, given: argparse.Namespace) -> None:
        self.given = given
        self.base = base
        self.models = base / "models"
        self.models.mkdir()
        tiny_gguf.write_tiny_gguf(base / "tiny.gguf", context=soak_memory.CALM_CONTEXT)
        self.sizes = soak_memory.Sizes(base / "tiny.gguf")
        self.budget_bytes = self.sizes.budget.bytes
        flags = [*self.sizes.flags, *(["--preemption", "true"] if given.preemption else [])]
        flags = ["--gateway", f"127.0.0.1:{free_ports(1)[0]}", *flags]
        self.system = System(base, *flags, engine=wrapper(base / "engine"))
        self.loose = self.models / "loose.gguf"
        shutil.copy(self.system.tiny, self.models / "tiny.gguf")
        shutil.copy(self.system.tiny, self.loose)
        self.system.tiny = self.models / "tiny.gguf"
        self.store = digests(self.models)
        self.system.state.mkdir(parents=True)
        self.excuses = Excuses()
        self.checker = Checker(given.grace, self.excuses, self.budget_bytes)
        self.queue = soak_memory.Queue()
        api, scan = Api(self.system.kubeconfig), Scan((str(base), self.system.files.home))
        self.watcher = Watcher(scan, api, SLICES, self.system.http, self.checker, self.budget_bytes)
        self.hand = Hand(
            self.system,
            api,
            scan,
            self.watcher,
            self.checker,
            self.excuses,
            self.sizes,
            loose=self.loose,
            preemption=given.preemption,
        )
        self.chats = [Chat(name, self.watcher.engine, tokens, 0.3) for name, tokens in STREAMS.items()]
        self.outcomes: dict[str, Outcome] = {}
        self.violations: list[Violation] = []
        self.checkpoints: list[dict[str, Resources]] = []
        self.converged_s: list[float] = []
        self.last: list[str] = []
        self.began = time.monotonic()
        self._answers_seen: Counter[str] = Counter()
        self._queue_at = 0.0

    def say(self, text: str) -> None:
        line = f"{time.monotonic() - self.began:7.1f}s  {text}"
        self.last = [*self.last, line][-LAST_FAULTS:]
        print(line, flush=True)

    # ── the run ──────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """The whole of it. Raises Stop."""
        rounds = soak_plan.sequence(self.given.seed, self.given.seconds, self.given.every)
        self.system.start()
        self.system.take_orders()
        soak_faults.start(self.hand)
        self.watcher.start()
        self.checkpoint([])
        for chat in self.chats:
            chat.start()
        for faults in rounds:
            self.hand.undo_late()
            started = time.monotonic()
            for fault in faults:
                self.wait_until(started + fault.at_s)
                self.commit(fault)
            self.wait_until(started + min(self.given.every, self.given.seconds))
            self.hand.undo_due(everything=True)
            self.checkpoint([fault.kind.name for fault in faults])

    def commit(self, fault: soak_plan.Fault) -> None:
        outcome = self.outcomes.setdefault(fault.kind.name, Outcome())
        try:
            self.say(self.hand.commit(fault))
            outcome.done += 1
        except Nothing as why:
            outcome.idle += 1
            self.say(f"{fault}: nothing to do, {why}")
        except ApiError:
            outcome.done += 1
            self.say(f"{fault}: the API does not take it now; again at the checkpoint")
        except (OSError, psutil.Error) as error:
            outcome.idle += 1
            self.say(f"{fault}: nothing to do, {error!r}")

    def wait_until(self, at: float) -> None:
        while True:
            self.hand.undo_due()
            self.judge()
            left_s = at - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(0.1, left_s))

    def judge(self) -> None:
        """Collects violations. Raises Stop."""
        if time.monotonic() - self._queue_at > QUEUE_EVERY_S:
            self._queue_at = time.monotonic()
            self.queue.look(self.system.files.records()[0])
        found, self.watcher.violations = self.watcher.violations, []
        for chat in self.chats:
            seen = self._answers_seen[chat.name]
            answers = chat.answers[seen:]
            self._answers_seen[chat.name] += len(answers)
            found += soak_check.cut(answers, self.excuses)
        self.found(found)

    def found(self, violations: list[Violation]) -> None:
        self.violations += violations
        for each in violations:
            self.say(f"VIOLATION of rule {each.rule}, {each.at - self.began:.1f}s: {each.text}")
        if violations and not self.given.keep_going:
            raise Stop

    def checkpoint(self, kinds: list[str]) -> None:
        """Waits until all is as it was asked for, and counts. Raises Stop."""
        started = time.monotonic()
        problems, last = soak_quiet.converge(self.hand, self.given.bound, self.judge)
        took_s = time.monotonic() - started
        self.converged_s.append(took_s)
        for kind in kinds:
            self.outcomes[kind].worst_s = max(self.outcomes[kind].worst_s, took_s)
        now = time.monotonic()
        self.found([Violation(rule, now, f"{took_s:.0f} s after the last fault: {text}") for rule, text in problems])
        self.excuses.quiets.append(now)
        for name in (*soak_plan.PREY, *soak_plan.EXTRAS) if self.given.preemption else soak_quiet.waiting(self.hand):
            self.excuses.touch(now, name)  # what waits starts once others leave; what makes room ends once others come
        self.hand.forget_hands()
        self.checkpoints.append(soak_quiet.resources(self.hand))
        held = " ".join(f"{role} {each.fds}" for role, each in self.checkpoints[-1].items())
        word = "NOT all" if problems else "all"
        self.say(f"── checkpoint: {word} as asked for after {took_s:.1f} s; descriptors: {held}")
        if last:
            self.say(f"   last to come: {last[:200]}")
        if digests(self.models) != self.store:
            self.found([Violation(4, now, f"the model files changed: {sorted(digests(self.models))}")])
        self.found([Violation(5, now, text) for text in soak_check.leaks(self.checkpoints)])

    def close(self) -> None:
        """Ends everything, whatever state it is in."""
        for chat in self.chats:
            chat.last()
        self.hand.thaw()
        for chat in self.chats:
            if chat.ident is not None:
                chat.join(10)
        if self.watcher.samples:
            self.watcher.stop()
        for typed in self.hand.typed:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(typed.pid, signal.SIGKILL)
            typed.wait(5)
        try:
            self.system.close()
        except (AssertionError, psutil.Error) as error:  # a leftover may be a zombie when it is to be named
            self.violations.append(Violation(5, time.monotonic(), str(error)))
            self.say(f"VIOLATION of rule 5: {error}")

    # ── what is told ─────────────────────────────────────────────────────────────────────────────

    def answers(self) -> list[Answer]:
        return [answer for chat in self.chats for answer in chat.answers]

    def summary(self) -> dict[str, Any]:
        answers = self.answers()
        broken = [each for each in answers if each.error]
        unexcused = [each for each in broken if not self.excuses.covers(each.service, each.began, each.ended)]
        return {
            "seed": self.given.seed,
            "seconds": self.given.seconds,
            "faults": {name: asdict(each) for name, each in sorted(self.outcomes.items())},
            "convergence_s": self.converged_s,
            "streams_completed": len(answers) - len(broken),
            "tokens": sum(chat.tokens for chat in self.chats),
            "streams_cut_by_a_fault_of_their_own": len(broken) - len(unexcused),
            "streams_cut_without_one": len(unexcused),
            "tokens_lost_without_one": sum(max(0, each.asked - each.got) for each in unexcused),
            "engine_restarts_asked_for": self.checker.excused_restarts,
            "engine_restarts_not_asked_for": self.checker.unasked_restarts,
            "longest_dead_endpoint_s": self.checker.longest_dead_s,
            "samples": self.watcher.samples,
            "samples_with_sidecar_and_api_up": self.checker.steady,
            "budget_bytes": self.budget_bytes,
            "peak_reserved_bytes": self.checker.peak_bytes,
            "samples_with_an_unread_reservation": self.checker.unsized,
            "waits_for_memory": self.queue.times,
            "longest_queue": self.queue.longest,
            "resources": [{role: asdict(each) for role, each in point.items()} for point in self.checkpoints],
            "violations": [asdict(each) for each in self.violations],
        }

    def report(self, told: dict[str, Any]) -> None:
        print(f"\n{'fault':<16} {'done':>5} {'idle':>5}  worst convergence of its rounds")
        for name, each in told["faults"].items():
            print(f"{name:<16} {each['done']:>5} {each['idle']:>5}  {each['worst_s']:.1f} s")
        done = sum(each["done"] for each in told["faults"].values())
        worst = max(self.converged_s, default=0.0)
        print(f"{done} faults, {len(self.checkpoints)} checkpoints, worst convergence {worst:.1f} s")
        print(
            f"{told['streams_completed']} streams completed, {told['tokens']} tokens; "
            f"{told['streams_cut_by_a_fault_of_their_own']} cut by a fault of their own"
        )
        print(
            f"without one: {told['streams_cut_without_one']} cut, {told['tokens_lost_without_one']} tokens lost, "
            f"{told['engine_restarts_not_asked_for']} engine restarts "
            f"({told['engine_restarts_asked_for']} asked for)"
        )
        print(
            f"an endpoint without an engine: at most {told['longest_dead_endpoint_s']:.2f} s, sidecar and API up "
            f"(as in {self.checker.steady} of {self.watcher.samples} samples)"
        )
        for role, each in (self.checkpoints[-1] if self.checkpoints else {}).items():
            first = self.checkpoints[0].get(role, each)
            rss = f"{first.rss_bytes / 2**20:.0f} -> {each.rss_bytes / 2**20:.0f} MiB"
            print(f"{role:<12} {first.fds} -> {each.fds} descriptors, {rss}")
        mib = self.budget_bytes / 2**20, self.checker.peak_bytes / 2**20
        print(
            f"budget {mib[0]:.1f} MiB, at most {mib[1]:.1f} MiB reserved for live engines (unknown of one in "
            f"{self.checker.unsized} samples); {self.queue.times} times somebody waited for memory, at most "
            f"{self.queue.longest} together"
        )

    def tails(self) -> None:
        """What a reader needs who was not there."""
        keep = ROOT / "build" / f"soak-{self.given.seed}"
        shutil.rmtree(keep, ignore_errors=True)
        unfit = shutil.ignore_patterns("*.sock*", "*.bell", "current")
        shutil.copytree(self.system.state, keep, symlinks=True, ignore=unfit)
        shutil.copy(self.system.log, keep / "run.log")
        print(f"\n── seed {self.given.seed}; the last faults ──", *self.last, sep="\n")
        for path in [self.system.log, *(self.system.state / "log").glob("*.log")]:
            if path.name.partition(".")[0] in ("run", "controller", "sidecar", "supervisord", "apiserver"):
                lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:]
                print(f"── {path.name} ──", *(line[:300] for line in lines), sep="\n")
        print(f"\nkept: {keep.relative_to(ROOT)}")


def main() -> int:
    """Soaks; returns 0 if nothing was violated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600, help="of faults; starting and converging comes on top")
    parser.add_argument("--seed", type=int, default=None, help="the same seed is the same sequence of faults")
    parser.add_argument("--every", type=float, default=30, help="seconds of faults between checkpoints")
    parser.add_argument("--grace", type=float, default=1.0, help="seconds for which a dead endpoint may be ready")
    parser.add_argument("--bound", type=float, default=60, help="seconds within which all must converge")
    parser.add_argument("--preemption", action="store_true", help="let the important make the others stop")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first violation")
    given = parser.parse_args()
    if given.seed is None:
        given.seed = random.SystemRandom().randrange(1_000_000)
    print(f"seed {given.seed}, {given.seconds:.0f} s of faults", flush=True)
    for signum in (signal.SIGINT, signal.SIGTERM):  # a shell's background jobs inherit an ignored SIGINT
        signal.signal(signum, signal.default_int_handler)
    base = Path(tempfile.mkdtemp(prefix="ms-soak-"))
    soak, interrupted = Soak(base, given), False
    try:
        try:
            soak.run()
        except Stop:
            pass
        except KeyboardInterrupt:
            interrupted = True
            soak.say("interrupted; ending")
        finally:
            for signum in (signal.SIGINT, signal.SIGTERM):
                signal.signal(signum, signal.SIG_IGN)
            soak.close()
        told = soak.summary()
        soak.report(told)
        out = ROOT / "build" / "soak.json"
        out.parent.mkdir(exist_ok=True)
        out.write_text(json.dumps(told, indent=1) + "\n")
        print(f"written: {out.relative_to(ROOT)}")
        if soak.violations:
            soak.tails()
            print(f"\nseed {given.seed}: {len(soak.violations)} violations")
            for each in soak.violations:
                print(f"  rule {each.rule}, {each.at - soak.began:.1f}s: {each.text}")
            return 1
        return 130 if interrupted else 0
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
