"""Translation of the flags of LLMKube's own Mac agent, and of the environment in its launchd plist, to settings.

A user of that agent has a working command line. Each flag either becomes a setting, or is not needed here, or is
refused by name, with what to do instead; none is dropped silently. `docs/coming-from-the-go-agent.md` has the same
table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from metal_supervisor.install import go_flags
from metal_supervisor.install.go_flags import DURATION, LIST, NUMBER, PATH, PATHS, SWITCH, TEXT, WHOLE
from metal_supervisor.spec.nearest import did_you_mean

HOME_KUBECONFIG = "~/.kube/config"
HOME_STORE = "~/Library/Application Support/llmkube/models"
"""The agent's default directory of models since 0.10."""
EMPTIED = ("/tmp", "/private/tmp")
SHOWN_CHARS = 80
NOTHING_DEPENDS = "with this value nothing depends on it here"
NOT_RUN = "TensorFold is not run here"
OWN_PORT = "every engine has a port of its own, which pods learn: set `ports` to a range that your firewall lets in"


@dataclass(frozen=True)
class GoFlag:
    """One flag of the agent, or one variable of its environment."""

    name: str
    """Without dashes."""
    kind: str
    """Type of its value in Go; see go_flags."""
    default: str = ""
    """The agent's default, as its help shows it."""
    setting: str = ""
    """The setting that it becomes, "" for none."""
    why: str = ""
    """The difference from the setting; without one, why it is not needed, or is refused, and what to do instead."""
    harmless: tuple[Any, ...] | None = None
    """Without a setting: the values that are not refused; None: no value is refused."""
    convert: Callable[[Any], Any] | None = None
    """The agent's value -> the setting's value. May raise ValueError, which says why not, and what to do instead."""
    newer: bool = False
    """The agent has it only since 0.10."""


def _port(value: int) -> int:
    if value == 0:
        raise ValueError("0 turns health and metrics off, which ours always has, on loopback only; choose a port")
    return value


def _ollama(value: int) -> str:
    if not 0 <= value <= 65535:
        raise ValueError("must be a port between 1 and 65535, or 0")
    return f"http://127.0.0.1:{value}" if value else "off"


