"""Validation of the settings that name runtimes, their flags or their variables, registered in RUNTIME_CHECKS.

Import it wherever settings are read: the settings cannot import it, because the runtimes are in a layer above them.
`cli.main` does so once one of these settings is given.
"""

from __future__ import annotations

from metal_supervisor.runtimes import RUNTIMES
from metal_supervisor.runtimes.llama_arguments import ENVIRONMENT, GRAMMAR
from metal_supervisor.settings.checks import RUNTIME_CHECKS, listed
from metal_supervisor.settings.schema import Settings
from metal_supervisor.spec.arguments import NAMEABLE, FlagVerdict


def _runtime(value: str) -> str | None:
    return None if value in RUNTIMES else f"must be one of {', '.join(RUNTIMES)}"


def _runtimes(value: str) -> str | None:
    return None if RUNTIMES.keys() >= set(listed(value)) else f"must name some of {', '.join(RUNTIMES)}"


def _flags(value: str) -> str | None:
    for each in listed(value):
        if not NAMEABLE["extra-args"].fullmatch(each):
            return "must look like --flag,--other-flag"
        flag = GRAMMAR.flags.get(each)
        if flag is not None and flag.verdict is FlagVerdict.OURS:
            return f"must not name {each}: {flag.why}"
    return None


def _variables(value: str) -> str | None:
    for each in listed(value):
        if not NAMEABLE["env"].fullmatch(each):
            return "must look like NAME,OTHER_NAME"
        found = ENVIRONMENT.judge(each, {each})
        if found.verdict is FlagVerdict.OURS:
            return f"must not name {each}: {found.why}"
    return None


RUNTIME_CHECKS.update(runtime=_runtime, runtimes=_runtimes, allow_extra_args=_flags, allow_env=_variables)


def offered(settings: Settings) -> tuple[str, ...]:
    """The runtimes that this Mac offers, in order of preference."""
    return tuple(dict.fromkeys(listed(settings.runtimes))) or tuple(RUNTIMES)
