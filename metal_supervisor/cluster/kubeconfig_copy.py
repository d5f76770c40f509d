"""Self-contained copy of one context of a kubeconfig, for a launchd job, which may not be able to read other files.

A job must not depend on files that the user may move, nor on directories that macOS protects. The copy holds only the
chosen context; certificates and keys are inlined, and a token file is copied beside it, because a ServiceAccount's
token is renewed in its file.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from metal_supervisor.cluster import credentials
from metal_supervisor.cluster.credentials import Chosen
from metal_supervisor.spec.types import Json

TOKEN_FILE = "token"


@dataclass(frozen=True)
class Copy:
    """Contents of the files to write; both hold secrets."""

    file: Path
    """The kubeconfig that was copied."""
    kubeconfig: str = field(repr=False)
    """JSON, which is YAML."""
    token: str = field(repr=False)
    """Content of the file `token` beside it, "" if there is none."""
    plugin: str
    """Command that the job must find on PATH for a credential, "" if there is none."""


def copy(file: Path, context: str = "") -> Copy:
    """Copy a context, the current one by default. Raises BadKubeconfig."""
    chosen = credentials.choose(file, context)
    login = credentials.Login(chosen)  # refuses credentials that cannot be used here
    user: Json = {key: value for key, value in chosen.user.items() if key not in credentials.FILES}
    for name in ("client-certificate", "client-key"):
        user |= chosen.inlined(chosen.user, name)
    token = ""
    if chosen.token_file:
        token = login.current().secret + "\n"
        user["tokenFile"] = TOKEN_FILE
        user.pop("token", None)
    plugin = ""
    if isinstance(user.get("exec"), dict):
        user["exec"], plugin = _command(chosen, user["exec"])
    return Copy(file, text_of(chosen.context, chosen.cluster_info(), user), token, plugin)


def text_of(name: str, cluster: Json, user: Json, namespace: str = "") -> str:
    """Text of a kubeconfig with one context: JSON, which is YAML. Cluster, user and context all have the name."""
    context = {"cluster": name, "user": name, **({"namespace": namespace} if namespace else {})}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": name, "context": context}],
        "current-context": name,
    }
    return json.dumps(content, indent=1) + "\n"


def _command(chosen: Chosen, spec: Json) -> tuple[Json, str]:
    """(plugin's entry with an absolute path, ""), or (entry, name) for a command that must be found on PATH."""
    command = str(spec.get("command") or "")
    if "/" not in command:
        return spec, command
    return {**spec, "command": os.path.normpath(chosen.directory / command)}, ""
