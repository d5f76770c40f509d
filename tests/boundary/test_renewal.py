"""A Mac renews its own token, in time and in place; what goes wrong leaves the old one, and is told."""

from __future__ import annotations

import contextlib
import logging
import math
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from accounts_support import DAY, SIGNATURE, Api, jwt, kubeconfig, serving, token

from metal_supervisor.cluster import accounts
from metal_supervisor.cluster.accounts import Renewal
from metal_supervisor.cluster.kube import Kube
from metal_supervisor.spec.instants import utc
from tests.support.system import free_ports

T0 = 1_800_000_000.0


@pytest.fixture
def api() -> Iterator[Api]:
    with serving() as found:
        yield found


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
    assert mac.renewal.step() == 3600.0
    mac.now = T0 + 20 * DAY - 60
    assert mac.renewal.step() == pytest.approx(60, abs=0.01)
    assert mac.api.asked == []


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
    assert utc(T0 + 30 * DAY) in mac.renewal.problem and "llm/metal-mac-a" in mac.renewal.problem
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


@pytest.mark.parametrize(
    ("issued", "expires"),
    [(10**400, T0), (T0, 10**400), (-math.inf, T0), (-1.7e308, 1.7e308)],
    ids=["issued too late", "never over", "issued never", "too long"],
)
def test_times_that_no_server_gives_end_no_renewal(mac: Mac, issued: float, expires: float) -> None:
    mac.file.write_text(token(issued, expires))
    assert mac.renewal.step() == 3600.0
    mac.file.write_text(mac.old)
    mac.pass_days(20.01)
    mac.api.answer = {"kind": "TokenRequest", "status": {"token": token(issued, expires)}}
    assert mac.renewal.step() == 60.0 and "gave no token" in mac.renewal.problem
