"""`doctor --bundle`: an archive for remote support, with all secrets redacted.

It contains the findings, versions, settings, records, observations, the controller's report, sections of programs and
the ends of logs. It leaves out specs (which have the environments of engines), kubeconfigs, tokens and models. Logs may
quote secrets from specs, so the values in specs are read, to be redacted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import io
import itertools
import json
import os
import platform
import re
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from metal_supervisor import __version__
from metal_supervisor.cluster.credentials import BadKubeconfig
from metal_supervisor.doctor.findings import Finding, report
from metal_supervisor.doctor.redact import redact_json, redactor
from metal_supervisor.doctor.software import version_of
from metal_supervisor.doctor.surroundings import Surroundings
from metal_supervisor.settings.logging import entry_in, json_line
from metal_supervisor.spec.document import mapping
from metal_supervisor.spec.types import Json
from metal_supervisor.spec.user_error import UserError
from metal_supervisor.state.kept_files import write_atomic
from metal_supervisor.state.reports import CONTROLLER_REPORT, read_object

ROOT = "metal-supervisor-doctor"
LOG_BYTES, LOG_LINES, MOST_BYTES = 64 << 10, 300, 1 << 20
JSON_FILES = (CONTROLLER_REPORT, "records/*.json", "observed/*.json", "runs/*.json", "attached/*.json")
TEXT_FILES = ("supervisord.conf", "models.d/*.conf", "quarantine/*.why")
LOG_FILES = ("log/*.log", "log/crashed/*.log")
PACKAGES = (
    "supervisor", "kubernetes", "urllib3", "flask", "waitress", "psutil", "prometheus-client", "huggingface-hub",
)  # fmt: skip


class NotWritten(UserError):
    """The archive could not be written; the message says why and what to do."""

    code = 2


# ── what must not be seen ────────────────────────────────────────────────────────────────────────


def secrets_of(around: Surroundings) -> Iterator[str]:
    """All known secrets on this Mac: in specs, the kubeconfig, the embedded API's state and our own environment."""
    state = around.settings.state_path
    for path in (state / "specs").glob("*.json"):
        yield from secrets_of_spec(read_object(path))
    prefix = read_object(state / "apiserver.json").get("prefix")
    if isinstance(prefix, str):
        yield prefix
    with contextlib.suppress(BadKubeconfig, OSError, UnicodeDecodeError):
        chosen = around.chosen()
        yield from (str(each) for each in _texts(chosen.user))
        if chosen.token_file:
            yield chosen.token_file.read_text("ascii").strip()
    for name, value in os.environ.items():
        if re.search(r"(?i)token|secret|passw|api_?key", name):
            yield value
        elif name.lower().endswith("_proxy") and "@" in value:
            yield value.rpartition("@")[0].rpartition("//")[2]


def secrets_of_spec(spec: Json) -> Iterator[str]:
    """Values of an engine's environment, and of arguments whose flag is named like a secret."""
    argv = spec.get("argv")
    for name, each in mapping(spec, "env").items():
        if name not in ("HF_HUB_OFFLINE", "PATH", "HOME", "LANG"):
            yield str(each)
    words = [str(each) for each in argv] if isinstance(argv, list) else []
    for flag, value in itertools.pairwise([*words, ""]):
        if re.match(r"(?i)--?[\w-]*(key|token|secret|password)", flag):
            yield flag.partition("=")[2] or value


def _texts(value: Any) -> Iterator[str]:
    """All texts of a kubeconfig's user, as tokens, passwords and keys, except names of plugins and files."""
    if isinstance(value, dict):
        for name, each in value.items():
            if name not in ("apiVersion", "command", "tokenFile", "interactiveMode", "installHint", "name"):
                yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str):
        yield value


# ── what goes in ─────────────────────────────────────────────────────────────────────────────────


