"""A Mac's own credential: made by an administrator, renewed by itself, and never seen by anybody."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import re
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from metal_supervisor import accounts, cli
from metal_supervisor.accounts import AccountError, Renewal, duration_s, read_token
from metal_supervisor.boundary.kube import Kube
from tests.system import free_ports

ADMIN = "adm1n-s3cr3t"
SIGNATURE = "c2lnbmF0dXJl"
DAY = 86400


def jwt(payload: Any) -> str:
    parts = (base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in ({}, payload))
    return ".".join((*parts, SIGNATURE))


def token(issued: float, expires: float, account: str = "metal-mac-a") -> str:
    return jwt({"sub": f"system:serviceaccount:llm:{account}", "iat": issued, "exp": expires})


@dataclass
class Api:
    """What a cluster would be asked here: tokens of ServiceAccounts, and one list."""

    url: str = ""
    now: float = 0.0
    """The server's clock; 0.0: this machine's."""
    accounts: set[str] = field(default_factory=lambda: {"metal-mac-a"})
    longest_s: float = 365 * DAY
    listing: int = 200
    refuse: int = 0
    answer: Any = None
    """What to answer instead of a token."""
    asked: list[tuple[str, str, float]] = field(default_factory=list)
    """(account, who asked, for how long)."""
    given: list[str] = field(default_factory=list)

    def post(self, path: str, bearer: str, body: Any) -> tuple[int, Any]:
        account = path.split("/")[-2]
        self.asked.append((account, bearer, body["spec"]["expirationSeconds"]))
        if bearer != ADMIN and bearer not in self.given:
            return 401, {}
        if self.refuse:
            text = f'User "u" cannot create resource "serviceaccounts/token", saw {bearer}'
            return self.refuse, {"reason": "Forbidden", "message": text}
        if account not in self.accounts:
            return 404, {"reason": "NotFound", "message": f'serviceaccounts "{account}" not found'}
        if self.answer is not None:
            return 201, self.answer
        now = self.now or time.time()
        made = token(now, now + min(self.longest_s, body["spec"]["expirationSeconds"]), account)
        self.given.append(made)
        return 201, {"kind": "TokenRequest", "status": {"token": made}}

    def get(self, bearer: str) -> tuple[int, Any]:
        if bearer not in self.given:
            return 401, {"message": f"{bearer} is not known"}
        text = 'User "metal-mac-a" cannot list resource "inferenceservices"'
        return self.listing, {"items": [], "message": text if self.listing == 403 else ""}


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _reply(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            bearer = self.headers.get("Authorization", "").partition(" ")[2]
            path = self.path.partition("?")[0]
            code, answer = api.post(path, bearer, body) if self.command == "POST" else api.get(bearer)
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _reply  # noqa: N815

        def date_time_string(self, timestamp: Any = None) -> str:
            return super().date_time_string(api.now or None)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        api.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield api
        server.shutdown()
        thread.join()


def kubeconfig(path: Path, server: str, user: dict[str, Any], **cluster: Any) -> Path:
    path.write_text(json.dumps({
        "current-context": "c", "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}], "users": [{"name": "u", "user": user}],
    }))  # fmt: skip
    return path


@dataclass
class Shell:
    """Runs the command as an administrator would."""

    directory: Path
    api: Api
    capture: pytest.CaptureFixture[str]

    @property
    def output(self) -> Path:
        return self.directory / "mac-a"

    def run(self, *flags: str) -> tuple[int, str]:
        """(exit code, everything that was said)."""
        admin = kubeconfig(self.directory / "admin", self.api.url, {"token": ADMIN})
        base = ["--service-account", "metal-mac-a", "--namespace", "llm", "--from", str(admin)]
        code = cli.main(["kubeconfig", *base, "--output", str(self.output), *flags])
        said = self.capture.readouterr()
        text = said.out + said.err
        assert SIGNATURE not in text and ADMIN not in text
        return code, text


@pytest.fixture
def shell(tmp_path: Path, api: Api, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, api, capsys)


# ── the command ──────────────────────────────────────────────────────────────────────────────────


def test_an_administrator_makes_a_kubeconfig_for_one_mac(shell: Shell, api: Api) -> None:
    code, text = shell.run()
    assert code == 0, text
    assert api.asked == [("metal-mac-a", ADMIN, 30 * DAY)]
    files = shell.output, shell.directory / "mac-a.token"
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600, 0o600]
    assert files[1].read_text().strip() == api.given[0]
    assert api.given[0] not in files[0].read_text()
    assert "--node-name mac-a" in text and "tried it" in text
    assert re.search(r"until \d{4}-\d\d-\d\dT", text)


def test_the_files_may_be_moved_together(shell: Shell, tmp_path: Path) -> None:
    shell.run()
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("mac-a", "mac-a.token"):
        (shell.directory / name).rename(moved / name)
    kube = Kube(moved / "mac-a")
    assert kube.request("GET", "/apis/inference.llmkube.dev/v1alpha1/namespaces/llm/inferenceservices")["items"] == []
    kube.close()


def test_nothing_is_overwritten_unless_forced(shell: Shell, api: Api) -> None:
    (shell.directory / "mac-a.token").write_text("precious")
    code, text = shell.run()
    assert code == 1 and "--force" in text and "mac-a.token" in text
    assert api.asked == [] and (shell.directory / "mac-a.token").read_text() == "precious"
    (shell.directory / "mac-a.token").chmod(0o644)
    assert shell.run("--force")[0] == 0
    assert stat.S_IMODE((shell.directory / "mac-a.token").stat().st_mode) == 0o600


def test_what_the_cluster_needs_is_carried_over(shell: Shell, tmp_path: Path, api: Api) -> None:
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n")
    more = {"certificate-authority": "ca.pem", "tls-server-name": "api.internal"}
    admin = kubeconfig(tmp_path / "with-ca", api.url, {"token": ADMIN}, **more)
    chosen = accounts.credentials.choose(admin)
    order = accounts.Order(admin, "", "", "llm", "metal-mac-a", 3600, shell.output)
    cluster = accounts._content(order, chosen, "https://k8s.example:6443")["clusters"][0]["cluster"]
    assert cluster["server"] == "https://k8s.example:6443" and cluster["tls-server-name"] == "api.internal"
    assert base64.b64decode(cluster["certificate-authority-data"]) == (tmp_path / "ca.pem").read_bytes()
    assert "certificate-authority" not in cluster


def test_a_server_that_gives_less_is_reported(shell: Shell, api: Api) -> None:
    api.longest_s = DAY
    code, text = shell.run()
    assert code == 0 and "24.0 h at most" in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--service-account", "metal-mac-b"), 'ServiceAccount "metal-mac-b" does not exist in namespace "llm"'),
        (("--service-account", "../mac"), "--service-account must be a name"),
        (("--namespace", "a.b"), "--namespace must be a name"),
        (("--duration", "5m"), "--duration must be a time like 720h"),
        (("--duration", "1y"), "--duration must be a time like 720h"),
        (("--server", "http://k8s.example"), "--server must be the https URL"),
        (("--server", "https://me:pw@k8s.example"), "--server must be the https URL"),
        (("--context", "other"), 'no context "other"'),
        (("--output", "/nonexistent/file"), "/nonexistent is not a directory"),
        (("--from", "/nonexistent/config"), "/nonexistent/config does not exist"),
    ],
)
def test_wrong_input_is_answered_with_what_to_do(shell: Shell, flags: tuple[str, ...], words: str) -> None:
    code, text = shell.run(*flags)
    assert code == 1 and words in text and "Traceback" not in text
    assert not shell.output.exists()


def test_a_right_that_is_missing_is_named(shell: Shell, api: Api) -> None:
    api.refuse = 403
    code, text = shell.run()
    assert code == 1 and 'grant the verb "create" on "serviceaccounts/token"' in text
    assert not shell.output.exists()


def test_a_credential_that_may_not_read_is_kept_and_explained(shell: Shell, api: Api) -> None:
    api.listing = 403
    code, text = shell.run()
    assert code == 1 and 'grant the verb "list" on "inferenceservices"' in text and "conf/rbac/mac.yaml" in text
    assert shell.output.exists()


def test_a_cluster_without_our_kinds_is_no_failure(shell: Shell, api: Api) -> None:
    api.listing = 404
    code, text = shell.run()
    assert code == 0 and "conf/crds" in text


def test_a_server_that_only_the_mac_reaches_leaves_the_files(shell: Shell) -> None:
    code, text = shell.run("--server", f"http://127.0.0.1:{free_ports(1)[0]}")
    assert code == 1 and "if only the Mac reaches --server" in text and shell.output.exists()


@pytest.mark.parametrize("answer", [{}, {"status": 3}, {"status": {"token": "opaque"}}, {"status": {"token": None}}])
def test_an_answer_that_is_no_token_is_refused(shell: Shell, api: Api, answer: Any) -> None:
    api.answer = answer
    code, text = shell.run()
    assert code == 1 and "gave no token" in text and not shell.output.exists()


def test_durations_are_understood() -> None:
    assert [duration_s(text) for text in ("720h", "30d", "45m", "600s")] == [720 * 3600, 30 * DAY, 2700, 600]
    with pytest.raises(AccountError):
        duration_s("599s")


@pytest.mark.parametrize("text", ["", "a.b", "a.b.c", jwt([]), jwt({}), jwt({"sub": "alice", "iat": 1, "exp": 2}),
                                  token(5, 5), token(5, float("inf")), "é" + token(1, 2)])  # fmt: skip
def test_what_is_no_token_of_an_account_is_none(text: str) -> None:
    assert read_token(text) is None


# ── renewal ──────────────────────────────────────────────────────────────────────────────────────

T0 = 1_800_000_000.0


@dataclass
class Mac:
    """A Mac with a token of thirty days, and a clock to turn."""

    directory: Path
    api: Api
    now: float = T0

    def __post_init__(self) -> None:
        self.api.now = T0
        self.old = token(T0, T0 + 30 * DAY)
        self.api.given.append(self.old)
        self.file.write_text(self.old + "\n")
        config = kubeconfig(self.directory / "kubeconfig", self.api.url, {"tokenFile": "it.token"})
        self.kube = Kube(config)
        self.kube.request("GET", "/x")  # learns the server's clock
        # The test turns this machine's clock, which is then as wrong as the offset says.
        self.renewal = Renewal(config, "", self.kube, lambda: self.now - self.kube.clock_offset_s)

    @property
    def file(self) -> Path:
        return self.directory / "it.token"

    def pass_days(self, days: float) -> None:
        self.now = self.api.now = T0 + days * DAY


@pytest.fixture
def mac(tmp_path: Path, api: Api) -> Iterator[Mac]:
    mac = Mac(tmp_path, api)
    yield mac
    mac.kube.close()


@contextlib.contextmanager
def no_secret_in(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.DEBUG):
        yield
    for each in caplog.records:
        assert SIGNATURE not in str(vars(each))


def test_a_token_is_renewed_when_two_thirds_of_its_life_are_over(mac: Mac, caplog: pytest.LogCaptureFixture) -> None:
    with no_secret_in(caplog):
        mac.pass_days(19.9)
        assert mac.renewal.step() == 3600.0 and mac.api.asked == []
        mac.pass_days(20.01)
        assert mac.renewal.step() == 3600.0
    assert mac.api.asked == [("metal-mac-a", mac.old, 30 * DAY)]
    assert mac.file.read_text().strip() == mac.api.given[-1] != mac.old
    assert stat.S_IMODE(mac.file.stat().st_mode) == 0o600
    assert "token renewed" in caplog.text
    mac.kube.request("GET", "/x")
    assert mac.renewal.problem == ""


def test_the_next_step_is_due_when_the_token_is_or_within_the_hour(mac: Mac) -> None:
    now = T0 - mac.kube.clock_offset_s
    assert mac.renewal.due_s(now) == 3600.0
    assert mac.renewal.due_s(now + 20 * DAY - 60) == pytest.approx(60, abs=0.01)
    assert mac.renewal.due_s(now + 21 * DAY) == 0.0


@pytest.mark.parametrize("code", [403, 404, 500])
def test_a_failure_keeps_the_old_token_and_says_until_when(
    mac: Mac, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    mac.api.refuse = code
    mac.pass_days(21)
    with no_secret_in(caplog):
        assert mac.renewal.step() == 60.0
        assert 0 < mac.renewal.step() <= 60.0
    assert len(mac.api.asked) == 1, "it waits before it asks again"
    assert mac.file.read_text().strip() == mac.old
    assert accounts.utc(T0 + 30 * DAY) in mac.renewal.problem and "llm/metal-mac-a" in mac.renewal.problem
    assert mac.renewal.problem in {vars(each).get("problem") for each in caplog.records}


def test_a_failure_that_is_over_is_forgotten(mac: Mac) -> None:
    mac.api.refuse = 500
    mac.pass_days(21)
    mac.renewal.step()
    mac.api.refuse, mac.renewal._not_before = 0, 0.0
    assert mac.renewal.step() == 3600.0
    assert mac.renewal.problem == "" and mac.file.read_text().strip() == mac.api.given[-1]


def test_a_token_that_has_expired_says_how_to_get_another(mac: Mac) -> None:
    mac.api.given.remove(mac.old)
    mac.pass_days(31)
    mac.renewal.step()
    assert "expired at" in mac.renewal.problem and "metal-supervisor kubeconfig" in mac.renewal.problem


def test_a_server_away_is_a_failure_like_any_other(mac: Mac, tmp_path: Path) -> None:
    config = kubeconfig(tmp_path / "away", f"http://127.0.0.1:{free_ports(1)[0]}", {"tokenFile": "it.token"})
    renewal = Renewal(config, "", Kube(config), lambda: T0 + 21 * DAY)
    assert renewal.step() == 60.0 and "stays, and expires at" in renewal.problem


def test_a_token_that_ends_no_later_does_not_replace_the_old_one(mac: Mac) -> None:
    mac.api.longest_s = 3600
    mac.pass_days(21)
    mac.renewal.step()
    assert mac.file.read_text().strip() == mac.old and "ends no later" in mac.renewal.problem


def test_a_file_that_cannot_be_written_keeps_the_old_token(mac: Mac, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(accounts, "write_atomic", full)
    mac.pass_days(21)
    mac.renewal.step()
    assert "No space left" in mac.renewal.problem and mac.file.read_text().strip() == mac.old


@pytest.mark.parametrize("content", ["", "opaque-token", jwt({"sub": "alice", "iat": 1, "exp": 2})])
def test_somebody_elses_token_is_left_alone(mac: Mac, content: str) -> None:
    mac.file.write_text(content)
    mac.pass_days(29)
    assert mac.renewal.step() == 3600.0
    assert mac.api.asked == [] and mac.file.read_text() == content


def test_a_kubeconfig_without_a_token_file_is_left_alone(mac: Mac, tmp_path: Path) -> None:
    config = kubeconfig(tmp_path / "other", mac.api.url, {"token": mac.old})
    assert Renewal(config, "", mac.kube, lambda: T0 + 29 * DAY).step() == 3600.0
    assert Renewal(tmp_path / "missing", "", mac.kube).step() == 3600.0
    assert mac.api.asked == []


def test_a_link_to_the_token_file_stays_one(mac: Mac) -> None:
    real = mac.directory / "real.token"
    mac.file.rename(real)
    mac.file.symlink_to(real)
    mac.pass_days(21)
    mac.renewal.step()
    assert mac.file.is_symlink() and real.read_text().strip() == mac.api.given[-1]
