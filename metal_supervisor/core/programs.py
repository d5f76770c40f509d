"""Records, specs and sections: what the state directory holds of a service, to text and back.

Nothing a user wrote reaches the ini. A section is a fixed form around three things of ours: a program
name made of DNS names, the launcher, and the name of a spec file whose digest makes it immutable. Its
paths go through the state directory's `current/`, so a new release of ours changes no section.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from typing import Any

from metal_supervisor.core.types import (
    Endpoint,
    Engine,
    Json,
    Key,
    Observed,
    Probe,
    Program,
    Record,
    RunNote,
    Standing,
    Verdict,
)

RECORD_FORMAT = 1
SPEC_FORMAT = 1
OBSERVED_FORMAT = 1
RUN_FORMAT = 1
STOP_WAIT_S = 30
START_SECONDS = 2
# A file name may have 255 bytes; the longest of ours adds ".<digest>.json", a leading dot and ".<pid>.tmp".
LONGEST_NAME = 200
PROGRAM_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?\.[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
SAFE_HOME = re.compile(r"/[A-Za-z0-9._/+-]*")
SECTION_MARK = "; metal-supervisor: written from an InferenceService; edit that, not this file\n"


class Unreadable(Exception):
    """A file of the state directory is corrupt, or of a newer format; the message says which."""


def program_name(key: Key) -> str:
    """supervisord's name of a service: `<namespace>.<name>`, shortened with a digest if it must be.

    A namespace has no dot, so the first dot splits the two.
    """
    name = ".".join(key)
    if not PROGRAM_NAME.fullmatch(name):
        raise ValueError(f"not a Kubernetes name: {name!r:.100}")
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 13].rstrip('-.')}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def compose(program: str, engine: Engine, port: int, host: str, home: str) -> Program:
    """The Program of an engine. `home` is the state directory as the ini may name it (see SAFE_HOME)."""
    body = {
        "format": SPEC_FORMAT,
        "program": program,
        "argv": list(engine.argv),
        "env": dict(engine.env),
        "cwd": engine.cwd,
        "host": host,
        "port": port,
        "run": f"{home}/runs/{program}.json",
        "supervisor_log": f"{home}/log/supervisord.log",
    }
    text = json.dumps(body, indent=1, sort_keys=True) + "\n"
    spec_file = f"{program}.{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    return Program(program, spec_file, text)


def section(program: str, spec_file: str, home: str, autostart: bool) -> str:
    """The whole content of `models.d/<program>.conf`."""
    if not (SAFE_HOME.fullmatch(home) and PROGRAM_NAME.fullmatch(program)):
        raise ValueError(f"not safe in an ini: {home!r} {program!r}")
    return f"""{SECTION_MARK}[program:{program}]
command={home}/current/python -I -S {home}/current/launch.py {home}/specs/{spec_file}
directory=/
autostart={"true" if autostart else "false"}
autorestart=true
startsecs={START_SECONDS}
startretries=3
stopsignal=TERM
stopwaitsecs={STOP_WAIT_S}
stopasgroup=false
killasgroup=false
umask=077
redirect_stderr=true
stdout_logfile={home}/log/{program}.log
stdout_logfile_maxbytes=20MB
stdout_logfile_backups=3
"""


def section_spec(text: str) -> str:
    """The spec file that a section of ours names, "" if it is not one of ours."""
    found = re.search(r"(?m)^command=\S+ -I -S \S+ \S+/specs/(\S+)$", text)
    return found[1] if text.startswith(SECTION_MARK) and found else ""


def _checked(text: str, known: int, what: str) -> Json:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise Unreadable(f"{what} is not JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("format"), int):
        raise Unreadable(f"{what} has no format number")
    if data["format"] > known:
        raise Unreadable(f"{what} has format {data['format']}, newer than the {known} this version knows")
    return data


def _dump(format_number: int, value: Any) -> str:
    return json.dumps({"format": format_number, **dataclasses.asdict(value)}, indent=1, sort_keys=True) + "\n"


def record_text(record: Record) -> str:
    """A record as its file holds it."""
    return _dump(RECORD_FORMAT, record)


def read_record(text: str) -> Record:
    """A record from its file. Raises Unreadable."""
    data = _checked(text, RECORD_FORMAT, "record")
    try:
        verdict = Verdict(**{**data["verdict"], "standing": Standing(data["verdict"]["standing"])})
        known = {item.name for item in dataclasses.fields(Record)}
        record = Record(
            **{
                **{name: value for name, value in data.items() if name in known},
                "verdict": verdict,
                "endpoint": Endpoint(**data["endpoint"]) if data["endpoint"] else None,
                "probe": Probe(**data["probe"]),
                "files": tuple(data["files"]),
                "warning": tuple(data["warning"]) if data["warning"] else None,
            }
        )
        if record.program != program_name(record.key):
            raise ValueError(f"program {record.program!r} does not belong to {record.key}")
        return record
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Unreadable(f"record is damaged: {error!r:.200}") from None


def observed_text(observed: Observed) -> str:
    """What the sidecar saw, as its file holds it."""
    return _dump(OBSERVED_FORMAT, observed)


def read_observed(text: str) -> Observed:
    """What the sidecar saw, from its file. Raises Unreadable."""
    data = _checked(text, OBSERVED_FORMAT, "observation")
    known = {item.name for item in dataclasses.fields(Observed)}
    try:
        return Observed(**{name: value for name, value in data.items() if name in known})
    except TypeError as error:
        raise Unreadable(f"observation is damaged: {error!r:.200}") from None


def read_run(text: str) -> RunNote:
    """The launcher's note, from its file. Raises Unreadable."""
    data = _checked(text, RUN_FORMAT, "run note")
    try:
        return RunNote(
            pid=int(data["pid"]),
            launcher_pid=int(data["launcher_pid"]),
            started=str(data["started"]),
            spec_file=str(data["spec"]),
            starts=tuple(float(at) for at in data["starts"]),
            not_before=float(data["not_before"]),
            refused=str(data["refused"]),
            refused_message=str(data["refused_message"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Unreadable(f"run note is damaged: {error!r:.200}") from None
