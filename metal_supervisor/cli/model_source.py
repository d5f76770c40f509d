"""From what a user types to a model: a file, a repository of the Hub, Ollama's library, a URL, or a shipped example."""

from __future__ import annotations

import contextlib
import re
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from metal_supervisor.cli import fit
from metal_supervisor.models.listing import Unusable
from metal_supervisor.models.model_files import ESCAPED
from metal_supervisor.models.remote.origins import locate
from metal_supervisor.models.remote.web import Client
from metal_supervisor.models.repository import Ambiguous, usual
from metal_supervisor.models.store_context import lax_rules
from metal_supervisor.settings import checks
from metal_supervisor.settings.loader import Settings, conf_dir
from metal_supervisor.spec import fields
from metal_supervisor.spec.document import mapping, string
from metal_supervisor.spec.fields import Bad
from metal_supervisor.spec.nearest import did_you_mean
from metal_supervisor.spec.sources import (
    DEFAULT_REVISION,
    FORMS,
    Artifact,
    canonical,
    hub_parts,
    is_file,
    without_quantization,
)
from metal_supervisor.spec.types import Json

LONGEST_NAME = 50
_SNAPSHOT = re.compile(r"models--(?:.*--)?([^/]+)/snapshots/[^/]+/?$")
"""A repository in the cache of the Hub's library, whose own last part is a commit."""
_LIBRARY = re.compile(r"ollama://([\w./-]+(?::[\w.-]+)?)", re.ASCII)


@dataclass(frozen=True)
class ServedModel:
    """A model as manifests name it."""

    source: str
    """As `spec.source`."""
    format: str
    """As `spec.format`; "" for a repository that was not asked yet."""
    note: str = ""
    """What was chosen, "" if nothing was."""
    model: Json = field(default_factory=dict)
    """Further fields of the Model's spec."""
    service: Json = field(default_factory=dict)
    """Further fields of the InferenceService's spec."""
    name: str = ""
    """Name of the shipped example, "" if it is none."""


def resolve(settings: Settings, typed: str, context: int | None = None) -> ServedModel:
    """The model that a user named. Asks the Hub for the files of a repository. Raises Bad, Unusable."""
    found = named(typed)
    return found if found.format else _of_repository(settings, found.source, context)


def named(typed: str) -> ServedModel:
    """The model that a user named, without a question to the Hub: of its repositories, `format` is "". Raises Bad."""
    fields.text(typed, "SOURCE")
    if not typed.strip():  # as a path it would be the current directory
        raise Bad("InvalidModel", "SOURCE is empty; name a file, a repository, a URL or a shipped example")
    if typed.startswith("~") and (problem := checks.path(typed)):
        raise Bad("InvalidModel", f"SOURCE {problem}, not {typed!r:.200}")
    path = Path(typed).expanduser()
    if typed.startswith(("/", "~", "./", "../")) or path.exists():
        if not path.exists():
            hint = f"; {ESCAPED}" if "\\" in typed else ""
            raise Bad("InvalidModel", f"{typed}: there is no such file{hint}")
        place = _absolute(path).as_uri()
        canonical(place, "SOURCE")
        return ServedModel(place, "mlx" if path.is_dir() else "gguf")
    if library := _LIBRARY.fullmatch(typed):
        return ServedModel(canonical(f"https://ollama.com/library/{library[1]}", "SOURCE"), "gguf")
    if ":" not in typed and "/" in typed and typed.endswith(".gguf"):  # no repository of the Hub has such a name
        text = f"{typed}: there is no such file; one of Hugging Face is hf://OWNER/REPO/FILE.gguf"
        raise Bad("InvalidModel", text)
    known = examples()
    if typed in known:
        return known[typed]
    if "/" not in typed and "\\" not in typed:
        text = f"{typed}: there is no such file, and no example of that name{did_you_mean(typed, known)}"
        raise Bad("InvalidModel", f"{text}; name one of {', '.join(sorted(known))}, OWNER/REPO[:QUANT], or {FORMS}")
    written, quantization = without_quantization(typed)
    place = canonical(written, "SOURCE")
    if (parts := hub_parts(place)) and not parts[2]:
        place = place.removesuffix(f"@{DEFAULT_REVISION}")
        return ServedModel(f"{place}:{quantization}" if quantization else place, "")
    return ServedModel(place, "gguf")


