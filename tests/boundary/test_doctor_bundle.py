"""A bundle is for strangers: secrets are put into every file that goes in, in every dress, and none comes out."""

from __future__ import annotations

import getpass
import gzip
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from accounts_support import token
from doctor_support import surroundings

from metal_supervisor.doctor import bundle
from metal_supervisor.doctor.findings import Finding
from metal_supervisor.doctor.redact import HIDDEN, redact_json, redactor
from metal_supervisor.doctor.surroundings import Surroundings
from metal_supervisor.settings.logging import json_line

JWT = token(0, 2e9)
ENV = "plain-looking value"
WAY = "/k-zzzzPREFIXzzzz_secretWAY"
SECRETS = {
    "hub": "hf_QwErTyUiOpAsDfGhJkLz",
    "openai": "sk-proj-abcDEFghiJKL",
    "jwt": JWT,
    "bearer": "s3cr3t-bearer",
    "basic": "dTpwdzEyMw==",
    "userinfo": "joe:hunter2",
    "query": "X-Amz-Signature=deadbeefcafe",
    "env": ENV,
    "flag": "flag-s3cret",
    "way": WAY,
    "pem": "MHcCAQEEIBWQ/+" * 4,
}
DRESSED = (
    f"token {SECRETS['hub']} key={SECRETS['openai']} {JWT}",
    f"Authorization: Bearer {SECRETS['bearer']}",
    f'{{"authorization": "Basic {SECRETS["basic"]}"}}',
    f"GET https://{SECRETS['userinfo']}@models.test/m.gguf?{SECRETS['query']}#x",
    f"engine says: {ENV}!",
    f"argv: --api-key {SECRETS['flag']} --hf-token={SECRETS['flag']}",
    f"http://127.0.0.1:4711{WAY}/api",
    f"-----BEGIN EC PRIVATE KEY-----\n{SECRETS['pem']}\n-----END EC PRIVATE KEY-----",
    "x" * 20 + " home",
)


def lines(home: str, user: str) -> str:
    return "\n".join([*DRESSED, f"file {home}/models/m.gguf", f"user {user} said so"]) + "\n"


def in_json(home: str, user: str) -> dict[str, Any]:
    text = lines(home, user)
    return {"note": text, "list": text.splitlines(), "deep": {"apiKey": "opaque", "x_token": "opaque", "n": 3}}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Surroundings:
    """A state directory with secrets in each of its files."""
    home = tmp_path / "Users" / "josephine"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(getpass, "getuser", lambda: "josephine")
    monkeypatch.setenv("MY_API_KEY", "from-the-environment")
    around = surroundings(tmp_path, settings={"hf_endpoint": "", "context": "c", "node_labels": "by=josephine"})
    around.directory.create()
    state, text = around.settings.state_path, lines(str(home), "josephine") + "from-the-environment\n"
    said = json.dumps(in_json(str(home), "josephine"))
    (state / "specs" / "default.tiny.0123456789ab.json").write_text(json.dumps({
        "argv": ["llama-server", "--api-key", SECRETS["flag"]], "env": {"GREETING": ENV, "SHORT": "1"},
    }))  # fmt: skip
    (state / "apiserver.json").write_text(json.dumps({"port": 1, "prefix": WAY}))
    around.settings.kubeconfig_path.write_text(json.dumps({
        "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://api.test"}}],
        "users": [{"name": "u", "user": {"token": "opaque-kube-token"}}],
    }))  # fmt: skip
    (state / "log" / "crashed").mkdir(exist_ok=True)
    for name in ("log/controller.log", "log/default.tiny.log", "log/crashed/default.tiny.log", "supervisord.conf",
                 "models.d/default.tiny.conf", "quarantine/x.conf.why"):  # fmt: skip
        (state / name).write_text(text + "opaque-kube-token\nkept line\n")
    for name in ("controller.json", "records/default.tiny.json", "observed/default.tiny.json", "runs/default.tiny.json",
                 "attached/default.tiny.json"):  # fmt: skip
        (state / name).write_text(said)
    (state / "records" / "broken.json").write_text("{" + text)
    (state / "records" / "link.json").symlink_to(around.settings.kubeconfig_path)
    return around


