"""What the services of a shared daemon of any kind have in common: the attacher's process, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from metal_supervisor.runtimes.runtime import Place
from metal_supervisor.spec.attachment import JOB
from metal_supervisor.spec.first_request import smallest
from metal_supervisor.spec.types import Engine, Probe, Service
from metal_supervisor.state.programs import program_name

SHARED = "the shared daemon decides it for all its models"


def of_the_daemon(service: Service, daemon: str) -> tuple[str, str] | None:
    """(reason, message) of the first field of a service that only the daemon as a whole could honour, else None."""
    said = {"extraArgs": service.extra_args, "env": service.env, "containerPort": service.container_port}
    field = next((field for field, given in said.items() if given), None)
    return ("UnsupportedField", f"spec.{field} is not for {daemon}: {SHARED}; remove it") if field else None


def attended(service: Service, place: Place, daemon: str, job: Mapping[str, Any], probe: Probe) -> Engine:
    """The attacher of one model. `job`: parameters for that kind of daemon; `probe`: the daemon's own probe."""
    told = json.dumps({"daemon": daemon, "name": service.name, **job}, sort_keys=True)
    argv = (f"{place.cwd}/current/attacher", program_name(service.key), place.cwd)
    path, body = smallest(service.mode, service.name)
    asked = replace(probe, identity=service.name, shared=True, first_path=path, first_body=body)
    return Engine(argv, ((JOB, told),), place.cwd, asked, daemon=daemon)
