"""An embedded API that takes orders to misbehave the way real clusters do: rules that make chosen requests fail.

POST to `<prefix>/faults` appends rules, GET lists them, DELETE removes all. They are matched in order against (verb,
resource, name, subresource, namespace); each may be limited to a number of times.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from metal_supervisor import apiserver
from metal_supervisor.apiserver import ApiServer, Options
from metal_supervisor.apiserver.codec import decode_body, encode
from metal_supervisor.apiserver.errors import ApiError, bad_request, expired, forbidden, not_found
from metal_supervisor.apiserver.kernel import Kernel, Request, Response, Stream, resource_target, verb_of
from metal_supervisor.apiserver.patch import APPLY
from metal_supervisor.apiserver.storage import ObjectStore

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
ACTIONS = ("status", "hang_s", "drop", "garbage", "latency_s", "expire", "reset_rv")
_MATCHED = ("verb", "resource", "name", "subresource", "namespace")
_GARBAGE = b"\x00<html>not what you expected</html>"
_REASONS = {410: "Expired", 500: "InternalError", 504: "Timeout"}
"""Reasons that are not the phrase of their code."""


class Hangup(ConnectionAbortedError):
    """The connection is to be cut without a proper end."""


@dataclass(frozen=True)
class Call:
    """A request, as rules see it."""

    verb: str
    """get, list, watch, create, update, patch, apply, delete, deletecollection or discovery."""
    resource: str = ""
    """Plural name; empty for discovery."""
    name: str = ""
    subresource: str = ""
    namespace: str = ""


class FaultyKernel(Kernel):
    """Answers requests, except those that a rule is about."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._lock = threading.Lock()
        self._rules: list[Json] = []

    def answer(self, request: Request) -> Response | Stream:
        if request.path == "/faults":
            return self._faults(request)
        call = self._call(request)
        return (call and self._fault(call)) or super().answer(request)

    def _call(self, request: Request) -> Call | None:
        """None for a question of health, which always has an answer."""
        path = request.path
        if path.startswith(("/healthz", "/livez", "/readyz")):
            return None
        target = resource_target(self.registry, path)
        if target is None:
            return Call("discovery")
        verb = verb_of(request, target)
        shown = "apply" if verb == "patch" and request.content_type == APPLY else verb
        name = target.name or _selected_name(request.query.get("fieldSelector", ""))
        return Call(shown, target.resource.plural, name, target.subresource, target.namespace)

    def _faults(self, request: Request) -> Response:
        if request.method == "POST":
            self._add(decode_body(request.body))
        elif request.method == "DELETE":
            with self._lock:
                self._rules = []
        with self._lock:
            return Response(200, encode(self._rules))

    def _add(self, given: Any) -> None:
        rules = given if isinstance(given, list) else [given]
        for rule in rules:
            action = rule.get("action") if isinstance(rule, dict) else None
            if not isinstance(action, dict) or not any(name in action for name in ACTIONS):
                raise bad_request(f"a rule needs an action, one of {', '.join(ACTIONS)}")
        with self._lock:
            self._rules += [dict(rule) for rule in rules]
        for rule in rules:
            if rule.get("close_watches"):
                self._close_watches(rule.get("resource"))

    def _close_watches(self, plural: str | None) -> None:
        for subscription in self.watcher.subscriptions():
            if plural in (None, subscription.target.resource.plural):
                subscription.closed = True
        self.store.wake_all()

    def _action_for(self, call: Call) -> Json | None:
        """The action of the first rule that fits, counted; None when none does."""
        with self._lock:
            for rule in self._rules:
                if not matches(rule, call):
                    continue
                if "times" in rule:
                    rule["times"] -= 1
                    if rule["times"] <= 0:
                        self._rules.remove(rule)
                return dict(rule["action"])
        return None

    def _fault(self, call: Call) -> Response | Stream | None:
        """The answer by the first rule that fits a request; None if it is answered as usual. Raises ApiError."""
        action = self._action_for(call)
        if not action:
            return None
        watching = call.verb == "watch"
        time.sleep(float(action.get("latency_s", 0)))
        if action.get("reset_rv"):
            restart_versions(self.store)
            self._close_watches(None)
        if "status" in action:
            raise _failure(int(action["status"]), action, call)
        if action.get("expire"):
            forget_history(self.store)
            problem = expired("The resourceVersion for the provided request is too old.")
            if not watching:
                raise problem
            return _lines(encode({"type": "ERROR", "object": problem.status()}) + b"\n")
        if "hang_s" in action:
            return _silence(float(action["hang_s"]), watching=watching)
        if action.get("drop"):
            if not watching:
                raise Hangup
            return _lines(b'{"type":"MODIFIED","object":{"kin', cut=True)
        if action.get("garbage"):
            return _lines(_GARBAGE + b"\n") if watching else Response(200, _GARBAGE)
        return None


