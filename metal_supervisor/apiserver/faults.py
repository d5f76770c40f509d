"""Fault injection: rules that make chosen requests fail the way real clusters fail.

Tests use it to see how a client handles failures that are rare in reality. Rules are matched in order against
(verb, resource, name, subresource); each may be limited to a number of times.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from .errors import ApiError, Json, bad_request, forbidden, not_found

ACTIONS = ("status", "hang_s", "drop", "garbage", "latency_s", "expire", "reset_rv")
_MATCHED = ("verb", "resource", "name", "subresource", "namespace")


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


class Faults:
    """The rules in force."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[Json] = []

    def add(self, rules: Any) -> list[Json]:
        """Appends rules; 400 for one that cannot be understood. Returns those added."""
        added = rules if isinstance(rules, list) else [rules]
        for rule in added:
            action = rule.get("action") if isinstance(rule, dict) else None
            if not isinstance(action, dict) or not any(name in action for name in ACTIONS):
                raise bad_request(f"a rule needs an action, one of {', '.join(ACTIONS)}")
        with self._lock:
            self._rules += [dict(rule) for rule in added]
        return [dict(rule) for rule in added]

    def clear(self) -> None:
        """Remove all rules."""
        with self._lock:
            self._rules = []

    def rules(self) -> list[Json]:
        """The rules in force, with the times that are left."""
        with self._lock:
            return [dict(rule) for rule in self._rules]

    def action_for(self, call: Call) -> Json | None:
        """The action of the first rule that fits, counted; None when none does."""
        with self._lock:
            for rule in self._rules:
                if not matches(rule, call):
                    continue
                if "times" in rule:
                    rule["times"] -= 1
                    if rule["times"] <= 0:
                        self._rules.remove(rule)
                action: Json = dict(rule["action"])
                return action
        return None


def matches(rule: Json, call: Call) -> bool:
    """True if a rule matches a request: a field missing from the rule matches any value, and an apply is a patch."""
    if rule.get("verb") == "patch" and call.verb == "apply":
        rule = {**rule, "verb": "apply"}
    return all(rule.get(field) in (None, getattr(call, field)) for field in _MATCHED)


_REASONS = {410: "Expired", 500: "InternalError", 504: "Timeout"}
"""Reasons that are not the phrase of their code."""


def failure(code: int, action: Json, call: Call) -> ApiError:
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
