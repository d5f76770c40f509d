"""`metal-supervisor pull`: fetches a model into this Mac's store, in the foreground.

It is the system's own store, with the same locks and the same checks: a pulled model is there for services, and a
download that a service has begun is only watched. stdout gets the model's path and nothing else, for use in a script.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from metal_supervisor.cli.render import Bar, DownloadBars, bar
from metal_supervisor.cli.terminal import FAILED, INTERRUPTED, OK, USAGE, CommandError
from metal_supervisor.controller.prerequisites import own_ollama
from metal_supervisor.models.places import Places
from metal_supervisor.models.remote import s3
from metal_supervisor.models.store import Store
from metal_supervisor.models.store_context import Terms, terms_of
from metal_supervisor.runtimes.daemon_client import Away, Daemon, DaemonRefused
from metal_supervisor.runtimes.ollama_models import pulled
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.fields import Bad
from metal_supervisor.spec.hosts import web_url
from metal_supervisor.spec.model_resource import read_artifact
from metal_supervisor.spec.progress import DownloadProgress, duration
from metal_supervisor.spec.sizes import amount
from metal_supervisor.spec.sources import Artifact, Keys, bucket_key, library_model, shown
from metal_supervisor.spec.terminal_text import printable
from metal_supervisor.spec.types import Json, ModelFile
from metal_supervisor.state.downloads import AGAIN, counts

LOOK_S = 0.2
SAY_S = 10.0
CONTINUES = "the same command continues from there"
FIRST_TRIES = 4
"""Attempts at a server that has not sent a byte yet."""
OF_S3 = s3.ID, s3.SECRET, s3.TOKEN, *s3.REGIONS, *s3.ENDPOINTS
"""Variables of the environment that open S3; others of that name are of tools."""
FIELDS = {
    "spec.sourceSecretRef": "--secret-env",
    "spec.source": "SOURCE",
    "spec.files": "--files",
    "spec.sha256": "--sha256",
    "spec.quantization": "--quantization",
    "spec.format": "--format",
}


def for_a_terminal(text: str) -> str:
    """A message about fields of a Model, reworded for this command's arguments, and printable."""
    for name, flag in FIELDS.items():
        text = text.replace(name, flag)
    return printable(text)


def keys_of(artifact: Artifact, secrets: Sequence[str]) -> Keys:
    """The credentials for it. `secrets`: variables of the environment. Raises Bad for one that is not set.

    The Hub's client finds its token itself; other web servers get no credentials unless they are named.
    """
    names = [name for name in OF_S3 if os.environ.get(name)] if bucket_key(artifact.source) else []
    for name in secrets:
        if not os.environ.get(name):
            raise Bad("InvalidSpec", f"--secret-env {name!r:.80} is not set in the environment")
    return Keys({name: os.environ[name] for name in (*names, *secrets)})


def terms_for(settings: Settings, artifact: Artifact, keys: Keys) -> Terms:
    """The terms of this Mac, with more trust than a manifest gets: a user at its terminal named the host or path."""
    terms = terms_of(settings)
    typed = [artifact.source, *(text for name, text in keys.values.items() if name.startswith("AWS_ENDPOINT_URL"))]
    hosts = (parts.hostname or "" for each in typed if (parts := web_url(each)))
    private = (*terms.rules.private, *hosts)
    return replace(terms, rules=replace(terms.rules, private=private), places=Places())


def main(settings: Settings, spec: Json, secrets: Sequence[str], complain: Callable[[str], None]) -> int:
    """Fetch the model of a spec, and print its path or its name in Ollama.

    Returns 0, 1 if it failed, 130 if interrupted. Raises CommandError for wrong arguments.
    """
    try:
        artifact = read_artifact({"spec": spec})
        keys = keys_of(artifact, secrets)
    except Bad as bad:
        raise CommandError(for_a_terminal(bad.message), USAGE) from None
    if library := library_model(artifact.source):
        return _pull_into_ollama(settings, library, complain)
    return _Pull(settings.store_path, artifact, keys, terms_for(settings, artifact, keys), complain).run()