def _selected_name(selector: str) -> str:
    """The one name that a fieldSelector asks for, empty if it asks for none."""
    for term in selector.split(","):
        field, _, name = term.partition("=")
        if field.strip() == "metadata.name":
            return name.lstrip("=").strip()
    return ""


def matches(rule: Json, call: Call) -> bool:
    """True if a rule matches a request: a field missing from the rule matches any value, and an apply is a patch."""
    if rule.get("verb") == "patch" and call.verb == "apply":
        rule = {**rule, "verb": "apply"}
    return all(rule.get(field) in (None, getattr(call, field)) for field in _MATCHED)


def _failure(code: int, action: Json, call: Call) -> ApiError:
    """The error that an action asks for."""
    message = str(action.get("message", "a fault says so"))
    if code == 403:
        return forbidden("", call.resource, call.name, message)
    if code == 404:
        return not_found("", call.resource, call.name)
    problem = ApiError(code, _REASONS.get(code) or HTTPStatus(code).phrase.replace(" ", ""), message)
    if "retry_after_s" in action:
        problem.headers["Retry-After"] = str(action["retry_after_s"])
        problem.details = {"retryAfterSeconds": action["retry_after_s"]}
    return problem


def _silence(seconds: float, *, watching: bool) -> Stream:
    """No answer and then the end: for a watch after the headers, for everything else before them."""
    gone = threading.Event()

    def run(_send: Callable[[bytes], None]) -> None:
        gone.wait(seconds)
        raise Hangup

    if not watching:
        run(lambda _: None)
    return Stream(run, gone.set)


def _lines(data: bytes, *, cut: bool = False) -> Stream:
    def run(send: Callable[[bytes], None]) -> None:
        send(data)
        if cut:
            raise Hangup

    return Stream(run, lambda: None)


def forget_history(store: ObjectStore) -> None:
    """Makes every resourceVersion before the present one too old."""
    with store.lock:
        store._history.clear()
        store._floor = store.version


def restart_versions(store: ObjectStore) -> None:
    """Renumber everything from 1, as a cluster restored from elsewhere would."""
    with store.lock:
        store.version = 1
        for kind, name, obj in store.everything():
            store.put(kind, name, obj)
        forget_history(store)


class FaultyApi(ApiServer):
    """An API server for a test's own process."""

    def __init__(self, options: Options) -> None:
        super().__init__(options, FaultyKernel)


# ---- in a running system -----------------------------------------------------------------------

_START = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.support.faulty_api import main; main()"


def take_over(script: Path) -> None:
    """Have a system's `current/metal-supervisor` start this API for its own, until the next boot writes it anew."""
    first, rest = script.read_text("utf-8").split("\n", 1)
    # The module's name is what the tests know the processes of a system by.
    instead = f'exec {shlex.quote(sys.executable)} -I -c {shlex.quote(_START)} metal_supervisor "$@"'
    fresh = script.with_suffix(".new")
    fresh.write_text(f'{first}\n[ "$1" = apiserver ] && {instead}\n{rest}', "utf-8")
    fresh.chmod(0o700)
    os.replace(fresh, script)


def main() -> None:
    """`metal-supervisor apiserver`, with this kernel."""
    from metal_supervisor.cli.main import main as run

    apiserver.serve = functools.partial(apiserver.serve, kernel=FaultyKernel)  # type: ignore[assignment]
    sys.exit(run(sys.argv[2:]))
