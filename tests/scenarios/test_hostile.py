"""Words that want to be more than words, from end to end: written by users and engines, and looked at everywhere.

Every text of tests/support/hostile.py stands in every field that a user can set and in the last line of an engine. The
definitions of this cluster check nothing, so that each gets as far as it can.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from test_custom_resources import lax_definitions

from metal_supervisor.apiserver import ApiServer, Options
from metal_supervisor.cluster.kube import KubeError
from metal_supervisor.controller.boot import kubeconfig
from tests.support import chromium, hostile
from tests.support.engines import either, events, stand_in
from tests.support.faults import Figure, fault
from tests.support.hostile import MARK, TEXTS, forged, strange, typeable
from tests.support.macs import Mac, fleet
from tests.support.prometheus import lint
from tests.support.pseudo import Terminal
from tests.support.system import ISVC, MODELS, eventually, model, service

LONGEST_NOTE_BYTES = 1024
"""Kubernetes takes no more of an Event."""
LONGEST_MESSAGE = 2000
CRASHES = {"Crashed", "CrashLoopBackOff"}
BAD_SETTING = os.EX_CONFIG
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
PRINTABLE = [kind for kind, text in TEXTS.items() if text.isprintable()]
Fields = dict[str, Any]

SERVICE: dict[str, Callable[[str], Fields]] = {
    "runtime": lambda text: {"runtime": text},
    "priority": lambda text: {"priority": text},
    "mode": lambda text: {"mode": text},
    "path": lambda text: {"endpoint": {"path": text}},
    "type": lambda text: {"endpoint": {"type": text}},
    "env": lambda text: {"env": [{"name": f"{text}=", "value": text}]},
    "secret": lambda text: {"env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": text, "key": text}}}]},
    "ref": lambda text: {"modelRef": text},
    "cache": lambda text: {"cacheTypeK": text},
    "ours": lambda text: {"extraArgs": [f"--host={text}"]},
    "flag": lambda text: {"extraArgs": [f"--{text}"]},
    "rope": lambda text: {"ropeScaling": {"type": text}},
    "draft": lambda text: {"speculativeDecoding": {"type": "draft", "draftModelRef": text}},
    "key": lambda text: {text: text, "contextSize": text},
}
MODEL: dict[str, Callable[[str], Fields]] = {
    "format": lambda text: {"format": text},
    "file": lambda text: {"source": f"/{text}"},
    "repo": lambda text: {"source": f"hf://o/{text}"},
    "url": lambda text: {"source": f"https://h.invalid/{text}"},
    "digest": lambda text: {"sha256": text},
    "quant": lambda text: {"quantization": text, "source": "hf://o/r"},
    "keep": lambda text: {"sourceSecretRef": {"name": text}},
    "projector": lambda text: {"mmproj": text},
    "refresh": lambda text: {"refreshPolicy": text},
    "budget": lambda text: {"hardware": {"accelerator": "metal", "memoryBudget": text}},
}
NAMES = [f"{field}-{kind}" for field in (*SERVICE, *MODEL) for kind in TEXTS]
DYING = [f"dies-{kind}" for kind in TEXTS]
HELD = ("markup", "json", "formats")
"""The texts that a model which is fetched may have in its address: nothing in them that cannot be printed."""
QUOTED = {
    "dies-labels": f"{hostile.FORGED} 1",
    "dies-lines": hostile.FORGED,
    "dies-long": "m" * 80,
    "url-nul": "a NUL byte",
    "url-long": "100024 characters",
}
"""What `explain` has of a text where it has not its beginning: the last of several lines, or the end of one."""

G137 = fault(
    "G137",
    "names, fields and addresses are made to break a label, a line or a value of /metrics",
    happens="such names of Macs and objects are refused; the rest stays in its label, or is not there at all",
    sees="what promtool and a parser of OpenMetrics find nothing wrong with",
    bound="0 foreign metrics, 0 control characters",
)
G138 = fault(
    "G138",
    "every field of a user, and an engine's last line, holds markup, escapes of terminals, ends of lines, "
    "writing turned round, NUL, halves of characters, or 100 000 letters",
    happens="each is shown as words, cut where it is long",
    sees="the field by name; the words, escaped",
    bound="0 control characters, 0 elements, 0 lines of others in page, JSON, terminals, conditions, Events and logs",
)


@contextlib.contextmanager
def serving(path: Path) -> Iterator[str]:
    """A web server that has this file at every address; its URL."""

    class Handler(SimpleHTTPRequestHandler):
        def translate_path(self, _: str) -> str:
            return str(path)

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def manifests(tiny: str, url: str) -> Iterator[dict[str, Any]]:
    """A service for every field and text."""
    for field, of in SERVICE.items():
        for kind, text in TEXTS.items():
            yield service(f"{field}-{kind}", **{"model": "tiny", **of(text)})
    for kind in HELD:
        yield model(f"held-{kind}", f"{url}/{TEXTS[kind]}.gguf")
        yield service(f"held-{kind}", f"held-{kind}")
    for field, of in MODEL.items():
        for kind, text in TEXTS.items():
            yield model(f"{field}-{kind}", **{"source": tiny, **of(text)})
            yield service(f"{field}-{kind}", f"{field}-{kind}")


@pytest.fixture(scope="module")
def mac(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mac]:
    base = tmp_path_factory.mktemp("hostile")
    options = Options(data_file=base / "api.db", prefix="/k-test", crd_paths=lax_definitions(base))
    with ApiServer(options) as api:
        path = base / "cluster-kubeconfig"
        path.write_text(kubeconfig(api.url))
        with fleet(base, path, "--status-mode", "standalone") as macs, contextlib.ExitStack() as stack:
            up = macs.add("mac-a", engine=either(base))
            up.apply(up.tiny_model(), service("witness"))
            up.ready("witness")
            up.apply(*manifests(str(up.tiny), stack.enter_context(serving(up.tiny))))
            for kind, text in TEXTS.items():
                words = hostile.as_bytes(text).hex()[-60_000:]
                up.apply(stand_in(f"dies-{kind}", last_words=words, exit_after_s=0.2))
            for name in (*NAMES, *DYING):
                eventually(lambda name=name: up.condition("MetalReady", name).get("message"), 120, name)
            for name in DYING:
                eventually(lambda name=name: "exit status" in up.told(name), 120, f"the end of {name}")
                eventually(lambda name=name: CRASHES & events(up, name).keys(), 60, f"the Event of {name}")
            for kind in HELD:
                up.ready(f"held-{kind}", 60)
            yield up
            assert up.slice_ready("witness")


PAINTED = re.compile(r"\x1b\[3[123]m([A-Z][A-Za-z]+)\x1b\[0m")
"""A state in our own colour, which `status` gives it on a terminal after everything else was made harmless."""


TRY_EACH = """
import json, pathlib, sys
from metal_supervisor.cli.main import main
for words in json.loads(pathlib.Path(sys.argv[1]).read_text()):
    print(end=f"\\0{main(words)}\\0", flush=True)
