"""Arguments and variables of a manifest that would read, load, write or connect: judged by the code that decides.

The tables are held against the engines at hand: a flag or a variable that a release brings is in a table, or refused.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import find_llama_server
import pytest

from metal_supervisor.runtimes import RUNTIMES, VOCABULARIES, Binary, Place
from metal_supervisor.runtimes.llama_arguments import GRAMMAR, VOCABULARY
from metal_supervisor.runtimes.llama_flags import OPTION, options_of
from metal_supervisor.runtimes.llama_memory import demands
from metal_supervisor.runtimes.mlx_arguments import MLX
from metal_supervisor.spec.arguments import FlagVerdict, parse
from metal_supervisor.spec.references import Holding, filled
from metal_supervisor.spec.resources import Policy, interpret
from metal_supervisor.spec.types import Engine, PartKey, Rejected, Service, Standing
from tests.support import mlx, parts
from tests.support.engines import port
from tests.support.system import System, eventually, running, service

FORMATS = {"llama-server": "gguf", "mlx-server": "mlx", "vllm-swift": "mlx"}
POLICY = Policy("llama-server", {name: RUNTIMES[name].formats for name in FORMATS}, vocabularies=VOCABULARIES)
STORE = "/store/fetched.gguf"
PLACE = Place("/models/tiny.gguf", "127.0.0.1", 18100, None, "/state", registry="")


def decided(
    runtime: str = "llama-server", source: str = "hf://o/r/tiny.gguf", **spec: Any
) -> Service | tuple[str, str]:
    """What becomes of an InferenceService: understood, or (reason, message) of its refusal."""
    kind = FORMATS[runtime]
    place = source if kind == "gguf" else "hf://o/r"
    model = {
        "metadata": {"namespace": "default", "name": "m"},
        "spec": {"source": place, "format": kind, "hardware": {"accelerator": "metal"}},
    }
    asked = {"metadata": {"namespace": "default", "name": "a"}, "spec": {"modelRef": "m", "runtime": runtime, **spec}}
    found = interpret({("default", "a"): asked}, {("default", "m"): model}, POLICY)["default", "a"]
    if isinstance(found, Rejected):
        return found.reason, found.message
    return RUNTIMES[runtime].refuse(found) or found


def engine(asked: Service) -> Engine:
    """Its engine, with each file that it names where the store keeps it."""
    further: dict[PartKey, str] = {each.key: STORE for each in asked.companions}
    place = Place(PLACE.model_path, PLACE.host, PLACE.port, None, PLACE.cwd, further=further)
    binary = Binary("/engines/it", frozenset(), interpreter="/engines/python")
    return RUNTIMES[asked.runtime].engine(asked, binary, place)


def variable(name: str, value: str = "1") -> list[dict[str, Any]]:
    return [{"name": "TZ", "value": "Europe/Berlin"}, {"name": name, "value": value}]


@lru_cache(maxsize=1)
def real_help() -> str:
    told = find_llama_server.with_full_help()
    done = subprocess.run([str(told), "--help"], capture_output=True, check=False, timeout=60)
    return done.stdout.decode("utf-8", "replace")


# ── flags that name a file, a path, a URL, or a host (C2, H1) ────────────────────────────────────

REACH = (
    "--api-key-file",
    "--chat-template-file",
    "--control-vector",
    "--control-vector-scaled",
    "--docker-repo",
    "--grammar-file",
    "--hf-file",
    "--hf-repo",
    "--host",
    "--json-schema-file",
    "--log-file",
    "--log-prompts-dir",
    "--lookup-cache-dynamic",
    "--lookup-cache-static",
    "--lora",
    "--lora-scaled",
    "--mcp-servers-config",
    "--media-path",
    "--mmproj",
    "--mmproj-url",
    "--model",
    "--model-url",
    "--models-dir",
    "--models-preset",
    "--path",
    "--rpc",
    "--slot-save-path",
    "--spec-draft-hf",
    "--spec-draft-model",
    "--ssl-cert-file",
    "--ssl-key-file",
    "--tools",
    "--tools-runtime",
    "--ui-config-file",
    "--video-ffmpeg-dir",
)
REACHES = re.compile(
    r"FNAME(:SCALE,\.\.\.)?|FILE|PATH|DIR|URL|MODEL_URL|HOST|SERVERS|JINJA_TEMPLATE_FILE|OPTION|TOOL1,.*|.*<model>.*"
)
"""How the engine's help calls the value of such a flag."""
VALUES = (
    "cluster/token",
    "../../cluster/token",
    "/home/user/.metal-supervisor/cluster/token",
    "file:///etc/shadow",
    "~/.ssh/id_ed25519",
    "http://169.254.169.254/latest",
    "10.0.0.1:50052",
    "/dev/stdin",
    "a,/etc/passwd",
    "/etc/passwd:1",
)


