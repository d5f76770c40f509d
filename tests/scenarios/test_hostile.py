"""Words that want to be more than words, from end to end: written by users and engines, and looked at everywhere.

Every text of tests/hostile.py stands in every field that a user can set and in the last line of an engine. The
definitions of this cluster check nothing, so that each gets as far as it can.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_custom_resources import lax_definitions

from metal_supervisor.apiserver import ApiServer, Options
from metal_supervisor.boot import kubeconfig
from tests import chromium, hostile
from tests.engines import either, events, stand_in
from tests.faults import Figure, fault
from tests.hostile import MARK, TEXTS, forged, strange
from tests.macs import Mac, fleet
from tests.prometheus import lint
from tests.pseudo import Terminal
from tests.system import eventually, model, service

LONGEST_NOTE_BYTES = 1024
"""Kubernetes takes no more of an Event."""
LONGEST_MESSAGE = 2000
CRASHES = {"Crashed", "CrashLoopBackOff"}
Fields = dict[str, Any]

SERVICE: dict[str, Callable[[str], Fields]] = {
    "runtime": lambda text: {"runtime": text},
    "priority": lambda text: {"priority": text},
    "mode": lambda text: {"mode": text},
    "path": lambda text: {"endpoint": {"path": text}},
    "type": lambda text: {"endpoint": {"type": text}},
    "env": lambda text: {"env": [{"name": f"{text}=", "value": text}]},
    "secret": lambda text: {"env": [{"name": "T", "valueFrom": {"secretKeyRef": {"name": text, "key": text}}}]},
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

G137 = fault(
    "G137", "names, fields and engines' words are made to break a label, a line or a value of /metrics",
    happens="each stays in its label, or is not there at all", sees="what promtool finds nothing wrong with",
    bound="0 foreign metrics, 0 control characters",
)
G138 = fault(
    "G138", "every field of a user, and an engine's last line, holds markup, escapes of terminals, ends of lines, "
    "writing turned round, NUL, halves of characters, or 100 000 letters",
    happens="each is shown as words, cut where it is long", sees="the field by name; the words, escaped",
    bound="0 control characters, 0 elements, 0 lines of others in page, JSON, terminals, conditions, Events and logs",
)  # fmt: skip


def manifests(tiny: str) -> Iterator[dict[str, Any]]:
    """A service for every field and text."""
    for field, of in SERVICE.items():
        for kind, text in TEXTS.items():
            yield service(f"{field}-{kind}", **{"model": "tiny", **of(text)})
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
        with fleet(base, path, "--status-mode", "standalone") as macs:
            up = macs.add("mac-a", engine=either(base))
            up.apply(up.tiny_model(), service("witness"))
            up.ready("witness")
            up.apply(*manifests(str(up.tiny)))
            for kind, text in TEXTS.items():
                words = hostile.as_bytes(text).hex()[-60_000:]
                up.apply(stand_in(f"dies-{kind}", last_words=words, exit_after_s=0.2))
            for name in (*NAMES, *DYING):
                eventually(lambda name=name: up.condition("MetalReady", name).get("message"), 120, name)
            for name in DYING:
                eventually(lambda name=name: "exit status" in up.told(name), 120, f"the end of {name}")
                eventually(lambda name=name: CRASHES & events(up, name).keys(), 60, f"the Event of {name}")
            yield up
            assert up.slice_ready("witness")


def shown(mac: Mac, *arguments: str) -> str:
    """What a command writes to a terminal; ends of lines are `\\n`."""
    command = [sys.executable, "-m", "metal_supervisor", *arguments, "--state-dir", str(mac.state)]
    terminal = Terminal(command, 200)
    text = terminal.rest()
    terminal.process.wait(60)
    assert "Traceback" not in text
    return text.replace("\r\n", "\n")


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


@G137
def test_metrics_are_metrics(mac: Mac, figure: Figure) -> None:
    text = mac.fetch("/metrics")[1]
    families = list(text_string_to_metric_families(text))
    assert not [each.name for each in families if hostile.FORGED in each.name]
    named = {sample.labels["name"] for each in families for sample in each.samples if "name" in sample.labels}
    assert set(DYING) <= named
    assert not strange(text) and not forged(text)
    figure.add("metrics of others", 0, "")
    assert lint(text) == ""


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
@pytest.mark.parametrize(
    "arguments", [("status",), ("status", "--json"), ("models",), ("models", "--json"), ("doctor",)], ids=" ".join
)
def test_no_command_writes_more_than_words_to_a_terminal(mac: Mac, arguments: tuple[str, ...]) -> None:
    text = shown(mac, *arguments)
    assert text.strip() and not strange(text) and not forged(text)
    assert MARK in text or arguments[0] != "status"


@G138
@pytest.mark.parametrize("kind", TEXTS)
def test_why_a_service_is_as_it_is_and_its_log_are_words_on_a_terminal(mac: Mac, kind: str) -> None:
    for name in ("dies", "runtime", "url"):
        text = shown(mac, "explain", f"{name}-{kind}")
        assert text.strip() and not strange(text) and not forged(text), name
    text = shown(mac, "logs", f"dies-{kind}")
    assert MARK in text and not strange(text.replace("\t", " "))


@G138
def test_supervisorctl_shows_words(mac: Mac) -> None:
    program = str(Path(sys.executable).parent / "supervisorctl")
    terminal = Terminal([program, "-c", f"{mac.state}/supervisord.conf", "models"], 200)
    text = terminal.rest().replace("\r\n", "\n")
    terminal.process.wait(60)
    assert MARK in text and not strange(text) and not forged(text)


@G138
def test_our_own_logs_hold_words(mac: Mac) -> None:
    logs = [path for path in (mac.state / "log").glob("*.log*") if not path.name.startswith("default.")]
    assert {"controller.log", "sidecar.log", "supervisord.log"} <= {path.name for path in logs}
    for path in (*logs, mac.log):
        text = path.read_text("utf-8")
        assert not strange(text) and not forged(text), path.name
        assert "Traceback" not in text, path.name
