"""`metal-supervisor pull`, as it is typed: from a Hub and from web servers on loopback, on a terminal and off one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from range_server import Web, serving

from metal_supervisor.cli import pull
from metal_supervisor.models.model_directory import PARTIAL, ModelDirectory
from metal_supervisor.settings.loader import Settings
from metal_supervisor.spec.model_resource import read_artifact
from metal_supervisor.spec.sources import Artifact, canonical
from tests.support import ollama
from tests.support.hub import Hub
from tests.support.ollama_registry import registry
from tests.support.s3 import SECRET, Server
from tests.support.system import eventually
from tests.support.typed import typed

MIB = 1 << 20
GGUF = b"GGUF" + bytes(range(256)) * 4096
REPO = {"o/r": {"m-Q4_K_M.gguf": GGUF, "m-Q8_0.gguf": GGUF + b"8", "config.json": b"{}", "model.safetensors": b"w" * 9}}


class Mac:
    """A state directory, and our command for it."""

    def __init__(self, base: Path) -> None:
        self.state, self.base = base / "state", base
        self.environ = {
            name: value for name, value in os.environ.items() if not name.startswith(("HF_", "AWS_", "METAL_"))
        }
        self.environ |= {"HF_HOME": str(base / "hf"), "TERM": "xterm"}

    def command(self, *words: str) -> list[str]:
        # The Hub of the tests redirects to another host of this machine.
        mine = "--state-dir", str(self.state), "--private-hosts", "localhost"
        return [sys.executable, "-m", "metal_supervisor", "pull", *words, *mine]

    def pull(self, *words: str, code: int = 0) -> tuple[str, str]:
        """(stdout, stderr) of a command that is not on a terminal; asserts its exit code."""
        done = typed(*self.command(*words)[3:], environ=self.environ)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done.stdout, done.stderr

    @contextlib.contextmanager
    def begun(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            self.command(*words),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environ,
            stdin=subprocess.DEVNULL,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()

    def slot(self, source: str) -> ModelDirectory:
        return ModelDirectory(self.state / "models", Artifact(canonical(source)).slot)

    def partial_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.state.glob(f"models/*/*{PARTIAL}"))


@pytest.fixture
def mac(tmp_path: Path) -> Mac:
    return Mac(tmp_path)


@pytest.fixture
def web() -> Iterator[Web]:
    with serving() as server:
        server.files["m.gguf"] = GGUF
        yield server


@pytest.fixture
def hub(mac: Mac) -> Iterator[Hub]:
    with Hub(REPO) as server:
        mac.environ["HF_ENDPOINT"] = server.url
        yield server


# ── what comes ───────────────────────────────────────────────────────────────────────────────────


def test_stdout_is_the_path_alone_and_again_nothing_is_fetched(mac: Mac, web: Web) -> None:
    source = f"{web.url}/range/m.gguf"
    said, beside = mac.pull(source)
    path = Path(said.removesuffix("\n"))
    assert path == mac.slot(source).path / "m.gguf" and path.read_bytes() == GGUF
    assert "m.gguf: 1 MiB" in beside and "\r" not in beside
    sent = web.sent_bytes
    assert mac.pull(source)[0] == said and web.sent_bytes == sent


def test_a_model_of_the_hub_by_its_quantization_is_where_a_service_looks(mac: Mac, hub: Hub) -> None:
    said, _ = mac.pull("o/r", "--quantization", "Q8_0")
    slot = Artifact(canonical("hf://o/r"), quantization="Q8_0").slot
    assert Path(said.strip()) == mac.state / "models" / slot / "m-Q8_0.gguf"
    assert Path(said.strip()).read_bytes() == GGUF + b"8"


def test_one_of_two_quantizations_is_removed_by_the_name_it_was_pulled_by(mac: Mac, hub: Hub) -> None:
    paths = [Path(mac.pull(f"o/r:{quantization}")[0].strip()) for quantization in ("Q4_K_M", "Q8_0")]
    done = typed("models", "rm", "--yes", "o/r:Q8_0", "--state-dir", str(mac.state), environ=mac.environ)
    assert (done.returncode, [each.exists() for each in paths]) == (0, [True, False]), done.stderr
    done = typed("models", "rm", "--yes", "o/r:Q5_K_M", "--state-dir", str(mac.state), environ=mac.environ)
    assert (done.returncode, paths[0].exists()) == (4, True) and "'o/r:Q5_K_M' is no model in" in done.stderr


def test_the_files_of_a_repository_become_a_directory_for_mlx(mac: Mac, hub: Hub) -> None:
    path = Path(mac.pull("hf://o/r", "--format", "mlx", "--files", "config.json, model.safetensors")[0].strip())
    assert sorted(each.name for each in path.iterdir()) == ["config.json", "model.safetensors"]


def test_the_hubs_token_comes_from_the_environment_and_goes_nowhere_else(mac: Mac, hub: Hub, web: Web) -> None:
    hub.token = "hf_" + "t" * 20
    assert "401" in mac.pull("hf://o/r/m-Q4_K_M.gguf", code=1)[1]
    mac.environ["HF_TOKEN"] = hub.token
    said, beside = mac.pull("hf://o/r/m-Q4_K_M.gguf")
    assert Path(said.strip()).read_bytes() == GGUF and hub.token not in beside
    mac.pull(f"{web.url}/range/m.gguf")
    assert not any("Authorization" in each for each in web.headers)


def test_an_expired_token_of_the_user_does_not_keep_public_models_away(mac: Mac, hub: Hub) -> None:
    hub.expired = mac.environ["HF_TOKEN"] = "hf_" + "e" * 20
    said, beside = mac.pull("hf://o/r/m-Q4_K_M.gguf")
    assert Path(said.strip()).read_bytes() == GGUF and hub.expired not in beside


def test_a_key_goes_to_a_web_server_that_it_is_meant_for(mac: Mac, web: Web) -> None:
    source = f"{web.url}/range/m.gguf"
    assert "--secret-env 'HF_TOKEN' is not set" in mac.pull(source, "--secret-env", "HF_TOKEN", code=2)[1]
    mac.environ["HF_TOKEN"] = "abc"
    mac.pull(source, "--secret-env", "HF_TOKEN")
    assert web.headers[-1]["Authorization"] == "Bearer abc"


def test_a_local_file_is_used_where_it_is(mac: Mac, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(GGUF)
    assert mac.pull(str(tmp_path / "m.gguf"))[0] == f"{tmp_path}/m.gguf\n"


def test_keys_of_s3_are_those_of_the_environment_and_its_server_may_be_private(mac: Mac, tmp_path: Path) -> None:
    server = Server(tmp_path / "s3")
    try:
        server.put("models", "", b"")
        server.put("models", "tiny/m.gguf", GGUF)
        mac.environ |= server.keys
        said, beside = mac.pull("s3://models/tiny/m.gguf")
        assert Path(said.strip()).read_bytes() == GGUF
        mac.environ["AWS_SECRET_ACCESS_KEY"] = "wrong"
        refused = mac.pull("s3://models/tiny/other.gguf", code=1)[1]
        assert "403" in refused and "spec." not in refused
    finally:
        server.end()
    assert SECRET not in said + beside + refused


def test_a_model_of_the_library_is_pulled_by_the_users_own_ollama(mac: Mac, tmp_path: Path) -> None:
    with registry() as source, ollama.serving(tmp_path / "daemon") as daemon:
        source.publish("tiny", ollama.tiny(tmp_path / "tiny.gguf", n_layer=3), tag="1b")
        flags = (
            "--ollama-url",
            f"http://127.0.0.1:{daemon.port}",
            "--ollama-registry",
            f"http://127.0.0.1:{source.port}",
        )
        said, _ = mac.pull("ollama://tiny:1b", *flags)
        assert said.strip() in {each["name"] for each in daemon.ask("GET", "/api/tags")[1]["models"]}
        assert "file does not exist" in mac.pull("ollama://none", *flags, code=1)[1]
    assert "no Ollama answers at" in mac.pull("ollama://tiny:1b", *flags, code=1)[1]


# ── what does not ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("ftp://h/m.gguf",), "SOURCE 'ftp://h/m.gguf' is not supported"),
        (("o/r", "--sha256", "12"), "--sha256 must be 64 hexadecimal digits"),
        (("https://h/x/", "--format", "mlx"), "name its files in --files"),
        (("s3://UPPER/x",), "SOURCE 's3://UPPER/x' must look like"),
    ],
)
def test_a_wrong_order_is_told_in_the_words_of_the_command_line(mac: Mac, words: tuple[str, ...], text: str) -> None:
    said, beside = mac.pull(*words, code=2)
    assert text in beside and "spec." not in beside and not said


def test_a_file_that_is_not_there_ends_it_with_its_message(mac: Mac, web: Web) -> None:
    said, beside = mac.pull(f"{web.url}/range/none.gguf", code=1)
    assert "answered 404: there is no such file; check SOURCE" in beside and "tried again" not in beside and not said


def test_a_file_that_is_another_ends_it(mac: Mac, web: Web) -> None:
    beside = mac.pull(f"{web.url}/range/m.gguf", "--sha256", "0" * 64, code=1)[1]
    assert f"should have sha256 {'0' * 64}" in beside or f"should have --sha256 {'0' * 64}" in beside
    assert mac.partial_bytes() == 0


def test_a_server_that_is_not_there_is_asked_a_few_times_only(mac: Mac, web: Web) -> None:
    port = web.server_address[1]
    with serving() as gone:
        port = gone.server_address[1]
    beside = mac.pull(f"http://127.0.0.1:{port}/m.gguf", code=1)[1]
    assert "is the server up?" in beside and "tried again" not in beside


def test_a_host_that_is_not_allowed_here_is_refused_at_the_terminal_too(mac: Mac, web: Web) -> None:
    beside = mac.pull(f"{web.url}/range/m.gguf", "--allowed-hosts", "huggingface.co", code=1)[1]
    assert "--allowed-hosts" in beside and not web.asked


def test_a_private_host_that_was_not_typed_is_refused(mac: Mac, hub: Hub) -> None:
    hub.redirects["/elsewhere/m.gguf"] = "http://127.0.0.2/m.gguf"
    assert "no public address" in mac.pull(f"{hub.url}/elsewhere/m.gguf", code=1)[1]


# ── on the way ───────────────────────────────────────────────────────────────────────────────────


def test_a_line_that_is_cut_is_taken_up_again(mac: Mac, hub: Hub) -> None:
    hub.cut_after_bytes, hub.cut_times = MIB // 2, 2
    assert Path(mac.pull("hf://o/r/m-Q4_K_M.gguf")[0].strip()).read_bytes() == GGUF
    assert hub.cut_times == 0 and hub.sent("m-Q4_K_M.gguf") < 2 * len(GGUF)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_it_at_once_and_the_same_command_goes_on(mac: Mac, hub: Hub, signum: signal.Signals) -> None:
    hub.chunk_delay_s = 0.1
    with mac.begun("hf://o/r/m-Q4_K_M.gguf") as process:
        eventually(lambda: mac.partial_bytes() > MIB // 8, 30, "bytes to come")
        process.send_signal(signum)
        began = time.monotonic()
        said, beside = process.communicate(timeout=20)
        assert time.monotonic() - began < 5 and process.returncode == 130
    assert "the same command continues from there" in beside and not said
    here, hub.chunk_delay_s = mac.partial_bytes(), 0.0
    asked = len(hub.log)
    assert Path(mac.pull("hf://o/r/m-Q4_K_M.gguf")[0].strip()).read_bytes() == GGUF
    # Of this command alone: the server may still write a chunk to the one that has gone.
    assert here > 0 and 0 < sum(each.sent_bytes for each in hub.log[asked:]) <= len(GGUF) - here + 1


def test_what_somebody_else_fetches_already_is_watched_and_not_fetched_twice(mac: Mac, hub: Hub) -> None:
    hub.chunk_delay_s = 0.1
    source = "hf://o/r/m-Q4_K_M.gguf"
    with mac.begun(source) as first:
        eventually(mac.slot(source).busy, 30, "the first to fetch")
        with mac.begun(source) as second:
            eventually(lambda: len(hub.asked(method="HEAD")) + len(hub.asked("m-Q4_K_M.gguf")) >= 3, 30, "both to ask")
            hub.chunk_delay_s = 0.0
            paths = {process.communicate(timeout=60)[0] for process in (first, second)}
            assert first.returncode == second.returncode == 0
    assert paths == {f"{mac.slot(source).path}/m-Q4_K_M.gguf\n"}
    assert hub.sent("m-Q4_K_M.gguf") <= len(GGUF) + 1024


def test_off_a_terminal_there_is_a_plain_line_now_and_then(
    mac: Mac, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pull, "SAY_S", 0.05)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("HF_HOME", mac.environ["HF_HOME"])
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if "25" in text or len(said) > 20:
            hub.chunk_delay_s = 0.0

    hub.chunk_delay_s = 0.3
    settings = Settings(state_dir=str(mac.state), hf_endpoint=hub.url, private_hosts="localhost")
    assert pull.main(settings, {"source": "hf://o/r/m-Q4_K_M.gguf"}, (), say) == 0
    assert all(line.startswith("m-Q4_K_M.gguf: ") and line.isprintable() for line in said)
    assert any(re.search(r"\d % of 1 MiB", line) for line in said) and said[-1].startswith("m-Q4_K_M.gguf: 1 MiB, in ")
    assert capsys.readouterr() == (f"{mac.slot('hf://o/r/m-Q4_K_M.gguf').path}/m-Q4_K_M.gguf\n", "")


def test_hosts_that_are_typed_may_be_private_and_no_others() -> None:
    settings = Settings(private_hosts="nas.lan", allowed_hosts="h", hf_endpoint="https://hub.lan")
    own = ("nas.lan",)
    web = pull.terms_for(settings, Artifact("http://192.168.1.5:8080/m.gguf"), pull.Keys())
    assert web.rules.private == (*own, "192.168.1.5") and web.rules.hosts == ("h",)
    keys = pull.Keys({"AWS_ENDPOINT_URL_S3": "http://minio.lan:9000", "AWS_REGION": "http://other"})
    assert pull.terms_for(settings, Artifact("s3://b/k"), keys).rules.private == (*own, "minio.lan")
    assert pull.terms_for(settings, Artifact("hf://o/r@main"), pull.Keys()).rules.private == own
    assert web.rules.mirror == ("hub.lan", 443)


def test_keys_of_s3_come_from_the_environment_for_s3_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("MY_KEY", "secret")
    found = pull.keys_of(read_artifact({"spec": {"source": "s3://bucket/m.gguf"}}), ["MY_KEY"]).values
    assert found["AWS_ACCESS_KEY_ID"] == "id" and found["MY_KEY"] == "secret"
    assert pull.keys_of(read_artifact({"spec": {"source": "https://h/m.gguf"}}), ()).values == {}


ERASED = "\x1b[1A\x1b[2K"


class Terminal:
    """A command on a terminal of a given width; its stdout is a pipe."""

    def __init__(self, mac: Mac, *words: str, columns: int) -> None:
        self.said, self._main = "", -1
        self._main, theirs = pty.openpty()
        self.resize(columns)
        self.process = subprocess.Popen(
            mac.command(*words), stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, text=True, env=mac.environ
        )
        os.close(theirs)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read(self, until: str) -> str:
        """What came since, up to a pattern."""
        fresh, end = "", time.monotonic() + 30
        while not re.search(until, fresh):
            assert time.monotonic() < end and select.select([self._main], [], [], 30)[0], (until, fresh)
            try:
                fresh += os.read(self._main, 65536).decode()
            except OSError:  # its other end was closed
                raise AssertionError((until, fresh)) from None
        self.said += fresh
        return fresh

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self._main)


def test_a_terminal_has_one_line_that_is_rewritten_and_follows_its_width(mac: Mac, hub: Hub) -> None:
    hub.chunk_delay_s = 0.2
    terminal = Terminal(mac, "hf://o/r/m-Q4_K_M.gguf", columns=100)
    try:
        assert "━" in terminal.read(r"m-Q4_K_M.gguf .*\d%.*\d\.\d/1.0 MiB")
        terminal.resize(40)
        terminal.read(r"m-Q4_K_M.gguf[^━\r\n]+\d%[^━\r\n]+MiB")
        hub.chunk_delay_s = 0.0
        terminal.read("m-Q4_K_M.gguf: 1 MiB, in ")
        assert terminal.process.stdout is not None
        assert terminal.process.stdout.read() == f"{mac.slot('hf://o/r/m-Q4_K_M.gguf').path}/m-Q4_K_M.gguf\n"
        assert terminal.process.wait(30) == 0
    finally:
        terminal.close()
    bars, _, end = terminal.said.rpartition(ERASED)
    assert bars.count("\n") == 1, "the bar is one line, which is left once, to be erased"
    assert end.startswith("metal-supervisor: m-Q4_K_M.gguf")


def test_ctrl_c_on_a_terminal_leaves_no_bar_behind(mac: Mac, hub: Hub) -> None:
    hub.chunk_delay_s = 0.2
    terminal = Terminal(mac, "hf://o/r/m-Q4_K_M.gguf", columns=80)
    try:
        terminal.read(r"\d+%")
        terminal.process.send_signal(signal.SIGINT)
        assert f"{ERASED}metal-supervisor: stopped" in terminal.read("continues from there")
        assert terminal.process.wait(30) == 130
    finally:
        terminal.close()