def spellings(name: str) -> list[str]:
    flag = GRAMMAR.flags[name]
    return [*flag.names, *(f"--{each[2:].replace('-', '_')}" for each in flag.names if each.startswith("--"))]


def test_the_flags_that_are_tried_are_those_of_the_engine_at_hand() -> None:
    found = set()
    for line in real_help().splitlines():
        match = OPTION.fullmatch(line.rstrip())
        if match is not None and REACHES.fullmatch(match["values"].strip()):
            found.add(parse((match["names"].split(",")[0].strip(),), GRAMMAR).items[0].flag)
    tried = {GRAMMAR.flags[name] for name in REACH}
    assert None not in found and found <= tried, [each.names for each in found - tried if each]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("flag", REACH)
def test_a_flag_that_reaches_out_is_refused_or_its_file_is_the_stores(flag: str, value: str) -> None:
    for spelled in spellings(flag):
        for arguments in ([spelled, value], [f"{spelled}={value}"], ["--chat-template", "-c", spelled, value]):
            found = decided(extraArgs=arguments)
            if isinstance(found, Service):
                assert GRAMMAR.flags[flag].verdict is FlagVerdict.PATH, "its file is not judged"
                assert value not in " ".join(engine(found).argv), "the engine is given what the manifest says"
                assert found.companions, "the store is not asked for it"
            else:
                assert found[1].startswith("spec.extraArgs[")


@pytest.mark.parametrize("flag", REACH)
def test_the_variable_of_a_flag_that_reaches_out_is_refused_as_well(flag: str) -> None:
    name = GRAMMAR.flags[flag].variable
    for each in filter(None, (name, f"LLAMA_ARG_{flag[2:].replace('-', '_').upper()}")):
        found = decided(env=variable(each, "/etc/passwd"))
        assert not isinstance(found, Service)
        assert re.match(rf"spec\.env\[1\]\.name '?{each}'? ", found[1])


@pytest.mark.parametrize("name", ["--lora", "--mmproj", "--spec-draft-model"])
def test_a_name_leads_nowhere_but_beside_the_model(name: str) -> None:
    for source, value in (("hf://o/r/tiny.gguf", "x.gguf"), ("/models/tiny.gguf", "x.gguf")):
        found = decided(source=source, extraArgs=[name, value])
        assert isinstance(found, Service)
        (companion,) = found.companions
        assert companion.artifact.source in ("hf://o/r@main/x.gguf", "/models/x.gguf")
    for value in ("../x.gguf", "a/../../x.gguf", "..", "a\\..\\x"):
        refused = decided(source="/models/tiny.gguf", extraArgs=[name, value])
        assert not isinstance(refused, Service) and "must name a file beside spec.source" in refused[1]


@pytest.mark.parametrize(
    "field",
    [
        {"tensorOverrides": ["x=RPC[10.0.0.1:50052]"]},
        {"tensorOverrides": ["x=CPU,y=RPC0"]},
        {"tensorOverrides": ["x"]},
        {"metadataOverrides": ["general.name=path:/etc/passwd"]},
        {"metadataOverrides": ["../x=str:y"]},
        {"cacheTypeCustomK": "../f16"},
        {"extraArgs": ["-ot", "x=RPC[10.0.0.1:50052]"]},
        {"extraArgs": ["--device", "RPC0"]},
        {"extraArgs": ["-otd", "x=CUDA0"]},
        {"extraArgs": ["--device", "CPU,RPC[h:1]"]},
    ],
)
def test_no_field_names_the_device_of_another_machine(field: dict[str, Any]) -> None:
    found = decided(**field)
    assert not isinstance(found, Service) and found[1].startswith("spec.")


