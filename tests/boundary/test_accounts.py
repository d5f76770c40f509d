"""A Mac's own credential, as an administrator makes it: never shown, never overwritten, and tried before it is used."""

from __future__ import annotations

import base64
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from accounts_support import ADMIN, DAY, SIGNATURE, Api, jwt, kubeconfig, serving, token

from metal_supervisor.cli import main
from metal_supervisor.cluster import accounts
from metal_supervisor.cluster.accounts import AccountError, duration_s, read_token
from metal_supervisor.cluster.kube import Kube
from tests.support.system import free_ports


@pytest.fixture
def api() -> Iterator[Api]:
    with serving() as found:
        yield found


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
        code = main.main(["kubeconfig", *base, "--output", str(self.output), *flags])
        said = self.capture.readouterr()
        text = said.out + said.err
        assert SIGNATURE not in text and ADMIN not in text
        return code, text


@pytest.fixture
def shell(tmp_path: Path, api: Api, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, api, capsys)


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
    cluster = chosen.cluster_info("https://k8s.example:6443")
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
        (("--from", "/nonexistent/config"), "--from: /nonexistent/config does not exist; name the kubeconfig"),
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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a.b",
        "a.b.c",
        jwt([]),
        jwt({}),
        jwt({"sub": "alice", "iat": 1, "exp": 2}),
        token(5, 5),
        token(5, float("inf")),
        "é" + token(1, 2),
    ],
)
def test_what_is_no_token_of_an_account_is_none(text: str) -> None:
    assert read_token(text) is None
