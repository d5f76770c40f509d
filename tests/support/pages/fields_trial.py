"""Tries a field out: what the code makes of a resource with it, and what of the same resource without it.

A trial goes the way of a real custom resource: `interpret`, the runtime's refusals, its command line, its record, and
the objects that are published. What comes out is compared, so nobody has to say, or can get wrong, what a field does.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

from metal_supervisor import runtimes
from metal_supervisor.cluster.manifests import service_object, url_of
from metal_supervisor.controller import reconcile
from metal_supervisor.models.metadata import Demand, Reading
from metal_supervisor.placement import placement
from metal_supervisor.runtimes import Binary, Executable, Place
from metal_supervisor.spec.attachment import JOB
from metal_supervisor.spec.name_claims import on_daemons
from metal_supervisor.spec.references import Holding, Source, filled
from metal_supervisor.spec.resources import Policy, interpret
from metal_supervisor.spec.sizes import GIB
from metal_supervisor.spec.types import Engine, Json, ModelFile, Program, Rejected, Service
from tests.support.pages.fields_leaves import Leaf
from tests.support.pages.fields_samples import (
    BASES,
    BESIDE,
    BY_THE_WAY,
    DRAFT,
    FLAGS,
    HELD,
    MAP_KEY,
    MLX_CONFIG,
    NEEDS,
    NEUTRAL,
    SCALARS,
    VALUES,
    WORDS,
)
from tests.support.records import accept

NAME = "tiny"
OTHER = "example"
DRAFTING = "draft"
"""The Model that services name, one more, and one that drafts."""
PORT = 18100
HOST = "127.0.0.1"
TOTAL_BYTES = 64 * GIB
"""Of the Mac that is asked."""


class EveryFlag(frozenset[str]):
    """The flags of a build that knows all there are, so that nothing is left out for want of one."""

    def __contains__(self, flag: object) -> bool:
        return True


@dataclass(frozen=True)
class Column:
    """One engine of the page."""

    runtime: str
    executable: Executable
    title: str

    @property
    def binary(self) -> Binary:
        name = self.executable.name
        interpreter = "/engines/python" if self.executable.script else ""
        return Binary(f"/engines/{name}", FLAGS.get(name, EveryFlag()), name, interpreter)

    @property
    def model_spec(self) -> Mapping[str, Any]:
        """The spec of a Model that it serves. KeyError: there is none in fields_samples."""
        formats = sorted(runtimes.RUNTIMES[self.runtime].formats)
        name = next((each for each in (self.runtime, *formats) if each in BASES), self.runtime)
        return BASES[name]


def columns() -> list[Column]:
    """One for each executable of each runtime."""
    found = []
    for name, row in runtimes.RUNTIMES.items():
        for executable in row.executables:
            alone = len(row.executables) == 1 or executable.name == name
            found.append(Column(name, executable, name if alone else f"{name}: {executable.name}"))
    return found


@dataclass(frozen=True)
class Outcome:
    """What became of one custom resource."""

    refusal: tuple[str, str] | None
    """(reason, message) if it was refused."""
    arguments: Counter[str]
    """Of the engine's command line, each flag with its values."""
    facts: Mapping[str, str]
    """Whatever else somebody acts on, by name."""
    daemon: Counter[str] = field(default_factory=Counter)
    """Of the command line of the daemon that serves it with others."""
    elsewhere: bool = False
    """Another engine runs it, so that nothing else can be compared."""


@dataclass(frozen=True)
class Cell:
    """What one field does with one engine."""

    changes: tuple[str, ...]
    """Fit for the page; () if it changes nothing."""
    refusals: tuple[tuple[tuple[str, ...], str, str], ...]
    """(values, reason, message); values () if all that were tried were refused alike."""
    idle: tuple[str, ...]
    """Values that changed nothing."""
    untried: str = ""
    """Why nothing can be said: what its resource was refused for without it."""


def steps(path: str) -> list[str | int]:
    """What leads to a field: names, and 0 for the first item of a list."""
    found: list[str | int] = []
    for step in path.split("."):
        found.append(MAP_KEY if step == "*" else step.removesuffix("[]"))
        if step.endswith("[]"):
            found.append(0)
    return found


def with_value(inside: Any, way: list[str | int], value: Any) -> Any:
    """A copy of a document with a value where the way leads; what is missing on it is made."""
    if not way:
        return value
    if way[0] == 0:
        return [with_value(inside[0] if inside else None, way[1:], value)]
    known = inside or {}
    return {**known, way[0]: with_value(known.get(way[0]), way[1:], value)}


def resource(name: str, spec: Json) -> Json:
    """A custom resource, as far as it is looked at."""
    return {"metadata": {"namespace": "default", "name": name, "uid": name, "generation": 1}, "spec": spec}


