"""A process that fetches one model into a store, until it has it or is killed: `python fetching_process.py DIR URL`."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from metal_supervisor.models.remote.source_policy import SourcePolicy
from metal_supervisor.models.store import Store
from metal_supervisor.models.store_context import Terms
from metal_supervisor.spec.sources import NO_KEYS, Artifact


def main() -> None:
    """Prints the model's path once it is whole."""
    rang = threading.Event()
    store = Store(Path(sys.argv[1]), rang.set, Terms(SourcePolicy(private=("127.0.0.0/8",))))
    artifact = Artifact(sys.argv[2])
    store.want({artifact: NO_KEYS})
    store.give_leave(artifact)
    while store.state(artifact).phase != "Ready":
        rang.wait()
        rang.clear()
    print(store.state(artifact).path, flush=True)


if __name__ == "__main__":
    main()