def _pull_into_ollama(settings: Settings, name: str, complain: Callable[[str], None]) -> int:
    """Let the user's own Ollama pull a model of its library. Returns what `main` does."""
    address = own_ollama.address_of(settings.ollama_url)
    if address is None or not own_ollama.answers(address):
        where = f"no Ollama answers at {settings.ollama_url}"
        complain(printable(f"{name}: {where}; start it (ollama serve), or name its --ollama-url"))
        return FAILED
    bars = DownloadBars(sys.stderr)
    job = {"library": name, "registry": settings.ollama_registry}
    try:
        try:
            made = pulled(Daemon(*address), job, lambda text: bars.draw([Bar(name, 0, 0, text)]))
        finally:
            bars.clear()
    except (Away, DaemonRefused) as error:
        complain(printable(f"{name}: {error}"))
        return FAILED
    except KeyboardInterrupt:
        complain(f"stopped; {CONTINUES}")
        return INTERRUPTED
    print(made)
    return OK


class _Pull:
    """One download."""

    def __init__(
        self, directory: Path, artifact: Artifact, keys: Keys, terms: Terms, complain: Callable[[str], None]
    ) -> None:
        self._artifact, self._keys, self._complain = artifact, keys, complain
        self._changed, self._interrupted = threading.Event(), False
        self._store = Store(directory, self._changed.set, terms)
        self._bars = DownloadBars(sys.stderr)
        self._meter = DownloadProgress()
        self._name = shown(artifact.source).rstrip("/").rpartition("/")[2]
        self._began_at = self._said_at = time.monotonic()
        self._troubles: set[str] = set()

    def run(self) -> int:
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._on_signal)
        self._store.want({self._artifact: self._keys})
        self._store.give_leave(self._artifact)
        try:
            while True:
                state = self._store.state(self._artifact)
                if self._interrupted:
                    return self._stopped()
                if state.phase == "Ready":
                    return self._done(state)
                if self._is_over(state):
                    self._bars.clear()
                    self._complain(for_a_terminal(state.message.partition(AGAIN)[0]))
                    return FAILED
                self._show(state)
                self._changed.wait(LOOK_S)
                self._changed.clear()
        finally:
            self._bars.clear()
            self._store.want({})

    def _on_signal(self, _signum: int, _frame: object) -> None:
        # Not the event: its lock may be held by the very thread that this interrupts.
        self._interrupted = True

    def _is_over(self, state: ModelFile) -> bool:
        """True if the download has failed for good; a broken connection is retried until the user interrupts.

        A server that never sent a byte may not exist, so it is tried a few times only.
        """
        if state.phase != "Failed":
            return False
        if AGAIN not in state.message:
            return True
        self._troubles.add(state.message)
        return not self._meter.got_bytes and len(self._troubles) >= FIRST_TRIES

    def _show(self, state: ModelFile) -> None:
        now = time.monotonic()
        numbers = counts(state.got_bytes, state.total_bytes, state.message)
        if state.phase == "Downloading" and numbers:
            self._meter.update(state.got_bytes, state.total_bytes, now)
        if self._bars.possible:
            message = for_a_terminal(state.message)
            self._bars.draw([bar(self._name, state.got_bytes, state.total_bytes, message)])
        elif now - self._said_at >= SAY_S:
            self._said_at = now
            text = str(self._meter) if numbers else state.message
            self._complain(for_a_terminal(f"{self._name}: {text}"))

    def _done(self, state: ModelFile) -> int:
        self._bars.clear()
        passed = time.monotonic() - self._began_at
        began = self._meter.got_bytes or self._meter.total_bytes
        came = f"in {duration(passed)}" if began or passed > 1 else "here"
        self._complain(for_a_terminal(f"{self._name}: {amount(state.size_bytes)}, {came}"))
        print(state.path)
        return OK

    def _stopped(self) -> int:
        self._bars.clear()
        self._store.want({})
        here = f" after {amount(self._meter.got_bytes, 'down')}" if self._meter.got_bytes else ""
        self._complain(f"stopped{here}; {CONTINUES}")
        return INTERRUPTED
