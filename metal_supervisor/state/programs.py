"""Serialization of a service's files in the state directory: records, specs and sections.

Nothing a user wrote reaches the ini. A section is a fixed template around three values of our own: a
program name made of DNS names, the launcher, and the program's spec file, which the launcher reads at each start. So a
new spec changes no section, and neither does a new release: its paths go through the state directory's `current/`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import sys
from enum import Enum
from functools import lru_cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from metal_supervisor.spec.attachment import Attachment
from metal_supervisor.spec.document import UnreadableRecord
from metal_supervisor.spec.ini import SAFE_HOME
from metal_supervisor.spec.processes import Observed, RunNote
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Engine, Json, Key, Program

T = TypeVar("T")
FORMAT = 1
"""Of records, observations and attachers' notes."""
SPEC_FORMAT = 1
ANY_FORMAT = 1 << 30
STOP_WAIT_S = 30
DAEMONS = {"omlx": 90, "ollama": 60}
"""Programs of shared daemons, and how long each may take to end: a KILL may leave wired memory behind on a Mac."""
START_SECONDS = 2
# A file name may have 255 bytes; our longest adds ".json", a leading dot and ".<pid>.tmp".
LONGEST_NAME = 200
LONGEST_SCRATCH = 64
"""Longest path of a scratch directory that keeps its name: sockets have 104 bytes on macOS, and vLLM adds 37."""
PROGRAM_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?\.[a-z0-9]([-a-z0-9.]*[a-z0-9])?(@[1-9][0-9]*)?")
SECTION_MARK = "; metal-supervisor: written from an InferenceService; edit that, not this file"


def program_name(key: Key) -> str:
    """supervisord's name of a service: `<namespace>.<name>`, shortened with a digest if it must be.

    A namespace has no dot, so the first dot splits the two. A further engine for the same service on this
    Mac ends in `@1` and so on, which no name does. A shared daemon has no namespace, and goes by its name alone.
    """
    if not key[0] and key[1] in DAEMONS:
        return key[1]
    name = ".".join(key)
    if not PROGRAM_NAME.fullmatch(name):
        raise ValueError(f"not a Kubernetes name: {name!r:.100}")
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 13].rstrip('-.')}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def scratch_name(program: str, home: str) -> str:
    """Name of a program's own directory in `scratch/`: its own, or a digest where sockets in it would be too long."""
    whole = f"{home}/scratch/{program}"
    return program if len(whole) <= LONGEST_SCRATCH else hashlib.sha256(program.encode()).hexdigest()[:12]


def compose(
    program: str,
    engine: Engine,
    port: int,
    host: str,
    home: str,
    asked: str = "",
    reserved_bytes: int = 0,
    mapped_bytes: int = 0,
    confinement: Json | Literal[False] | None = False,
) -> Program:
    """The Program of an engine. `home` is the state directory as the ini may name it (see SAFE_HOME).

    `confinement`: the policy, False to start it unconfined, None while that is not known: then it is not started.
    Its edition is a digest of only what reaches the engine: fields that a release adds around that change no edition.
    """
    cwd, env = engine.cwd, dict(engine.env)
    if not engine.daemon and program not in DAEMONS:
        # A name in argv that is relative, or a library that looks in the home directory, finds nothing of this Mac's.
        cwd = f"{home}/scratch/{scratch_name(program, home)}"
        env |= {"HOME": cwd, "TMPDIR": cwd}
    meaning: Json = {
        "program": program,
        "argv": list(engine.argv),
        "env": env,
        "cwd": cwd,
    }
    where = {"host": host, "port": port}
    if engine.daemon:
        meaning["shared"] = True  # the port is the daemon's: taken, and its attacher finds it by itself
    else:
        meaning |= where
    around = {
        **where,
        "format": SPEC_FORMAT,
        "asked": asked,
        "supervisor_log": f"{home}/log/supervisord.log",
        "reserved_bytes": reserved_bytes,
        "mapped_bytes": mapped_bytes,
        "confinement": confinement,
    }
    edition = _digest(json.dumps(meaning, sort_keys=True))
    whole = {**around, **meaning, "edition": edition}
    return Program(program, edition, json.dumps(whole, indent=1, sort_keys=True) + "\n")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def section(program: str, home: str, autostart: bool, log_mib: int = 20, log_files: int = 3) -> str:
    """The whole content of `models.d/<program>.conf`."""
    known = program in DAEMONS or PROGRAM_NAME.fullmatch(program)
    if not (SAFE_HOME.fullmatch(home) and known):
        raise ValueError(f"not safe in an ini: {home!r} {program!r}")
    body = f"""[program:{program}]
command={home}/current/python -I -S {home}/current/launch.py {home}/specs/{program}.json
directory=/
autostart={"true" if autostart else "false"}
autorestart=true
startsecs={START_SECONDS}
startretries=3
stopsignal=TERM
stopwaitsecs={DAEMONS.get(program, STOP_WAIT_S)}
stopasgroup=false
killasgroup=false
umask=077
redirect_stderr=true
stdout_logfile={home}/log/{program}.log
stdout_logfile_maxbytes={int(log_mib)}MB
stdout_logfile_backups={int(log_files)}
"""
    return f"{SECTION_MARK} [{_digest(body)}]\n{body}"


