"""Several kubeconfigs, as in $KUBECONFIG: merged as kubectl merges them, and missing files named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from doctor_support import found, shown, surroundings
from test_credentials import reply, script
from test_kube import answering, http
from test_kube_tls import AUTHORITY, SERVER, pem, server_context

from metal_supervisor.cluster.credentials import BadKubeconfig, choose
from metal_supervisor.cluster.kube import Kube
from metal_supervisor.cluster.kubeconfig_copy import copy
from metal_supervisor.settings import loader


def write(path: Path, current: str = "", **entries: dict[str, Any]) -> Path:
    """A kubeconfig; `cluster`, `user` and `context` map names to entries."""
    path.parent.mkdir(exist_ok=True)
    lists = {f"{kind}s": [{"name": name, kind: each} for name, each in of.items()] for kind, of in entries.items()}
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": current, **lists}))
    return path


def listed(*paths: Path) -> Path:
    return Path(os.pathsep.join(map(str, paths)))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Three kubeconfigs, one of them missing. The first has no current context, and no cluster."""
    first = write(
        tmp_path / "a" / "config",
        user={"u": {"tokenFile": "token"}, "twice": {"token": "first"}},
        context={"other": {"cluster": "c", "user": "twice"}},
    )
    second = write(
        tmp_path / "b" / "config",
        "main",
        cluster={"c": {"server": "https://h", "certificate-authority": "ca.pem"}},
        user={"twice": {"token": "second", "username": "second"}, "u": {"token": "second"}},
        context={"main": {"cluster": "c", "user": "u"}, "other": {"cluster": "none", "user": "none"}},
    )
    third = write(tmp_path / "c" / "config", "third", cluster={"c": {"server": "https://third"}})
    (tmp_path / "a" / "token").write_text("of-a")
    (tmp_path / "b" / "ca.pem").write_text(pem(AUTHORITY))
    return listed(first, tmp_path / "missing", second, third)


def test_they_are_merged_as_kubectl_does(files: Path) -> None:
    kubectl = shutil.which("kubectl")
    assert kubectl, "kubectl of the development environment"
    for context in ("", "other"):
        command = [kubectl, "config", "view", "--raw", "--minify", "-o", "json"]
        environment = {**os.environ, "KUBECONFIG": str(files)}
        done = subprocess.run([*command, f"--context={context}"], env=environment, capture_output=True, check=True)
        theirs, ours = json.loads(done.stdout), choose(files, context)  # kubectl prints paths as they are written
        assert ours.context == theirs["current-context"]
        both = (ours.cluster, theirs["clusters"][0]["cluster"]), (ours.user, theirs["users"][0]["user"])
        for entry, wanted in both:
            paths = {name: Path(entry[name]).name for name in ("certificate-authority", "tokenFile") if name in entry}
            assert {**entry, **paths} == wanted


def test_relative_paths_and_plugins_are_of_their_own_file_and_the_copy_has_all(tmp_path: Path, files: Path) -> None:
    copied = json.loads(copy(files).kubeconfig)
    assert copy(files).token == "of-a\n" and set(copied["clusters"][0]["cluster"]) == {
        "server",
        "certificate-authority-data",
    }
    plugin = tmp_path / "a"
    reply(plugin, token="from-plugin")
    first = write(plugin / "config", user={"u": {"exec": script(plugin)}})
    tls = server_context(tmp_path)
    with answering(lambda request: http(b"{}" if b"from-plugin" in request else b"[]"), tls) as url:
        cluster = {"c": {"server": url, "certificate-authority": "ca.pem"}}
        second = write(tmp_path / "b" / "config", "m", cluster=cluster, context={"m": {"cluster": "c", "user": "u"}})
        kube = Kube(listed(second, first))
        assert kube.request("GET", "/x") == {}
        kube.close()


def test_a_change_of_any_of_them_is_followed(tmp_path: Path) -> None:
    with answering(lambda _: http(b"{}")) as url:
        first = write(tmp_path / "a", "m", context={"m": {"cluster": "c", "user": "u"}}, user={"u": {"token": "t"}})
        second = write(tmp_path / "b", cluster={"c": {"server": "http://127.0.0.1:1"}})
        kube = Kube(listed(first, second))
        write(second, cluster={"c": {"server": url}})
        with pytest.raises(Exception, match="refused"):
            kube.request("GET", "/x")
        assert kube.request("GET", "/x") == {}
        kube.close()


def test_a_list_is_kept_with_absolute_paths(tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    wanted = str(listed(tmp_path / "a" / "config", tmp_path / "b" / "config"))
    found = loader.read_env({"METAL_SUPERVISOR_KUBECONFIG": "a/config:~/b/config"})
    assert loader.placed(found, tmp_path)["kubeconfig"] == wanted
    (tmp_path / "a:b").write_text("one file")
    assert loader.placed({"kubeconfig": "a:b"}, tmp_path)["kubeconfig"] == str(tmp_path / "a:b")


@pytest.mark.parametrize("name", ["certificate-authority", "client-certificate", "client-key", "tokenFile"])
def test_a_missing_file_is_named_by_the_client_the_doctor_and_install(tmp_path: Path, name: str) -> None:
    pair = {"client-certificate": "here", "client-key": "here"}
    user = {"token": "t"} if name == "certificate-authority" else {**pair, name: "gone.pem"}
    cluster = {"server": "https://127.0.0.1:1", **({name: "gone.pem"} if name == "certificate-authority" else {})}
    (tmp_path / "here").write_text(pem(SERVER))
    file = write(
        tmp_path / "k", "m", cluster={"c": cluster}, user={"u": user}, context={"m": {"cluster": "c", "user": "u"}}
    )
    wanted = f"kubeconfig {file} names {tmp_path}/gone.pem ({name}), which does not exist"
    for read in (Kube, copy):
        with pytest.raises(BadKubeconfig) as caught:
            read(file)
        assert wanted in str(caught.value)
    told = found(surroundings(tmp_path, settings={"kubeconfig": str(file)}), "kubeconfig", "credential", "api")
    assert wanted in shown(told["kubeconfig"]) and "credential" not in told
    assert shown(told["api"]) == "fail not asked: the kubeconfig cannot be used | see kubeconfig"


def test_data_beside_a_missing_file_is_enough(tmp_path: Path) -> None:
    cluster = {"server": "https://h", "certificate-authority": "gone", "certificate-authority-data": "eA=="}
    file = write(tmp_path / "k", "m", cluster={"c": cluster}, context={"m": {"cluster": "c"}})
    assert choose(file).cluster == cluster
