"""The contract's servers: always the embedded one, and the real one too if METAL_CLUSTER is set (`make test-cluster`).

METAL_TEST_CRDS says which definitions of our kinds they have: `field` (LLMKube's, beside the checkout) or `ours`; by
default the field's where they are.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from metal_supervisor.apiserver import ApiServer, Options
from tests.cluster import server as cluster_server
from tests.cluster.server import KubeCluster, crd_directory
from tests.contract.api import Api, Space
from tests.contract.things import CRD_PATH, WIDGET_CRD
from tests.support.faulty_api import forget_history

SERVERS = ("embedded", "real") if os.environ.get("METAL_CLUSTER") else ("embedded",)


@pytest.fixture(scope="session")
def embedded() -> Iterator[Api]:
    """Our own server."""
    prefix = f"/k-{secrets.token_hex(8)}"
    crds = tuple(sorted(crd_directory().glob("*.yaml")))
    with tempfile.TemporaryDirectory(prefix="contract-") as directory:
        options = Options(Path(directory) / "api.db", prefix, crd_paths=crds)
        with ApiServer(options) as server:
            client = Api("embedded", server.port, prefix=prefix, expire=partial(forget_history, server.kernel.store))
            client.request("POST", CRD_PATH, WIDGET_CRD)
            yield client
            client.close()


@pytest.fixture(scope="session")
def real() -> Iterator[Api]:
    """kube-apiserver."""
    server = cluster_server.cluster()
    assert server.request("POST", CRD_PATH, WIDGET_CRD)[0] == 201
    client = Api(
        "real",
        server.port,
        token=server.token,
        ca_file=str(server.ca_file),
        expire=partial(_expire, server),
        collects=server.has_controllers,
    )
    eventually_served(client)
    yield client
    client.close()


def eventually_served(client: Api) -> None:
    """A definition that was just made is served a moment later."""
    until_s = time.monotonic() + 10
    while client.request("GET", "/apis/example.test/v1/widgets").code != 200:
        assert time.monotonic() < until_s, "the Widget definition is not served"
        time.sleep(0.02)


def _expire(server: KubeCluster) -> None:
    """The history in etcd, and the newer one in the server's memory."""
    server.compact_etcd()
    server.stop_apiserver()
    server.start_apiserver()


@pytest.fixture(params=SERVERS)
def api(request: pytest.FixtureRequest) -> Api:
    """A client of the server that this round of the test is about."""
    found: Api = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def space(api: Api) -> Space:
    """A namespace of the test's own."""
    return api.space()
