"""What survives: objects, versions and ownership outlive a kill -9; a TERM ends it at once."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from apiserver_support import (
    CONFIG_MAPS,
    CRD_PATH,
    LEASES,
    PREFIX,
    SERVICES,
    WIDGET_CRD,
    WIDGETS,
    Client,
    config_map,
    lease,
    options,
    widget,
)

from metal_supervisor.apiserver import ApiServer, Options, UnusableData
from metal_supervisor.apiserver.errors import ApiError
from metal_supervisor.settings.loader import Overrides, save_overrides
from tests.support.pace import patience
from tests.support.system import eventually

PROGRAM = """
import sys
from pathlib import Path
from metal_supervisor.apiserver import Options, serve
serve(Options(data_file=Path(sys.argv[1]), prefix=sys.argv[2], port=int(sys.argv[3])))
"""


@contextmanager
def process(directory: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """An API server in a process of its own, answering."""
    command = [sys.executable, "-c", PROGRAM, str(directory / "api.db"), PREFIX, str(port)]
    with subprocess.Popen(command) as server:
        deadline_s = time.monotonic() + 10
        while time.monotonic() < deadline_s:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.01)
        try:
            yield server
        finally:
            server.kill()


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_everything_answered_survives_a_kill(tmp_path: Path, port: int) -> None:
    with process(tmp_path, port) as server:
        client = Client(port)
        client.post(CRD_PATH, WIDGET_CRD)
        client.apply(f"{WIDGETS}/w", widget(), "one")
        client.apply(f"{LEASES}/slot", lease("slot", holderIdentity="a"), "a")
        address = client.post(SERVICES, {"metadata": {"name": "s"}, "spec": {"ports": [{"port": 1}]}}).body["spec"]
        for number in range(50):
            last = client.post(CONFIG_MAPS, config_map(f"c{number}")).body["metadata"]["resourceVersion"]
        cluster = client.get("/api/v1/namespaces/kube-system").body["metadata"]["uid"]
        server.kill()
        server.wait()
        client.close()
    with process(tmp_path, port):
        client = Client(port)
        assert client.version() == last
        assert len(client.get(CONFIG_MAPS).body["items"]) == 50
        assert client.get("/api/v1/namespaces/kube-system").body["metadata"]["uid"] == cluster
        assert client.get(f"{SERVICES}/s").body["spec"]["clusterIP"] == address["clusterIP"]
        assert client.apply(f"{LEASES}/slot", lease("slot", holderIdentity="b"), "b").code == 409
        assert client.apply(f"{WIDGETS}/w", widget(size=2), "two").code == 409
        with client.watch(CONFIG_MAPS, resourceVersion=last) as watch:
            client.post(CONFIG_MAPS, config_map("next"))
            kind, obj = watch.next()
            assert kind == "ADDED" and int(obj["metadata"]["resourceVersion"]) > int(last)
        with client.watch(CONFIG_MAPS, resourceVersion=str(int(last) - 1)) as watch:
            assert watch.next()[1]["code"] == 410
        client.close()


def test_a_watch_from_a_version_that_a_restored_file_lacks_is_refused(tmp_path: Path) -> None:
    for directory in ("first", "older"):
        (tmp_path / directory).mkdir()
    with ApiServer(options(tmp_path / "first")) as api, Client(api.port) as client:
        client.post(CONFIG_MAPS, config_map("a"))
    shutil.copytree(tmp_path / "first", tmp_path / "older", dirs_exist_ok=True)
    with ApiServer(options(tmp_path / "first")) as api, Client(api.port) as client:
        lost = client.post(CONFIG_MAPS, config_map("lost")).body["metadata"]["resourceVersion"]
    with ApiServer(options(tmp_path / "older")) as api, Client(api.port) as client:
        for name in ("b", "c"):
            client.post(CONFIG_MAPS, config_map(name))
        with client.watch(CONFIG_MAPS, resourceVersion=lost) as watch:
            assert watch.next()[1]["code"] == 410


def test_a_term_ends_open_watches_and_the_process_within_a_second(tmp_path: Path, port: int) -> None:
    with process(tmp_path, port) as server:
        client = Client(port)
        with client.watch(CONFIG_MAPS, resourceVersion=client.version()) as watch:
            server.send_signal(signal.SIGTERM)
            assert server.wait(patience(1.0)) == 0
            assert watch.ended()
        client.close()


def test_installing_the_same_crds_again_changes_nothing(tmp_path: Path) -> None:
    versions = []
    for _ in range(2):
        with ApiServer(options(tmp_path)) as server:
            versions.append(server.kernel.store.version)
    assert versions[0] == versions[1]


def test_one_data_file_has_one_server(tmp_path: Path) -> None:
    with ApiServer(options(tmp_path, crd_paths=())) as server:
        with pytest.raises(UnusableData, match="another server"):
            ApiServer(options(tmp_path, crd_paths=()))
        with Client(server.port) as client:
            assert client.get("/healthz").code == 200


def test_a_full_disk_is_named_and_nothing_is_changed(
    api: ApiServer, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    client.post(CONFIG_MAPS, config_map("c", a="b"))
    version = client.version()
    pages = api.kernel.store._db.execute("PRAGMA page_count").fetchone()[0]
    api.kernel.store._db.execute(f"PRAGMA max_page_count = {pages}")  # as on a disk without room for another page
    for refused in (
        client.post(CONFIG_MAPS, config_map("d", a="x" * 100_000)),
        client.merge(f"{CONFIG_MAPS}/c", {"data": {"a": "x" * 100_000}}),
    ):
        assert (refused.code, refused.body["reason"]) == (507, "InsufficientStorage")
        assert "api.db" in refused.body["message"] and "disk" in refused.body["message"]
    assert caplog.records == [] and client.version() == version
    api.kernel.store._db.execute("PRAGMA max_page_count = 1000000")
    assert client.post(CONFIG_MAPS, config_map("d", a="x" * 100_000)).code == 201
    assert client.get(f"{CONFIG_MAPS}/c").body["data"] == {"a": "b"}


def test_what_cannot_be_collected_keeps_nothing_else_and_is_told_once(
    api: ApiServer, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, collector = api.kernel.store, api.kernel.collector
    monkeypatch.setattr(collector, "_stopping", True)  # the test sweeps by itself
    owner = client.post(CONFIG_MAPS, config_map("owner", a="b")).body
    gone = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    for name in ("a", "b", "c"):
        owned = config_map(name, a="b")
        owned["metadata"]["ownerReferences"] = [gone]
        assert client.post(CONFIG_MAPS, owned).code == 201
    client.delete(f"{CONFIG_MAPS}/owner")
    remove = store.remove

    def refused(kind: str, name: tuple[str, str]) -> object:
        if name[1] == "a":
            raise ApiError(507, "InsufficientStorage", "api.db cannot be written")
        return remove(kind, name)

    monkeypatch.setattr(store, "remove", refused)
    collector.sweep(time.time())
    collector._work.clear()
    collector.sweep(time.time())
    assert not collector._work.is_set(), "another sweep at once would meet the same"
    assert [client.get(f"{CONFIG_MAPS}/{name}").code for name in ("a", "b", "c")] == [200, 404, 404]
    (told,) = caplog.records
    assert "api.db" in told.error
    monkeypatch.setattr(store, "remove", remove)
    collector.sweep(time.time())
    assert client.get(f"{CONFIG_MAPS}/a").code == 404


def test_on_a_mac_too_the_log_is_on_the_disk_before_it_is_moved_into_the_file(tmp_path: Path) -> None:
    """SQLite's own default leaves the order of both to the disk's cache there."""
    with ApiServer(options(tmp_path)) as api:
        assert api.kernel.store._db.execute("PRAGMA checkpoint_fullfsync").fetchone() == (1,)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        ("UPDATE objects SET body = '{' WHERE name = 'default'", "namespaces /default"),
        ("UPDATE objects SET body = '[]' WHERE name = 'default'", "namespaces /default"),
        ("UPDATE counters SET value = 'x'", "counters"),
        (b"\0" * 4096, "malformed"),
        (b"garbage" * 4096, "not a database"),
    ],
)
def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path, spoil: str | bytes, named: str) -> None:
    file = tmp_path / "api.db"
    with ApiServer(options(tmp_path)):
        pass
    if isinstance(spoil, str):
        with contextlib.closing(sqlite3.connect(file)) as db, db:
            db.execute(spoil)
    else:
        pages = file.read_bytes()
        start = 0 if b"garbage" in spoil else 4096
        file.write_bytes(pages[:start] + spoil + pages[start + len(spoil) :])
    for _ in range(2):  # the first attempt leaves no lock behind
        with pytest.raises(UnusableData, match=named) as refused:
            ApiServer(options(tmp_path))
        assert str(file) in str(refused.value) and "docs/operations.md" in str(refused.value)
    for each in tmp_path.glob("api.db*"):
        each.unlink()
    with ApiServer(options(tmp_path)):
        pass


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    """As one that is root's since a run with sudo; a directory, as root itself may open any file."""
    (tmp_path / "api.db").mkdir()
    with pytest.raises(UnusableData, match=r"api\.db cannot be opened .*make it a file that is yours"):
        ApiServer(options(tmp_path))