LONGEST = "one setting for all engines: the longest of theirs that is given"
FLAGS: Mapping[str, GoFlag] = {flag.name: flag for flag in (
    GoFlag("namespace", TEXT, "default", "namespace", "empty means all namespaces in both"),
    GoFlag("model-store", PATH, "/tmp/llmkube-models; since 0.10 " + HOME_STORE, "model_store",
         "the same directory, so that what is in it is taken over in place; not in /tmp, which macOS empties"),
    GoFlag("llama-server", PATH, "found", "llama_server", "not required unless a service wants it"),
    GoFlag("llama-server-port", WHOLE, "0", "",
         f"a fixed port allows one llama-server only; {OWN_PORT}", harmless=(0,)),
    GoFlag("runtime", TEXT, "llama-server", "runtime", "llamacpp, its other name, becomes llama-server",
         convert=lambda value: "llama-server" if value in ("llamacpp", "") else value),
    GoFlag("omlx-bin", PATH, "found", "omlx"),
    GoFlag("omlx-port", WHOLE, "8000", "", f"oMLX is run behind our gate; {OWN_PORT}", harmless=(8000,)),
    GoFlag("ollama-port", WHOLE, "11434", "ollama_url",
         "the Ollama at that port of this Mac, if one answers; 0 becomes off, and then one of our own may be run",
         convert=_ollama),
    GoFlag("vllm-swift-bin", PATH, "found", "vllm_swift"),
    GoFlag("mlx-server-bin", PATH, "found", "mlx_server"),
    GoFlag("mlx-server-port", WHOLE, "8080", "",
         f"a fixed port allows one mlx-server only; {OWN_PORT}", harmless=(8080,)),
    GoFlag("port", WHOLE, "9090", "port", "0 is refused: there always is a port, on loopback", convert=_port),
    GoFlag("client-port", WHOLE, "9999", "",
         "no request passes through us, so there is no proxy on this Mac: ask the engine itself, at the address that "
         "`metal-supervisor status` shows and that stays with the service", harmless=(0,)),
    GoFlag("log-level", TEXT, "info", "log_level", "warn becomes warning",
         convert=lambda value: "warning" if value == "warn" else value),
    GoFlag("host-ip", TEXT, "found", "host_ip", "an IP address; loopback is never published"),
    GoFlag("memory-fraction", NUMBER, "0", "memory_fraction", "the models together have it, not each of them"),
    GoFlag("memory-check-mode", TEXT, "enforce", "memory_check_mode"),
    GoFlag("memory-watchdog-interval", DURATION, "10s", "memory_watchdog_interval"),
    GoFlag("memory-pressure-warning", NUMBER, "0.20", "memory_pressure_warning"),
    GoFlag("memory-pressure-critical", NUMBER, "0.10", "memory_pressure_critical"),
    GoFlag("eviction-enabled", SWITCH, "false", "eviction_enabled"),
    GoFlag("max-watch-failures", WHOLE, "3", "", "an API that is away ends no process here; it is tried again"),
    GoFlag("inference-service-allowlist", LIST, "", "inference_service_allowlist",
         "several Macs need none: Leases decide which of them runs what"),
    GoFlag("llama-server-startup-timeout", DURATION, "120s", "llama_server_startup_timeout", LONGEST),
    GoFlag("omlx-startup-timeout", DURATION, "120s", "llama_server_startup_timeout", LONGEST),
    GoFlag("vllm-swift-startup-timeout", DURATION, "120s", "llama_server_startup_timeout", LONGEST),
    GoFlag("mlx-server-startup-timeout", DURATION, "120s", "llama_server_startup_timeout", LONGEST),
    GoFlag("apple-power-enabled", SWITCH, "false", "apple_power_enabled",
         "with a sudoers rule of our own: the one of theirs lets more through than it says"),
    GoFlag("apple-power-interval", DURATION, "1s", "", "how often the chip is measured is not a setting"),
    GoFlag("powermetrics-bin", PATH, "/usr/bin/powermetrics", "",
         "only the system's own is ever run as root; with another path theirs measures nothing either",
         harmless=("/usr/bin/powermetrics",)),
    GoFlag("version", SWITCH, "false", "", "an agent with this flag prints its version and ends; remove it",
         harmless=(False,)),
    GoFlag("kubeconfig", PATH, "$KUBECONFIG, else " + HOME_KUBECONFIG, "kubeconfig",
         "written out even if it is not given, for without it ours uses its embedded API"),
    GoFlag("state-dir", PATH, "~/Library/Application Support/llmkube/metal-agent", "",
         "nothing of theirs is read, and ours must not be the same directory: see `state_dir`", newer=True),
    GoFlag("ingress-port", WHOLE, "9443", "",
         "there is no ingress here: pods reach the engines themselves. `bind` narrows where these listen, and a VPN "
         "between cluster and Mac protects it", harmless=(), newer=True),
    GoFlag("legacy-direct-endpoints", SWITCH, "false", "",
         "endpoints are always direct ones here; LLMKube's operator knows them by their labels and goes on with them",
         harmless=(True,), newer=True),
    GoFlag("allowed-model-roots", PATHS, "", "allowed_roots",
         "the model store is added, as it is always allowed there", newer=True),
    GoFlag("allowed-download-hosts", LIST, "", "private_hosts",
         "hosts and networks that need not be public; `allowed_hosts` is another thing, the only hosts there are",
         newer=True),
    GoFlag("allow-unsafe-extra-args", SWITCH, "false", "",
         "not all at once: name each flag of llama-server that is needed in `allow_extra_args`", harmless=(False,),
         newer=True),
    GoFlag("tensorfold-bin", PATH, "found", "", f"{NOT_RUN}: choose another runtime for those services", harmless=("",),
         newer=True),
    GoFlag("tensorfold-startup-timeout", DURATION, "10m", "", NOT_RUN, newer=True),
    GoFlag("kube-context", TEXT, "", "context", newer=True),
)}  # fmt: skip
PROXY = "put `proxy-url` into the kubeconfig for the API, and set `download_proxy` for models"
ENVIRONMENT: Mapping[str, str] = {
    "KUBECONFIG": "becomes `kubeconfig`, unless the flag is given",
    "PATH": "engines are looked for in Homebrew's prefixes too; the job of `metal-supervisor install` has its own PATH",
    "GGML_*": "engines start with a clean environment, and Metal needs no variable: `spec.env` of a service has more",
    "HF_TOKEN": "a token belongs neither into a plist nor into settings: `hf auth login`, or `spec.sourceSecretRef`",
    "HTTP_PROXY": PROXY,
    "HTTPS_PROXY": PROXY,
    "other": "engines start with a clean environment: `spec.env` of a service has what its engine needs",
}
REFUSED_ENVIRONMENT = frozenset({"HF_TOKEN", "HTTP_PROXY", "HTTPS_PROXY"})


@dataclass(frozen=True)
class GoAgentJob:
    """The keys of a launchd plist that matter here."""

    arguments: tuple[str, ...]
    """ProgramArguments, the program first."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """EnvironmentVariables."""
    directory: str = "/"
    """WorkingDirectory, the base of relative paths."""


@dataclass(frozen=True)
class Said:
    """The value of a setting, translated from flags."""

    value: Any
    """Not yet checked."""
    origins: tuple[str, ...]
    """The flags and variables that it comes from, as a user writes them."""
    note: str = ""


@dataclass(frozen=True)
class Remark:
    """A message about a flag or variable that became no setting, or needs attention."""

    subject: str
    """The flag or variable."""
    text: str


@dataclass
class Import:
    """Result of a translation."""

    settings: dict[str, Said] = field(default_factory=dict)
    unneeded: list[Remark] = field(default_factory=list)
    refused: list[Remark] = field(default_factory=list)
    warnings: list[Remark] = field(default_factory=list)


def _shown(word: str) -> str:
    """A user's word for a message: printable, and not too long."""
    return repr(word if len(word) <= SHOWN_CHARS else word[:SHOWN_CHARS] + "…")


