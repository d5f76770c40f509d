"""An engine is published once it has answered, not once it says that it is well."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from tests.support.engines import beside_a_bystander, gone, reason, said, stand_in, tell, untouched
from tests.support.system import System, eventually, kill, service

CHAT = "/v1/chat/completions"
UNFRIENDLY = "{% if messages[-1]['content'] == 'hi' %}{{ raise_exception('no greetings here') }}{% endif %}ok"
"""A chat template that passes llama-server's own check at its start, and fails in a request."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with beside_a_bystander(tmp_path_factory.mktemp("first")) as up:
        yield up


def asked(system: System, name: str) -> int:
    """How many requests a stand-in got that make a model work."""
    return said(system, name).count("\nasked ")


def why(system: System, name: str, words: str) -> None:
    """Waits until the condition of a service says so."""
    eventually(lambda: words in system.condition("MetalReady", name).get("message", ""), 20, words)


def test_a_real_engine_whose_chat_template_fails_is_not_published_and_the_condition_quotes_it(system: System) -> None:
    arguments = ["--threads", "1", "--jinja", "--chat-template", UNFRIENDLY]
    with untouched(system):
        system.apply(service("rude", extraArgs=arguments))
        why(system, "rude", f"{CHAT} answered 400: ")
        assert "parser for this template" in system.condition("MetalReady", "rude")["message"]
        assert system.slice_ready("rude") is not True and reason(system, "rude") == "Loading"
        assert system.condition("Available", "rude")["status"] == "False"
        system.apply(service("rude"))
        system.ready("rude")
        gone(system, "rude")


def test_an_engine_is_ready_with_its_first_answer_and_never_asked_for_another(system: System) -> None:
    system.apply(stand_in("slow", answer_delay_s=600))
    why(system, "slow", "its first answer is waited for")
    eventually(lambda: asked(system, "slow") == 1, 20, "the request")
    assert system.slice_ready("slow") is not True
    tell(system, "slow", answer_delay_s=0)
    before = system.own_pid("sidecar")
    kill(before)  # the request goes with it, and a new one is made
    pid = system.ready("slow")
    assert asked(system, "slow") == 2
    started = eventually(lambda: (now := system.own_pid("sidecar")) != before and now, 20, "another sidecar")
    kill(started)
    since = time.time()
    eventually(lambda: json.loads(system.fetch("/status")[1])["at"] > since, 20, "a sidecar that has looked")
    assert system.observe("slow")["pid"] == pid
    assert system.slice_ready("slow") is True and asked(system, "slow") == 2
    gone(system, "slow")


def test_a_service_that_goes_does_not_wait_for_its_first_answer(system: System) -> None:
    system.apply(stand_in("brief", answer_delay_s=600))
    eventually(lambda: system.pid("brief") and asked(system, "brief") == 1, 20, "the request")
    gone(system, "brief")


def test_the_key_of_an_engine_is_used_and_stays_where_it_was(system: System) -> None:
    key = "k3y-of-the-engine"
    system.apply(service("locked", env=[{"name": "LLAMA_API_KEY", "value": f"{key},other"}]))
    system.ready("locked")
    files = [path for path in system.state.rglob("*") if path.is_file() and path.parent.name not in ("specs", "runs")]
    told = [str(path) for path in files if key.encode() in path.read_bytes()]
    assert [path for path in told if "/records/" in path or "/observed/" in path or "/log/" in path] == []
    assert key not in system.fetch("/status")[1] and key not in system.said()
    gone(system, "locked")
