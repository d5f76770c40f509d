"""What answers mean: how long to wait, which right is missing, and what time it is over there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from test_kube import answering, config, failure, http

from metal_supervisor.cluster.kube import Kube, KubeError

MODELS = "/apis/inference.llmkube.dev/v1alpha1/namespaces/x/models"
NOW = "Wed, 21 Oct 2026 07:28:00 GMT"


def refused(directory: Path, answer: bytes, act: Callable[[Kube], Any] | None = None) -> KubeError:
    """How a request fails that is answered like that."""
    with answering(lambda _: answer) as url:
        kube = Kube(config(directory / "k", url))
        try:
            if act is None:
                return failure(kube)
            with pytest.raises(KubeError) as caught:
                act(kube)
            return caught.value
        finally:
            kube.close()


@pytest.mark.parametrize(
    ("headers", "details", "pause_s"),
    [
        (["Retry-After: 7"], None, 7),
        (["Retry-After:  7 "], None, 7),
        (["Retry-After: 0"], None, 0),
        ([], None, 0),
        (["Retry-After: 61"], None, 60),
        ([f"Retry-After: {'9' * 400}"], None, 60),
        (["Retry-After:"], None, 0),
        (["Retry-After: -3"], None, 0),
        (["Retry-After: 1.5"], None, 0),
        (["Retry-After: inf"], None, 0),
        (["Retry-After: soon"], None, 0),
        (["Retry-After: \xb2"], None, 0),
        ([f"Date: {NOW}", "Retry-After: Wed, 21 Oct 2026 07:28:07 GMT"], None, 7),
        ([f"Date: {NOW}", "Retry-After: Wed, 21 Oct 2026 07:27:00 GMT"], None, 0),
        ([f"Date: {NOW}", "Retry-After: Wed, 21 Oct 2099 07:27:00 GMT"], None, 60),
        (["Retry-After: Wed, 21 Oct 2099 07:28:00 GMT"], None, 60),
        (["Retry-After: Wed, 21 Oct 1999"], None, 0),
        (["Retry-After: Wed, 99 Oct 2026 07:28:07 GMT"], None, 0),
        ([], {"retryAfterSeconds": 5}, 5),
        ([], {"retryAfterSeconds": 500}, 60),
        ([], {"retryAfterSeconds": "x"}, 0),
        ([], {"retryAfterSeconds": -5}, 0),
        ([], [5], 0),
        (["Retry-After: 3"], {"retryAfterSeconds": 5}, 3),
    ],
)
@pytest.mark.parametrize("status", ["429 Slow", "503 No"])
def test_a_server_is_left_alone_as_long_as_it_asks_for_within_a_minute(
    tmp_path: Path, status: str, headers: list[str], details: Any, pause_s: float
) -> None:
    body = json.dumps({"message": "slow down", **({} if details is None else {"details": details})}).encode()
    assert refused(tmp_path, http(body, status, *headers)).retry_after_s == pause_s


RBAC = 'models.inference.llmkube.dev is forbidden: User "system:serviceaccount:x:mac" cannot {verb} resource "models"'


@pytest.mark.parametrize(
    ("method", "path", "query", "told", "says"),
    [
        ("GET", MODELS, None, "", 'cannot list models in namespace "x"; grant the verb "list" on "models" of inf'),
        ("GET", f"{MODELS}/a", None, "", 'cannot get models in namespace "x"; grant the verb "get" on "models"'),
        ("GET", MODELS.replace("/namespaces/x", ""), None, "", 'cannot list models; grant the verb "list" on "models"'),
        ("GET", "/api/v1/namespaces", None, "", 'cannot list namespaces; grant the verb "list" on "namespaces"'),
        ("GET", "/api/v1/namespaces/x/services/a", None, "no", 'cannot get services in namespace "x"; grant the verb'),
        ("POST", MODELS, None, "", "cannot create models"),
        ("PUT", f"{MODELS}/a", None, "", "cannot update models"),
        ("DELETE", f"{MODELS}/a", None, "", "cannot delete models"),
        ("DELETE", MODELS, None, "", "cannot deletecollection models"),
        ("PATCH", f"{MODELS}/a/status", None, "", 'cannot patch models/status in namespace "x"; grant the verb "pat'),
        # A server-side apply of what is not there yet is refused as a create, and the server knows who asked.
        (
            "PATCH",
            f"{MODELS}/a",
            None,
            RBAC.format(verb="create"),
            'cannot create models in namespace "x"; grant the verb "create" on "models" of inference.llmkube.dev'
            " to system:serviceaccount:x:mac",
        ),
        ("POST", MODELS, None, "exceeded quota: all", 'cannot create models in namespace "x": exceeded quota: all'),
        ("POST", MODELS, None, "admission webhook w denied the request", 'x": admission webhook w denied the request'),
        ("GET", "/version", None, "no", "cannot GET /version: no"),
    ],
)
def test_a_refusal_names_the_verb_and_the_resource(
    tmp_path: Path, method: str, path: str, query: Any, told: str, says: str
) -> None:
    body = json.dumps({"reason": "Forbidden", "message": told}).encode()
    error = refused(tmp_path, http(body, "403 Forbidden"), lambda kube: kube.request(method, path, query))
    assert error.code == 403
    assert str(error).startswith("403 Forbidden: cannot")
    assert says in str(error)


def test_a_refused_watch_is_named_as_a_watch(tmp_path: Path) -> None:
    error = refused(tmp_path, http(b"{}", "403 Forbidden"), lambda kube: kube.stream(MODELS, {"watch": "true"}))
    assert 'cannot watch models in namespace "x"; grant the verb "watch" on "models"' in str(error)


def dated(date: str, status: str = "200 OK") -> Callable[[bytes], bytes]:
    return lambda _: http(b"{}", status, f"Date: {date}")


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0, 30.0, 86_400.0 * 365])
def test_the_clock_of_the_server_is_known_within_about_a_second(tmp_path: Path, ahead_s: float) -> None:
    with answering(lambda _: http(b"{}", "200 OK", f"Date: {formatdate(time.time() + ahead_s, usegmt=True)}")) as url:
        kube = Kube(config(tmp_path / "k", url))
        assert kube.clock_offset_s == 0.0
        before = time.time()
        kube.request("GET", "/x")
        took_s = time.time() - before
        assert abs(kube.clock_offset_s - ahead_s) <= 1.0 + took_s
        kube.close()


def test_a_clock_in_order_is_left_at_zero(tmp_path: Path) -> None:
    with answering(lambda _: http(b"{}", "200 OK", f"Date: {formatdate(usegmt=True)}")) as url:
        kube = Kube(config(tmp_path / "k", url))
        for _ in range(20):  # a date is cut to seconds: that alone must not move anything
            kube.request("GET", "/x")
            assert kube.clock_offset_s == 0.0
        kube.close()


@pytest.mark.parametrize(
    "date", ["", "yesterday", "0", "-1", "Wed, 99 Oct 2026 07:28:00 GMT", "Wed, 21 Oct 99999 07:28:00 GMT", "\xb2"]
)
def test_a_date_that_is_none_tells_nothing(tmp_path: Path, date: str) -> None:
    with answering(dated(date)) as url:
        kube = Kube(config(tmp_path / "k", url))
        assert kube.request("GET", "/x") == {}
        assert kube.clock_offset_s == 0.0
        kube.close()


def test_a_proxy_that_complains_does_not_set_the_clock(tmp_path: Path) -> None:
    with answering(dated(NOW, "502 Bad Gateway")) as url:
        kube = Kube(config(tmp_path / "k", url))
        failure(kube)
        assert kube.clock_offset_s == 0.0
        kube.close()
