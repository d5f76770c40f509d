"""Each flag of LLMKube's own agent: a setting of ours, or a word on why it is none."""

from __future__ import annotations

from typing import Any

import pytest

from metal_supervisor.install.go_agent import (
    ENVIRONMENT,
    FLAGS,
    HOME_KUBECONFIG,
    NOTHING_DEPENDS,
    REFUSED_ENVIRONMENT,
    GoAgentJob,
    Import,
    translate,
)
from metal_supervisor.settings.loader import FIELDS, Settings

OLDER = """
namespace model-store llama-server llama-server-port runtime omlx-bin omlx-port ollama-port vllm-swift-bin
mlx-server-bin mlx-server-port port client-port log-level host-ip memory-fraction memory-check-mode
memory-watchdog-interval memory-pressure-warning memory-pressure-critical eviction-enabled max-watch-failures
inference-service-allowlist llama-server-startup-timeout omlx-startup-timeout vllm-swift-startup-timeout
mlx-server-startup-timeout apple-power-enabled apple-power-interval powermetrics-bin version kubeconfig"""
NEWER = """
state-dir ingress-port legacy-direct-endpoints allowed-model-roots allowed-download-hosts
allow-unsafe-extra-args tensorfold-bin tensorfold-startup-timeout kube-context"""


def of(*flags: str, environment: dict[str, str] | None = None, directory: str = "/") -> Import:
    return translate(GoAgentJob(("/usr/local/bin/llmkube-metal-agent", *flags), environment or {}, directory))


def values(found: Import) -> dict[str, Any]:
    return {name: said.value for name, said in found.settings.items()}


def words(remarks: list[Any]) -> dict[str, str]:
    return {each.subject: each.text for each in remarks}


def test_the_flags_of_both_releases_have_a_row_each() -> None:
    assert {name for name, flag in FLAGS.items() if not flag.newer} == set(OLDER.split())
    assert {name for name, flag in FLAGS.items() if flag.newer} == set(NEWER.split())


def test_every_row_is_a_setting_of_ours_or_says_why_there_is_none() -> None:
    for name, flag in FLAGS.items():
        assert (flag.setting in FIELDS) if flag.setting else flag.why, name
        assert flag.harmless is None or not flag.setting, name


@pytest.mark.parametrize(
    ("flags", "setting", "value"),
    [
        (["--namespace", ""], "namespace", ""),
        (["--model-store=/Volumes/m"], "model_store", "/Volumes/m"),
        (["--llama-server", "bin/llama-server"], "llama_server", "/srv/bin/llama-server"),
        (["--runtime", "omlx"], "runtime", "omlx"),
        (["--runtime", "llamacpp"], "runtime", "llama-server"),
        (["--runtime="], "runtime", "llama-server"),
        (["--omlx-bin", "/o"], "omlx", "/o"),
        (["--vllm-swift-bin", "/v"], "vllm_swift", "/v"),
        (["--mlx-server-bin", "~/m"], "mlx_server", "~/m"),
        (["--ollama-port", "11435"], "ollama_url", "http://127.0.0.1:11435"),
        (["--ollama-port", "0"], "ollama_url", "off"),
        (["--port", "9091"], "port", 9091),
        (["--log-level", "warn"], "log_level", "warning"),
        (["--host-ip", "100.64.0.10"], "host_ip", "100.64.0.10"),
        (["--memory-fraction", "0.9"], "memory_fraction", 0.9),
        (["--memory-check-mode", "warn"], "memory_check_mode", "warn"),
        (["--memory-watchdog-interval", "1m30s"], "memory_watchdog_interval", 90.0),
        (["--memory-pressure-warning", ".3"], "memory_pressure_warning", 0.3),
        (["--memory-pressure-critical", "0.05"], "memory_pressure_critical", 0.05),
        (["-eviction-enabled"], "eviction_enabled", True),
        (["--eviction-enabled=false"], "eviction_enabled", False),
        (["--inference-service-allowlist", "a, b,"], "inference_service_allowlist", "a,b"),
        (["--apple-power-enabled"], "apple_power_enabled", True),
        (["--kubeconfig", "k:1"], "kubeconfig", "/srv/k:1"),
        (["--kube-context", "home"], "context", "home"),
        (["--allowed-model-roots", "/a,b"], "allowed_roots", "/a,/srv/b"),
        (["--allowed-download-hosts", "nas.local,10.0.0.0/8"], "private_hosts", "nas.local,10.0.0.0/8"),
        (["--port", "1", "--port", "2"], "port", 2),
    ],
)
def test_a_flag_becomes_a_setting(flags: list[str], setting: str, value: Any) -> None:
    found = of(*flags, directory="/srv")
    assert values(found)[setting] == value and not found.refused
    assert found.settings[setting].origins == (f"--{flags[0].lstrip('-').partition('=')[0]}",)
    assert type(found.settings[setting].value) is type(getattr(Settings(), setting))


