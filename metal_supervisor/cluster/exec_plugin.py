"""Credentials from an exec plugin: a command of the cloud provider, run as kubectl does, with a timeout.

A plugin may hang, fail, want a browser, print its token, or leave children behind. It is run in a process group of its
own, and killed after a timeout. Its credential is renewed in the background after most of its lifetime. While the
plugin fails, the old credential is used until the server refuses it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metal_supervisor.host.machine import HOMEBREW
from metal_supervisor.spec.instants import unix
from metal_supervisor.spec.terminal_text import shortened
from metal_supervisor.spec.types import Json

GROUP = "client.authentication.k8s.io"
API_VERSIONS = (f"{GROUP}/v1", f"{GROUP}/v1beta1")
LONGEST_TEXT = 240
POLL_S = 0.05
"""Longest time until the end of a command is noticed whose child holds its pipes open."""
log = logging.getLogger(__name__)

_SECRETS = (
    re.compile(r"eyJ[\w-]+(?:\.[\w-]*)*"),
    re.compile(r"(?i)((?:bearer|basic)\s+|token\s+(?=\S*\d))[^\s\"',;]+"),
    re.compile(r"(?i)((?:token|passw(?:or)?d|secret|authorization|key)[\"']?\s*[:=]\s*[\"']?)[^\s\"',;]+"),
)
"""Patterns: a JWT; the text after a word such as `bearer` or `password`."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_FAILURE = re.compile(
    r"(?i)error|fail|fatal|panic|expired|invalid|denied|refused|unable|unauthori[sz]ed|not found|no such|no active"
    r"|(?:can|could|did|do|does|is|are|was|were) ?(?:not|n't)\b"
)
_LONG = re.compile(r"(?<![\w/.-])[\w+=-]{32,}")
"""A long text that is no path or host."""


