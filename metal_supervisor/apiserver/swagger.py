"""OpenAPI v2: paths and their parameters, which kubectl reads for a `v1` List, and old versions for everything.

No definitions: clients that find none leave the checking of objects to the server. In protobuf the document has
the field numbers of `openapiv2/OpenAPIv2.proto` in github.com/google/gnostic-models.
"""

from __future__ import annotations

from . import openapi
from .codec import encode
from .errors import ApiError, Json
from .protobuf import flag, message, repeated, text
from .resources import Registry, Resource

_JSON = "application/json"
_PROTOBUF = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
_ASKED_FOR = {
    **dict.fromkeys((_JSON, "application/*", "*/*", ""), _JSON),
    **dict.fromkeys((_PROTOBUF, "application/com.github.proto-openapi.spec.v2@v1.0+protobuf"), _PROTOBUF),
}
"""kubectl sends the second name of the protobuf form, which isn't valid as the type of an answer."""
_PATCH, _REQUIRED_BODY = "patch", ("patch", "post", "put")
_METHODS = {"get": 2, "put": 3, "post": 4, "delete": 5, "patch": 8}
_BODY: Json = {"name": "body", "in": "body", "required": True, "schema": {"type": "object"}}


def answer(registry: Registry, accept: str) -> tuple[bytes, str]:
    """(body, content type) of `/openapi/v2` in the first supported form of an Accept header; 406 without one."""
    for offer in accept.split(","):
        kind = _ASKED_FOR.get(offer.partition(";")[0].strip())
        if kind:
            whole = document(registry)
            return (encode(whole) if kind == _JSON else encoded(whole)), kind
    accepted = ", ".join((_JSON, _PROTOBUF))
    raise ApiError(406, "NotAcceptable", f"only the following media types are accepted: {accepted}")


def document(registry: Registry) -> Json:
    """The document of all groups and versions."""
    paths: Json = {}
    for resource in registry.all():
        for path, operations in openapi.paths(resource).items():
            paths[path] = {method: _operation(method, operation) for method, operation in operations.items()}
            paths[path]["parameters"] = _path_parameters(path, resource)
    return {"swagger": "2.0", "info": openapi.INFO, "paths": paths}


def _path_parameters(path: str, resource: Resource) -> list[Json]:
    names = {"name": f"name of the {resource.kind}", "namespace": "object name and auth scope"}
    return [
        {"name": name, "in": "path", "required": True, "type": "string", "description": meaning}
        for name, meaning in names.items()
        if f"/{{{name}}}" in path
    ]


def _operation(method: str, newer: Json) -> Json:
    """An operation of OpenAPI v3, as v2 says it."""
    parameters = [_BODY] if method in _REQUIRED_BODY else []
    for parameter in newer.get("parameters", []):
        parameters.append({"name": parameter["name"], "in": parameter["in"], **parameter["schema"]})
    operation: Json = {name: value for name, value in newer.items() if name.startswith("x-")}
    operation |= {"produces": [_JSON], "parameters": parameters, "responses": {"200": {"description": "OK"}}}
    if method == _PATCH:
        operation["consumes"] = list(newer["requestBody"]["content"])
    return operation


# ---- as protobuf -------------------------------------------------------------------------------


def encoded(document: Json) -> bytes:
    """The result of `document` as a protobuf message `openapi.v2.Document`."""
    info = text(1, document["info"]["title"]) + text(2, document["info"]["version"])
    paths = [_named(path, _path(item)) for path, item in document["paths"].items()]
    return text(1, document["swagger"]) + message(2, info) + message(8, repeated(2, paths))


def _path(item: Json) -> bytes:
    operations = [message(number, _encoded_operation(item[name])) for name, number in _METHODS.items() if name in item]
    return b"".join(operations) + repeated(9, map(_parameter, item["parameters"]))


def _encoded_operation(operation: Json) -> bytes:
    # A value is YAML within an `Any`, and JSON is YAML.
    extensions = [_named(name, message(2, encode(value))) for name, value in operation.items() if name.startswith("x-")]
    responses = [
        _named(code, message(1, text(1, response["description"]))) for code, response in operation["responses"].items()
    ]
    return (
        repeated(6, map(str.encode, operation["produces"]))
        + repeated(7, map(str.encode, operation.get("consumes", [])))
        + repeated(8, map(_parameter, operation["parameters"]))
        + message(9, repeated(1, responses))
        + repeated(13, extensions)
    )


def _parameter(parameter: Json) -> bytes:
    """A `ParametersItem`."""
    name, place = parameter["name"], parameter["in"]
    if place == "body":
        kind = message(22, text(1, parameter["schema"]["type"]))
        return message(1, message(1, text(2, name) + text(3, place) + flag(4) + message(5, kind)))
    if place == "path":
        own = flag(1) + text(2, place) + text(3, parameter["description"])
        return message(1, message(2, message(4, own + text(4, name) + text(5, parameter["type"]))))
    own = text(2, place) + text(4, name) + text(6, parameter["type"]) + flag(20)
    return message(1, message(2, message(3, own)))


def _named(name: str, value: bytes) -> bytes:
    """An entry of what JSON has as an object: `NamedPathItem`, `NamedAny` and their like."""
    return text(1, name) + message(2, value)