"""


def shown(state: Path, base: Path, *commands: str | tuple[str, ...], code: int = 0) -> list[str]:
    """What commands that end with this code write to a terminal, all from one process; ends of lines are `\\n`."""
    each = [[*(words.split() if isinstance(words, str) else words), "--state-dir", str(state)] for words in commands]
    (base / "commands.json").write_text(json.dumps(each))
    terminal = Terminal([sys.executable, "-c", TRY_EACH, str(base / "commands.json")], 200)
    *parts, rest = terminal.rest().replace("\r\n", "\n").split("\0")
    assert terminal.process.wait(60) == 0 and not rest, rest
    assert parts[1::2] == [str(code)] * len(commands), parts
    assert not any("Traceback" in text for text in parts)
    return parts[::2]


@G138
def test_no_word_of_a_condition_or_an_event_is_more_than_a_word(mac: Mac, figure: Figure) -> None:
    said, bad = 0, {}
    for name in (*NAMES, *DYING):
        for each in mac.status(name)["conditions"]:
            if strange(each["message"]) or len(each["message"]) > LONGEST_MESSAGE:
                bad[name] = each["message"][:400]
            said += MARK in each["message"]
    assert bad == {}
    assert said > len(NAMES) // 2, "most are quoted, or this test shows nothing"
    for each in mac.get("/apis/events.k8s.io/v1/namespaces/default/events")["items"]:
        assert not strange(each["note"]) and len(each["note"].encode()) <= LONGEST_NOTE_BYTES, each
    figure.add("texts", len(NAMES) + len(DYING), "")
    figure.add("control characters", 0, "")


@G138
def test_status_is_json_in_one_line_of_ascii(mac: Mac) -> None:
    body = mac.fetch("/status")[1]
    assert body.isascii() and body.count("\n") == 1 and not strange(body)
    rows = {row["name"]: row for row in json.loads(body)["services"]}
    assert set(NAMES) <= set(rows) and hostile.FORGED not in json.loads(body)
    for row in rows.values():
        assert not strange(str(row["message"])), "what a user named a Model stays what he wrote, as JSON spells it"
    assert not strange(mac.fetch("/readyz?verbose")[1]) and not strange(mac.fetch("/healthz")[1])


def openmetrics_page(mac: Mac) -> str:
    """/metrics in the other format."""
    request = urllib.request.Request(f"http://127.0.0.1:{mac.http}/metrics", headers={"Accept": OPENMETRICS})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        text: str = answer.read().decode()
    return text


def refused(state: Path, text: str) -> None:
    assert "--node-name" in text and MARK in text and not strange(text) and not forged(text)
    assert len(text) < 2 * LONGEST_MESSAGE and not state.exists()


@G137
def test_no_mac_has_such_a_name(tmp_path: Path) -> None:
    none, names = tmp_path / "none", [text for text in TEXTS.values() if typeable(text)]
    for text in shown(none, tmp_path, *(("run", "--node-name", name) for name in names), code=BAD_SETTING):
        refused(none, text)
    words = ["run", "--node-name", TEXTS["commands"], "--state-dir", str(none)]
    terminal = Terminal([sys.executable, "-m", "metal_supervisor", *words], 200)
    refused(none, terminal.rest().replace("\r\n", "\n"))
    assert terminal.process.wait(60) == BAD_SETTING


@G137
@pytest.mark.parametrize("kind", TEXTS)
def test_no_object_has_such_a_name(mac: Mac, kind: str) -> None:
    for path, of in ((MODELS, model), (ISVC, service)):
        with pytest.raises(KubeError) as refused:
            mac.kube.request("POST", path, body=of(TEXTS[kind]))
        assert refused.value.code == 422


@G137
def test_metrics_are_metrics(mac: Mac, figure: Figure) -> None:
    text = mac.fetch("/metrics")[1]
    families = list(text_string_to_metric_families(text))
    assert not [each.name for each in families if hostile.FORGED in each.name]
    samples = [sample for each in families for sample in each.samples]
    assert {*DYING} <= {sample.labels["name"] for sample in samples if "name" in sample.labels}
    failed = {each.labels["model"] for each in samples if each.name == "metal_supervisor_model_fetch_failed"}
    assert {f"url-{kind}" for kind in PRINTABLE} <= failed
    assert not strange(text) and not forged(text)
    assert lint(text) == ""
    assert list(openmetrics(openmetrics_page(mac)))
    figure.add("metrics of others", 0, "")


@G138
def test_the_page_is_made_of_what_it_is_always_made_of(mac: Mac, tmp_path: Path) -> None:
    with chromium.tab(tmp_path) as tab:
        tab.open(f"http://localhost:{mac.http}/")
        assert tab.run(f"document.body.innerText.includes({json.dumps(MARK)})") is True
        assert tab.run(f"typeof window.{hostile.FORGED}") == "undefined"
        assert tab.run("document.querySelectorAll('img, iframe, object, form, [onerror], a[href^=j]').length") == 0
        assert tab.run("document.querySelectorAll('script').length") == 1
        assert not strange(tab.html())
        assert tab.complaints == []


@G138
def test_no_command_writes_more_than_words_to_a_terminal(mac: Mac, tmp_path: Path) -> None:
    commands = "status", "status --json", "models ls", "models ls --json", "doctor", "doctor --json"
    found = dict(zip(commands, shown(mac.state, tmp_path, *commands), strict=True))
    for command, text in found.items():
        words = PAINTED.sub(r"\1", text)
        assert words.strip() and not strange(words) and not forged(words), command
        assert MARK in words or command.startswith("doctor"), command
    models = json.loads(found["models ls --json"])["models"]
    assert {user: MARK in each["source"] for each in models for user in each["usedBy"]} == {
        f"default/held-{kind}": True for kind in HELD
    }


@G138
def test_why_services_are_as_they_are_is_words_on_a_terminal(mac: Mac, tmp_path: Path) -> None:
    left = [f"{field}-{kind}" for field in ("dies", "runtime", "url") for kind in TEXTS]

    def all_quoted() -> bool:
        """One that dies is started again now and then, and nothing is said of its end meanwhile."""
        texts = shown(mac.state, tmp_path, *(("explain", name) for name in left))
        for name, text in zip(tuple(left), texts, strict=True):
            assert text and not strange(text) and not forged(text), name
            if QUOTED.get(name, MARK) in text:
                left.remove(name)
        return not left

    eventually(all_quoted, 40, f"the words of {left}")


@G138
def test_logs_of_engines_are_words_on_a_terminal(mac: Mac, tmp_path: Path) -> None:
    for name, text in zip(DYING, shown(mac.state, tmp_path, *(("logs", name) for name in DYING)), strict=True):
        assert MARK in text and not strange(text.replace("\t", " ")), name


@G138
def test_supervisorctl_shows_words(mac: Mac) -> None:
    program = str(Path(sys.executable).parent / "supervisorctl")
    terminal = Terminal([program, "-c", f"{mac.state}/supervisord.conf", "models"], 200)
    text = terminal.rest().replace("\r\n", "\n")
    assert terminal.process.wait(60) == 0
    assert MARK in text and not strange(text) and not forged(text)


@G138
def test_our_own_logs_hold_words(mac: Mac) -> None:
    logs = [path for path in (mac.state / "log").glob("*.log*") if not path.name.startswith("default.")]
    assert {"controller.log", "sidecar.log", "supervisord.log"} <= {path.name for path in logs}
    for path in (*logs, mac.log):
        text = path.read_text("utf-8")
        assert not strange(text) and not forged(text), path.name
        assert "Traceback" not in text, path.name
    for path in (mac.state / "log" / "sidecar.log", mac.log):
        assert MARK in path.read_text("utf-8"), path.name