def attempt(column: Column, kind: str, values: Mapping[str, Any]) -> Outcome:
    """The outcome of a service of this engine, with fields of it, or of its Model, set to the given values."""
    spec = {**column.model_spec, "hardware": {"accelerator": "metal"}}
    other = {**spec, "source": str(spec["source"]).replace("base", OTHER)}
    made = {
        "InferenceService": resource(NAME, {"modelRef": NAME, "runtime": column.runtime}),
        "Model": resource(NAME, spec),
    }
    for path, value in values.items():
        made[kind] = with_value(made[kind], steps(path), value)
    asked = made["InferenceService"]
    models = {
        ("default", NAME): made["Model"],
        ("default", OTHER): resource(OTHER, other),
        ("default", DRAFTING): resource(DRAFTING, DRAFT),
    }
    offered = {name: row.formats for name, row in runtimes.RUNTIMES.items()}
    policy = Policy(
        "llama-server",
        offered,
        allowed_args=frozenset({"--your-flag"}),
        allowed_env=frozenset({"YOUR_NAME"}),
        vocabularies=runtimes.VOCABULARIES,
    )
    found = interpret({("default", NAME): asked}, models, policy)["default", NAME]
    if isinstance(found, Rejected):
        return Outcome((found.reason, found.message), Counter(), {})
    return _run(column, found, asked)


def held(source: Source) -> Holding:
    """A Secret or a ConfigMap: there is every one that is asked for."""
    _, kind, name = source
    return Holding(200, {key: f"{kind} {name} {key}" for key in HELD})


def _run(column: Column, service: Service, asked: Json) -> Outcome:
    row, binary = runtimes.RUNTIMES[service.runtime], column.binary
    if service.runtime != column.runtime:
        return Outcome(None, Counter(), {"runtime": repr(service.runtime)}, elsewhere=True)
    if refusal := row.refuse(service) or row.lacks(service, binary):
        return Outcome(refusal, Counter(), {})
    service = filled(service, held)
    if row.shared is not None:
        service = on_daemons([service], (), row.shared.names)[service.key]
    port = service.container_port or PORT
    path = service.model.source.removeprefix("file://")  # the store keeps what is downloaded by its source, too
    reading = Reading(4 * GIB, config=None if service.model.format == "gguf" else MLX_CONFIG)
    further = {each.role: each.artifact.source for each in service.companions}
    place = Place(path, HOST, port, 8, "/state", reading, further)
    engine = row.engine(service, binary, place)
    demand = row.demand(service, engine.argv, reading, lambda _path: reading) or Demand(None)
    limit = service.model.limit.resolve(TOTAL_BYTES)
    outlook = reconcile.Outlook(
        ModelFile("Ready", path, 4 * GIB),
        port,
        engine,
        Program("p", "p.json", ""),
        host=HOST,
        demand=demand,
        limit_bytes=limit,
    )
    record = accept(service, None, outlook, 0.0)
    artifact = service.model.artifact
    facts = {
        **dict(environment(engine)),
        "fetched": repr((artifact.source, artifact.directory, artifact.files, artifact.quantization)),
        "digest": repr((artifact.sha256, artifact.digests)),
        "opened": repr(artifact.secret),
        **dict(flat("probe", engine.probe)),
        **dict(flat("Service", service_object(record, service.endpoint))),
        **{name: repr(getattr(record, name)) for name in ACTED_ON},
        "standing": (service.awaits[0] if service.awaits else record.verdict.standing).value,
        "url": url_of(service.namespace, service.endpoint),
        "placement": placement.unplaced(asked, {}),
    }
    return Outcome(None, arguments(engine.argv), facts, daemon_arguments(service, binary, place))


def environment(engine: Engine) -> Iterator[tuple[str, str]]:
    """(name, value) of the engine's environment; of an attendant, what it is to ask its daemon for."""
    for name, value in engine.env:
        if name == JOB:
            yield from ((f"{DAEMON}`{path}`", each) for path, each in flat("", json.loads(value)))
        else:
            yield f"environment `{name}`", value


def daemon_arguments(service: Service, binary: Binary, place: Place) -> Counter[str]:
    """The command line of the daemon that the service shares, if that is how it is run."""
    shared = runtimes.RUNTIMES[service.runtime].shared
    if shared is None:
        return Counter()
    said = {name: service.options[name] for name in shared.options if name in service.options}
    return arguments(shared.engine(binary, place, said).argv)


