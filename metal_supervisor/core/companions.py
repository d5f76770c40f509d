"""Files that an engine loads beside its model: a draft model, a vision projector, the other shards.

They are named in two resources: the projector and the shards in the Model, the draft model in the InferenceService, as
another Model or as a file beside the model's own. A file that nobody would load is refused by name, as is what has to
be fetched: only models that are on this Mac have files beside them so far.
"""

from __future__ import annotations

import posixpath
import urllib.parse
from collections.abc import Collection, Mapping
from typing import Any

from metal_supervisor.core import fields
from metal_supervisor.core.fields import Bad
from metal_supervisor.core.shards import shard_names
from metal_supervisor.core.types import Companion, Json, Role

SPECULATION = "spec.speculativeDecoding"
DRAFTED = ("draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark")
"""Kinds of speculation that ask a model for its proposals; draft-mtp may ask the model itself."""
LOOKED_UP = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
"""Kinds that look them up in the text so far."""
OFF = ("none", "disabled")
OTHER_NAMES: Mapping[str, str] = {"mtp": "draft-mtp", "draft": "draft-simple"}


def local_path(source: str) -> str:
    """The absolute path of a source on this Mac, "" if it is elsewhere."""
    if source.startswith("/"):
        return source
    if not source.startswith("file://"):
        return ""
    try:
        return urllib.parse.unquote(urllib.parse.urlsplit(source).path)
    except ValueError:
        return ""


def beside(source: str, name: str, path: str) -> str:
    """The absolute path of a file that is named next to a model's source. Raises Bad, which names the field."""
    fields.text(name, path)
    model = local_path(source)
    if not model:
        raise Bad("UnsupportedField", f"{path} is only supported for a spec.source on this Mac yet: an absolute path")
    plain = posixpath.normpath(name)
    if name.startswith("/") or plain in (".", "..") or plain.startswith("../"):
        raise Bad("InvalidSpec", f"{path} must name a file beside spec.source, not {name!r:.80}; leave out its path")
    return posixpath.join(posixpath.dirname(model), plain)


def projector_of(spec: Json, source: str) -> str:
    """Absolute path of a Model's vision projector, "" without one. Raises Bad."""
    name = fields.get(spec, "spec.mmproj", str, "").strip()
    return beside(source, name, "spec.mmproj") if name else ""


def check_files(spec: Json, source: str, known: Collection[str]) -> None:
    """Raises Bad for a file of a Model that nothing loads. `known`: absolute paths of what is loaded besides."""
    model = local_path(source)
    shards = [posixpath.join(posixpath.dirname(model), name) for name in shard_names(posixpath.basename(model))]
    for index, name in enumerate(fields.texts(spec, "spec.files")):
        where = f"spec.files[{index}]"
        if beside(source, name, where) not in (*shards, *known):
            text = f"{where} {name!r:.80} would not be loaded: it is no shard of spec.source, nor spec.mmproj"
            raise Bad("UnsupportedField", f"{text}; remove it")


def speculation(resource: Json) -> dict[str, Any] | None:
    """What a service says of speculative decoding, in the engine's own terms; None if it has none. Raises Bad.

    Keys: `type`, and where they are said `nDraftMax` (tokens), `pMin`, `draftModel` and `draftModelRef`.
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


def draft_beside(source: str, name: str) -> Companion:
    """The draft model that is a file beside the model's own, or any other by its absolute path. Raises Bad."""
    field = f"{SPECULATION}.draftModel"
    found = fields.text(name, field) if name.startswith("/") else beside(source, name, field)
    return Companion(Role.DRAFT, field, found)
