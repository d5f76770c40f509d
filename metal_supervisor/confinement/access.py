"""Files and ports that an engine may use, as data: composed with its command line, because both have the same paths."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Access:
    """All files and ports that an engine may use; paths are absolute."""

    execute: tuple[str, ...] = ()
    """Programs it may be executed from, and may start."""
    libraries: tuple[str, ...] = ()
    """Directories of its own code, or files of it where others lie beside them."""
    read: tuple[str, ...] = ()
    """Its model and auxiliary files: files or directories, by their real paths."""
    write: tuple[str, ...] = ()
    """Directories of its own, by their real paths."""
    bind: tuple[int, ...] = ()
    """TCP ports it may listen on."""
    list: tuple[str, ...] = ()
    """Directories whose entries it may list, but not read."""
    python: bool = False
    """It is run by an interpreter, which is among `execute`."""
    pulls: bool = False
    """It downloads its models itself, and has runners on ports of their own: any address and port, and children."""
    gated: bool = False
    """Its gate, which is our own program and stays unconfined, puts the policy in force before it executes it."""