def test_flags_are_read_as_the_engine_reads_them() -> None:
    for arguments in (["--chat-template", "--parallel", "-np", "9"], ["--tags", "-c", "-np", "9"]):
        found = decided(extraArgs=arguments)
        assert isinstance(found, Service)
        assert demands(engine(found).argv).settings.slots == 9
        assert demands(engine(found).argv).settings.context == 2048


# ── the tables and the engines at hand ───────────────────────────────────────────────────────────


def test_every_flag_of_the_llama_server_at_hand_is_in_the_table_and_takes_as_many_values() -> None:
    options = options_of(real_help())
    assert len(options) > 300
    missing = {name for name in options if name not in GRAMMAR.flags}
    assert not missing, "decide what a manifest may make of these, in runtimes/llama_arguments.py"
    odd = {name: option for name, option in options.items() if option.values != len(GRAMMAR.flags[name].values)}
    assert not odd


def test_every_variable_of_its_flags_is_known_as_theirs() -> None:
    lines, flag = real_help().splitlines(), None
    seen = 0
    for line in lines:
        if match := OPTION.fullmatch(line.rstrip()):
            flag = GRAMMAR.flags.get(match["names"].split(",")[0].strip())
        named = re.search(r"\(env: (\w+)\)", line)
        if named is None or flag is None or named[1] in VOCABULARY.environment.names:
            continue
        seen += 1
        assert VOCABULARY.flag(named[1]) is flag, named[1]
    assert seen > 80


def test_every_flag_of_the_mlx_server_at_hand_is_in_the_table() -> None:
    remembered, real = mlx.server(), parts.found(mlx.find_mlx.find)
    done, of_memory = (
        subprocess.run([str(each), "--help"], capture_output=True, check=True, timeout=120)
        for each in (real, remembered)
    )
    assert done.stdout == of_memory.stdout
    found = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", done.stdout.decode()))
    assert len(found) > 20 and not found - MLX.grammar.flags.keys()


# ── variables (C1) ───────────────────────────────────────────────────────────────────────────────

HARMLESS = frozenset(
    {
        "HF_TOKEN",
        "LLAMA_API_KEY",
        "NO_COLOR",
        "GGML_CPU_DISABLE_FUSION",
        "GGML_NO_BACKTRACE",
        "GGML_OP_OFFLOAD_MIN_BATCH",
        "LLAMA_ATTN_ROT_DISABLE",
        "LLAMA_GRAPH_REUSE_DISABLE",
    }
)
"""Of the variables in the binaries, those that were read in the engine's source and found to be so."""
WORDS = re.compile(rb"[A-Za-z0-9_]{2,}\0")
NAMES = re.compile(
    rb"(?:GGML|LLAMA|HF|HUGGINGFACE|MTMD|AIP|VK|OMP|GOMP|KMP|XDG|SSL|OPENSSL|MESA|LD|HTTP|NO|TMP|HOME|PATH)"
    rb"(?:_[A-Z0-9_]+)?\0"
)
"""Two patterns, because the second takes three times as long for all of a binary."""
DANGEROUS = (
    "GGML_BACKEND_PATH",
    "OPENSSL_CONF",
    "PATH",
    "HOME",
    "TMPDIR",
    "HF_ENDPOINT",
    "HTTPS_PROXY",
    "https_proxy",
    "HTTP_PROXY",
    "ALL_PROXY",
    "SSLKEYLOGFILE",
    "SSL_CERT_FILE",
    "MallocLogFile",
    "MallocStackLogging",
    "__XPC_DYLD_INSERT_LIBRARIES",
    "DYLD_INSERT_LIBRARIES",
    "DYLD_LIBRARY_PATH",
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "LD_AUDIT",
    "GCONV_PATH",
    "LOCPATH",
    "AIP_MODE",
    "AIP_HTTP_PORT",
    "LLAMA_SERVER_ROUTER_PORT",
    "LLAMA_SERVER_CHILD_MODE",
    "LLAMA_CACHE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "GGML_METAL_PATH_RESOURCES",
    "GGML_METAL_CAPTURE_COMPUTE",
    "GGML_VK_VISIBLE",
    "VK_ICD_FILENAMES",
    "VK_LAYER_PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "PYTHONINSPECT",
    "BASH_ENV",
    "ENV",
    "IFS",
    "SHELLOPTS",
    "SUPERVISOR_SERVER_URL",
    "METAL_SUPERVISOR_STATE_DIR",
    "MTL_CAPTURE_ENABLED",
    "METAL_DEVICE_WRAPPER_TYPE",
    "NSUnbufferedIO",
    "CFNETWORK_HAR",
    "OBJC_DEBUG_MISSING_POOLS",
    "CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "VLLM_PLUGINS",
    "MLX_HOSTFILE",
    "MLX_MPI_LIBNAME",
)