def option(name: str) -> str:
    """A flag as a user writes it, `--port`; an unknown one printable, and not too long."""
    plain = name.isascii() and name.isprintable() and len(name) <= SHOWN_CHARS
    return f"--{name}" if plain else f"--{_shown(name)}"


def translate(job: GoAgentJob) -> Import:
    """Translate every flag and variable of the agent. Raises nothing."""
    found = Import()
    switches = {flag.name for flag in FLAGS.values() if flag.kind == SWITCH}
    given, left = go_flags.split(job.arguments[1:], FLAGS.keys(), switches)
    last = {each.name: each for each in given}  # of two, Go takes the last
    for each in last.values():
        _one(found, each, job)
    if left:
        text = f"the agent reads nothing from here on ({len(left)} words): flags end where a word is none"
        found.refused.append(Remark(f"word {_shown(left[0])}", text))
    for name in job.environment:
        _variable(found, name, job)
    _complete(found)
    return found


def _one(found: Import, given: go_flags.GivenFlags, job: GoAgentJob) -> None:
    subject = option(given.name)
    flag = FLAGS.get(given.name)
    if flag is None:
        near = did_you_mean(subject, map(option, FLAGS))
        found.refused.append(Remark(subject, given.problem or f"is no flag of the agent's{near}"))
        return
    try:
        if given.problem:
            raise ValueError(given.problem)
        value = go_flags.value(flag.kind, given.text)
    except ValueError as error:
        shown = "" if given.problem else f", not {_shown(given.text)}"
        found.refused.append(Remark(subject, f"{error}{shown}"))
        return
    if flag.setting:
        _set(found, flag, subject, value, job)
    elif flag.harmless is None or value in flag.harmless:
        found.unneeded.append(Remark(subject, flag.why if flag.harmless is None else NOTHING_DEPENDS))
    else:
        found.refused.append(Remark(subject, flag.why))


def _set(found: Import, flag: GoFlag, origin: str, value: Any, job: GoAgentJob) -> None:
    try:
        value = flag.convert(value) if flag.convert else value
    except ValueError as error:
        found.refused.append(Remark(origin, str(error)))
        return
    if flag.kind == PATH:
        value = _absolute(value, job.directory)
    if flag.kind == PATHS:
        value = ",".join(_absolute(each, job.directory) for each in value.split(",") if each)
    before = found.settings.get(flag.setting)
    if before is None:
        found.settings[flag.setting] = Said(value, (origin,), flag.why)
    else:  # several timeouts of the agent become one setting
        found.settings[flag.setting] = Said(max(before.value, value), (*before.origins, origin), flag.why)


def _absolute(path: str, directory: str) -> str:
    return path if not path or path.startswith(("/", "~")) else f"{directory.rstrip('/')}/{path}"


def _variable(found: Import, name: str, job: GoAgentJob) -> None:
    """Translate one variable; values are never shown, as they may be secrets."""
    plain = name if name.isidentifier() and name.isascii() and len(name) <= SHOWN_CHARS else _shown(name)
    subject = f"environment {plain}"
    if name == "KUBECONFIG":
        if not (said := found.settings.get("kubeconfig")) or not said.value:
            found.settings.pop("kubeconfig", None)
            files = (_absolute(each, job.directory) for each in job.environment[name].split(":") if each)
            _set(found, replace(FLAGS["kubeconfig"], kind=TEXT), subject, ":".join(files), job)
        return
    known = "GGML_*" if name.startswith("GGML_") else name.upper() if name.lower().endswith("_proxy") else name
    text = ENVIRONMENT.get(known, ENVIRONMENT["other"])
    if known in REFUSED_ENVIRONMENT:
        found.refused.append(Remark(subject, text))
        return
    found.unneeded.append(Remark(subject, text))
    if known not in ENVIRONMENT:
        found.warnings.append(Remark(subject, f"is not taken over: {text}"))


def _complete(found: Import) -> None:
    """Complete the settings: those that depend on several flags, or on one that is not given."""
    settings = found.settings
    kubeconfig = settings.get("kubeconfig")
    refused = {each.subject for each in found.refused}
    if (kubeconfig is None or not kubeconfig.value) and not refused & {"--kubeconfig", "environment KUBECONFIG"}:
        settings["kubeconfig"] = Said(HOME_KUBECONFIG, (), "not given: where the agent looks then")
    store = settings.get("model_store")
    if store is None or not store.value:
        settings.pop("model_store", None)
        text = f"not given: to take over what the agent fetched, set model_store; since 0.10 it is {HOME_STORE!r}"
        found.warnings.append(Remark("--model-store", text))
    elif any(f"{store.value}/".startswith(f"{each}/") for each in EMPTIED):
        text = "macOS empties this directory when it starts: move it to one that stays, and set model_store to that"
        found.warnings.append(Remark("--model-store", text))
    roots = settings.get("allowed_roots")
    if roots is not None and roots.value and store is not None and store.value:
        value = f"{roots.value},{store.value}" if store.value not in roots.value.split(",") else roots.value
        settings["allowed_roots"] = Said(value, roots.origins, "and the model store")
