"""Every refusal, shaped as the real API server shapes it.

Clients read these: kubectl composes its sentence from `reason`, `details.kind`, `details.name` and
`details.causes`, and client libraries decide by `reason` and `code` whether to retry. So an error is
a value with those parts, and the HTTP layer only prints it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]

_TYPE_NAMES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


@dataclass(frozen=True)
class Problem:
    """One thing wrong with one field of an object."""

    field: str
    """Path as users write it, e.g. `spec.ports[0].port`."""
    reason: str
    """Machine-readable cause, e.g. `FieldValueRequired`."""
    body: str
    """The sentence after the field, e.g. `Required value`."""

    def __str__(self) -> str:
        return f"{self.field}: {self.body}" if self.field else self.body


class ApiError(Exception):
    """A request that ends in a `Status` of kind Failure."""

    def __init__(self, code: int, reason: str, message: str, *, details: Json | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details
        """None to have no details in the answer; a generic refusal has an empty object."""
        self.headers: dict[str, str] = {}

    def status(self) -> Json:
        """The `Status` object for the body of the response."""
        body: Json = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        known = {"message": self.message, "reason": self.reason or None, "details": self.details, "code": self.code}
        return body | {name: value for name, value in known.items() if value is not None}


# ---- problems of single fields -----------------------------------------------------------------


def shown(value: Any) -> str:
    """A value as it appears inside a message: JSON, and never pages of it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if len(text) <= 1000 else text[:1000] + "…"


def required(field: str, detail: str = "") -> Problem:
    """A field that is missing."""
    return Problem(field, "FieldValueRequired", "Required value" + (f": {detail}" if detail else ""))


def invalid_value(field: str, value: Any, detail: str) -> Problem:
    """A field whose value breaks a rule."""
    return Problem(field, "FieldValueInvalid", f"Invalid value: {shown(value)}: {detail}")


def unsupported_value(field: str, value: Any, allowed: Sequence[Any]) -> Problem:
    """A field whose value is not one of a fixed list."""
    listed = ", ".join(shown(item) for item in allowed)
    return Problem(field, "FieldValueNotSupported", f"Unsupported value: {shown(value)}: supported values: {listed}")


def wrong_type(field: str, value: Any, expected: str) -> Problem:
    """A field whose value has another type than the schema says."""
    found = json_type(value)
    detail = f'{field or "object"} in body must be of type {expected}: "{found}"'
    return Problem(field, "FieldValueTypeInvalid", f'Invalid value: "{found}": {detail}')


def duplicate_value(field: str, value: Any) -> Problem:
    """A list item that repeats another one."""
    return Problem(field, "FieldValueDuplicate", f"Duplicate value: {shown(value)}")


def too_long(field: str, limit: int) -> Problem:
    """A text over its limit."""
    return Problem(field, "FieldValueTooLong", f"Too long: may not be more than {limit} bytes")


def json_type(value: Any) -> str:
    """Name of a JSON value's type, as the messages use it."""
    return _TYPE_NAMES[type(value)]


# ---- whole requests ----------------------------------------------------------------------------


def qualified(name: str, group: str) -> str:
    """`services`, or `leases.coordination.k8s.io` when there is a group."""
    return f"{name}.{group}" if group else name


def no_such_path() -> ApiError:
    """An address that means nothing here."""
    return ApiError(404, "NotFound", "the server could not find the requested resource", details={})


def about(group: str, plural: str, name: str) -> Json:
    """Details that name an object."""
    return {"name": name, "kind": plural, **({"group": group} if group else {})}


def not_found(group: str, plural: str, name: str) -> ApiError:
    """An object that does not exist."""
    message = f'{qualified(plural, group)} "{name}" not found'
    return ApiError(404, "NotFound", message, details=about(group, plural, name))


def already_exists(group: str, plural: str, name: str) -> ApiError:
    """A create for a name that is taken."""
    message = f'{qualified(plural, group)} "{name}" already exists'
    return ApiError(409, "AlreadyExists", message, details=about(group, plural, name))


def conflict(group: str, plural: str, name: str, why: str) -> ApiError:
    """A write based on an outdated state."""
    message = f'Operation cannot be fulfilled on {qualified(plural, group)} "{name}": {why}'
    return ApiError(409, "Conflict", message, details=about(group, plural, name))


def invalid(group: str, kind: str, name: str, problems: Sequence[Problem]) -> ApiError:
    """An object that breaks rules; all of them at once."""
    listed = ", ".join(str(problem) for problem in problems)
    text = listed if len(problems) == 1 else f"[{listed}]"
    known = {"name": name, "group": group, "kind": kind}
    details: Json = {field: value for field, value in known.items() if value}
    details["causes"] = [{"reason": p.reason, "message": p.body, "field": p.field} for p in problems]
    return ApiError(422, "Invalid", f'{qualified(kind, group)} "{name}" is invalid: {text}', details=details)


def bad_request(message: str) -> ApiError:
    """A request that cannot be understood."""
    return ApiError(400, "BadRequest", message)


def forbidden(group: str, plural: str, name: str, why: str) -> ApiError:
    """A request that is understood and refused."""
    message = f'{qualified(plural, group)} "{name}" is forbidden: {why}'
    return ApiError(403, "Forbidden", message, details=about(group, plural, name))


def expired(message: str) -> ApiError:
    """A resourceVersion or continue token from before the remembered history."""
    return ApiError(410, "Expired", message)


def unknown_format(kinds: Sequence[str]) -> ApiError:
    """A body in a format that is not supported."""
    message = "the body of the request was in an unknown format - accepted media types include: " + ", ".join(kinds)
    return ApiError(415, "UnsupportedMediaType", message)
