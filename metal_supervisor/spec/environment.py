"""Environment variables that a manifest may give to an engine: an allow-list, as data.

A variable can name a library to load, a file to read or a host to connect to, and engines and their libraries read
hundreds of them; so only those known to be harmless are passed on. A variable that stands for a flag is judged as that
flag, and given to the engine as one, so that the memory estimate takes it into account.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from metal_supervisor.spec.arguments import TEXT, Flag, FlagVerdict, Grammar, Problem, ValueCheck, opens, whole


@dataclass(frozen=True)
class Variable:
    """One variable of an engine's environment."""

    verdict: FlagVerdict
    check: ValueCheck = TEXT
    why: str = ""


@dataclass(frozen=True)
class Environment:
    """The variables that an engine may be given."""

    names: Mapping[str, Variable]
    ignored: re.Pattern[str] | None = None
    """Names without a meaning on a Mac."""
    never: re.Pattern[str] = re.compile(r"(LD_|DYLD_|__XPC_|SUPERVISOR_|METAL_SUPERVISOR_)", re.IGNORECASE)
    """Beginnings of names that no setting can allow."""

    def judge(self, name: str, opened: Collection[str] = ()) -> Variable:
        """The verdict about a variable; `opened`: names that the administrator of this Mac allows."""
        found = self.names.get(name)
        if self.never.match(name):
            return Variable(FlagVerdict.OURS, why="it would change the loader or the supervisor")
        if found is not None and (found.verdict is not FlagVerdict.REFUSED or name not in opened):
            return found
        if name in opened:
            return Variable(FlagVerdict.VALUE)
        if self.ignored is not None and self.ignored.match(name):
            return Variable(FlagVerdict.IGNORED)
        return Variable(FlagVerdict.REFUSED, why="it is not known to be harmless")


def variables(
    text: str, check: ValueCheck = TEXT, verdict: FlagVerdict = FlagVerdict.VALUE, why: str = ""
) -> dict[str, Variable]:
    """Rows of variables with the same verdict; their names are separated by spaces."""
    return dict.fromkeys(text.split(), Variable(verdict, check, why))


SWITCH = ValueCheck("1, 0, true, false, on or off", "(?i:0|1|true|false|on|off)")
LOCALE = ValueCheck("a locale such as en_US.UTF-8", r"[A-Za-z0-9_@.-]{0,40}")
ZONE = ValueCheck("a time zone such as Europe/Berlin", r"[A-Za-z0-9_+-]{1,30}(/[A-Za-z0-9_+-]{1,30}){0,2}")
COMMON: Mapping[str, Variable] = {
    **variables("LANG LC_ALL LC_COLLATE LC_CTYPE LC_MESSAGES LC_MONETARY LC_NUMERIC LC_TIME", LOCALE),
    **variables("TZ", ZONE),
    **variables("OMP_NUM_THREADS", whole(1, 1024)),
    **variables("NO_COLOR"),
    **variables("HF_TOKEN"),
    **variables("HOME PATH TMPDIR", verdict=FlagVerdict.OURS, why="each engine has its own, set by this Mac"),
}
ELSEWHERE = re.compile(
    r"(NVIDIA|CUDA|NCCL|NVTE|HIP|ROCR|ROCM|HSA|AMD|GPU|ONEAPI|SYCL|ZE|GGML_(CUDA|VK|HIP|SYCL|OPENCL|CANN|MUSA))_[A-Z0-9_]+"
    r"|GGML_DISABLE_VULKAN"
)
"""Variables of other platforms."""


@dataclass(frozen=True)
class Vocabulary:
    """The flags and variables that a manifest may give to an engine."""

    engine: str
    grammar: Grammar
    environment: Environment

    def flag(self, name: str) -> Flag | None:
        """The flag that a variable stands for, None for a variable that is judged by itself."""
        return None if name in self.environment.names else _flags_by_variable(self.grammar).get(name)

    def variable(self, name: str, opened: Collection[str] = ()) -> Variable:
        """The verdict about a variable, which is that of its flag if it stands for one."""
        flag = self.flag(name)
        if flag is None:
            return self.environment.judge(name, opened)
        return Variable(flag.verdict, flag.values[0] if flag.values else SWITCH, flag.why)

    def refusal(
        self, name: str, where: str, opened: Collection[str] = (), opened_flags: Collection[str] = ()
    ) -> Problem | None:
        """(reason, message) if a manifest may not set a variable; its value is not looked at."""
        flag, found = self.flag(name), self.variable(name, opened)
        if flag is not None and flag.verdict is FlagVerdict.PATH:
            return "InvalidSpec", f"{where} {name} names a file; write {flag.names[-1]} in spec.extraArgs instead"
        if found.verdict is FlagVerdict.OURS:
            advice = "; remove it"
        elif found.verdict is not FlagVerdict.REFUSED:
            return None
        elif flag is None:
            advice = opens(name, "env")
        elif set(flag.names).isdisjoint(opened_flags):
            advice = opens(flag.names[-1], "extra-args")
        else:
            return None
        return "InvalidSpec", f"{where} {name!r:.80} is not yours to set: {found.why}{advice}"


@lru_cache(maxsize=16)
def _flags_by_variable(grammar: Grammar) -> Mapping[str, Flag]:
    named = {flag.variable: flag for flag in grammar.flags.values() if flag.variable}
    off = {name.replace("LLAMA_ARG_", "LLAMA_ARG_NO_", 1): flag for name, flag in named.items() if _negative(flag)}
    return {**off, **named}


def _negative(flag: Flag) -> str:
    """Name of the switch that turns a flag off, "" unless it has one for each direction."""
    off = next((name for name in flag.names if name.startswith("--no-")), "")
    return off if _positive(flag) != off else ""


def _positive(flag: Flag) -> str:
    return next((name for name in flag.names if name.startswith("--") and not name.startswith("--no-")), flag.names[-1])


def as_arguments(
    env: Iterable[tuple[str, str]], vocabulary: Vocabulary
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """(flags that variables stand for, the other variables); a switch that is already as wanted is left out."""
    arguments: list[str] = []
    rest = []
    for name, value in env:
        flag = vocabulary.flag(name)
        if flag is None:
            rest.append((name, value))
        elif flag.values:
            arguments += [_positive(flag), value]
        else:
            on = value.lower() in ON and name == flag.variable
            arguments += [_positive(flag)] if on else [_negative(flag)] if _negative(flag) else []
    return tuple(arguments), tuple(rest)


ON = frozenset({"1", "true", "on", "enabled"})
