"""A Kubernetes API small enough to live on one Mac.

Custom resources, Services, EndpointSlices, Leases and Events with the semantics unmodified clients
expect (kubectl, the Python client), in one process without dependencies, on loopback only, with all data
in one SQLite file. It is what `make run` uses instead of a cluster, and the double our tests run against.
"""

from .options import Options
from .server import ApiServer, serve

__all__ = ["ApiServer", "Options", "serve"]
