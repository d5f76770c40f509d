"""Files that an engine loads beside its model: a draft model, a vision projector, the other shards.

Two resources name them: the Model its projector and shards, the InferenceService its draft model, as another Model or
as a file beside the model's own. A file that no engine would load is refused by name.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from metal_supervisor.spec import fields
from metal_supervisor.spec.arguments import Argument, ParsedArguments, Paths, decimal
from metal_supervisor.spec.fields import Bad
from metal_supervisor.spec.shards import shard_names
from metal_supervisor.spec.sources import Artifact, beside, canonical, is_file, library_model, same_origin, shown
from metal_supervisor.spec.types import Companion, Json, Role

SPECULATION = "spec.speculativeDecoding"
DRAFTED = ("draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark")
"""Kinds of speculation that ask a model for its proposals; draft-mtp may ask the model itself."""
LOOKED_UP = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
"""Kinds that look them up in the text so far."""
OFF = ("none", "disabled")
OTHER_NAMES: Mapping[str, str] = {"mtp": "draft-mtp", "draft": "draft-simple"}
SCALE = decimal(-1000, 1000)
MOST_NAMED = 64
"""Files that the arguments of one engine may name: each has a thread of the store's own."""


def check_files(spec: Json, place: str, known: Collection[str]) -> None:
    """Raises Bad for a file of a Model that nothing loads. `known`: sources of what is loaded besides."""
    for index, name in enumerate(fields.texts(spec, "spec.files", fields.MOST_FILES)):
        where = f"spec.files[{index}]"
        found = beside(place, name, where)
        if found not in (*shard_names(place), *known):
            text = f"{where} {name!r:.80} would not be loaded: it is no shard of spec.source, nor spec.mmproj"
            raise Bad("UnsupportedField", f"{text}; remove it")


def speculation(resource: Json) -> dict[str, Any] | None:
    """Speculative decoding settings of a service, in the engine's own terms; None if it has none. Raises Bad.

    Keys: `type`, and where they are set `nDraftMax` (tokens), `pMin`, `draftModel` and `draftModelRef`.
    """
    if fields.get(resource, SPECULATION, dict, None) is None:
        return None
    said = fields.get(resource, f"{SPECULATION}.type", str, "")
    kind = OTHER_NAMES.get(said, said)
    if kind in OFF:
        return None
    if kind not in (*DRAFTED, *LOOKED_UP):
        known = ", ".join((*OFF, *OTHER_NAMES, *DRAFTED, *LOOKED_UP))
        raise Bad("InvalidSpec", f"{SPECULATION}.type must be one of {known}, not {said!r:.80}")
    least = fields.get(resource, f"{SPECULATION}.pMin", float, None)
    if least is not None and not 0 <= least <= 1:
        raise Bad("InvalidSpec", f"{SPECULATION}.pMin must be between 0 and 1, not {least!r:.40}")
    if least is not None and kind in LOOKED_UP:
        raise Bad("InvalidSpec", f"{SPECULATION}.pMin means nothing to {kind}, which asks no model; remove it")
    found = {
        "type": kind,
        "nDraftMax": fields.ranged(1, fields.MAX)(resource, f"{SPECULATION}.nDraftMax"),
        "pMin": least,
        **{name: _weights(resource, name, said, kind) for name in ("draftModel", "draftModelRef")},
    }
    if found["draftModel"] and found["draftModelRef"]:
        raise Bad("InvalidSpec", f"{SPECULATION}: set one of draftModelRef and draftModel, not both")
    if kind in DRAFTED and said not in ("mtp", "draft-mtp") and not (found["draftModel"] or found["draftModelRef"]):
        text = f"{SPECULATION}.type {said} needs a draft model; set {SPECULATION}.draftModelRef to a Model"
        raise Bad("InvalidSpec", f"{text} of the same namespace")
    return {name: value for name, value in found.items() if value is not None}


