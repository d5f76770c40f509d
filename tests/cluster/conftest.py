"""A real API server, and what tests do with it."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.server import KubeCluster
from tests.cluster.server import cluster as shared_cluster

Kubectl = Callable[..., "subprocess.CompletedProcess[str]"]
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def cluster() -> KubeCluster:
    """The server of this run."""
    return shared_cluster()


@pytest.fixture
def namespace(cluster: KubeCluster) -> str:
    """A namespace of the test's own."""
    name = f"cluster-{next(_numbers)}"
    code, answer = cluster.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    assert code == 201, answer
    return name


@pytest.fixture
def kubectl(cluster: KubeCluster, namespace: str, tmp_path: Path) -> Kubectl:
    """Runs the real kubectl as the administrator; asserts the exit code (`code=`, 0 by default)."""
    found = shutil.which("kubectl")
    assert found, "kubectl is not on PATH; `make test-cluster` installs one"
    config = cluster.kubeconfig(tmp_path / "kubeconfig", namespace=namespace)
    base = [found, "--kubeconfig", str(config), "--cache-dir", str(tmp_path / "cache")]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}

    def run(*arguments: str, given: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*base, *arguments], input=given, capture_output=True, text=True, timeout=60, env=environment
        )
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run
