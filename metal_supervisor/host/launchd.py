"""Property list of launchd's job for this program, rendered from its template.

Values are inserted after parsing: a home directory with an ampersand in its name is text like any other.
"""

from __future__ import annotations

import hashlib
import plistlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LABEL = "dev.metal-supervisor"
INCUMBENT = "com.llmkube.metal-agent"
PREFIXES = ("/opt/homebrew/bin", "/opt/homebrew/sbin", "/usr/local/bin")
SYSTEM_PATH = ("/usr/bin", "/bin", "/usr/sbin", "/sbin")
OF_A_DAEMON = ("UserName", "GroupName", "InitGroups")
STOPPING_S = 100
"""On top of stop_timeout: the sidecar's shutdown (10), the controller's (5), an engine to kill (10), and a reserve."""
NOTE = "<!-- Written by `metal-supervisor install` ({}). An edited one is kept and loaded by the next install. -->\n"
"""Its field is a digest of the text below it, by which an edit is known."""


def path_of(home: str) -> str:
    """PATH of a job: Homebrew's prefixes, what its user installed for themselves, and the system's own."""
    return ":".join((*PREFIXES, f"{home}/.local/bin", *SYSTEM_PATH))


def exit_timeout_s(stop_timeout_s: float) -> int:
    """Seconds that launchd must allow for an orderly shutdown. `stop_timeout_s`: the setting."""
    return int(stop_timeout_s) + STOPPING_S


@dataclass(frozen=True)
class Job:
    """Where and as whom the job runs."""

    user: str
    group: str
    home: str
    state: str
    stop_timeout_s: float
    agent: bool = False
    """It is a LaunchAgent, which belongs to its user's login."""
    label: str = LABEL
    """launchd's name for it."""


def rendered(template: bytes, job: Job) -> bytes:
    """The property list for one Mac. Raises KeyError for an unknown placeholder."""
    known = {"@USER@": job.user, "@GROUP@": job.group, "@HOME@": job.home, "@STATE@": job.state}
    known["@PATH@"] = path_of(job.home)
    content = {key: _filled(value, known) for key, value in plistlib.loads(template).items()}
    content["Label"], content["ExitTimeOut"] = job.label, exit_timeout_s(job.stop_timeout_s)
    if job.agent:
        content = {key: value for key, value in content.items() if key not in OF_A_DAEMON}
    head, mark, rest = plistlib.dumps(content, sort_keys=False).partition(b"<plist ")
    return head + _note(mark + rest) + mark + rest


def is_edited(plist: bytes) -> bool:
    """True if a property list is not as `rendered` made it, for any Mac and in any release."""
    head, mark, rest = plist.partition(b"<plist ")
    return not head.endswith(_note(mark + rest))


def _note(body: bytes) -> bytes:
    return NOTE.format(hashlib.sha256(body).hexdigest()).encode()


def _filled(value: Any, known: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return re.sub(r"@[A-Z]+@", lambda found: known[found[0]], value)
    if isinstance(value, list):
        return [_filled(each, known) for each in value]
    if isinstance(value, dict):
        return {key: _filled(each, known) for key, each in value.items()}
    return value
