"""Settings, declared once: TOML file < environment `METAL_SUPERVISOR_*` < flags.

The flags carry the names of LLMKube's own agent, so that a launchd plist can be ported by changing one
path. Each setting is a field of `Settings` with its help beside it; the TOML file, the environment names,
the flags, `conf/metal-supervisor.toml` and the error messages all follow from that one declaration.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import ipaddress
import json
import os
import re
import sys
import types
import typing
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metal_supervisor.core import fields
from metal_supervisor.runtimes import RUNTIMES
from metal_supervisor.runtimes.llama_server import OWNED

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "METAL_SUPERVISOR_"
HUB = "https://huggingface.co"
OVERRIDES_FILE, GOOD_FILE = "overrides.json", "settings.json"


class ConfigError(Exception):
    """A setting is wrong; the message names it, where it came from, and what to do."""


def _setting(default: Any, help_text: str, check: Callable[[Any], str | None] | None = None) -> Any:
    return field(default=default, metadata={"help": help_text, "check": check})


def _one_of(*words: str) -> Callable[[Any], str | None]:
    return lambda value: None if value in words else f"must be one of {', '.join(words)}"


def _between(low: float, high: float) -> Callable[[Any], str | None]:
    return lambda value: None if low <= value <= high else f"must be between {low} and {high}"


def _address(value: str) -> str | None:
    try:
        ipaddress.ip_address(value or "127.0.0.1")
    except ValueError:
        return "must be an IP address"
    return None


def _node_name(value: str) -> str | None:
    good = not value or re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,48}[a-z0-9])?", value)
    if value == "reaper":
        return "must not be the name of the cluster's reaper"
    return None if good else "must be a name of lower-case letters, digits and dashes, at most 50"


def _label_list(value: str) -> str | None:
    part = r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,252}[A-Za-z0-9])?"
    for each in filter(None, (item.strip() for item in value.split(","))):
        if not re.fullmatch(rf"{part}=({part})?", each, re.ASCII):
            return "must look like name=value,name=value"
    return None


def _port_range(value: str) -> str | None:
    low, dash, high = value.partition("-")
    digits = re.fullmatch(r"\d{4,5}-\d{4,5}", value, re.ASCII)
    good = dash and digits and 1024 <= int(low) <= int(high) <= 65535
    return None if good else "must look like 18100-18999, within 1024-65535"


def _daemon_url(value: str) -> str | None:
    good = value == "off" or re.fullmatch(r"http://(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?/?", value)
    return None if good else "must be off, or look like http://127.0.0.1:11434: only a daemon of this machine"


def _mirror(value: str) -> str | None:
    good = not value or re.fullmatch(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?/?", value)
    return None if good else "must look like https://registry.example.com"


def _hub(value: str) -> str | None:
    good = re.fullmatch(r"(/.*|https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?(/[\w./-]*)?)?", value)
    return None if good else "must look like https://mirror.example.com, or be an absolute directory"


def _host_list(value: str) -> str | None:
    for each in _listed(value):
        with contextlib.suppress(ValueError):
            ipaddress.ip_network(each, strict=False)
            continue
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", each, re.ASCII):
            return "must name hosts, without scheme or port, or networks, separated by commas"
    return None


def _directory_list(value: str) -> str | None:
    good = all(each.startswith(("/", "~")) for each in _listed(value))
    return None if good else "must be absolute directories, separated by commas"


def _listed(value: str) -> tuple[str, ...]:
    """The parts of a setting that are separated by commas."""
    return tuple(each.strip() for each in value.split(",") if each.strip())


def _runtime_list(value: str) -> str | None:
    unknown = [each.strip() for each in value.split(",") if each.strip() and each.strip() not in RUNTIMES]
    return f"must name some of {', '.join(RUNTIMES)}" if unknown else None


def _flag_list(value: str) -> str | None:
    for each in filter(None, (item.strip() for item in value.split(","))):
        if not re.fullmatch(r"--?[A-Za-z][A-Za-z0-9-]*", each, re.ASCII):
            return "must look like --flag,--other-flag"
        if each in OWNED:
            return f"must not name {each}: {OWNED[each]}"
    return None


@dataclass(frozen=True)
class Settings:
    """Everything a user may decide. Paths may start with `~`; "" means: find it yourself."""

    namespace: str = _setting("default", "Namespace to watch; empty for all namespaces.")
    state_dir: str = _setting("~/.metal-supervisor", "This Mac's memory: records, specs, logs, the supervisord socket.")
    model_store: str = _setting("", "Where downloaded model files are kept; default: models/ in the state directory.")
    kubeconfig: str = _setting("", "Kubeconfig of the cluster; empty: the embedded Kubernetes API.")
    context: str = _setting("", "Context within the kubeconfig; empty: its current context.")
    host_ip: str = _setting("", "Address to advertise in the cluster; empty: the one that routes to it.", _address)
    bind: str = _setting(
        "", "Address the engines listen on; empty: loopback with the embedded API, else all interfaces.", _address
    )
    port: int = _setting(9090, "Port of health, metrics and status, on loopback.", _between(1, 65535))
    ports: str = _setting("18100-18999", "Range of the engines' ports; a service keeps the one it got.", _port_range)
    runtime: str = _setting(
        "llama-server", "Runtime of services that name none, as far as it serves their model's format.",
        _one_of(*RUNTIMES),
    )
    runtimes: str = _setting(
        "", "Runtimes that this Mac offers, separated by commas, the preferred first; empty: all there are.",
        _runtime_list,
    )
    llama_server: str = _setting("", "Path of llama-server; empty: PATH, then Homebrew's prefixes.")
    mlx_server: str = _setting("", "Path of the Swift mlx-server; empty: PATH, then Homebrew's prefixes.")
    mlx_lm_server: str = _setting("", "Path of mlx_lm.server, used where there is no mlx-server; empty: as above.")
    vllm_swift: str = _setting("", "Path of vllm-swift; empty: PATH, then Homebrew's prefixes.")
    omlx: str = _setting("", "Path of omlx; empty: PATH, then Homebrew's prefixes.")
    downloads: int = _setting(2, "How many models are fetched at the same time.", _between(1, 64))
    stall_timeout: float = _setting(
        60.0, "Seconds in which a server must send something of a model before it is asked anew.", _between(1, 3600)
    )
    hf_endpoint: str = _setting(
        "", "Mirror of Hugging Face, as http(s)://HOST, or an absolute directory with O/R/FILE or a Hub cache in it; "
        "empty: HF_ENDPOINT of the environment, else https://huggingface.co.", _hub,
    )
    allowed_roots: str = _setting(
        "", "Directories whose files a Model may name, separated by commas; empty: all with the embedded API, else the "
        "home directory, the model store, /Users/Shared and /Volumes.", _directory_list,
    )
    allowed_hosts: str = _setting(
        "", "Hosts that models may be fetched from, their subdomains included, separated by commas; empty: any.",
        _host_list,
    )
    private_hosts: str = _setting(
        "", "Hosts and networks (192.168.1.0/24) whose addresses may be private, loopback or link-local; others that "
        "have such an address are refused, whatever their name.", _host_list,
    )
    ollama: str = _setting("", "Path of ollama, for a daemon of ours; empty: PATH, then Homebrew's prefixes.")
    ollama_url: str = _setting(
        "http://127.0.0.1:11434", "Where the user's own Ollama is used, and never stopped, if it is up; off: nowhere.",
        _daemon_url,
    )
    ollama_models: str = _setting(
        "", "Where an Ollama of ours keeps its models; default: ollama/ beside the downloaded model files."
    )
    ollama_registry: str = _setting(
        "", "Mirror of Ollama's library, as http(s)://HOST; empty: the library itself.", _mirror
    )
    allow_extra_args: str = _setting(
        "", "Flags of llama-server that spec.extraArgs may hold though they reach beyond the engine (--slot-save-path, "
        "--api-key-file, --tools …), separated by commas.", _flag_list,
    )
    llama_server_startup_timeout: float = _setting(
        600.0, "Seconds an engine may take to load; one that still does no work then is restarted.",
        _between(1, 86400),
    )
    hang_timeout: float = _setting(
        60.0, "Seconds an engine may be silent without any sign of work before it is restarted; 0: for ever.",
        _between(0, 86400),
    )
    drain_timeout: float = _setting(
        300.0, "Seconds an engine that is to stop may finish what it answers.", _between(0, 86400)
    )
    stop_timeout: float = _setting(
        20.0, "Seconds for the same when the whole system is stopped; below launchd's ExitTimeOut.", _between(0, 600)
    )
    log_size: int = _setting(20, "MiB after which the log of an engine is rotated.", _between(1, 4096))
    log_files: int = _setting(3, "How many rotated logs of an engine are kept.", _between(0, 100))
    memory_fraction: float = _setting(
        0.0, "Share of the memory that models may use; 0: by the size of the machine.", _between(0, 1)
    )
    memory_check_mode: str = _setting(
        "enforce", "What becomes of models of unknown size: enforce (refused) or warn (started with a warning).",
        _one_of("enforce", "warn"),
    )
    preemption: bool = _setting(
        False, "Whether a model may stop ones of lower spec.priority when there is no room for it."
    )
    memory_watchdog_interval: float = _setting(
        5.0, "Seconds between looks at how short the machine is of memory; 0: it is not watched.", _between(0, 3600)
    )
    memory_pressure_warning: float = _setting(
        0.20, "Share of the memory below which little is available: nothing starts. Half of what the budget leaves "
        "free counts if that is less.", _between(0, 1)
    )
    memory_pressure_critical: float = _setting(
        0.10, "Share below which it is critical, or a quarter of what the budget leaves free.", _between(0, 1)
    )
    memory_recovery: float = _setting(
        300.0, "Seconds for which memory must have been ample before a model that was stopped for it comes back.",
        _between(1, 86400),
    )
    eviction_enabled: bool = _setting(
        False, "Whether the least important model is stopped while memory is critical and our models are why."
    )
    procfs: str = _setting("/proc", "Where Linux tells of memory and pressure; not used on a Mac.")
    inference_service_allowlist: str = _setting(
        "", "Comma-separated InferenceService names; empty: every metal service of the namespace."
    )
    node_name: str = _setting(
        "", "Name of this Mac in the cluster; empty: made of the host's name and its hardware id.", _node_name
    )
    node_labels: str = _setting(
        "", "Labels of this Mac for spec.nodeSelector, as name=value,name=value; hostname, os and arch are there.",
        _label_list,
    )
    claims: str = _setting(
        "auto", "auto: Leases decide which Mac runs what, in a real cluster; off: this Mac runs everything.",
        _one_of("auto", "off"),
    )
    replicas_per_mac: int = _setting(
        1, "How many replicas of one service this Mac may run; the others are left to other Macs.", _between(1, 64)
    )
    fleet_node: str = _setting(
        "off", "on: also list this Mac among LLMKube Foreman's FleetNodes, as one that takes no tasks.",
        _one_of("off", "on"),
    )
    lease_duration: float = _setting(
        40.0, "Seconds of silence after which peers take this Mac's services over.", _between(2, 3600)
    )
    status_mode: str = _setting(
        "auto", "Who writes status: auto, operator (LLMKube's, beside our own condition) or standalone (all of it).",
        _one_of("auto", "operator", "standalone"),
    )
    log_level: str = _setting("info", "debug, info, warning or error.", _one_of("debug", "info", "warning", "error"))

    @property
    def offered(self) -> tuple[str, ...]:
        """The runtimes that this Mac offers, the preferred first."""
        named = [each.strip() for each in self.runtimes.split(",") if each.strip()]
        return tuple(dict.fromkeys(named)) or tuple(RUNTIMES)

    @property
    def allowed_args(self) -> frozenset[str]:
        """Flags that `spec.extraArgs` may hold though they reach beyond the engine."""
        return frozenset(each.strip() for each in self.allow_extra_args.split(",") if each.strip())

    @property
    def uses_claims(self) -> bool:
        """Whether Leases decide what runs here: the embedded API serves one Mac only."""
        return self.claims == "auto" and not self.embedded

    @property
    def labels(self) -> dict[str, str]:
        """The configured labels of this Mac."""
        pairs = (each.strip().partition("=") for each in self.node_labels.split(",") if each.strip())
        return {name: value for name, _, value in pairs}

    @property
    def allowlist(self) -> frozenset[str]:
        """Names this Mac is limited to; empty means no limit."""
        return frozenset(name.strip() for name in self.inference_service_allowlist.split(",") if name.strip())

    @property
    def port_range(self) -> range:
        low, high = self.ports.split("-")
        return range(int(low), int(high) + 1)

    @property
    def embedded(self) -> bool:
        """True when the embedded Kubernetes API is the cluster."""
        return not self.kubeconfig

    @property
    def bind_address(self) -> str:
        return self.bind or ("127.0.0.1" if self.embedded else "0.0.0.0")

    @property
    def roots(self) -> tuple[Path, ...]:
        """The directories whose files a Model may name."""
        usual = ("/",) if self.embedded else ("~", "/Users/Shared", "/Volumes", str(self.store_path))
        found = (Path(each).expanduser() for each in _listed(self.allowed_roots) or usual)
        return tuple(each.resolve() for each in found)

    @property
    def hub(self) -> str:
        """Base URL of Hugging Face or of a mirror, or the absolute path of a local one."""
        said = self.hf_endpoint or os.environ.get("HF_ENDPOINT", "")
        return (said if said and _hub(said) is None else HUB).rstrip("/")

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that models may be fetched from; empty: any."""
        return _listed(self.allowed_hosts)

    @property
    def private(self) -> tuple[str, ...]:
        """Hosts and networks whose addresses need not be public."""
        return _listed(self.private_hosts)

    @property
    def state_path(self) -> Path:
        return Path(self.state_dir).expanduser().resolve()

    @property
    def ollama_models_path(self) -> str:
        return self.ollama_models or str(self.store_path / "ollama")

    @property
    def store_path(self) -> Path:
        return Path(self.model_store).expanduser().absolute() if self.model_store else self.state_path / "models"