def files_of(
    around: Surroundings, findings: Sequence[Finding], redact: Callable[[str], str]
) -> Iterator[tuple[str, str]]:
    """(name in the archive, redacted content) of all readable files."""
    for name, value in (
        ("doctor.json", report(findings)),
        ("versions.json", versions()),
        ("settings.json", dataclasses.asdict(around.settings)),
    ):
        yield name, _dumped(value, redact)
    state = around.settings.state_path
    for pattern in (*JSON_FILES, *TEXT_FILES, *LOG_FILES):
        for path in sorted(state.glob(pattern)):
            with contextlib.suppress(OSError):
                if path.is_file() and not path.is_symlink():
                    yield redact(str(path.relative_to(state))), _content(path, pattern, redact)


def _content(path: Path, pattern: str, redact: Callable[[str], str]) -> str:
    if pattern in LOG_FILES:
        return "".join(_log(_tail(path), redact))
    with path.open("rb") as file:
        text = file.read(MOST_BYTES).decode("utf-8", "replace")
    if pattern in JSON_FILES:
        with contextlib.suppress(ValueError, RecursionError):
            return _dumped(json.loads(text), redact)
    return redact(text)


def _log(lines: Sequence[str], redact: Callable[[str], str]) -> Iterator[str]:
    """A log, redacted: JSON lines value by value, because escapes hide secrets; other lines in blocks, because a key in
    PEM spans several.
    """
    read = ((line, _entry(line, redact)) for line in lines)
    for is_text, some in itertools.groupby(read, lambda each: each[1] is None):
        if is_text:
            yield redact("\n".join(line for line, _ in some) + "\n")
        else:
            yield from (f"{entry}\n" for _, entry in some)


def _entry(line: str, redact: Callable[[str], str]) -> str | None:
    """A line in our own JSON format, redacted; None for any other, and for one that cannot be encoded as JSON again.

    An engine may write such lines too, with values that JSON does not have (NaN), or nested too deep.
    """
    entry = entry_in(line)
    if entry is None:
        return None
    try:
        return json_line(redact_json(entry, redact))
    except (ValueError, RecursionError):
        return None


def _tail(path: Path) -> list[str]:
    """The last whole lines of a log: half a line may be half a token, which no pattern recognizes."""
    with path.open("rb") as file:
        start = max(0, os.fstat(file.fileno()).st_size - LOG_BYTES)
        file.seek(start)
        content = file.read(LOG_BYTES)
    if start:
        content = content.partition(b"\n")[2]
    return content.decode("utf-8", "replace").splitlines()[-LOG_LINES:]


def _dumped(value: Any, redact: Callable[[str], str]) -> str:
    return json.dumps(redact_json(value, redact), indent=1, ensure_ascii=False, default=str) + "\n"


def versions() -> dict[str, str]:
    """Versions of metal-supervisor, Python, the system, and the installed ones of PACKAGES."""
    ours = {"metal-supervisor": __version__, "python": platform.python_version(), "system": platform.platform()}
    return {**ours, **{name: version for name in PACKAGES if (version := version_of(name))}}


# ── the archive ──────────────────────────────────────────────────────────────────────────────────


def write(target: Path, around: Surroundings, findings: Sequence[Finding]) -> int:
    """Write the archive, with mode 0600. Returns the number of files in it. Raises NotWritten."""
    redact = redactor(set(secrets_of(around)), str(Path.home()), _user())
    content, count = io.BytesIO(), 0
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, text in files_of(around, findings, redact):
            data = text.encode("utf-8", "replace")
            member = tarfile.TarInfo(f"{ROOT}/{name}")
            member.size, member.mode, member.mtime = len(data), 0o600, int(time.time())
            archive.addfile(member, io.BytesIO(data))
            count += 1
    try:
        if target.is_dir():
            raise NotWritten(f"--bundle: {target} is a directory; name a file")
        write_atomic(target, content.getvalue())
        target.chmod(0o600)
    except OSError as error:
        raise NotWritten(f"--bundle: cannot write {target}: {error.strerror}; name another file") from None
    return count


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return ""