def opened(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        found = {each.name: archive.extractfile(each) for each in archive.getmembers()}
        assert {each.mode for each in archive.getmembers()} == {0o600}
        assert {(each.uid, each.uname) for each in archive.getmembers()} == {(0, "")}
        return {name: file.read().decode() for name, file in found.items() if file is not None}


def test_no_secret_that_is_in_a_file_is_in_the_bundle(tmp_path: Path, planted: Surroundings) -> None:
    home = str(Path.home())
    findings = [Finding("api", "fail", lines(home, "josephine"), f"see {home}")]
    target = tmp_path / "b.tar.gz"
    count = bundle.write(target, planted, findings)
    assert target.stat().st_mode & 0o777 == 0o600
    files = opened(target)
    assert len(files) == count
    names = {name.partition("/")[2] for name in files}
    assert names == {
        "doctor.json", "versions.json", "settings.json", "controller.json", "records/default.tiny.json",
        "records/broken.json", "observed/default.tiny.json", "runs/default.tiny.json", "attached/default.tiny.json",
        "supervisord.conf", "models.d/default.tiny.conf", "quarantine/x.conf.why", "log/controller.log",
        "log/default.tiny.log", "log/crashed/default.tiny.log",
    }  # fmt: skip
    bad = [*SECRETS.values(), "opaque", "from-the-environment", home, "josephine", "hunter2", "deadbeef"]
    for name, text in files.items():
        for secret in bad:
            assert secret not in text, f"{secret} in {name}: {text}"
    texts = [text for name, text in files.items() if name.endswith((".log", ".conf", ".why"))]
    assert len(texts) == 6 and all("kept line" in text for text in texts)
    assert all(json.loads(text) for name, text in files.items() if name.endswith(".json") and "broken" not in name)
    assert '"n": 3' in files[f"{bundle.ROOT}/controller.json"]
    assert b"josephine" not in gzip.decompress(target.read_bytes()), "nor in the archive's own headers"


@pytest.mark.parametrize("argv", [["--api-key=the-last-word"], ["--api-key", "the-last-word"]])
def test_a_secret_that_is_an_engines_last_argument_is_not_in_the_bundle(
    tmp_path: Path, planted: Surroundings, argv: list[str]
) -> None:
    state = planted.settings.state_path
    (state / "specs" / "default.tiny.0123456789ab.json").write_text(json.dumps({"argv": ["llama-server", *argv]}))
    (state / "log" / "default.tiny.log").write_text("the-last-word is no good key\nkept line\n")
    bundle.write(tmp_path / "b.tar.gz", planted, [])
    text = opened(tmp_path / "b.tar.gz")[f"{bundle.ROOT}/log/default.tiny.log"]
    assert "the-last-word" not in text and "kept line" in text


def test_half_a_token_at_the_cut_of_a_log_does_not_slip_through(tmp_path: Path, planted: Surroundings) -> None:
    log = planted.settings.state_path / "log" / "controller.log"
    tail = b"end of the log\n"
    secret = b"Authorization: Bearer half-of-it-is-cut-off"
    filler = b"x y\n" * ((bundle.LOG_BYTES - len(tail) - 10) // 4)
    log.write_bytes(b"before\n" + secret + b"\n" + filler + tail)
    assert log.stat().st_size > bundle.LOG_BYTES
    cut = log.read_bytes()[-bundle.LOG_BYTES :].splitlines()[0]
    assert cut not in (b"before", secret), "the cut is in the middle of the secret"
    bundle.write(tmp_path / "b.tar.gz", planted, [])
    text = opened(tmp_path / "b.tar.gz")[f"{bundle.ROOT}/log/controller.log"]
    assert "cut-off" not in text and text.endswith("end of the log\n") and len(text.splitlines()) == bundle.LOG_LINES


def test_lines_of_json_are_redacted_by_their_values_and_stay_json(
    tmp_path: Path, planted: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Escaped, neither a name nor a header looks like what it is."""
    home = tmp_path / "Users" / "josé"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(getpass, "getuser", lambda: "josé")
    monkeypatch.setenv("MY_API_KEY", 'süß"\\pass')
    said = {"why": f'süß"\\pass at {home}: {{"x-api-key": "abc"}}', "by": "josé", "port": 3, "token": "plain-secret"}
    line = json_line({"ts": "t", "level": "info", "logger": "controller", "msg": "pass", **said})
    log = planted.settings.state_path / "log" / "controller.log"
    log.write_text(f"{line}\n-----BEGIN X KEY-----\ndeadbeef\n-----END X KEY-----\n{line}\n")
    bundle.write(tmp_path / "b.tar.gz", planted, [])
    first, hidden, last = opened(tmp_path / "b.tar.gz")[f"{bundle.ROOT}/log/controller.log"].splitlines()
    assert hidden == HIDDEN and first == last
    found = json.loads(first)
    assert list(found) == ["ts", "level", "logger", "msg", *said]
    assert found["why"].startswith(f'{HIDDEN} at ~: {{"x-api-key": ') and "abc" not in found["why"]
    assert (found["by"], found["port"], found["token"]) == ("[user]", 3, HIDDEN)


@pytest.mark.parametrize("odd", ["NaN", "1e999", "-Infinity", "[" * 700 + "]" * 700], ids=lambda odd: odd[:9])
def test_a_line_of_an_engine_that_cannot_be_json_again_is_redacted_as_text(
    tmp_path: Path, planted: Surroundings, odd: str
) -> None:
    """It looks like one of ours, and would cost the whole bundle."""
    said = f'{{"ts": "a", "level": "b", "logger": "c", "msg": "{ENV}", "x": {odd}, '
    said += r'"password": "opaque \\ \"words", "n": 7}'
    log = planted.settings.state_path / "log" / "default.tiny.log"
    log.write_text(f"{said}\nkept line\n")
    bundle.write(tmp_path / "b.tar.gz", planted, [])
    first, last = opened(tmp_path / "b.tar.gz")[f"{bundle.ROOT}/log/default.tiny.log"].splitlines()
    assert first.startswith(f'{{"ts": "a", "level": "b", "logger": "c", "msg": "{HIDDEN}", "x": {odd}, ')
    assert "opaque" not in first and "words" not in first and first.endswith('", "n": 7}') and last == "kept line"


def test_a_log_that_begins_within_a_key_tells_nothing_of_it(planted: Surroundings) -> None:
    redact = redactor([], "", "")
    assert redact("short+/tail==\n-----END RSA PRIVATE KEY-----\nnext\n") == f"{HIDDEN}\nnext\n"


def test_a_system_that_never_ran_has_a_bundle_too(tmp_path: Path) -> None:
    around = surroundings(tmp_path)
    assert bundle.write(tmp_path / "b.tar.gz", around, []) == 3
    assert sorted(opened(tmp_path / "b.tar.gz")) == [
        f"{bundle.ROOT}/{name}" for name in ("doctor.json", "settings.json", "versions.json")
    ]


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    around = surroundings(tmp_path)
    with pytest.raises(bundle.NotWritten, match="is a directory"):
        bundle.write(tmp_path, around, [])
    with pytest.raises(bundle.NotWritten, match="No such file"):
        bundle.write(tmp_path / "none" / "b", around, [])


def test_a_bundle_over_an_older_one_and_a_link_replaces_only_itself(tmp_path: Path) -> None:
    around, other = surroundings(tmp_path), tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "b.tar.gz").symlink_to(other)
    bundle.write(tmp_path / "b.tar.gz", around, [])
    assert other.read_text() == "mine" and not (tmp_path / "b.tar.gz").is_symlink()


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("model qwen3-30b in namespace llm serves", "model qwen3-30b in namespace llm serves"),
        ("https://api.test:6443/apis?limit=1", f"https://api.test:6443/apis?{HIDDEN}"),
        ("http://u:p@ss@h.test/x, a@b.test", "http://h.test/x, a@b.test"),
        ("default.tiny.0123456789ab.json", "default.tiny.0123456789ab.json"),
        ("10.7 GiB (67 % of 16.0 GiB)", "10.7 GiB (67 % of 16.0 GiB)"),
        ("/home/u/x and /home/u2/x", "~/x and ~2/x"),
        ("uptime of u: 5", "uptime of u: 5"),
    ],
)
def test_what_is_no_secret_stays(text: str, kept: str) -> None:
    assert redactor(["true", "1"], "/home/u", "u")(text) == kept


@pytest.mark.parametrize(
    "text", ['say: pä"ss w/rd+!', 'say: p\\u00e4\\"ss w/rd+!', 'say: pä\\"ss w/rd+!', "say: p%C3%A4%22ss%20w/rd%2B%21",
             "say: p%C3%A4%22ss%20w%2Frd%2B%21", "say: p%C3%A4%22ss+w%2Frd%2B%21"],
)  # fmt: skip
def test_a_secret_is_known_in_whatever_dress_it_comes(text: str) -> None:
    assert redactor(['pä"ss w/rd+!'], "", "")(text) == f"say: {HIDDEN}"


def test_a_number_may_be_a_secret_too() -> None:
    redact = redactor(["48151623", "2342"], "", "")
    told = {"api_key": 7, "tokens": 7, "pin": 48151623, "half": 48151623.0, "list": [23421, 3], "passwords": [1]}
    assert redact_json(told, redact) == {
        "api_key": HIDDEN, "tokens": 7, "pin": HIDDEN, "half": HIDDEN, "list": [HIDDEN, 3], "passwords": [1],
    }  # fmt: skip
    assert redact_json({"token": [12, None, True], "password": None}, redact) == {
        "token": [HIDDEN, None, True], "password": None,
    }  # fmt: skip


def test_json_stays_json_and_telling_names_hide_all_they_have() -> None:
    redact = redactor(["s3cr3t"], os.sep, "")
    found = redact_json({"password": "x", "env": [{"a": "s3cr3t"}], "n": 1, "ok": True, "token": ""}, redact)
    assert found == {"password": HIDDEN, "env": [{"a": HIDDEN}], "n": 1, "ok": True, "token": ""}
