"""Conflicts between the services of a shared daemon: names, settings and namespaces that do not go together.

A daemon has one set of options, and its models are not protected from each other. Of services that do not go together,
those that come first keep it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from metal_supervisor.controller.prerequisites.path_looks import PathLook
from metal_supervisor.runtimes import RUNTIMES
from metal_supervisor.runtimes.omlx import CACHE_DIRECTORY
from metal_supervisor.runtimes.omlx import NAME as OMLX
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec import limits
from metal_supervisor.spec.sources import library_model
from metal_supervisor.spec.types import Json, Service

DAEMONS = {name: row.shared for name, row in RUNTIMES.items() if row.shared is not None}
"""Shared daemons by program name, which is that of the runtime."""


def conflict(
    service: Service, users: Sequence[Service], settings: Settings, uses_own: bool, cache: PathLook | None
) -> tuple[str, str] | None:
    """(reason, message) of what keeps a service off its daemon, None if nothing does.

    `users`: its services, the first to have it first. `uses_own`: it is the user's own daemon. `cache`: the directory
    that the service names for it, None for none.
    """
    row, runtime = DAEMONS[service.runtime], service.runtime
    if service.ordinal:
        text = f"spec.replicas: the shared {runtime} daemon of a Mac serves a service once; each further"
        return "ServedNameConflict", f"{text} replica takes a Mac of its own"
    if cache is not None and cache.refusal is not None:  # the daemon would write there
        return cache.refusal[0], f"spec.{CACHE_DIRECTORY}: {cache.refusal[1]}"
    if refusal := not_shared(service, users, settings):
        return refusal
    before = users[: next((at for at, each in enumerate(users) if each.key == service.key), len(users))]
    for other in before:
        where = "/".join(other.key)
        if other.name == service.name:
            text = f"{where} is served as {service.name!r} by the same {runtime} daemon; rename one of them"
            return "ServedNameConflict", f"metadata.name: {text}"
        told = options_said(other, row.options)
        for name in row.options if told else ():
            if name in service.options and told.get(name) != service.options[name]:
                text = f"the {runtime} daemon has it as {where} says; make them alike, or leave it out"
                return "DaemonSettingsConflict", f"spec.{name}: {text}"
        source = service.model.artifact.source
        # A supervised Ollama has its own link to the file for each service, and so runs the model for each.
        same = other.model.artifact.source == source and (bool(library_model(source)) or uses_own)
        if row.per_file and same and row.per_file(other) != row.per_file(service):
            text = f"{where} has {runtime} run that model with another context, batch size or gpu.layers"
            return "DaemonSettingsConflict", f"spec.contextSize: {text}, and it runs a model once; make them alike"
    return None


def not_shared(service: Service, users: Sequence[Service], settings: Settings) -> tuple[str, str] | None:
    """(reason, message) where a daemon serves another namespace: its models are not protected from each other."""
    if not users or users[0].namespace == service.namespace:
        return None
    first, sharing = users[0].namespace, limits.namespaces(settings.shared_daemons)
    if "*" in sharing or {first, service.namespace} <= sharing:
        return None
    text = f"metadata.namespace: the {service.runtime} daemon of this Mac serves namespace {first} alone"
    advice = "use another Mac or runtime, or have the administrator name both namespaces in --shared-daemons"
    return "DaemonNotShared", f"{text}; {advice}"


def cache_directory(service: Service) -> str | None:
    """The directory for the daemon's cache that a service names, None if it names none."""
    return service.options.get(CACHE_DIRECTORY) if service.runtime == OMLX else None


def options_said(service: Service, options: Collection[str]) -> Json:
    """The service's options that configure its daemon, by name."""
    return {name: service.options[name] for name in options if name in service.options}
