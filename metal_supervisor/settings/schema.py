"""Settings, each declared once: its default, its help, its allowed values.

The names are those of LLMKube's own agent where it has them.
"""

from __future__ import annotations

import dataclasses
import os
import pwd
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from metal_supervisor.settings import checks
from metal_supervisor.settings.logging import FORMATS, LEVELS
from metal_supervisor.spec import limits
from metal_supervisor.spec.hosts import in_url, is_loopback
from metal_supervisor.spec.on_demand import IDLE_TTL_S, LONGEST_IDLE_S

HUB = "https://huggingface.co"
GATEWAY = "127.0.0.1:9100"
SECRET_KEYS = "secret-keys"
"""Directory of the state directory with a copy of `gateway_keys_secret`, under its name: one Secret's keys are no
other's.
"""


def _setting(default: Any, help_text: str, check: checks.SettingCheck | None = None) -> Any:
    return field(default=default, metadata={"help": help_text, "check": check})


def _address_and_port(value: str) -> tuple[str, int]:
    """(address, port) of a text that `checks.address_and_port` lets pass."""
    address, _, port = value.rpartition(":")
    return address.strip("[]"), int(port)


@dataclass(frozen=True)
class Settings:
    """All settings. Paths may start with `~`; "" means that the path is looked up."""

    namespace: str = _setting("default", "Namespace to watch; empty for all namespaces.", checks.namespace)
    state_dir: str = _setting("~/.metal-supervisor", "This Mac's memory: records, specs, logs, the supervisord socket.")
    model_store: str = _setting("", "Where downloaded model files are kept; default: models/ in the state directory.")
    kubeconfig: str = _setting(
        "",
        "Kubeconfig of the cluster, or several separated by colons, merged as kubectl does; empty: the embedded "
        "Kubernetes API.",
    )
    context: str = _setting("", "Context within the kubeconfig; empty: the one that is current at the start.")
    host_ip: str = _setting(
        "",
        "Address to advertise in the cluster; empty: the one that routes to it.",
        checks.address,
    )
    bind: str = _setting(
        "", "Address the engines listen on; empty: loopback with the embedded API, else all interfaces.", checks.address
    )
    port: int = _setting(9090, "Port of health, metrics and status, on loopback.", checks.between(1, 65535))
    metrics_listen: str = _setting(
        "",
        "ADDRESS:PORT on which Prometheus can scrape /metrics, and the engines that /sd lists, without a password; "
        "empty: only /metrics on loopback.",
        checks.address_and_port,
    )
    gateway: str = _setting(
        "",
        "ADDRESS:PORT of the gateway, one URL for all models of this Mac, or off; empty: 127.0.0.1:9100 with the "
        "embedded API, else off.",
        checks.gateway_address,
    )
    gateway_keys: str = _setting(
        "",
        "File with the keys that the gateway asks for, made with `metal-supervisor key add`, read anew when it "
        "changes; empty: it asks for none.",
    )
    gateway_keys_secret: str = _setting(
        "",
        "NAMESPACE/NAME of a Secret whose `keys` is such a file, in place of gateway_keys; a change is seen within "
        "30 s.",
        checks.namespaced,
    )
    gateway_tls_cert: str = _setting(
        "", "PEM file with the gateway's certificate and its chain, read anew when it changes; empty: no TLS."
    )
    gateway_tls_key: str = _setting("", "PEM file with the certificate's key.")
    gateway_insecure: bool = _setting(
        False, "Let the gateway listen beyond loopback without keys: anyone in the network may use every model."
    )
    gateway_origins: str = _setting(
        "",
        "Origins of the web pages, browser extensions and apps that may use the gateway's models, separated by "
        "commas; empty: none.",
        checks.origins,
    )
    on_demand: bool = _setting(
        False,
        "Run a service only while it is used, if it does not say (annotation metal-supervisor.io/on-demand): "
        "the gateway starts its engine with the first request.",
    )
    idle_ttl: float = _setting(
        IDLE_TTL_S,
        "Seconds without a request after which the engine of an on-demand service is unloaded; 0: only to "
        "make room for another.",
        checks.between(0, LONGEST_IDLE_S),
    )
    ports: str = _setting(
        "18100-18999",
        "Range of the engines' ports, spec.containerPort's too; a service keeps the one it got.",
        checks.port_range,
    )
    runtime: str = _setting(
        "llama-server",
        "Runtime of services that name none, as far as it serves their model's format.",
        checks.by_runtimes("runtime"),
    )
    runtimes: str = _setting(
        "",
        "Runtimes that this Mac offers, separated by commas, the preferred first; empty: all there are.",
        checks.by_runtimes("runtimes"),
    )
    llama_server: str = _setting("", "Path of llama-server; empty: PATH, then Homebrew's prefixes.")
    mlx_server: str = _setting("", "Path of the Swift mlx-server; empty: PATH, then Homebrew's prefixes.")
    mlx_lm_server: str = _setting("", "Path of mlx_lm.server, used where there is no mlx-server; empty: as above.")
    vllm_swift: str = _setting("", "Path of vllm-swift; empty: PATH, then Homebrew's prefixes.")
    omlx: str = _setting("", "Path of omlx; empty: PATH, then Homebrew's prefixes.")
    downloads: int = _setting(
        2,
        "Number of models that are downloaded at the same time, and of namespaces that they are for.",
        checks.between(1, 64),
    )
    stall_timeout: float = _setting(
        60.0,
        "Seconds in which a server must send something of a model before it is asked anew.",
        checks.between(1, 3600),
    )
    hf_endpoint: str = _setting(
        "",
        "Mirror of Hugging Face, as http(s)://HOST, or an absolute directory with O/R/FILE or a Hub cache in it; "
        "empty: HF_ENDPOINT of the environment, else https://huggingface.co.",
        checks.hub,
    )
    allowed_roots: str = _setting(
        "",
        "Directories whose files a manifest may name, separated by commas; empty: /Users/Shared and /Volumes, and "
        "with the embedded API the home directory too. Hidden files and Library of the home directory have to be named "
        "here themselves; the state directory and the store's models are never a manifest's.",
        checks.directory_list,
    )
    allowed_hosts: str = _setting(
        "",
        "Hosts that models may be fetched from, their subdomains included, separated by commas; empty: any.",
        checks.each_of(checks.host),
    )
    download_proxy: str = _setting(
        "",
        "Forward proxy for downloads, as http(s)://HOST:PORT or socks5://HOST:PORT, or an absolute path of a file "
        "with its URL, which may have USER:PASSWORD@; off: none; empty: HTTPS_PROXY and HTTP_PROXY of the environment.",
        checks.proxy,
    )
    download_no_proxy: str = _setting(
        "",
        "Hosts, domains and networks that downloads reach without the proxy, separated by commas; empty: NO_PROXY "
        "of the environment, or none with download_proxy.",
    )
    download_ca_file: str = _setting(
        "",
        "PEM file of the authorities that downloads trust, in place of this Mac's; empty: REQUESTS_CA_BUNDLE or "
        "SSL_CERT_FILE of the environment.",
    )
    private_hosts: str = _setting(
        "",
        "Hosts and networks (192.168.1.0/24) whose addresses may be private, loopback or link-local; others that "
        "have such an address are refused, whatever their name.",
        checks.each_of(checks.host_or_network),
    )
    ollama: str = _setting("", "Path of ollama, for a supervised daemon; empty: PATH, then Homebrew's prefixes.")
    ollama_url: str = _setting(
        "http://127.0.0.1:11434",
        "Where the user's own Ollama is used, and never stopped, if it is up; off: nowhere.",
        checks.daemon_url,
    )
    ollama_models: str = _setting(
        "", "Where a supervised Ollama keeps its models; default: ollama/ beside the downloaded model files."
    )
    ollama_registry: str = _setting(
        "", "Mirror of Ollama's library, as http(s)://HOST; empty: the library itself.", checks.mirror
    )
    allow_extra_args: str = _setting(
        "",
        "Flags that spec.extraArgs may hold although they reach beyond the engine (--slot-save-path, --tools …) "
        "or are not known, separated by commas; at your own risk.",
        checks.by_runtimes("allow_extra_args"),
    )
    allow_env: str = _setting(
        "",
        "Variables that spec.env may hold although they are not known to be harmless, separated by commas; at your "
        "own risk.",
        checks.by_runtimes("allow_env"),
    )
    confinement: str = _setting(
        "on",
        "on: engines run confined by the operating system, as far as a trial shows that it works here; required: "
        "none starts that cannot be confined; off: none is confined.",
        checks.one_of("on", "off", "required"),
    )
    shared_daemons: str = _setting(
        "",
        "Namespaces whose services may share one daemon (oMLX, Ollama), separated by commas; *: all; empty: a "
        "daemon serves the namespace that had it first, and no other.",
        limits.problem(limits.namespaces),
    )
    llama_server_startup_timeout: float = _setting(
        600.0,
        "Seconds an engine may take to load; one that still does no work then is restarted.",
        checks.between(1, 86400),
    )
    parallel_starts: int = _setting(
        0,
        "Engines that may load at the same time; further ones wait for their turn, for 60 s at most behind each. "
        "0: half as many as there are cores, at least 4.",
        checks.between(0, 1000),
    )
    hang_timeout: float = _setting(
        60.0,
        "Seconds an engine may be silent without any sign of work before it is restarted; 0: for ever.",
        checks.between(0, 86400),
    )
    drain_timeout: float = _setting(
        300.0, "Seconds an engine that is to stop may finish what it answers.", checks.between(0, 86400)
    )
    stop_timeout: float = _setting(
        20.0,
        "Seconds for the same when the whole system is stopped; below launchd's ExitTimeOut.",
        checks.between(0, 600),
    )
    log_size: int = _setting(20, "MiB after which the log of an engine is rotated.", checks.between(1, 4096))
    log_files: int = _setting(3, "Number of rotated logs that are kept for each engine.", checks.between(0, 100))
    memory_fraction: float = _setting(
        0.0, "Share of the memory that models may use; 0: by the size of the machine.", checks.between(0, 1)
    )
    memory_check_mode: str = _setting(
        "enforce",
        "Models of unknown size: enforce (refused) or warn (started with a warning).",
        checks.one_of("enforce", "warn"),
    )
    preemption: bool = _setting(False, "Let a model stop ones of lower spec.priority when there is no room for it.")
    memory_watchdog_interval: float = _setting(
        5.0,
        "Seconds between looks at how short the machine is of memory; 0: it is not watched.",
        checks.between(0, 3600),
    )
    memory_pressure_warning: float = _setting(
        0.20,
        "Share of the memory below which little is available: nothing starts. Half of what the budget leaves "
        "free counts if that is less.",
        checks.between(0, 1),
    )
    memory_pressure_critical: float = _setting(
        0.10, "Share below which it is critical, or a quarter of what the budget leaves free.", checks.between(0, 1)
    )
    memory_recovery: float = _setting(
        300.0,
        "Seconds for which memory must have been ample before a model that was stopped for it comes back.",
        checks.between(1, 86400),
    )
    eviction_enabled: bool = _setting(
        False, "Stop the least important model while memory is critical because of our models."
    )
    procfs: str = _setting("/proc", "Where Linux tells of memory and pressure; not used on a Mac.")
    inference_service_allowlist: str = _setting(
        "", "Comma-separated InferenceService names; empty: every metal service of the namespace."
    )
    node_name: str = _setting(
        "", "Name of this Mac in the cluster; empty: made of the host's name and its hardware id.", checks.node_name
    )
    node_labels: str = _setting(
        "",
        "Labels of this Mac for spec.nodeSelector, as name=value,name=value; hostname, os and arch are there.",
        checks.label_list,
    )
    claims: str = _setting(
        "auto",
        "auto: Leases decide which Mac runs what, in a real cluster; off: this Mac runs everything.",
        checks.one_of("auto", "off"),
    )
    replicas_per_mac: int = _setting(
        1, "Replicas of one service that this Mac may run; the others are left to other Macs.", checks.between(1, 64)
    )
    fleet_node: str = _setting(
        "off",
        "on: also list this Mac among LLMKube Foreman's FleetNodes, as one that takes no tasks.",
        checks.one_of("off", "on"),
    )
    lease_duration: float = _setting(
        40.0, "Seconds of silence after which peers take this Mac's services over.", checks.between(2, 3600)
    )
    status_mode: str = _setting(
        "auto",
        "Writer of status: auto, operator (LLMKube's, beside our own condition) or standalone (all of it).",
        checks.one_of("auto", "operator", "standalone"),
    )
    caffeinate: str = _setting(
        "/usr/bin/caffeinate", "Program that keeps this Mac awake while a model is wanted on it; empty: it may sleep."
    )
    apple_power_enabled: bool = _setting(
        False,
        "Measure the power of the chip, by powermetrics, which has to be allowed once (make "
        "install-powermetrics-sudo).",
    )
    namespace_priority: str = _setting(
        "",
        "The highest spec.priority that counts, as NAMESPACE=normal, separated by commas; * stands for all others.",
        limits.problem(limits.priorities),
    )
    namespace_protection: str = _setting(
        "*",
        "Namespaces whose spec.evictionProtection counts, separated by commas; *: all; empty: none.",
        limits.problem(limits.namespaces),
    )
    service_types: str = _setting(
        "ClusterIP,NodePort,LoadBalancer",
        "Types of Services that spec.endpoint.type may ask for; another counts as ClusterIP.",
        limits.problem(limits.service_types),
    )
    log_level: str = _setting("info", "debug, info, warning or error.", checks.one_of(*LEVELS))
    log_format: str = _setting(
        "auto",
        "Format of our programs' logs: auto (text on a terminal, else JSON, one object a line), text or json.",
        checks.one_of(*FORMATS),
    )

    @cached_property
    def limits(self) -> limits.Limits:
        """Limits of the namespaces: priority, protection and service types."""
        return limits.Limits(
            limits.priorities(self.namespace_priority),
            limits.namespaces(self.namespace_protection),
            limits.service_types(self.service_types),
        )

    @property
    def uses_claims(self) -> bool:
        """True if claims on Leases decide what runs here; never with the embedded API, which serves one Mac only."""
        return self.claims == "auto" and not self.embedded

    @property
    def labels(self) -> dict[str, str]:
        pairs = (each.partition("=") for each in checks.listed(self.node_labels))
        return {name: value for name, _, value in pairs}

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
    def metrics_address(self) -> tuple[str, int]:
        """Address and port of `metrics_listen`, which must not be empty."""
        return _address_and_port(self.metrics_listen)

    @property
    def gateway_on(self) -> bool:
        return self.gateway != "off" and (bool(self.gateway) or self.embedded)

    @property
    def gateway_address(self) -> tuple[str, int]:
        """Address and port of the gateway, which must be on."""
        return _address_and_port(self.gateway or GATEWAY)

    @property
    def own_ports(self) -> frozenset[int]:
        """Ports that are our own: no engine gets one, and no service on demand."""
        found = {self.port}
        if self.gateway_on:
            found.add(self.gateway_address[1])
        if self.metrics_listen:
            found.add(self.metrics_address[1])
        return frozenset(found)

    @property
    def gateway_url(self) -> str:
        """Base URL of the gateway for clients on this Mac."""
        address, port = self.gateway_address
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(address, in_url(address))
        return f"{'https' if self.gateway_tls_cert else 'http'}://{host}:{port}/v1"

    @property
    def gateway_keys_path(self) -> Path | None:
        """File of the gateway's keys, None if it asks for none."""
        if self.gateway_keys_secret:
            return self.state_path / SECRET_KEYS / self.gateway_keys_secret.replace("/", ".")
        return Path(self.gateway_keys).expanduser() if self.gateway_keys else None

    @property
    def gateway_problem(self) -> str:
        """Reason why the gateway must not listen with these settings, and what to do; "" if it may."""
        if bool(self.gateway_tls_cert) != bool(self.gateway_tls_key):
            missing = "gateway_tls_key" if self.gateway_tls_cert else "gateway_tls_cert"
            return f"{missing} is missing: certificate and key go together"
        if self.gateway_address[1] == self.port:
            return f"gateway and port are both {self.port}: the second is that of health and metrics; change one"
        if self.gateway_keys and self.gateway_keys_secret:
            return "gateway_keys and gateway_keys_secret are both set: keys come from a file or from a Secret"
        if not (is_loopback(self.gateway_address[0]) or self.gateway_keys_path or self.gateway_insecure):
            text = f"gateway is {self.gateway}, beyond loopback, and there are no keys"
            return f"{text}; set --gateway-keys, or --gateway-insecure if everyone in that network may use it"
        return ""

    @property
    def roots(self) -> tuple[Path, ...]:
        """The directories whose files a Model may name."""
        usual = (*(("~",) if self.embedded else ()), "/Users/Shared", "/Volumes")
        found = (Path(each).expanduser() for each in checks.listed(self.allowed_roots) or usual)
        return tuple(each.resolve() for each in found)

    @property
    def homes(self) -> tuple[Path, ...]:
        """The home directories of this user, by the environment and by the account."""
        found = [Path.home()]
        with suppress(KeyError):  # a container may have a user without an account
            found.append(Path(pwd.getpwuid(os.getuid()).pw_dir))
        return tuple(each for each in dict.fromkeys(each.resolve() for each in found) if each != Path("/"))

    @property
    def hub(self) -> str:
        """Base URL of Hugging Face or of a mirror, or the absolute path of a local one."""
        said = self.hf_endpoint or os.environ.get("HF_ENDPOINT", "")
        return (said if said and checks.hub(said) is None else HUB).rstrip("/")

    @property
    def state_path(self) -> Path:
        return Path(self.state_dir).expanduser().resolve()

    @property
    def kubeconfig_path(self) -> Path:
        """The kubeconfig; of the embedded API its own."""
        return Path(self.kubeconfig).expanduser() if self.kubeconfig else self.state_path / "kubeconfig"

    @property
    def ollama_models_path(self) -> str:
        return self.ollama_models or str(self.store_path / "ollama")

    @property
    def store_path(self) -> Path:
        return Path(self.model_store).expanduser().absolute() if self.model_store else self.state_path / "models"


PATHS = frozenset(
    {
        "state_dir",
        "model_store",
        "kubeconfig",
        "llama_server",
        "mlx_server",
        "mlx_lm_server",
        "vllm_swift",
        "omlx",
        "ollama",
        "ollama_models",
        "procfs",
        "caffeinate",
        "gateway_keys",
        "gateway_tls_cert",
        "gateway_tls_key",
        "download_ca_file",
    }
)
FIELDS = {item.name: item for item in dataclasses.fields(Settings)}