def starts_itself(text: str) -> bool:
    """True if supervisord starts the program of a section by itself (autostart)."""
    return "\nautostart=false\n" not in text


def with_autostart(text: str, starts: bool = True) -> str:
    """The section with autostart on, or off if not `starts`."""
    head, _, body = text.partition("\n")
    before, after = ("false", "true") if starts else ("true", "false")
    started = body.replace(f"\nautostart={before}\n", f"\nautostart={after}\n")
    return f"{SECTION_MARK} [{_digest(started)}]\n{started}" if is_unedited(text) else f"{head}\n{started}"


def is_unedited(text: str) -> bool:
    """True if a section is unchanged since this program wrote it, in this release or another."""
    head, _, body = text.partition("\n")
    return head == f"{SECTION_MARK} [{_digest(body)}]"


def is_section(text: str) -> bool:
    """True if this program wrote a section, perhaps edited since."""
    return text.startswith(SECTION_MARK)


def _checked(text: str, known: int, what: str) -> Json:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableRecord(f"{what} is not JSON: {error!s:.200}") from None
    if not isinstance(data, dict) or not isinstance(data.get("format"), int):
        raise UnreadableRecord(f"{what} has no format number")
    if data["format"] > known:
        raise UnreadableRecord(f"{what} has format {data['format']}, newer than the {known} this version knows")
    return data


def text_of(value: Any) -> str:
    """Text of a record's file, of an observation's, and of an attacher's note."""
    return json.dumps({"format": FORMAT, **dataclasses.asdict(value)}, indent=1, sort_keys=True) + "\n"


_types = lru_cache(maxsize=16)(get_type_hints)
"""Field -> its type; to find them out takes longer than to read the values."""


def _value(given: Any, hint: Any, what: str) -> Any:
    """A value from JSON as the type that a field declares. Raises ValueError if it is of another, UnreadableRecord."""
    hint = getattr(hint, "__supertype__", hint)  # that of a NewType
    if hint is Any:
        return given
    if hint in (str, bool):
        fits = isinstance(given, hint)
    elif hint is float:
        fits = isinstance(given, (int, float)) and not isinstance(given, bool) and abs(given) <= sys.float_info.max
    elif hint is int:  # beyond 64 bits it is no size and no count, and raises where it meets a float
        fits = isinstance(given, int) and not isinstance(given, bool) and abs(given) < 1 << 63
    else:
        return _compound(given, hint, what)
    if not fits:
        raise ValueError
    return given


def _compound(given: Any, hint: Any, what: str) -> Any:
    """As `_value`, of a type that is made of others."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if given is None and type(None) in arguments:
            return None
        for each in arguments:
            with contextlib.suppress(ValueError):
                return _value(given, each, what)
        raise ValueError
    if origin is tuple and isinstance(given, list) and (arguments[-1] is Ellipsis or len(given) == len(arguments)):
        return tuple(_value(each, arguments[0], what) for each in given)
    if origin is dict and isinstance(given, dict):
        return {name: _value(each, arguments[1], what) for name, each in given.items()}
    if dataclasses.is_dataclass(hint) and isinstance(given, dict):
        return built(hint, given, what)  # type: ignore[arg-type]  # to mypy, it may be an instance
    if origin is None and issubclass(hint, Enum):
        return hint(given)
    raise ValueError


def built(kind: type[T], data: Json, what: str) -> T:
    """A dataclass from JSON, every field of the type it declares. Raises UnreadableRecord, naming the field.

    Unknown fields are ignored, and missing fields take their default: a record of an older or slightly newer
    version is still a record.
    """
    values: dict[str, Any] = {}
    for name, hint in _types(kind).items():  # type: ignore[arg-type]  # to mypy, a type is not hashable
        if name in data:
            try:
                values[name] = _value(data[name], hint, what)
            except ValueError:
                raise UnreadableRecord(f"{what} is damaged: {name} is {data[name]!r:.80}") from None
    try:
        return kind(**values)
    except TypeError as error:
        raise UnreadableRecord(f"{what} is damaged: {error!s:.200}") from None


def read_record(text: str) -> Record:
    """Record from the text of its file. Raises UnreadableRecord."""
    record = built(Record, _checked(text, FORMAT, "record"), "record")
    try:
        own = program_name(record.key)
    except ValueError as error:
        raise UnreadableRecord(f"record is damaged: {error}") from None
    if record.program != own:
        raise UnreadableRecord(f"record is damaged: {record.program!r:.80} is not {own}")
    return record


def read_observed(text: str) -> Observed:
    """The sidecar's observation from the text of its file. Raises UnreadableRecord."""
    return built(Observed, _checked(text, FORMAT, "observation"), "observation")


def read_attached(text: str) -> Attachment:
    """Attacher's note from the text of its file. Raises UnreadableRecord."""
    return built(Attachment, _checked(text, FORMAT, "attachment"), "attachment")


def read_run(text: str) -> RunNote:
    """Launcher's note from the text of its file. Raises UnreadableRecord.

    A note of a newer format is read as far as possible: it is about a running process.
    """
    return built(RunNote, _checked(text, ANY_FORMAT, "run note"), "run note")
