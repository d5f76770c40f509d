"""The Seatbelt profile of an engine: generated text without any path; paths are parameters, referenced by index.

Assembled from published profiles and reports, and untested on a Mac until the acceptance script has run there
(docs/mac-acceptance.md). The last matching rule wins, so excessive permissions of the imported system profile are
denied after the import.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterable, Mapping

from metal_supervisor.confinement.access import Access

HEAD = """(version 1)
(deny default)
(deny file-map-executable process-info* nvram* dynamic-code-generation mach-priv-host-port)
(import "system.sb")
(deny process-fork sysctl-read signal file-write-setugid)
(deny file-read* file-write* (subpath "/Users") (subpath "/Volumes"))
(deny file-read* file-write* (subpath (param "HOME")))
(allow process-info* signal (target self))
(allow sysctl-read
  (sysctl-name-prefix "hw.") (sysctl-name-prefix "machdep.") (sysctl-name-prefix "iogpu.")
  (sysctl-name-prefix "vm.") (sysctl-name-prefix "kern.os")
  (sysctl-name "kern.version" "kern.argmax" "kern.hostname" "kern.maxfilesperproc" "kern.usrstack64"
   "kern.bootargs" "kern.secure_kernel" "kern.ngroups" "kern.hv_vmm_present" "sysctl.proc_cputype"))
(allow file-read* (literal "/"))
(allow file-read-metadata (vnode-type SYMLINK))
(allow iokit-open (iokit-user-client-class "AGXDeviceUserClient")
  (iokit-user-client-class "IOSurfaceRootUserClient"))
(allow mach-lookup (global-name "com.apple.MTLCompilerService") (xpc-service-name "com.apple.MTLCompilerService"))
"""
"""A list of sysctls, because kern.procargs2 shows the arguments and environment of siblings.

Links may be followed wherever they lie: rules match resolved paths, and a path to an engine or its libraries leads over
links that those do not name (Homebrew's bin and opt, an environment's python).
"""
FRAMEWORK = ".framework/Versions/"
"""Where a framework (of Homebrew, python.org or Xcode) has its `bin/python3`."""
APP = "Resources/Python.app/Contents/MacOS"
"""The program that replaces that `bin/python3`."""
PYTHON = """(allow ipc-posix-sem)
(allow mach-lookup (global-name "com.apple.system.opendirectoryd.libinfo"))
"""
PULLS = """(allow process-fork)
(allow signal process-info* (target same-sandbox))
(allow network-bind network-inbound (local ip "*:*"))
(allow network-outbound (remote ip "*:*") (literal "/private/var/run/mDNSResponder"))
(allow mach-lookup (global-name "com.apple.dnssd.service") (global-name "com.apple.trustd.agent"))
(allow file-read* (literal "/private/etc/hosts") (literal "/private/etc/resolv.conf"))
"""


ABOVE = '(allow file-read-metadata (path-ancestors (param "{}")))'
GRANTS: Mapping[str, tuple[str, ...]] = {
    "BINARY": (
        '(allow process-exec* (literal (param "{}")))',
        '(allow file-read* file-map-executable (literal (param "{}")))',
        ABOVE,
    ),
    "APP": ('(allow process-exec* (subpath (param "{}")))',),
    "LIBRARY": ('(allow file-read* file-map-executable (subpath (param "{}")))', ABOVE),
    "READ": ('(allow file-read* (subpath (param "{}")))', ABOVE),
    "LIST": ('(allow file-read-data (literal (param "{}")))',),
    "WRITE": ('(allow file-read* file-write* (subpath (param "{}")))', ABOVE),
    "BIND": ('(allow network-bind network-inbound (local ip (param "{}")))',),
}
"""Kind of a parameter -> the rules for each of that kind; `{}` stands for its name, the kind and its index."""


def profile(access: Access, home: str) -> tuple[str, dict[str, str], dict[str, str]]:
    """(text, parameters, parameters to be resolved at the start) for `sandbox_init_with_parameters`.

    `home`: the home directory of the user who runs engines, by its real path.
    """
    rules, judged = [HEAD], {"HOME": home}
    resolved: dict[str, str] = {}
    if access.python:
        rules.append(PYTHON)
    if access.pulls:
        rules.append(PULLS)
    frameworks = [each for each in access.libraries if access.python and FRAMEWORK in each]
    values: tuple[tuple[str, Iterable[str], dict[str, str]], ...] = (
        ("BINARY", access.execute, resolved),
        ("APP", [f"{each}/{APP}" for each in frameworks], resolved),
        ("LIBRARY", access.libraries, resolved),
        ("READ", access.read, judged),
        # llama.cpp lists the directory that it is started from, and takes EACCES for an answer, not Seatbelt's EPERM.
        ("LIST", dict.fromkeys((*map(os.path.dirname, access.execute), *access.list)), resolved),
        ("WRITE", access.write, judged),
        ("BIND", [f"*:{port}" for port in access.bind], judged),
    )
    for kind, paths_or_ports, parameters in values:
        for index, value in enumerate(paths_or_ports):
            name = f"{kind}_{index}"
            parameters[name] = value
            rules += [rule.format(name) for rule in GRANTS[kind]]
    return "\n".join(rules) + "\n", judged, resolved