def scrub(text: str, *secrets: str) -> str:
    """Replace these secrets in a text, and whatever looks like a secret, with `…`."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "…")
    for pattern in _SECRETS:
        text = pattern.sub(lambda found: (found[1] if found.re.groups else "") + "…", text)
    return _LONG.sub(lambda found: found[0] if _is_word(found[0]) else "…", text)


def _reason(output: str) -> str:
    """Find the reason in the error output of a command: all lines if they are short, else from the first with a reason.

    A stack is left out; the lines below it have its error.
    """
    lines: list[str] = []
    stack = False
    for line in _ESCAPES.sub("", output).splitlines():
        stack = line.startswith("Traceback ") or (stack and line[:1].isspace())
        if not stack and re.search(r"\w", line):
            lines.append(line.strip())
    if len(" ".join(lines)) > LONGEST_TEXT:
        lines = lines[next((at for at, line in enumerate(lines) if _FAILURE.search(line)), -1) :]
    return " ".join(lines)


def _is_word(text: str) -> bool:
    """True if a long text is a word, a number or a rule. A pattern that looked for that would take quadratic time."""
    return not (re.search(r"\d", text) and re.search("[A-Za-z]", text))


class PluginFailed(Exception):
    """The plugin gave no credential; the message names the command and holds no secret."""


@dataclass(frozen=True)
class PluginCredential:
    """Credential from a plugin."""

    token: str = field(default="", repr=False)
    certificate: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    at: float = 0.0
    """Unix time of the run."""
    lasts: float | None = None
    """Unix time of its expiry. None if the plugin gave none, or one in the past, because a clock is wrong: then it is
    used until the server refuses it."""


class Plugin:
    """An exec entry of a kubeconfig, and its latest credential."""

    TIMEOUT_S = 20.0
    """Once a credential has expired, every request waits this long for a plugin that hangs, the heartbeat too. With the
    third of a Lease that has passed by then, it must be less than a Lease (40 s), or peers take this Mac for dead."""
    MOST_BYTES = 1 << 20
    RETRY_S = 30.0
    LONGEST_RETRY_S = 300.0
    FRESH = 0.8
    """Share of a credential's lifetime after which it is renewed."""

    def __init__(
        self, spec: Any, directory: Path, cluster: Json | None, clock: Callable[[], float] = time.time
    ) -> None:
        """`directory`: the kubeconfig's; `cluster`: cluster info for the plugin, None for none. Raises PluginFailed."""
        if not isinstance(spec, dict) or not isinstance(spec.get("command"), str) or not spec["command"]:
            raise PluginFailed("its exec entry has no command")
        self.name: str = spec["command"]
        if spec.get("apiVersion") not in API_VERSIONS:
            raise PluginFailed(f"{self.name} must speak {' or '.join(API_VERSIONS)}; update it and the kubeconfig")
        if spec.get("interactiveMode") == "Always":
            raise PluginFailed(f"{self.name} wants a terminal (interactiveMode: Always), which a service has not")
        self.entry = (spec, directory, cluster)
        """Plugins of equal entries are the same."""
        self._spec, self._directory, self._cluster, self._clock = spec, directory, cluster, clock
        try:
            self._arguments = [str(each) for each in spec.get("args") or []]
            self._extra = {str(each["name"]): str(each["value"]) for each in spec.get("env") or []}
        except (TypeError, KeyError):
            raise PluginFailed(f"the args or env of {self.name} are not lists of what they should be") from None
        self._given = PluginCredential()
        self._running = threading.Lock()
        self._failures = 0
        self._not_before = 0.0

    # ── what it gave ─────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Run the plugin for the first time. Raises PluginFailed."""
        with self._running:
            self._given = self._run()

    def current(self) -> PluginCredential:
        """Return the credential to use now. Renews an ageing one in the background; waits only if it has expired."""
        given, now = self._given, self._clock()
        if given.lasts is None or self._is_held(now):
            return given
        if now >= given.lasts:
            self._renew(given)
        elif now >= given.at + self.FRESH * (given.lasts - given.at) and not self._running.locked():
            with contextlib.suppress(RuntimeError):  # no thread can be started: try on the next call
                threading.Thread(target=self._renew, args=(given,), name="credentials", daemon=True).start()
        return self._given

    def renew(self) -> None:
        """Run the plugin again after a refusal, unless another thread just did, or it is backing off."""
        self._renew(self._given)

    def _renew(self, old: PluginCredential) -> None:
        """Run the plugin again, unless another thread has done so since `old`, or it is backing off."""
        with self._running:
            if self._given is old and not self._is_held(self._clock()):
                self._refresh()

    def _is_held(self, now: float) -> bool:
        """True while it backs off; a time farther ahead than that takes is of a clock that has been set back since."""
        return 0 < self._not_before - now <= self.LONGEST_RETRY_S

    def _refresh(self) -> None:
        """Replace the credential; on failure keep the old one, and back off longer each time."""
        try:
            self._given = self._run()
            if self._failures:
                log.info("credential plugin works again", extra={"command": self.name})
            self._failures, self._not_before = 0, 0.0
        except PluginFailed as error:
            if not self._failures:
                log.warning("no new credential; the old one stays until it is refused", extra={"error": str(error)})
            self._not_before = self._clock() + min(self.LONGEST_RETRY_S, self.RETRY_S * 2 ** min(self._failures, 8))
            self._failures += 1

    # ── one run ──────────────────────────────────────────────────────────────────────────────────

    def _failed(self, text: str, *secrets: str) -> PluginFailed:
        hidden = [value for name, value in self._extra.items() if re.search("(?i)secret|token|key|pass", name)]
        return PluginFailed(f"{self.name} {shortened(scrub(text, *secrets, *hidden), LONGEST_TEXT)}")

    def _run(self) -> PluginCredential:
        """Run the plugin once, and return its credential. Raises PluginFailed."""
        code, out, err = self._output()
        named = [found.decode("utf-8", "replace") for found in re.findall(rb'"[\w-]*"\s*:\s*"([^"]{6,})"', out)]
        if code != 0:
            raise self._failed(f"failed ({code}): {_reason(err.decode('utf-8', 'replace')) or 'no output'}", *named)
        return self._parsed(out)

    def _parsed(self, out: bytes) -> PluginCredential:
        status: Any = None
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            answer = json.loads(out)
            if answer["kind"] == "ExecCredential" and answer["apiVersion"] == self._spec["apiVersion"]:
                status = answer["status"]
        if not isinstance(status, dict):
            raise self._failed(f"gave no ExecCredential of {self._spec['apiVersion']} with a status")
        token = str(status.get("token") or "").strip()
        certificate, key = (str(status.get(name) or "") for name in ("clientCertificateData", "clientKeyData"))
        if token and not re.fullmatch(r"[\x21-\x7e]+", token):
            raise self._failed("gave a token with characters that no header can hold")
        if not (certificate + key).isascii():
            raise self._failed("gave a certificate or key that is no PEM")
        if bool(certificate) != bool(key):
            raise self._failed("gave only one of clientCertificateData and clientKeyData")
        if not token and not certificate:
            raise self._failed("gave neither a token nor a certificate")
        now = self._clock()
        expires = self._expiry(status)
        lasts = expires if expires is not None and expires > now else None
        return PluginCredential(token, certificate.encode(), key.encode(), now, lasts)

    def _expiry(self, status: Json) -> float | None:
        text = status.get("expirationTimestamp")
        with contextlib.suppress(ValueError):
            return None if text is None else unix(str(text))
        raise self._failed("gave an expirationTimestamp that is not a time")

    def _command(self, path: str) -> str:
        """Find the command as kubectl does: a bare name on PATH, else a path relative to the kubeconfig's directory.

        `path`: PATH, with Homebrew's directories. Raises PluginFailed.
        """
        if os.sep in self.name:
            found = os.path.normpath(self._directory / self.name)
            found = found if os.access(found, os.X_OK) and Path(found).is_file() else ""
        else:
            found = shutil.which(self.name, path=path) or ""
        if found:
            return found
        hint = str(self._spec.get("installHint") or "").strip()
        where = "not an executable file" if os.sep in self.name else "neither on PATH nor where Homebrew installs"
        raise PluginFailed(f"{self.name} is {where}; {hint or 'install it'}"[:500])

    def _output(self) -> tuple[int, bytes, bytes]:
        """Run the command: (exit code, standard output, end of standard error). Raises PluginFailed."""
        path = os.pathsep.join([*filter(None, os.environ.get("PATH", "").split(os.pathsep)), *HOMEBREW])
        info: Json = {"apiVersion": self._spec["apiVersion"], "kind": "ExecCredential", "spec": {"interactive": False}}
        if self._cluster is not None:
            info["spec"]["cluster"] = self._cluster
        environment = {**os.environ, "PATH": path, **self._extra, "KUBERNETES_EXEC_INFO": json.dumps(info, default=str)}
        command = self._command(environment["PATH"])
        try:
            process = subprocess.Popen(
                [command, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self._directory,
                env=environment,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", "") or type(error).__name__
            raise self._failed(f"cannot be started: {problem}") from None
        with process:
            try:
                return self._read(process)
            except OSError as error:  # e.g. too many open files
                raise self._failed(f"cannot be read: {error.strerror or type(error).__name__}") from None
            finally:
                if process.poll() is None:
                    with contextlib.suppress(OSError):  # macOS refuses it for a group that is only a zombie
                        os.killpg(process.pid, signal.SIGKILL)
                    process.kill()

    def _read(self, process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
        """Wait for the end of the command, but not for that of a child that holds its pipes open."""
        until = time.monotonic() + self.TIMEOUT_S
        while True:
            over = process.poll() is not None  # polled before the read, so that all its output is read
            try:
                out, err = process.communicate(timeout=POLL_S)
                return process.returncode, out, err
            except subprocess.TimeoutExpired as error:
                out, err = error.output or b"", error.stderr or b""
            if len(out) + len(err) > self.MOST_BYTES:
                raise self._failed("printed far too much; it was ended")
            if over:
                return process.returncode, out, err
            if time.monotonic() > until:
                raise self._failed(f"did not finish within {self.TIMEOUT_S:g} s; it was ended with its children")