def test_the_program_says_in_one_sentence_that_its_file_is_damaged(tmp_path: Path, port: int) -> None:
    (tmp_path / "runs").mkdir()
    save_overrides(tmp_path, Overrides("", {"state_dir": str(tmp_path)}))
    (tmp_path / "apiserver.json").write_text(json.dumps({"port": port, "prefix": PREFIX}))
    (tmp_path / "apiserver.db").write_bytes(b"garbage" * 1000)
    command = [sys.executable, "-m", "metal_supervisor", "apiserver", "--state-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "apiserver.db is damaged" in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


EMPTIED = {
    "removed": lambda file: [each.unlink() for each in file.parent.glob("apiserver.db*")],
    "truncated": lambda file: file.write_bytes(b""),
    "without rows": lambda file: change(file, "DELETE FROM objects"),
}


def change(file: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(file)) as db, db:
        db.execute(statement)


@pytest.mark.parametrize("how", EMPTIED)
def test_an_emptied_file_is_not_served_while_services_have_records(tmp_path: Path, port: int, how: str) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "records").mkdir()
    save_overrides(tmp_path, Overrides("", {"state_dir": str(tmp_path)}))
    (tmp_path / "apiserver.json").write_text(json.dumps({"port": port, "prefix": PREFIX}))
    with ApiServer(Options(tmp_path / "apiserver.db", PREFIX)):
        pass
    EMPTIED[how](tmp_path / "apiserver.db")
    record = tmp_path / "records" / "default.tiny.json"
    record.write_text("{}")
    report = tmp_path / "controller.json"
    report.write_text(json.dumps({"cluster": {"server": f"http://127.0.0.1:{port}"}}))
    command = [sys.executable, "-m", "metal_supervisor", "apiserver", "--state-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "default.tiny" in done.stderr and f"{tmp_path / 'records'} has services" in done.stderr
    assert "delete that directory" in done.stderr

    def serves() -> bool:
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
            try:
                return eventually(lambda: listens(port) or server.poll() is not None) and listens(port)
            finally:
                server.terminate()

    report.write_text(json.dumps({"cluster": {"server": "https://cluster.example:6443"}}))
    assert serves(), "the records of a cluster's services mean nothing here"
    EMPTIED["removed"](tmp_path / "apiserver.db")
    report.write_text(json.dumps({"cluster": {"server": f"http://127.0.0.1:{port}"}}))
    record.unlink()
    assert serves()


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def test_a_port_in_use_is_an_error_that_leaves_nothing_open(api: ApiServer, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="in use"):
        ApiServer(options(tmp_path / "other", port=api.port))


def test_a_prefix_is_needed(tmp_path: Path) -> None:
    for prefix in ("", "/", "k", "/k/", "/k?", "/k k"):
        with pytest.raises(ValueError, match="prefix"):
            Options(data_file=tmp_path / "api.db", prefix=prefix)


def test_the_data_file_is_private(tmp_path: Path) -> None:
    with ApiServer(options(tmp_path, crd_paths=())):
        assert {path.stat().st_mode & 0o077 for path in tmp_path.glob("api.db*")} == {0}
