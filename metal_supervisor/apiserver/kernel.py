"""Assembly of the API: one store, one registry, and the parts that read, write and collect."""

from __future__ import annotations

from . import crds
from .codec import load_yaml_file, section
from .deletes import PERMANENT_NAMESPACES, Collector
from .errors import Json
from .options import Options
from .patch import APPLY
from .resources import Registry
from .storage import ObjectStore
from .targets import RequestTarget, WriteOptions
from .watch import Watcher
from .writes import Writer

_MANAGER = "metal-supervisor-apiserver"


class Kernel:
    """The API server without HTTP."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.store = ObjectStore(options.data_file)
        self.registry = Registry()
        self.watcher = Watcher(self.store, self.registry, options.bookmark_s)
        self.collector = Collector(self.store, self.registry)
        self.writer = Writer(self.store, self.registry, self.collector, allow_loopback=options.allow_loopback_endpoints)

    def start(self) -> None:
        """Serve what the store holds, and create the objects that must exist."""
        for crd in self.store.items(crds.KIND):
            self.writer.install(crd)
        kind = {"apiVersion": "v1", "kind": "Namespace"}
        documents: list[Json] = [{**kind, "metadata": {"name": name}} for name in PERMANENT_NAMESPACES]
        documents += [document for path in self.options.crd_paths for document in load_yaml_file(path)]
        for document in documents:
            self._apply(document)  # nothing changes if it is there already
        self.collector.start()

    def stop(self) -> None:
        """Ends the collector, and closes the store."""
        self.collector.stop()
        self.store.close()

    def _apply(self, body: Json) -> None:
        resource = self.registry.of_kind(body["apiVersion"], body["kind"])
        assert resource is not None
        target = RequestTarget(resource, "", section(body, "metadata").get("name", ""))
        self.writer.patch(target, APPLY, body, WriteOptions(_MANAGER, force=True))