@pytest.mark.parametrize("runtime", FORMATS)
@pytest.mark.parametrize("name", DANGEROUS)
def test_a_variable_that_reaches_beyond_the_engine_never_gets_there(name: str, runtime: str) -> None:
    kept = {"name": name, "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    for env in (variable(name, "/tmp/evil.so"), [variable("x")[0], kept]):
        found = decided(runtime, env=env)
        if isinstance(found, Service):
            assert name.startswith("GGML_VK_") and found.ignored == (f"spec.env[1] {name}",)
            assert not found.references and name not in dict(engine(found).env)
        else:
            assert found[0] == "InvalidSpec" and f"spec.env[1].name {name!r} is not yours to set" in found[1]
            assert "evil" not in found[1]


def test_no_variable_of_the_binaries_at_hand_gets_there_unless_it_was_judged() -> None:
    home = find_llama_server.with_full_help().resolve().parent
    files = [path for path in home.iterdir() if path.is_file() and not path.is_symlink()]
    words = {word for path in files for word in WORDS.findall(path.read_bytes())}
    found = {word[:-1].decode() for word in words if NAMES.fullmatch(word)}
    found = {name for name in found if VOCABULARY.flag(name) is None}
    assert {"GGML_BACKEND_PATH", "LLAMA_CACHE", "AIP_MODE", "HF_ENDPOINT"} <= found
    passed = set()
    for name in found:
        asked = decided(env=variable(name))
        if isinstance(asked, Service) and name in dict(engine(asked).env):
            passed.add(name)
    assert passed <= HARMLESS, "read in the engine's source what these do"


@pytest.mark.parametrize("value", [":/etc/passwd", "/etc/passwd", "../../etc/passwd", "a/../../b", "x" * 200])
@pytest.mark.parametrize("name", ["TZ", "LANG", "LC_ALL", "LC_MESSAGES", "OMP_NUM_THREADS", "GGML_METAL_NDEBUG"])
def test_a_harmless_variable_takes_no_path(name: str, value: str) -> None:
    found = decided(env=variable(name, value))
    assert not isinstance(found, Service) and found[1].startswith(f"spec.env[1].value: {name} takes ")
    assert value not in found[1]


@pytest.mark.parametrize("kind", ["secretKeyRef", "configMapKeyRef"])
def test_a_value_that_is_kept_elsewhere_is_checked_as_well_and_not_shown(kind: str) -> None:
    asked = decided(env=[{"name": "TZ", "valueFrom": {kind: {"name": "s", "key": "k"}}}])
    assert isinstance(asked, Service)
    found = filled(asked, lambda _source: Holding(200, {"k": ":/etc/passwd"}))
    assert found.awaits is not None and found.awaits[:2] == (Standing.FAILED, "InvalidSpec")
    assert found.awaits[2].startswith(f"spec.env[0].valueFrom.{kind}: TZ takes ") and "passwd" not in found.awaits[2]
    assert not dict(found.env)["TZ"]
    assert dict(filled(asked, lambda _source: Holding(200, {"k": "Etc/UTC"})).env)["TZ"] == "Etc/UTC"


@pytest.mark.parametrize("runtime", FORMATS)
def test_what_is_for_other_platforms_is_left_out_and_said(runtime: str) -> None:
    names = ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    found = decided(runtime, env=[{"name": each, "value": "all"} for each in names])
    assert isinstance(found, Service)
    assert found.ignored == tuple(f"spec.env[{index}] {name}" for index, name in enumerate(names))
    assert not set(names) & dict(engine(found).env).keys()


def test_flags_of_other_platforms_are_left_out_and_said() -> None:
    found = decided(extraArgs=["--numa", "distribute", "-t", "2", "-ts", "3,1"])
    assert isinstance(found, Service)
    assert found.ignored == ("spec.extraArgs[0] --numa", "spec.extraArgs[4] -ts")
    assert engine(found).argv[-2:] == ("-t", "2") and "distribute" not in engine(found).argv


def test_a_flag_by_its_variable_is_a_flag_and_gives_way_to_the_spec() -> None:
    said = {"LLAMA_ARG_CTX_SIZE": "9", "LLAMA_ARG_KV_UNIFIED": "1", "LLAMA_ARG_NO_CACHE_PROMPT": "1"}
    found = decided(env=[{"name": name, "value": value} for name, value in said.items()])
    assert isinstance(found, Service)
    made = engine(found)
    assert not made.env and made.argv[1:5] == ("--ctx-size", "9", "--kv-unified", "--no-cache-prompt")
    assert demands(made.argv).settings.context == 9 and demands(made.argv).settings.unified
    found = decided(env=variable("LLAMA_ARG_CTX_SIZE", "9"), contextSize=4096)
    assert isinstance(found, Service) and demands(engine(found).argv).settings.context == 4096
    refused = decided(env=variable("LLAMA_ARG_CTX_SIZE", "/etc/passwd"))
    text = "spec.env[1].value: LLAMA_ARG_CTX_SIZE takes a whole number from -1 to 2147483647"
    assert refused == ("InvalidSpec", text)


@pytest.mark.parametrize("name", ["LLAMA_ARG_EMBEDDINGS", "LLAMA_ARG_RERANKING", "LLAMA_ARG_SOME_NEW_FLAG"])
def test_a_variable_changes_no_mode_and_no_flag_that_is_not_known(name: str) -> None:
    assert not isinstance(decided(env=variable(name)), Service)


def test_a_flag_is_no_place_for_a_secret() -> None:
    kept = {"name": "LLAMA_ARG_TAGS", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    found = decided(env=[kept])
    assert not isinstance(found, Service) and "spec.env[0].valueFrom: LLAMA_ARG_TAGS becomes a flag" in found[1]


# ── on a running system, with the real engine ────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running(tmp_path_factory.mktemp("arguments"), "--ollama-url", "off") as up:
        up.apply(up.tiny_model(), service("victim"))
        up.ready("victim")
        yield up


def refused(system: System, name: str, **spec: Any) -> str:
    """Message of the refusal of a service that never had an engine."""
    system.apply(service(name, **spec))
    eventually(lambda: system.status(name).get("phase") == "Failed", what=f"{name} to be refused")
    assert not system.pid(name)
    assert not (system.state / "specs" / f"default.{name}.json").exists(), "something could be started"
    return str(system.condition("MetalReady", name)["message"])


def test_no_library_of_a_manifest_is_loaded(system: System, tmp_path: Path) -> None:
    library = tmp_path / "tokenizer.model"
    library.write_bytes(b"\x7fELF")
    env = [{"name": "GGML_BACKEND_PATH", "value": str(library)}]
    assert "--allow-env=GGML_BACKEND_PATH" in refused(system, "loads", env=env, tensorOverrides=["x=CPU"])


def test_no_file_of_this_mac_is_shown_by_the_engine(system: System) -> None:
    secret = system.state / "secret.jinja"
    secret.write_text("THE-CLUSTERS-TOKEN")
    for index, value in enumerate((str(secret), "secret.jinja", f"file://{secret}")):
        told = refused(system, f"shows-{index}", extraArgs=["--threads", "1", "--chat-template-file", value])
        assert "spec.extraArgs[2] --chat-template-file is not yours to set" in told and "TOKEN" not in told
    before = system.pid("victim")
    system.apply(service("victim", extraArgs=["--threads", "1", "--chat-template-file", str(secret)]))
    eventually(lambda: system.condition("Degraded", "victim").get("reason") == "InvalidSpec", what="the edit refused")
    connection = http.client.HTTPConnection("127.0.0.1", port(system, "victim"), timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", "/props")
        answer = connection.getresponse().read()
    assert b"chat_template" in answer and b"THE-CLUSTERS-TOKEN" not in answer
    assert system.pid("victim") == before


@pytest.mark.parametrize("form", ["flag", "variable", "field"])
def test_no_engine_connects_where_a_manifest_says(system: System, form: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        spec: dict[str, Any] = {
            "flag": {"extraArgs": ["--rpc", where]},
            "variable": {"env": [{"name": "LLAMA_ARG_RPC", "value": where}]},
            "field": {"tensorOverrides": [f"x=RPC[{where}]"]},
        }[form]
        assert refused(system, f"connects-{form}", **spec).startswith("spec.")
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
