"""The policy in a spec file: an engine's access in the form that `enforce` takes on this platform."""

from __future__ import annotations

from typing import Any

from metal_supervisor.confinement import seatbelt
from metal_supervisor.confinement.access import Access

POLICY_FORMAT = 1


def policy(access: Access, platform: str, home: str) -> dict[str, Any]:
    """JSON of the policy. `platform`: as `sys.platform`; `home`: the user's, by its real path; a Mac's denies it."""
    head: dict[str, Any] = {"format": POLICY_FORMAT} | ({"gated": True} if access.gated else {})
    if platform == "darwin":
        text, parameters, resolved = seatbelt.profile(access, home)
        return {**head, "profile": text, "parameters": parameters, "resolved": resolved}
    fields = ("execute", "libraries", "read", "write", "bind", "list")
    return {**head, "pulls": access.pulls, **{name: list(getattr(access, name)) for name in fields}}