def question(found: ServedModel, context: int | None, slots: int | None, kv_type: str = "f16") -> fit.Question:
    """The question whether a model fits; what is not given is as its example has it."""
    source = found.source
    if (quantization := string(found.model, "quantization")) and not is_file(canonical(source)):
        source += f":{quantization}"
    context = found.service.get("contextSize") if context is None else context
    return fit.Question(source, context, found.service.get("parallelSlots", 1) if slots is None else slots, kv_type)


def _absolute(path: Path) -> Path:
    """An absolute path under the name that the user typed: the target of a link may have only a digest for a name.

    Links before `..` are followed, because `..` is the parent of what they lead to.
    """
    parts = path.absolute().parts
    after = len(parts) - parts[::-1].index("..") if ".." in parts else 0
    return Path(*parts[:after]).resolve().joinpath(*parts[after:])


def _of_repository(settings: Settings, source: str, context: int | None) -> ServedModel:
    """A GGUF file of a repository of the Hub, else the whole of it for MLX. Raises Unusable."""
    place, quantization = without_quantization(source)
    with contextlib.closing(Client(lax_rules(settings))) as client:
        try:
            found = locate(Artifact(canonical(place), quantization=quantization), {}, client, settings.hub)
            # Of a mirror on this Mac, the files may change.
            return ServedModel(source if found.path else f"{place}/{found.chosen}", "gguf")
        except Ambiguous as error:
            offered = [] if quantization else usual(error.names)
            if not offered:
                raise _for_a_terminal(error) from None
        except Unusable as error:
            if quantization or error.reason != "InvalidModel":
                raise _for_a_terminal(error) from None
            try:
                locate(Artifact(canonical(place), directory=True), {}, client, settings.hub)
            except Unusable as neither:
                raise _for_a_terminal(neither) from None
            return ServedModel(place, "mlx")
    chosen = next((each for each in offered if _fits(settings, f"{place}/{each}", context)), offered[0])
    note = f"of several files, {chosen} is taken; {place.removeprefix('hf://')}:QUANT names another"
    return ServedModel(f"{place}/{chosen}", "gguf", note)


def _for_a_terminal(error: Unusable) -> Unusable:
    """An error with advice for what a user types, instead of for the fields of a Model."""
    another = "; name another: OWNER/REPO:QUANT or hf://OWNER/REPO/FILE.gguf"
    return Unusable(error.reason, re.sub(r"; [^;]*\bspec\.[^;]*$", another, str(error)))


def _fits(settings: Settings, source: str, context: int | None) -> bool:
    """True if a model fits, or that cannot be told."""
    try:
        return fit.answer(settings, fit.Question(source, context)).fits
    except fit.CannotTell:
        return True


def examples() -> dict[str, ServedModel]:
    """The shipped examples that any Mac can fetch, by the name of their Model."""
    found, place = {}, conf_dir() / "examples"
    for path in sorted([*place.glob("*.yaml"), *place.glob("*gb/*.yaml")]):
        made = [each for each in yaml.safe_load_all(path.read_text("utf-8")) if isinstance(each, dict)]
        services = {
            mapping(each, "spec")["modelRef"]: each
            for each in made
            # One with a draft model is of two Models, and `serve` makes one.
            if each["kind"] == "InferenceService" and "speculativeDecoding" not in mapping(each, "spec")
        }
        for each in made:
            name, spec = each["metadata"]["name"], mapping(each, "spec")
            source = string(spec, "source")
            if each["kind"] == "Model" and name in services and not source.startswith("/"):
                service = {key: value for key, value in mapping(services[name], "spec").items() if key != "modelRef"}
                kind, note = string(spec, "format") or "gguf", f"{name} as in {path.name} of the shipped examples"
                found[name] = ServedModel(source, kind, note, spec, service, name)
    return found


def name_of(source: str) -> str:
    """Name of a service for a model: a DNS label made of the last part of its source."""
    plain = urllib.parse.unquote(source) if source.startswith("file://") else source
    if plain.lower().startswith(("https://", "http://")):
        plain = plain.partition("?")[0]  # which may hold a token
    snapshot = _SNAPSHOT.search(plain)
    last = snapshot[1] if snapshot else re.split(r"[/\\]", plain.rstrip("/"))[-1]
    plain = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", last, flags=re.IGNORECASE).lower()
    label = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:LONGEST_NAME].strip("-")
    return label if label[:1].isalpha() else f"model-{label}".rstrip("-")
