"""Attacks on real engines that run confined, on ways in that no table of flags can close."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from tests.boundary.test_llama_images import ask
from tests.support.system import eventually, running, seccomp, service
from tests.support.vision import projector


def test_a_confined_llama_server_fetches_no_image_that_a_request_names(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("the acceptance run on a Mac tries its profile")
    with running(tmp_path) as system, socket.create_server(("127.0.0.1", 0)) as server:
        projector(system.tiny.with_name("eyes.gguf"))
        seeing = system.tiny_model("seeing")
        seeing["spec"]["mmproj"] = "eyes.gguf"
        system.apply(seeing, service("seeing", "seeing"))
        assert seccomp(system.ready("seeing")) == "2"
        port = int(json.loads(system.fetch("/status")[1])["services"][0]["address"].rpartition(":")[2])
        content = [{"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{server.getsockname()[1]}/x.png"}}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        assert ask(port, "POST", "/v1/chat/completions", body) >= 400
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
        eventually(lambda: ask(port, "GET", "/health") == 200, 10, "it to serve on")
