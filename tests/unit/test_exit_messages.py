"""The line of an engine's log that tells why it ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from metal_supervisor import launch
from metal_supervisor.sidecar.exit_messages import cause, last_lines, why_down
from metal_supervisor.state.directory import StateDir
from metal_supervisor.supervisord.exits import UNKNOWN
from tests.support.records import a_record


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (
            [
                "main: loading",
                'error while handling argument "--temp": stof',
                "usage:",
                "--temp N  (on error 0)",
                "to show complete usage, run with -h",
            ],
            'error while handling argument "--temp": stof',
        ),
        (["error: of a request before", "GGML_ASSERT(n > 0) failed", "bye"], "GGML_ASSERT(n > 0) failed"),
        (
            [
                "0.1 I load_model: loading",
                "0.2 E llama_model_load: error loading model: corrupted",
                "0.3 E common_init_: failed to load",
                "0.4 I cleaning up",
                "0.5 E exiting due to model loading error",
            ],
            "0.2 E llama_model_load: error loading model: corrupted",
        ),
        (
            [
                "0.5 E exiting due to an error before",
                "0.1 I load_model: loading",
                "0.2 I warming up",
                "0.3 E failed now",
            ],
            "0.3 E failed now",
        ),
        (["one", "two"], "two"),
        ([], ""),
        (["error " + "x" * 999], "error " + "x" * 294),
    ],
)
def test_the_cause_is_the_last_error_and_not_the_usage_text(lines: list[str], told: str) -> None:
    assert cause(lines, "exit status 1") == told


FRAMES = [
    "0   libggml-base.dylib  0x0000000101a4 ggml_print_backtrace + 276",
    "1   libggml-base.dylib  0x0000000101a8 ggml_abort + 156",
    "2   dyld  0x0000000188 start + 6076",
]
TRACEBACK = ["Traceback (most recent call last):", '  File "/a/server.py", line 9, in main', "    load_error(model)"]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        # llama-server without the prefixes of newer releases
        (
            [
                "srv    load_model: loading model '/m.gguf'",
                "gguf_init_from_file_impl: invalid magic characters: 'xxxx'",
                "llama_model_load: error loading model: "
                "tensor 'a' data is not within the file bounds, model is corrupted",
                "llama_model_load_from_file_impl: failed to load model",
                "common_init_from_params: failed to load model '/m.gguf'",
                "srv    load_model: failed to load model",
                "srv    operator(): operator(): cleaning up before exit...",
                "main: exiting due to model loading error",
            ],
            "llama_model_load: error loading model: tensor 'a' data is not within the file bounds, model is corrupted",
        ),
        (
            [
                "srv start: couldn't bind HTTP server socket, hostname: 1.2.3.4, port: 1",
                "srv operator(): cleaning up",
                "main: exiting due to HTTP server error",
            ],
            "srv start: couldn't bind HTTP server socket, hostname: 1.2.3.4, port: 1",
        ),
        (
            [
                "0.1 E srv         start: couldn't bind HTTP server socket, hostname: 1.2.3.4, port: 1",
                "0.2 I srv    operator(): cleaning up before exit...",
                "0.3 E srv  llama_server: exiting due to HTTP error",
            ],
            "0.1 E srv         start: couldn't bind HTTP server socket, hostname: 1.2.3.4, port: 1",
        ),
        (
            ["/b/ggml.c:12: GGML_ASSERT(n > 0) failed", "WARNING: Using native backtrace.", *FRAMES],
            "/b/ggml.c:12: GGML_ASSERT(n > 0) failed",
        ),
        (["/b/ggml-metal.m:12: fatal error", *FRAMES], "/b/ggml-metal.m:12: fatal error"),
        (["/b/ggml.c:12: fatal error", "/lib/libggml-base.so(ggml_abort+0x152)[0x7f00]"], "/b/ggml.c:12: fatal error"),
        (
            ["terminate called after throwing an instance of 'std::runtime_error'", "  what():  bad vocabulary"],
            "what():  bad vocabulary",
        ),
        # MLX, whose Python prints more after the exception
        ([*TRACEBACK, "KeyError: 'model_type'"], "KeyError: 'model_type'"),
        (
            [
                *TRACEBACK,
                "ValueError: Model type foo not supported.",
                "/p/resource_tracker.py:254: UserWarning: failed",
            ],
            "ValueError: Model type foo not supported.",
        ),
        (
            [
                *TRACEBACK,
                "KeyError: 'a'",
                "During handling of the above exception, another exception occurred:",
                *TRACEBACK,
                "Unsupported: b",
            ],
            "Unsupported: b",
        ),
        (
            [*TRACEBACK, "HubGone: 404 Client Error", "Repository Not Found", "Invalid username or password."],
            "HubGone: 404 Client Error",
        ),
        (
            [
                "ERROR:    Traceback (most recent call last):",
                *TRACEBACK[1:],
                "OSError: [Errno 48] in use",
                "ERROR:    Application startup failed. Exiting.",
            ],
            "OSError: [Errno 48] in use",
        ),
        (
            [*TRACEBACK, "MemoryGone: x", "Exception ignored in: <function f>", *TRACEBACK, "TypeError: y"],
            "MemoryGone: x",
        ),
        (
            [
                "libc++abi: terminating due to uncaught exception of type std::runtime_error: "
                "[METAL] Insufficient Memory",
                "Fatal Python error: Aborted",
                '  File "/a.py", line 1 in f',
                "Extension modules: numpy (total: 40)",
            ],
            "libc++abi: terminating due to uncaught exception of type std::runtime_error: [METAL] Insufficient Memory",
        ),
        ([*TRACEBACK[:2]], '  File "/a/server.py", line 9, in main'),
        # Ollama, and the loader of macOS
        (
            ["Error: listen tcp 127.0.0.1:11434: bind: address already in use"],
            "Error: listen tcp 127.0.0.1:11434: bind: address already in use",
        ),
        (
            ["panic: no such device", "goroutine 1 [running]:", "main.(*Server).handleError(0xc000)", "exit status 2"],
            "panic: no such device",
        ),
        (
            [
                "dyld[71]: Library not loaded: @rpath/ggml.dylib",
                "  Referenced from: <1> /opt/llama-server",
                "  Reason: tried: '/opt/ggml.dylib' (no such file)",
            ],
            "dyld[71]: Library not loaded: @rpath/ggml.dylib",
        ),
        (["dyld: Symbol not found: _x", "  Expected in: /lib/y"], "dyld: Symbol not found: _x"),
    ],
)
def test_the_cause_is_the_line_with_the_reason_whatever_follows_it(lines: list[str], told: str) -> None:
    assert cause(lines, "exit status 1") == told


def test_of_an_engine_that_may_have_been_killed_only_an_error_is_quoted() -> None:
    assert cause(["GGML_ASSERT(n > 0) failed", "bye"], UNKNOWN) == "GGML_ASSERT(n > 0) failed"
    assert cause(["one", "two"], UNKNOWN) == ""


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"])
def test_a_log_does_not_tell_why_somebody_killed_its_engine(signal: str) -> None:
    assert cause(["error: of a request long before", "idle"], f"terminated by {signal}") == ""


@pytest.mark.parametrize("ended", ["exit status 1", "terminated by SIGABRT", "terminated by SIGSEGV", ""])
def test_a_log_may_tell_why_its_engine_ended_by_itself(ended: str) -> None:
    assert cause(["GGML_ASSERT(n > 0) failed"], ended) == "GGML_ASSERT(n > 0) failed"


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        ("terminated by SIGKILL", "terminated by SIGKILL; next start at 1970-01-01T00:00:09Z"),
        ("exit status 1", "exit status 1; error: of a request; next start at 1970-01-01T00:00:09Z"),
    ],
)
def test_a_crash_loop_quotes_the_log_only_of_an_engine_that_ended_by_itself(
    tmp_path: Path, ended: str, told: str
) -> None:
    state, held = StateDir(tmp_path), a_record(retry_at=9.0)
    log = state.log_path(held.program)
    log.parent.mkdir(parents=True)
    log.write_text("error: of a request\n")
    assert why_down(state, held, None, ended) == told


def test_what_the_launcher_says_of_an_adopted_engine_is_none_of_its_last_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, does in {"read_note": {"started": "s"}, "survivor": 7, "represent": None, "wait_for_exit": None}.items():
        monkeypatch.setattr(launch, name, lambda *_, does=does: does)
    monkeypatch.setattr(launch, "write_note", lambda *_: None)
    assert launch.main(str(tmp_path / "specs" / "a.b.1.json")) == launch.EXIT_UNSEEN
    state = StateDir(tmp_path)
    log = state.log_path("a.b")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("its last line\n" + capsys.readouterr().err)
    assert last_lines(state, "a.b") == ["its last line"]
