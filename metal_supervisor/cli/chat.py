"""`metal-supervisor chat NAME`: a conversation with a model in the terminal; with a question, one answer."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import unicodedata
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from metal_supervisor.cli import model_source
from metal_supervisor.cli.services import ServiceClient, gateway_url, own_url, state_of
from metal_supervisor.cli.terminal import CommandError
from metal_supervisor.cluster.manifests import metal_ready
from metal_supervisor.cluster.report import UNLOADED, WAKING
from metal_supervisor.models.listing import Unusable
from metal_supervisor.settings.loader import KEY_VARIABLE, Settings
from metal_supervisor.spec.document import mapping, objects, string
from metal_supervisor.spec.fields import Bad
from metal_supervisor.spec.types import Json

ANSWER_S = 600.0
PROMPT = "> "


@dataclass(frozen=True)
class Partner:
    """Where a model is asked."""

    url: str
    """Base URL, without a slash at its end."""
    model: str


def partner_of(settings: Settings, name: str) -> Partner:
    """The address of a service: the gateway's, or that of an engine if the gateway does not listen.

    Raises CommandError, BadKubeconfig.
    """
    gateway = gateway_url(settings)
    with contextlib.closing(ServiceClient(settings)) as services:
        found = _service(services, settings, name)
        if state_of(found) not in ("Ready", UNLOADED, WAKING, "Progressing"):
            why = string(metal_ready(mapping(found, "status")), "message") or "see metal-supervisor explain"
            raise CommandError(f"{name} is {state_of(found)}: {why}")
        url = gateway or own_url(settings, found, services.api)
    if not url:
        raise CommandError(f"{name} has no endpoint that is ready; see metal-supervisor explain")
    metadata = found["metadata"]
    return Partner(url, f"{metadata['namespace']}/{metadata['name']}" if gateway else metadata["name"])


def _service(services: ServiceClient, settings: Settings, name: str) -> Json:
    """The service of a name, or the one that `serve` makes for a model of that name. Raises CommandError."""
    try:
        return services.named(name)
    except CommandError as error:
        with contextlib.suppress(Bad, Unusable, CommandError):
            model = model_source.resolve(settings, name)
            return services.named(model_source.name_of(model.name or model.source))
        raise error


class Conversation:
    """What was said so far."""

    def __init__(self, partner: Partner) -> None:
        self._partner = partner
        self._said: list[Json] = []

    def answer(self, question: str, out: TextIO) -> None:
        """Ask, and print the answer as it comes; a part that was heard stays. Raises CommandError."""
        self._said.append({"role": "user", "content": question})
        heard: list[str] = []
        try:
            for piece in _streamed(self._partner, self._said):
                heard.append(piece)
                out.write("".join(char if _is_harmless(char) else "?" for char in piece))
                out.flush()
        except CommandError:
            if heard:  # the message begins on a line of its own
                out.write("\n")
                out.flush()
            raise
        finally:
            self._said.append({"role": "assistant", "content": "".join(heard)})
        out.write("\n")


def _is_harmless(char: str) -> bool:
    """True for what leaves a terminal's cursor and colours alone: the spaces and joiners of other scripts do, too."""
    return char.isprintable() or char in "\n\t\u200c\u200d" or unicodedata.category(char) == "Zs"


def _streamed(partner: Partner, said: Sequence[Json]) -> Iterator[str]:
    parts = urllib.parse.urlsplit(f"{partner.url}/chat/completions")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=ANSWER_S)
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY_VARIABLE):
        if not (key.isascii() and key.isprintable()):  # which no header can hold
            raise CommandError(f"the environment variable {KEY_VARIABLE} holds no key; see metal-supervisor key add")
        headers["Authorization"] = f"Bearer {key}"
    try:
        body = json.dumps({"model": partner.model, "messages": list(said), "stream": True})
        connection.request("POST", parts.path, body, headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise CommandError(_refusal(answer.status, answer.read(65536)))
        yield from _pieces(answer)
    except (OSError, http.client.HTTPException) as error:
        raise CommandError(f"{partner.url} does not answer: {getattr(error, 'strerror', None) or error}") from None
    finally:
        connection.close()


def _pieces(answer: Iterable[bytes]) -> Iterator[str]:
    """The pieces of text in the lines of an event stream. Raises CommandError for one that is not whole."""
    for line in answer:
        data = line[5:].strip() if line.startswith(b"data:") else b""
        if data == b"[DONE]":
            return
        if not data.startswith(b"{"):
            continue
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            break  # it ends within the event, or is not UTF-8
        if "error" in event:
            raise CommandError(string(mapping(event, "error"), "message") or "the answer broke off")
        for choice in objects(event, "choices"):
            if piece := string(mapping(choice, "delta"), "content"):
                yield piece
    raise CommandError("the answer broke off before its end; ask again, or see metal-supervisor logs NAME")


def _refusal(status: int, content: bytes) -> str:
    try:
        told = string(mapping(json.loads(content), "error"), "message")
    except (ValueError, RecursionError):
        told = ""
    hint = f"; put a key into the environment variable {KEY_VARIABLE}" if status == 401 else ""
    return f"{told or f'it was answered with {status}'}{hint}"


def talk(partner: Partner, ask: Callable[[str], str], out: TextIO) -> None:
    """Ask for questions until the end of the input. Ctrl-C ends an answer, and without one the conversation."""
    conversation = Conversation(partner)
    out.write(f"{partner.model}; Ctrl-C ends an answer, Ctrl-D the chat\n")
    while True:
        try:
            question = ask(PROMPT)
        except (EOFError, KeyboardInterrupt):
            out.write("\n")
            return
        if question.strip():
            try:
                conversation.answer(question, out)
            except KeyboardInterrupt:
                out.write(" …\n")
