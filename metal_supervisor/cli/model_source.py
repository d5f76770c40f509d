"""From what a user types to a model: a file, a repository of the Hub, Ollama's library, a URL, or a shipped example."""

from __future__ import annotations

import contextlib
import re
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from metal_supervisor.cli import fit
from metal_supervisor.models.listing import Unusable
from metal_supervisor.models.remote.origins import locate
from metal_supervisor.models.remote.web import Client
from metal_supervisor.models.store_context import lax_rules
from metal_supervisor.settings import checks
from metal_supervisor.settings.loader import Settings, conf_dir
from metal_supervisor.spec.document import mapping, string
from metal_supervisor.spec.fields import Bad
from metal_supervisor.spec.nearest import did_you_mean
from metal_supervisor.spec.sources import FORMS, Artifact, canonical
from metal_supervisor.spec.types import Json

QUANTIZATIONS = ("Q4_K_M", "Q4_K_S", "Q4_0", "Q3_K_M", "Q2_K", "Q5_K_M", "Q6_K", "Q8_0")
"""The usual one, then what is smaller, for a Mac that it does not fit; larger ones where a repository has no other."""
LONGEST_NAME = 50
_REPOSITORY = re.compile(r"(?:hf://)?([\w.-]+/[\w.-]+)(?::([\w.-]+))?", re.ASCII)
_LIBRARY = re.compile(r"ollama://([\w./-]+(?::[\w.-]+)?)", re.ASCII)


@dataclass(frozen=True)
class ServedModel:
    """A model as manifests name it."""

    source: str
    """As `spec.source`."""
    format: str
    note: str = ""
    """What was chosen, "" if nothing was."""
    model: Json = field(default_factory=dict)
    """Further fields of the Model's spec."""
    service: Json = field(default_factory=dict)
    """Further fields of the InferenceService's spec."""
    name: str = ""
    """Name of the shipped example, "" if it is none."""


def resolve(settings: Settings, typed: str, context: int | None = None) -> ServedModel:
    """The model that was named. Asks the Hub for the files of a repository. Raises Bad, Unusable."""
    if typed.startswith("~") and (problem := checks.path(typed)):
        raise Bad("InvalidModel", f"SOURCE {problem}, not {typed!r:.200}")
    path = Path(typed).expanduser()
    if typed.startswith(("/", "~", "./", "../")) or path.exists():
        if not path.exists():
            raise Bad("InvalidModel", f"{typed}: there is no such file")
        here = path.resolve()
        return ServedModel(here.as_uri(), "gguf") if path.is_file() else ServedModel(str(here), "mlx")
    if library := _LIBRARY.fullmatch(typed):
        return ServedModel(canonical(f"https://ollama.com/library/{library[1]}", "SOURCE"), "gguf")
    if "://" not in typed and "/" in typed and typed.endswith(".gguf"):  # no repository of the Hub has such a name
        text = f"{typed}: there is no such file; one of Hugging Face is hf://OWNER/REPO/FILE.gguf"
        raise Bad("InvalidModel", text)
    if repository := _REPOSITORY.fullmatch(typed):
        return _of_repository(settings, repository[1], repository[2] or "", context)
    if "://" in typed:
        return ServedModel(canonical(typed, "SOURCE"), "gguf")
    known = examples()
    if typed in known:
        return known[typed]
    text = f"{typed}: there is no such file, and no example of that name{did_you_mean(typed, known)}"
    raise Bad("InvalidModel", f"{text}; name one of {', '.join(sorted(known))}, OWNER/REPO[:QUANT], or {FORMS}")


def _of_repository(settings: Settings, name: str, quantization: str, context: int | None) -> ServedModel:
    """A GGUF file of a repository of the Hub, else the whole of it for MLX. Raises Unusable."""
    place = f"hf://{name}"
    with contextlib.closing(Client(lax_rules(settings))) as client:

        def source(wanted: str) -> str:
            found = locate(Artifact(place, quantization=wanted), {}, client, settings.hub)
            if found.path:  # in a mirror on this Mac
                return f"{place}:{wanted}" if wanted else place
            return f"{place}/{found.chosen}"

        try:
            return ServedModel(source(quantization), "gguf")
        except Unusable as error:
            if quantization or error.reason not in ("AmbiguousSource", "InvalidModel"):
                raise
            if error.reason == "InvalidModel":
                locate(Artifact(place, directory=True), {}, client, settings.hub)
                return ServedModel(place, "mlx")
            chosen = _fitting(source, lambda found: _fits(settings, found, context))
            if not chosen:
                raise
    note = f"of several files, {chosen.removeprefix(place)[1:]} is taken; {name}:QUANT names another"
    return ServedModel(chosen, "gguf", note)


def _fitting(source: Callable[[str], str], fits: Callable[[str], bool]) -> str:
    """The source of the first usual quantization that fits, of the first that is there if none does, "" without any."""
    first = ""
    for quantization in QUANTIZATIONS:
        try:
            found = source(quantization)
        except Unusable:
            continue
        if fits(found):
            return found
        first = first or found
    return first


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
    last = re.split(r"[/\\]", plain.rstrip("/"))[-1]
    plain = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", last, flags=re.IGNORECASE).lower()
    label = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:LONGEST_NAME].strip("-")
    return label if label[:1].isalpha() else f"model-{label}".rstrip("-")
