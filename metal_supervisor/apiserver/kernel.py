"""The API without HTTP: its options, one store, one registry, and the parts that read, write and collect."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .codec import load_yaml_file, section
from .deletes import PERMANENT_NAMESPACES, Collector
from .errors import Json
from .patch import APPLY
from .resources import DEFINITIONS, Registry, RequestTarget, WriteOptions
from .storage import ObjectStore
from .watch import Watcher
from .writes import Writer

_MANAGER = "metal-supervisor-apiserver"
_PREFIX = re.compile(r"(/[A-Za-z0-9._-]+)+")


@dataclass(frozen=True)
class Options:
    """Settings of one API server, which listens on loopback only, for it has no authentication.

    Raises ValueError for a bad prefix.
    """

    data_file: Path
    """SQLite file with all objects; created, 0600, when missing."""
    prefix: str
    """Unguessable first part of every path, e.g. `/k-3f…`; clients that do not know it see only 404."""
    port: int = 0
    """TCP port; 0 lets the system choose one."""
    crd_paths: tuple[Path, ...] = ()
    """YAML files with CRDs, applied at every start."""
    allow_loopback_endpoints: bool = False
    """Accept loopback addresses in EndpointSlices, which a real server refuses."""
    bookmark_s: float = 60.0
    """Pause between bookmarks on a quiet watch."""

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError("prefix: must be / and then letters, digits, dots, dashes or underscores")


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
        for crd in self.store.items(DEFINITIONS):
            self.writer.install(crd)
        kind = {"apiVersion": "v1", "kind": "Namespace"}
        documents: list[Json] = [{**kind, "metadata": {"name": name}} for name in PERMANENT_NAMESPACES]
        documents += [document for path in self.options.crd_paths for document in load_yaml_file(path)]
        for document in documents:
            resource = self.registry.of_kind(document["apiVersion"], document["kind"])
            assert resource is not None
            target = RequestTarget(resource, "", section(document, "metadata").get("name", ""))
            # Nothing changes if it is there already.
            self.writer.patch(target, APPLY, document, WriteOptions(_MANAGER, force=True))
        self.collector.start()

    def stop(self) -> None:
        """Ends the collector, and closes the store."""
        self.collector.stop()
        self.store.close()
