"""oMLX: one daemon for many MLX models. A service is a model attached to it, and its process the attacher.

The daemon runs behind our gate (`omlx_engine.py`), because by itself it finds a new model only by unloading all others.
Settings for all models together, such as caches, are the daemon's, and services cannot differ in them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from metal_supervisor.confinement.access import Access
from metal_supervisor.models.metadata import Demand, Reading
from metal_supervisor.runtimes import mlx_memory
from metal_supervisor.runtimes.attached import attended, of_the_daemon
from metal_supervisor.runtimes.mlx_server import NOT_HERE as NOT_MLX
from metal_supervisor.runtimes.mlx_server import meaningless
from metal_supervisor.runtimes.runtime import Binary, Executable, Place, Runtime, Shared
from metal_supervisor.spec.types import DIRECTORY_FORMATS, Engine, Probe, Service

NAME = "omlx"
CACHE_DIRECTORY = "pagedSSDCacheDir"
DAEMON_OPTIONS = ("hotCacheMaxSize", CACHE_DIRECTORY, "pagedSSDCacheMaxSize")
CACHE_FLAGS = {
    CACHE_DIRECTORY: "--paged-ssd-cache-dir",
    "pagedSSDCacheMaxSize": "--paged-ssd-cache-max-size",
    "hotCacheMaxSize": "--hot-cache-max-size",
}
KEY_FILE = "omlx.key"
BASE = "omlx"
SERVED = "served/omlx"
"""Directory of the models attached while the daemon runs, which it may read when confined."""
KEY = "served/omlx/key"
"""File with its key, which it may read when confined."""
MODELS = f"{SERVED}/models"
BASE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Base names of directories that clients may send as a model's name."""

NOT_HERE: Mapping[str, tuple[tuple[object, ...], str]] = {
    **NOT_MLX,
    **dict.fromkeys(("cacheTypeK", "cacheTypeV"), (("f16", "bf16"), "set spec.turboQuantBits instead")),
    "idleTtlS": ((), "a model of oMLX stays loaded while its service runs"),
}
"""Option of the spec that oMLX does not honour -> (values that change nothing, why all others are refused)."""


def refuse(service: Service) -> tuple[str, str] | None:
    """(reason, message) if oMLX cannot honour the service's spec, else None."""
    if found := of_the_daemon(service, "oMLX") or meaningless(service, NOT_HERE, "oMLX"):
        return found
    directory = service.options.get(CACHE_DIRECTORY)
    if directory is not None and (not directory.startswith("/") or ".." in directory.split("/")):
        return "InvalidSpec", f"spec.{CACHE_DIRECTORY} must be an absolute path without .."
    if CACHE_DIRECTORY not in service.options:
        for name in CACHE_FLAGS:
            if name in service.options:
                return "InvalidSpec", f"spec.{name} needs spec.{CACHE_DIRECTORY}, which is not set"
    return None


def engine(service: Service, _binary: Binary, place: Place) -> Engine:
    """The attacher of one model, with the daemon's probe."""
    settings: dict[str, Any] = {}
    if "contextSize" in service.options:
        settings["max_context_window"] = mlx_memory.slot_tokens(service)
    if "parallelSlots" in service.options:
        settings["max_concurrent_requests"] = service.options["parallelSlots"]
    if "turboQuantBits" in service.options:
        settings |= {"turboquant_kv_enabled": True, "turboquant_kv_bits": service.options["turboQuantBits"]}
    job = {"path": place.model_path, "settings": settings, "key_file": f"{place.cwd}/{KEY_FILE}"}
    job |= {"files": place.judged} if place.judged[1:] else {}
    probe = Probe(
        expects='"healthy"',
        identity_path="/metal-supervisor/models",
        busy_path=f"/metal-supervisor/slots/{service.name}",
    )
    return attended(service, place, NAME, job, probe)


def names(service: Service) -> tuple[str, ...]:
    """The Model's name and the base name of its source: LLMKube's ModelRouter asks oMLX for that one."""
    base = service.model.source.rstrip("/").rpartition("/")[2]
    return tuple(dict.fromkeys((service.model.name, *([base] if BASE_NAME.fullmatch(base) else []))))


def daemon(binary: Binary, place: Place, options: Mapping[str, Any]) -> Engine:
    """The daemon itself. `options`: the DAEMON_OPTIONS that its services agree on."""
    home = place.cwd
    argv = [binary.interpreter, "-E", f"{home}/current/omlx_engine.py"]
    argv += ["--key-file", f"{home}/{KEY}", "--base-path", f"{home}/{BASE}", "--served", f"{home}/{MODELS}"]
    argv += ["--host", place.host, "--port", str(place.port)]
    cache = [part for name, flag in CACHE_FLAGS.items() if name in options for part in (flag, str(options[name]))]
    argv += cache or ["--no-cache"]  # by default it fills a tenth of the disk with caches
    base = f"{home}/{BASE}"
    env = (("HF_HUB_CACHE", f"{home}/hub"), ("HF_HUB_OFFLINE", "1"), ("HOME", base), ("TMPDIR", base))
    return Engine(tuple(argv), env, base, Probe(expects='"healthy"', busy_path=""))


def access(binary: Binary, code: str) -> Access:
    """System access of the daemon's process; it exits if psutil cannot list processes."""
    return Access((binary.interpreter,), (*binary.homes, code), list=("/proc",), python=True)


def demand(
    service: Service, argv: Sequence[str], model: Reading, reading_of: Callable[[str], Reading | None]
) -> Demand:
    """Estimate for a model, with a share of the daemon itself.

    For as many conversations as `spec.parallelSlots` says. Without it oMLX answers eight requests at once, and the
    charge is for one: eight of full length are rare, and would keep out models that run well. `spec.turboQuantBits`
    lowers nothing: oMLX 0.7.0 keeps the cache of a running request in 16 bits whatever it says.
    """
    hot = service.options.get("hotCacheMaxSize")
    told = [*argv, "--decode-concurrency", str(service.options.get("parallelSlots", 1))]
    told += ["--prompt-cache-bytes", str(cache_bytes(hot))] if hot else []
    return mlx_memory.demand(service, told, model, reading_of)


def cache_bytes(said: str) -> int:
    """A size as oMLX parses it, in bytes: `8GB` is 2^33."""
    return int(float(said[:-2]) * 1024 ** (1 + "KMGT".index(said[-2])))


RUNTIME = Runtime(
    name=NAME,
    executables=(Executable("omlx", "omlx", "install it (brew install jundot/omlx/omlx)", True, ("serve", "--help")),),
    formats=DIRECTORY_FORMATS,
    refuse=refuse,
    engine=engine,
    demand=demand,
    shared=Shared(daemon, options=DAEMON_OPTIONS, names=names),
    access=access,
)