def test_every_flag_with_a_setting_was_tried() -> None:
    tried = test_a_flag_becomes_a_setting.pytestmark[0].args[1]  # type: ignore[attr-defined]
    named = {flags[0].lstrip("-").partition("=")[0] for flags, _, _ in tried}
    timeouts = {name for name in FLAGS if name.endswith("-startup-timeout")}
    assert named | timeouts >= {name for name, flag in FLAGS.items() if flag.setting}


def test_of_several_timeouts_the_longest_counts_for_all() -> None:
    found = of("--omlx-startup-timeout", "5m", "--llama-server-startup-timeout=120s", "--mlx-server-startup-timeout=1m")
    assert values(found)["llama_server_startup_timeout"] == 300.0
    assert found.settings["llama_server_startup_timeout"].origins == (
        "--omlx-startup-timeout", "--llama-server-startup-timeout", "--mlx-server-startup-timeout",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "subject"),
    [
        (["--max-watch-failures", "3"], "--max-watch-failures"),
        (["--state-dir", "~/x"], "--state-dir"),
        (["--apple-power-interval", "500ms"], "--apple-power-interval"),
        (["--tensorfold-startup-timeout", "1m"], "--tensorfold-startup-timeout"),
    ],
)
def test_what_is_not_needed_says_why_and_is_no_refusal(flags: list[str], subject: str) -> None:
    found = of(*flags)
    assert words(found.unneeded) == {subject: FLAGS[subject[2:]].why} and not found.refused
    assert set(found.settings) == {"kubeconfig"}


@pytest.mark.parametrize(
    ("harmless", "refused"),
    [
        ("--llama-server-port=0", "--llama-server-port=8080"),
        ("--omlx-port=8000", "--omlx-port=8001"),
        ("--mlx-server-port=8080", "--mlx-server-port=8081"),
        ("--client-port=0", "--client-port=9999"),
        ("--powermetrics-bin=/usr/bin/powermetrics", "--powermetrics-bin=/opt/powermetrics"),
        ("--version=false", "--version"),
        ("--legacy-direct-endpoints", "--legacy-direct-endpoints=false"),
        ("--allow-unsafe-extra-args=f", "--allow-unsafe-extra-args"),
        ("--tensorfold-bin=", "--tensorfold-bin=/opt/tensorfold"),
        ("", "--ingress-port=9443"),
    ],
)
def test_a_value_that_cannot_be_had_is_refused_by_name_and_says_what_to_do(harmless: str, refused: str) -> None:
    subject = refused.partition("=")[0]
    if harmless:
        found = of(harmless)
        assert words(found.unneeded) == {subject: NOTHING_DEPENDS} and not found.refused
    found = of(refused)
    assert words(found.refused) == {subject: FLAGS[subject[2:]].why} and not found.unneeded