def _weights(resource: Json, name: str, said: str, kind: str) -> str | None:
    value: str | None = fields.get(resource, f"{SPECULATION}.{name}", str, "").strip() or None
    if value is not None and (kind in LOOKED_UP or said == "mtp"):
        raise Bad("InvalidSpec", f"{SPECULATION}.{name} means nothing to {said}, which loads no draft model; remove it")
    return value


def _files(item: Argument) -> list[tuple[str, str]]:
    """(file as written, what stands behind it) for each file that an argument names; [] if its flag names no files."""
    if item.flag is None or item.flag.paths is None or not item.values:
        return []
    if item.flag.paths is Paths.ONE:
        return [(item.values[0], "")]
    parts = item.values[0].split(",")
    if item.flag.paths is Paths.LIST:
        return [(each, "") for each in parts]
    split = (each.rpartition(":") for each in parts)  # without a scale, all of it is the last of the three
    return [(name, f":{scale}") if colon else (scale, "") for name, colon, scale in split]


def named_files(item: Argument) -> tuple[str, ...]:
    """The files that an argument names, as written; none if its flag names no files."""
    return tuple(name for name, _ in _files(item))


def with_files(item: Argument, found: Mapping[str, str]) -> str:
    """The value of such an argument, with each of its files where it is on this Mac."""
    return ",".join(found.get(name, "") + behind for name, behind in _files(item))


def misread(item: Argument, source: str) -> str:
    """Reason why the engine would misread a file's place in an argument, or "" if it would not. `source`: canonical."""
    if item.flag is None or item.flag.paths is None:
        return ""
    plain = urllib.parse.unquote(source).partition("://")[2] or urllib.parse.unquote(source)
    forbidden = {Paths.ONE: "", Paths.LIST: ",", Paths.SCALED: ",:"}[item.flag.paths]
    return f"must have no {' or '.join(forbidden)} in its name" if set(forbidden) & set(plain) else ""


def argument_source(name: str, model: Artifact, where: str) -> str:
    """Source of a file that an argument names: a URL, an absolute path, or a name beside the model's. Raises Bad."""
    if "://" in name or name.startswith("/"):
        return canonical(name, where)
    return beside(model.source, name, where) if name else canonical(name, where)


def named_by_arguments(arguments: ParsedArguments, model: Artifact) -> tuple[Companion, ...]:
    """The files that `spec.extraArgs` name, such as LoRA adapters. Raises Bad.

    Those that are where the model is are opened by its Secret; no other server is sent that.
    """
    found: dict[str, Companion] = {}
    for item in arguments.items:
        where, files = f"spec.extraArgs[{item.value_index}]", _files(item)
        scaled = item.flag is not None and item.flag.paths is Paths.SCALED
        if scaled and not all(SCALE.allows(behind[1:]) for _, behind in files):
            text = f"must be FILE:SCALE, with {SCALE.says}"
            raise Bad("InvalidSpec", f"{where} {shown(item.values[0])!r:.120} {text}")
        for name, _ in files:
            place = argument_source(name, model, where)
            if not is_file(place) or library_model(place):
                raise Bad("InvalidSpec", f"{where} {shown(name)!r:.120} must name one GGUF file")
            if why := misread(item, place):
                raise Bad("InvalidSpec", f"{where} {shown(name)!r:.120} {why}")
            origin = Artifact(place, secret=model.secret if same_origin(place, model.source) else None)
            found[place] = Companion(Role.ADAPTER, where, origin)
            if len(found) > MOST_NAMED:
                raise Bad("InvalidSpec", f"{where} names one file too many: at most {MOST_NAMED} are possible")
    return tuple(found.values())


def draft_beside(artifact: Artifact, name: str) -> Companion:
    """The draft model that is a file beside the model's own, or any other by its absolute path. Raises Bad."""
    field = f"{SPECULATION}.draftModel"
    if name.startswith("/"):
        return Companion(Role.DRAFT, field, Artifact(fields.address(name, field)))
    found = beside(artifact.source, name, field)
    return Companion(Role.DRAFT, field, replace(artifact, source=found, sha256="", quantization=""))
