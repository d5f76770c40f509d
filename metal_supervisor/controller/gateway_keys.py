"""The gateway's keys from a Secret: a copy in the state directory, where the gateway reads them as from any file.

Only the controller speaks to the cluster. The Secret holds what the file would: names, digests and limits, no key.
"""

from __future__ import annotations

import logging

from metal_supervisor.settings.schema import SECRET_KEYS, Settings
from metal_supervisor.spec.references import Holding, Source
from metal_supervisor.state.kept_files import write_atomic

DATA_KEY = "keys"
log = logging.getLogger("controller")


class GatewayKeys:
    """Keeps the copy."""

    def __init__(self, settings: Settings) -> None:
        namespace, _, name = settings.gateway_keys_secret.partition("/")
        self.source: Source | None = (namespace, "secrets", name) if name and settings.gateway_on else None
        self._path = settings.gateway_keys_path
        for each in (settings.state_path / SECRET_KEYS).glob("*"):
            if each != self._path:  # of a Secret that was meant before
                each.unlink(missing_ok=True)
        self._problem = ""

    def keep(self, found: Holding | None) -> None:
        """Copy the keys of a Secret that could be read; else the last copy stays."""
        if self.source is None or self._path is None or found is None or not found.code:
            return
        text, problem = found.values.get(DATA_KEY), ""
        if found.code != 200:
            problem = found.text
        elif text is None:
            problem = f"it has no data.{DATA_KEY}, which is what a file of `metal-supervisor key add` holds"
        else:
            try:
                self._path.parent.mkdir(mode=0o700, exist_ok=True)
                write_atomic(self._path, text, durable=False)
            except OSError as error:  # a full disk must not keep engines from being stopped
                problem = f"they cannot be copied: {error.strerror}"
        if problem and problem != self._problem:
            namespace, _, name = self.source
            log.error("the gateway's keys cannot be had", extra={"secret": f"{namespace}/{name}", "why": problem})
        self._problem = problem