def test_port_0_is_refused_for_there_always_is_one() -> None:
    assert "choose a port" in words(of("--port=0").refused)["--port"]
    assert words(of("--ollama-port=70000").refused) == {"--ollama-port": "must be a port between 1 and 65535, or 0"}


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--port=x", "must be a whole number, in decimal digits, not 'x'"),
        ("--memory-fraction=much", "must be a number, not 'much'"),
        ("--memory-watchdog-interval=10", "must be a duration such as 90s, 1m30s or 300ms, not '10'"),
        ("--eviction-enabled=maybe", "must be true or false, not 'maybe'"),
        ("--log-level", "has no value"),
    ],
)
def test_a_value_that_go_would_not_take_is_named(flag: str, text: str) -> None:
    assert words(of(flag).refused) == {flag.partition("=")[0]: text}


def test_an_unknown_flag_is_named_with_the_nearest_there_is() -> None:
    found = of("--kube-contxt", "home", "--port=9091")
    assert words(found.refused) == {"--kube-contxt": "is no flag of the agent's (did you mean --kube-context?)"}
    assert values(found)["port"] == 9091
    assert words(of("--zzz").refused) == {"--zzz": "is no flag of the agent's"}
    (evil,) = of("--a\nport = 1").refused
    assert "\n" not in evil.subject and "\\n" in evil.subject


def test_what_comes_after_the_flags_is_not_overlooked() -> None:
    found = of("--eviction-enabled", "false", "--port=9091")
    assert values(found) == {"eviction_enabled": True, "kubeconfig": HOME_KUBECONFIG}
    assert "reads nothing from here on (2 words)" in words(found.refused)["word 'false'"]


def test_without_a_kubeconfig_the_agents_default_is_written_out() -> None:
    assert values(of()) == {"kubeconfig": HOME_KUBECONFIG}
    assert values(of("--kubeconfig", "")) == {"kubeconfig": HOME_KUBECONFIG}
    assert values(of(environment={"KUBECONFIG": ":"})) == {"kubeconfig": HOME_KUBECONFIG}
    assert values(of(environment={"KUBECONFIG": "/k"})) == {"kubeconfig": "/k"}
    assert values(of("--kubeconfig=", environment={"KUBECONFIG": "/k"})) == {"kubeconfig": "/k"}
    assert values(of("--kubeconfig=/f", environment={"KUBECONFIG": "/k"})) == {"kubeconfig": "/f"}
    assert values(of(environment={"KUBECONFIG": "/k::/l"})) == {"kubeconfig": "/k:/l"}


def test_variables_are_told_by_name_and_never_by_value() -> None:
    names = "PATH", "GGML_METAL_ENABLE", "HF_TOKEN", "https_proxy", "A b"
    found = of(environment=dict.fromkeys(names, "s3cret"))
    assert set(words(found.unneeded)) == {"environment PATH", "environment GGML_METAL_ENABLE", "environment 'A b'"}
    assert set(words(found.refused)) == {"environment HF_TOKEN", "environment https_proxy"}
    assert "environment 'A b'" in words(found.warnings), "an engine may have depended on it"
    assert "s3cret" not in repr(found)
    assert ENVIRONMENT.keys() >= REFUSED_ENVIRONMENT


def test_a_store_that_does_not_last_is_warned_of() -> None:
    for path in ("/tmp", "/tmp/llmkube-models", "/private/tmp/x"):
        assert "empties" in words(of("--model-store", path).warnings)["--model-store"], path
    assert words(of("--model-store", "/tmpfs/x").warnings) == {}
    found = of()
    assert "since 0.10" in words(found.warnings)["--model-store"] and "model_store" not in found.settings


def test_the_store_is_among_the_roots_as_it_always_is_there() -> None:
    found = of("--allowed-model-roots", "/Volumes/a", "--model-store", "/s")
    assert values(found)["allowed_roots"] == "/Volumes/a,/s"
    assert values(of("--allowed-model-roots=", "--model-store=/s"))["allowed_roots"] == ""
    assert values(of("--allowed-model-roots=/s,/t", "--model-store=/s"))["allowed_roots"] == "/s,/t"