DAEMON = "daemon: "
ACTED_ON = (
    "replicas",
    "mode",
    "priority",
    "drain_s",
    "protected",
    "limit_bytes",
    "reserved_bytes",
    "runtime",
    "model",
    "daemon_names",
)
"""Fields of a record that others act on."""


def flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """(dotted name, value) of everything inside of a value."""
    inner = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    if isinstance(inner, list | tuple):
        inner = dict(enumerate(inner))
    if not isinstance(inner, Mapping):
        yield name, str(inner)
        return
    for key, each in inner.items():
        yield from flat(f"{name}.{key}".lstrip("."), each)


def arguments(argv: tuple[str, ...]) -> Counter[str]:
    """How often each flag is given, with its values."""
    groups: list[str] = []
    for argument in argv[1:]:
        if re.match(r"--?[A-Za-z]", argument) or not groups:
            groups.append(argument)
        else:
            groups[-1] += f" {argument}"
    return Counter(groups)


def changes(before: Outcome, after: Outcome) -> set[str]:
    """What differs, as the page says it."""
    found = flags(before.arguments, after.arguments)
    found |= {f"{DAEMON}{each}" for each in flags(before.daemon, after.daemon)}
    names = {name for name in {*before.facts, *after.facts} if before.facts.get(name) != after.facts.get(name)}
    if after.elsewhere:
        found, names = set(), names & set(after.facts)
    told = names - BY_THE_WAY if found or names - BY_THE_WAY else names
    return found | {WORDS.get(name, name) for name in told}


def flags(before: Counter[str], after: Counter[str]) -> set[str]:
    """The flags that are new or have other values, or else those that are gone."""
    added, removed = after - before, before - after
    return {f"`{each.split(' ')[0]}`" for each in added} or {f"no `{each.split(' ')[0]}`" for each in removed}


def values_of(kind: str, leaf: Leaf) -> tuple[Any, ...]:
    """What to try a field with."""
    if leaf.path == "spec.modelRef":
        return (OTHER,)
    if leaf.values:
        return tuple(int(each) if leaf.type == "integer" else each for each in leaf.values)
    return VALUES.get(kind, {}).get(leaf.path, SCALARS[leaf.type])


def beside(path: str) -> Mapping[str, Any]:
    """What has to be said with a field: by itself, or by the nearest that it is a part of."""
    found = [above for above in BESIDE if path == above or path.startswith(f"{above}.")]
    return BESIDE[max(found, key=len)] if found else {}


def said(value: Any) -> str:
    """A value as the page shows it."""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


@functools.cache
def _untouched(column: Column, kind: str) -> Outcome:
    """What most fields are compared with."""
    return attempt(column, kind, {})


def cell(column: Column, kind: str, leaf: Leaf) -> Cell:
    """What a field does with an engine."""
    base = beside(leaf.path)
    before = attempt(column, kind, base) if base else _untouched(column, kind)
    found: set[str] = set()
    refused: dict[tuple[str, str], list[str]] = {}
    idle, untried = [], ""
    values = values_of(kind, leaf)
    for value in values:
        after = attempt(column, kind, {**base, **NEEDS.get(leaf.path, {}).get(str(value), {}), leaf.path: value})
        if after.refusal is not None:
            same = next((each for each in refused if each[0] == after.refusal[0]), after.refusal)
            refused.setdefault(same, []).append(said(value))
        elif before.refusal is not None:
            untried = before.refusal[1]
        elif change := changes(before, after):
            found |= change
        else:
            idle.append(said(value))
    alike = len(refused) == 1 and len(values) == len(next(iter(refused.values()), ()))
    refusals = tuple((() if alike else tuple(each), *why) for why, each in refused.items())
    return Cell(tuple(sorted(found)), refusals, tuple(idle), untried)


def names_field(kind: str, path: str, message: str) -> bool:
    """Whether a message tells its reader which field to look at: this one, or what it is a part of below spec."""
    text = re.sub(r"\[\d+\]", "", message)
    names = path.replace("[]", "").removesuffix(".*").split(".")
    ways = [".".join(names[:end]) for end in range(2, len(names) + 1)]
    if len(names) == 2:
        ways.append(names[1])  # as in a sentence that is about two of them
    return any(re.search(rf"\b{re.escape(way)}\b", text) for way in ways) and (kind != "Model" or 'Model "' in text)


def silent(leaf: Leaf, found: Cell) -> list[str]:
    """The values of a field that change nothing and should."""
    if leaf.type == "boolean" and (found.changes or found.refusals):
        return []  # one of the two is what there is without it
    neutral = {said(value) for value in NEUTRAL.get(leaf.path, ())}
    own = {said(each.runtime) for each in columns()} if leaf.path == "spec.runtime" else set()
    return [value for value in found.idle if value not in neutral | own]
