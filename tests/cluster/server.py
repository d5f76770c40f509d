"""One real API server for a whole run of pytest, started by the first test that wants it."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import tempfile
from pathlib import Path

from tests.support.kube.kube_cluster import KubeCluster

ROOT = Path(__file__).resolve().parents[2]

__all__ = ["FIELD", "OURS", "ROOT", "KubeCluster", "cluster", "crd_directory"]

OURS = ROOT / "conf" / "crds"
FIELD = ROOT.parent / "shared" / "crds"


def crd_directory() -> Path:
    """The definitions of our kinds to test with: METAL_TEST_CRDS, `field` or `ours`; the field's where they are."""
    wanted = os.environ.get("METAL_TEST_CRDS") or ("field" if FIELD.is_dir() else "ours")
    return {"ours": OURS, "field": FIELD}[wanted]


_resources = contextlib.ExitStack()
atexit.register(_resources.close)


@functools.cache
def cluster() -> KubeCluster:
    """The server, with our kinds and its controllers; it ends with this process."""
    directory = _resources.enter_context(tempfile.TemporaryDirectory(prefix="kube-cluster-"))
    server = _resources.enter_context(KubeCluster(Path(directory)))
    server.apply_crds(crd_directory())
    if server.has_controllers:
        server.start_controllers()
    return server