PATHS = frozenset({
    "state_dir", "model_store", "kubeconfig", "llama_server", "mlx_server", "mlx_lm_server", "vllm_swift", "omlx",
    "ollama", "ollama_models", "procfs",
})  # fmt: skip
FIELDS = {item.name: item for item in dataclasses.fields(Settings)}
_TYPES = typing.get_type_hints(Settings)
_WORDS: Mapping[Any, str] = types.MappingProxyType(
    {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
)
_TRUTHS = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def _convert(name: str, value: Any, origin: str) -> Any:
    """The value in the setting's type. Raises ConfigError, naming where the value came from."""
    wanted = _TYPES[name]
    try:
        if wanted is bool:
            truth = value if isinstance(value, bool) else _TRUTHS.get(str(value).lower())
            if truth is None:
                raise ValueError
            return truth
        if isinstance(value, bool) or (not isinstance(value, str) and wanted is str):
            raise ValueError
        if wanted is int and isinstance(value, float) and not value.is_integer():
            raise ValueError
        length_s = fields.seconds_of(value) if wanted is float and isinstance(value, str) else None
        result = wanted(value if length_s is None else length_s)
    except (TypeError, ValueError):
        raise ConfigError(f"{origin}: {name} must be {_WORDS[wanted]}, not {value!r}") from None
    check = FIELDS[name].metadata["check"]
    problem = check(result) if check else None
    if problem is None and isinstance(result, str) and any(unicodedata.category(char) == "Cc" for char in result):
        problem = "must not contain control characters"
    if problem:
        raise ConfigError(f"{origin}: {name} {problem}, not {value!r}")
    return result


def read_toml(path: Path) -> dict[str, Any]:
    """The settings of a TOML file. Raises ConfigError with the file, the line or the key."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for key in content:
        if key not in FIELDS:
            raise ConfigError(f"{path}: unknown setting {key!r}{_nearest(key, list(FIELDS))}")
    return {key: _convert(key, value, str(path)) for key, value in content.items()}


def read_env(environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings among environment variables; an unknown METAL_SUPERVISOR_* name is an error."""
    found = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable == ENV_PREFIX + "CONFIG":
            continue
        name = variable[len(ENV_PREFIX) :].lower()
        if name not in FIELDS:
            known = [ENV_PREFIX + each.upper() for each in FIELDS]
            raise ConfigError(f"environment: unknown setting {variable!r}{_nearest(variable, known)}")
        found[name] = _convert(name, value, f"environment {variable}")
    return found


@dataclass(frozen=True)
class Overrides:
    """What was said when the system was started, so that its programs see the same thing."""

    config: str = ""
    """Path of the TOML file; it is read anew whenever a program starts."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Settings from the environment and the flags."""


def load(overrides: Overrides) -> Settings:
    """Settings from the TOML file and what overrides it. Raises ConfigError."""
    from_file = read_toml(Path(overrides.config)) if overrides.config else {}
    return Settings(**{**from_file, **overrides.values})


def add_flags(parser: argparse.ArgumentParser, only: Sequence[str] = ()) -> None:
    """One flag per setting, or for those named, plus --config."""
    parser.add_argument("--config", default=None, metavar="FILE", help="TOML file with settings")
    for name, item in FIELDS.items():
        if only and name not in only:
            continue
        shown = f"{item.metadata['help']} [{item.default}]" if item.default != "" else item.metadata["help"]
        alone: dict[str, Any] = {"nargs": "?", "const": "true"} if _TYPES[name] is bool else {}
        parser.add_argument(
            flag_of(name), default=None, metavar=name.upper(), help=shown.replace("%", "%%"), **alone
        )


def overrides_from(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Overrides:
    """What flags and environment say, checked. Raises ConfigError."""
    values = read_env(environ)
    for name in FIELDS:
        given = getattr(arguments, name, None)
        if given is not None:
            values[name] = _convert(name, given, flag_of(name))
    for name in PATHS & values.keys():
        if values[name]:  # supervisord runs our programs in another directory
            values[name] = str(Path(values[name]).expanduser().absolute())
    config = arguments.config or environ.get(ENV_PREFIX + "CONFIG", "")
    return Overrides(str(Path(config).expanduser().absolute()) if config else "", values)


def save_overrides(state: Path, overrides: Overrides) -> None:
    """Keeps the overrides beside the state, for the programs that supervisord starts."""
    text = json.dumps({"config": overrides.config, "values": dict(overrides.values)}, indent=1, sort_keys=True)
    _replace(state / OVERRIDES_FILE, text + "\n")


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, "utf-8")
    temporary.chmod(0o600)
    temporary.replace(path)


def load_saved(state: Path) -> Settings:
    """The settings of the system whose state directory this is. Raises ConfigError."""
    try:
        saved = json.loads((state / OVERRIDES_FILE).read_text("utf-8"))
        values = {name: _convert(name, value, OVERRIDES_FILE) for name, value in saved["values"].items()}
        if not isinstance(saved["config"], str):
            raise TypeError("config must be a path")
        overrides = Overrides(saved["config"], values)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{state / OVERRIDES_FILE}: {error}; start the system with `metal-supervisor run`") from None
    return dataclasses.replace(load(overrides), state_dir=str(state))


def load_good(state: Path) -> tuple[Settings, str]:
    """(the saved settings, ""), or the last that were in order and what is wrong with those on file now.

    Raises ConfigError if there never were any.
    """
    kept = state / GOOD_FILE
    try:
        settings = load_saved(state)
    except ConfigError as error:
        return _last_good(kept, state, error), str(error)
    text = json.dumps(dataclasses.asdict(settings), indent=1, sort_keys=True) + "\n"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if kept.read_text("utf-8") == text:
            return settings, ""
    with contextlib.suppress(OSError):
        _replace(kept, text)
    return settings, ""


def _last_good(kept: Path, state: Path, problem: ConfigError) -> Settings:
    try:
        found = json.loads(kept.read_text("utf-8"))
        values = {name: _convert(name, value, GOOD_FILE) for name, value in found.items() if name in FIELDS}
    except (OSError, ValueError, AttributeError):
        raise problem from None
    return dataclasses.replace(Settings(**values), state_dir=str(state))


def sample() -> str:
    """The text of conf/metal-supervisor.toml: every setting with its default, commented out."""
    lines = ["# metal_supervisor: every setting with its default. Generated from config.py; a test keeps it true.", ""]
    for name, item in FIELDS.items():
        lines += [f"# {item.metadata['help']}", f"# {name} = {json.dumps(item.default)}", ""]
    return "\n".join(lines)


def conf_dir() -> Path:
    """The directory of shipped configuration: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).parent
    return next(path for path in (package / "_conf", package.parent / "conf") if path.is_dir())
