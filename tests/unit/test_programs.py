"""Records, specs and sections: what is written is read back, and nothing of a user's ever reaches the ini."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shlex
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from supervisor.options import ServerOptions

from metal_supervisor import launch
from metal_supervisor.spec.processes import Observed, RunNote
from metal_supervisor.spec.record import Record, Verdict
from metal_supervisor.spec.types import Endpoint, Engine, ModelFile, Probe, Standing
from metal_supervisor.spec.withdrawal import NO_WITHDRAWAL, WithdrawalToken, requested_at, withdrawal_token
from metal_supervisor.state import programs
from metal_supervisor.state.programs import (
    LONGEST_SCRATCH,
    UnreadableRecord,
    built,
    compose,
    is_unedited,
    program_name,
    read_observed,
    read_record,
    read_run,
    scratch_name,
    section,
    text_of,
)
from tests.support.records import a_record

PROPERTY = settings(max_examples=60, database=None, derandomize=True)
HOME = "/state"
NASTY = [
    "a\n[program:evil]\ncommand=touch /tmp/pwned",
    "[program:evil]",
    "x'\nenvironment=LD_PRELOAD=/tmp/evil.so",
    "be nice ;) please",
    " ;",
    "# comment",
    "\t#",
    "%(ENV_HOME)s",
    "%s",
    "%%",
    "%(here)s",
    "%",
    '"',
    "'",
    '"\'"',
    "\\",
    "\r\n",
    "\x0b\x0c\x85\u2028",
    "🦙",
    "a" * 5000,
    "",
    " ",
    "=",
    "-",
    "\x7f",
]
TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=30) | st.sampled_from(NASTY)
WORDS = st.text(max_size=20)
TIMES = st.floats(0, 2e9)
NUMBERS = st.integers(0, 2**31)


def names() -> st.SearchStrategy[str]:
    return st.from_regex(r"\A[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?\Z")


RECORDS = st.builds(
    lambda namespace, name, **rest: a_record(name, namespace, program=program_name((namespace, name)), **rest),
    namespace=names(),
    name=names() | st.sampled_from(["a.b", "x" * 253]),
    uid=WORDS,
    generation=NUMBERS,
    model=WORDS,
    runtime=WORDS,
    replicas=NUMBERS,
    mode=WORDS,
    priority=WORDS,
    verdict=st.builds(Verdict, st.sampled_from(Standing), WORDS, TEXT, TIMES),
    endpoint=st.none() | st.builds(Endpoint, names(), NUMBERS, TEXT, WORDS, st.none() | NUMBERS),
    port=st.none() | NUMBERS,
    edition=st.just(None),
    probe=st.builds(Probe, TEXT, TEXT, TEXT, asleep_path=TEXT),
    files=st.lists(TEXT, max_size=3).map(tuple),
    withdraw=WORDS,
    stopped_by_hand=st.booleans(),
    retry_at=st.none() | TIMES,
    warning=st.none() | st.tuples(WORDS, TEXT),
)
OBSERVED = st.builds(
    Observed,
    WORDS,
    NUMBERS,
    st.booleans(),
    TIMES,
    WORDS,
    TEXT,
    WORDS,
    NUMBERS,
    TIMES,
    TEXT,
    TEXT,
    exits=st.dictionaries(WORDS, NUMBERS, max_size=3),
)
RECORD = a_record(
    model="tiny",
    endpoint=Endpoint("tiny", 8080, "/v1", "ClusterIP", None),
    port=18100,
    host="0123456789ab",
    files=("/m.gguf",),
)
OBSERVATION = Observed("default.tiny", 7, True, 1.0, "RUNNING")
NOTE = {
    "format": 1,
    "pid": 7,
    "launcher_pid": 7,
    "started": "ticks 1",
    "spec": {"edition": "0123456789ab", "asked": "a"},
    "starts": [1.0, 2.5],
    "not_before": 0.0,
    "refused": "",
    "refused_message": "",
}
READERS: list[tuple[Callable[[str], Any], str]] = [
    (read_record, text_of(RECORD)),
    (read_observed, text_of(OBSERVATION)),
    (read_run, json.dumps(NOTE)),
]
EACH_READER = pytest.mark.parametrize(("read", "good"), READERS, ids=["record", "observed", "run"])


# ── round trips ──────────────────────────────────────────────────────────────────────────────────


@PROPERTY
@given(RECORDS)
def test_a_record_is_read_back_as_it_was_written(record: Record) -> None:
    text = text_of(record)
    assert read_record(text) == record
    assert text_of(read_record(text)) == text


@PROPERTY
@given(OBSERVED)
def test_an_observation_is_read_back_as_it_was_written(observed: Observed) -> None:
    assert read_observed(text_of(observed)) == observed


@PROPERTY
@given(
    st.builds(
        ModelFile,
        st.sampled_from(("Ready", "Downloading")),
        TEXT,
        NUMBERS,
        real=st.tuples(TEXT, TEXT),
        gguf=st.dictionaries(WORDS, TEXT | NUMBERS, max_size=4),
    )
)
def test_a_file_of_a_model_is_read_back_as_the_controller_reports_it(file: ModelFile) -> None:
    assert built(ModelFile, json.loads(json.dumps(vars(file))), "model") == file


@PROPERTY
@given(NUMBERS, NUMBERS, WORDS, WORDS, st.lists(TIMES, max_size=4), TIMES, WORDS, TEXT)
def test_a_launchers_note_is_read_back_as_it_was_written(
    pid: int, launcher: int, started: str, spec: str, starts: list[float], not_before: float, refused: str, why: str
) -> None:
    text = json.dumps(
        {
            "format": launch.FORMAT,
            "pid": pid,
            "launcher_pid": launcher,
            "started": started,
            "spec": {"edition": spec},
            "starts": starts,
            "not_before": not_before,
            "refused": refused,
            "refused_message": why,
        }
    )
    assert read_run(text) == RunNote(pid, launcher, started, {"edition": spec}, tuple(starts), not_before, refused, why)


def test_a_note_that_the_launcher_writes_is_one_that_the_controller_reads(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    launch.write_note(str(path), dict(NOTE))
    assert read_run(path.read_text()).starts == (1.0, 2.5)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]
    assert launch.FORMAT == programs.SPEC_FORMAT


def test_a_record_with_a_field_of_the_future_but_the_same_format_is_read() -> None:
    text = json.dumps({**json.loads(text_of(RECORD)), "colour": "blue"})
    assert read_record(text) == RECORD


# ── damage ───────────────────────────────────────────────────────────────────────────────────────


@EACH_READER
def test_a_newer_format_is_unreadable_and_says_so_but_for_the_note_of_what_runs(
    read: Callable[[str], Any], good: str
) -> None:
    if read is read_run:
        assert read(json.dumps({**json.loads(good), "format": 2, "more": []})) == read(good)
        return
    with pytest.raises(UnreadableRecord, match="format 2, newer than the 1"):
        read(json.dumps({**json.loads(good), "format": 2}))


@EACH_READER
@PROPERTY
@given(data=st.data())
def test_a_file_cut_short_or_garbled_is_unreadable_and_nothing_else(
    read: Callable[[str], Any], good: str, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(good) - 2))
    with pytest.raises(UnreadableRecord):
        read(good[:cut])
    with contextlib.suppress(UnreadableRecord):
        read(good[:cut] + data.draw(st.text(max_size=8)) + good[data.draw(st.integers(cut, len(good))) :])


@EACH_READER
@pytest.mark.parametrize(
    "text", ["", "null", "[]", "5", '"x"', "{}", "\0" * 64, '{"format": "1"}', '{"format": null}', "{" * 50]
)
def test_what_is_no_file_of_ours_is_unreadable(read: Callable[[str], Any], good: str, text: str) -> None:
    with pytest.raises(UnreadableRecord):
        read(text)


@EACH_READER
def test_a_file_of_brackets_is_unreadable_too(read: Callable[[str], Any], good: str) -> None:
    with pytest.raises(UnreadableRecord):
        read("[" * 200_000)


@EACH_READER
def test_a_missing_field_is_unreadable(read: Callable[[str], Any], good: str) -> None:
    optional = {item.name for item in dataclasses.fields(Record) if item.default is not dataclasses.MISSING}
    optional |= {item.name for item in dataclasses.fields(Observed) if item.default is not dataclasses.MISSING}
    body = json.loads(good)
    for field in body.keys() - ({"probe", "exits", "wakes", "acceleration"} | optional):
        with pytest.raises(UnreadableRecord):
            read(json.dumps({key: value for key, value in body.items() if key != field}))


@EACH_READER
@pytest.mark.parametrize(
    "value", [{"a": 1}, [[1]], float("inf"), 10**400], ids=["object", "list", "infinity", "beyond a float"]
)
def test_no_value_of_a_wrong_type_raises_anything_but_unreadable(
    read: Callable[[str], Any], good: str, value: Any
) -> None:
    body = json.loads(good)
    for field in body:
        with contextlib.suppress(UnreadableRecord):
            read(json.dumps({**body, field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", "18100"),
        ("edition", 5),
        ("replicas", None),
        ("generation", "1"),
        ("files", "/m.gguf"),
        ("retry_at", "soon"),
        ("warning", "ab"),
        ("withdraw", None),
        ("endpoint", {**dataclasses.asdict(Endpoint("tiny", 8080, "/", "ClusterIP", None)), "port": "x"}),
    ],
)
def test_a_record_whose_field_has_another_type_is_damaged_not_believed(field: str, value: Any) -> None:
    with pytest.raises(UnreadableRecord):
        read_record(json.dumps({**json.loads(text_of(RECORD)), field: value}))


@given(st.floats(0, 4e9, allow_nan=False))
def test_a_withdrawal_token_tells_its_time_and_is_the_text_that_older_releases_wrote(now: float) -> None:
    token = withdrawal_token(now)
    older = json.dumps({**json.loads(text_of(RECORD)), "withdraw": f"{now:.6f}"})
    assert read_record(older) == dataclasses.replace(RECORD, withdraw=token)
    assert requested_at(token) == pytest.approx(now, abs=1e-6)


def test_no_token_and_one_that_is_no_time_are_requests_of_long_ago() -> None:
    assert [requested_at(token) for token in (NO_WITHDRAWAL, WithdrawalToken("t"))] == [0.0, 0.0]


@pytest.mark.parametrize(("field", "value"), [("pid", "7"), ("ready", "no"), ("since", None), ("withdrawn", 5)])
def test_an_observation_whose_field_has_another_type_is_damaged_not_believed(field: str, value: Any) -> None:
    with pytest.raises(UnreadableRecord):
        read_observed(json.dumps({**json.loads(text_of(OBSERVATION)), field: value}))


@pytest.mark.parametrize("change", [{"namespace": "other"}, {"name": "x"}, {"program": "default.evil"}])
def test_a_record_whose_program_is_not_its_own_is_damaged(change: dict[str, str]) -> None:
    with pytest.raises(UnreadableRecord, match=r"does not belong|damaged"):
        read_record(json.dumps({**json.loads(text_of(RECORD)), **change}))


# ── names ────────────────────────────────────────────────────────────────────────────────────────


def test_the_first_dot_splits_namespace_and_name() -> None:
    assert program_name(("default", "phi-4.mini")) == "default.phi-4.mini"
    assert program_name(("default", "phi-4.mini")).partition(".")[::2] == ("default", "phi-4.mini")


@PROPERTY
@given(
    st.from_regex(r"\A[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z"),
    st.lists(st.from_regex(r"\A[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z"), min_size=1, max_size=4),
)
def test_every_kubernetes_name_gives_a_name_that_supervisord_and_file_systems_take(
    namespace: str, labels: list[str]
) -> None:
    name = ".".join(labels)[:253].rstrip(".-")
    program = program_name((namespace, name))
    assert len(program) <= programs.LONGEST_NAME
    assert program.partition(".")[0] == namespace
    assert programs.PROGRAM_NAME.fullmatch(program)
    assert len(f".{program}.0123456789ab.json.1234567890.tmp") <= 255


def test_a_name_is_kept_to_its_longest_and_shortened_with_its_own_digest_beyond() -> None:
    exact = "n" * (programs.LONGEST_NAME - 2)
    assert program_name(("a", exact)) == f"a.{exact}"
    first, second = (program_name(("a", "n" * 240 + last)) for last in "xy")
    assert first != second
    assert first.endswith(hashlib.sha256(("a." + "n" * 240 + "x").encode()).hexdigest()[:12])
    assert len(first) == programs.LONGEST_NAME


@pytest.mark.parametrize(
    "key",
    [
        ("", "a"),
        ("a", ""),
        ("A", "b"),
        ("a", "b c"),
        ("a", "b\n"),
        ("a", "b:c"),
        ("a", "../x"),
        ("a", "-b"),
        ("a", "b%"),
    ],
)
def test_what_is_no_kubernetes_name_is_refused(key: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="not a Kubernetes name"):
        program_name(key)


# ── sections ─────────────────────────────────────────────────────────────────────────────────────


SECTION_BODY = """\
[program:default.tiny]
command=/state/current/python -I -S /state/current/launch.py /state/specs/default.tiny.json
directory=/
autostart=true
autorestart=true
startsecs=2
startretries=3
stopsignal=TERM
stopwaitsecs=30
stopasgroup=false
killasgroup=false
umask=077
redirect_stderr=true
stdout_logfile=/state/log/default.tiny.log
stdout_logfile_maxbytes=20MB
stdout_logfile_backups=3
"""


def whole(body: str) -> str:
    """A section as it is on file: its first line has the digest of the rest."""
    digest = hashlib.sha256(body.encode()).hexdigest()[:12]
    return f"; metal-supervisor: written from an InferenceService; edit that, not this file [{digest}]\n{body}"


SECTION = whole(SECTION_BODY)


def test_a_section_has_a_fixed_form() -> None:
    assert section("default.tiny", HOME, True) == SECTION
    stopped = section("default.tiny", HOME, False)
    assert stopped == whole(SECTION_BODY.replace("autostart=true", "autostart=false"))
    logs = section("default.tiny", HOME, True, 5, 9)
    assert logs == whole(SECTION_BODY.replace("20MB", "5MB").replace("backups=3", "backups=9"))


def test_a_section_tells_whether_somebody_edited_it_even_one_of_another_release() -> None:
    assert is_unedited(SECTION)
    assert is_unedited(whole("[program:default.tiny]\ncommand=/new/form/of/it\n"))
    assert not is_unedited(SECTION.replace("20MB", "21MB"))
    assert not is_unedited(SECTION_BODY) and not is_unedited("")


def test_only_sections_of_this_program_are_taken_for_its_own() -> None:
    assert programs.is_section(SECTION) and programs.is_section(SECTION.replace("startretries=3", "startretries=4"))
    assert not programs.is_section(SECTION.partition("\n")[2]) and not programs.is_section("")


@pytest.mark.parametrize(
    ("program", "home"),
    [
        ("default.tiny", "/with space"),
        ("default.tiny", "/per%cent"),
        ("default.tiny", "relative"),
        ("default.tiny", "/x;y"),
        ("default.tiny", "/x\n[program:evil]"),
        ("default.tiny\n[program:evil]", HOME),
        ("default.%(ENV_HOME)s", HOME),
        ("../../tmp/evil", HOME),
        ("a.*", HOME),
    ],
)
def test_nothing_unsafe_is_ever_put_into_a_section(program: str, home: str) -> None:
    with pytest.raises(ValueError, match="safe"):
        section(program, home, True)


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ms-unit-") as name:
        path = Path(name).resolve()
        for each in ("log", "models.d", "specs"):
            (path / each).mkdir()
        (path / "supervisord.conf").write_text(
            f"[supervisord]\nnodaemon=true\n[include]\nfiles={path}/models.d/*.conf\n"
        )
        yield path


def parsed(home: Path) -> list[Any]:
    """The process groups that supervisord's own parser finds."""
    options = ServerOptions()
    options.configfile = str(home / "supervisord.conf")
    options.process_config(do_usage=False)
    return list(options.process_group_configs)


@PROPERTY
@given(
    name=names() | st.sampled_from(["phi-4.mini", "x" * 253, "program", "default"]),
    argv=st.lists(TEXT, min_size=1, max_size=4),
    env=st.dictionaries(TEXT.filter(lambda name: name and "=" not in name), TEXT, max_size=3),
    cwd=TEXT,
)
def test_supervisords_own_parser_finds_exactly_our_command_whatever_the_user_wrote(
    home: Path, name: str, argv: list[str], env: dict[str, str], cwd: str
) -> None:
    program = program_name(("default", name))
    made = compose(program, Engine(tuple(argv), tuple(env.items()), cwd, Probe()), 18100, "127.0.0.1", str(home))
    text = section(program, str(home), True)
    (home / "models.d" / "x.conf").write_text(text, "utf-8")

    (group,) = parsed(home)
    assert (group.name, len(group.process_configs)) == (program, 1)
    (process,) = group.process_configs
    assert shlex.split(process.command) == [
        f"{home}/current/python",
        "-I",
        "-S",
        f"{home}/current/launch.py",
        f"{home}/specs/{program}.json",
    ]
    assert process.name == program
    assert not process.environment
    assert (process.autostart, process.autorestart.__name__, process.stopsignal) == (True, "RestartUnconditionally", 15)
    assert (process.startsecs, process.startretries, process.stopwaitsecs) == (2, 3, 30)
    assert (process.stopasgroup, process.killasgroup, process.redirect_stderr, process.umask) == (
        False,
        False,
        True,
        0o77,
    )
    assert process.stdout_logfile == f"{home}/log/{program}.log"
    assert text.isascii()

    path = home / "specs" / f"{program}.json"
    path.write_text(made.spec, "utf-8")
    spec = launch.read_spec(str(path))
    own = f"{home}/scratch/{scratch_name(program, str(home))}"
    assert (spec["argv"], spec["cwd"]) == (argv, own) and len(own) <= max(LONGEST_SCRATCH, len(f"{home}/scratch/") + 12)
    assert spec["env"] == {**env, "HOME": own, "TMPDIR": own}
    assert (spec["port"], spec["host"], spec["program"]) == (18100, "127.0.0.1", program)
    assert launch.note_path(str(path)) == f"{home}/runs/{program}.json"
    assert spec["supervisor_log"] == f"{home}/log/supervisord.log"
    path.unlink()


def test_what_a_release_adds_around_an_engine_changes_no_edition(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(("/bin/x",), (), "/", Probe())
    before = compose("default.tiny", engine, 1, "::", HOME, "u/1/m/1")
    monkeypatch.setattr(programs, "SPEC_FORMAT", 2)
    after = compose("default.tiny", engine, 1, "::", HOME, "u/2/m/1")
    assert after.edition == before.edition and after.spec != before.spec


def test_the_same_engine_gives_the_same_edition_and_any_difference_another() -> None:
    base = Engine(("/bin/x", "1"), (("A", "1"), ("B", "2")), "/", Probe())

    def made(engine: Engine = base, port: int = 1, host: str = "::", program: str = "a.b") -> str:
        return compose(program, engine, port, host, HOME).edition

    assert made() == made()
    assert made(dataclasses.replace(base, env=base.env[::-1])) == made()
    others = {
        made(dataclasses.replace(base, argv=("/bin/x", "2"))),
        made(dataclasses.replace(base, env=(("A", "1"),))),
        made(port=2),
        made(host="0.0.0.0"),
        made(program="a.c"),
    }
    assert len(others | {made()}) == 6
    assert made(dataclasses.replace(base, cwd="/tmp")) == made(), "an engine's directory is its own"
    daemon = dataclasses.replace(base, daemon="omlx")
    assert made(daemon) != made(dataclasses.replace(daemon, cwd="/tmp"))
    assert made(dataclasses.replace(base, probe=Probe("/other"))) == made(), "a probe does not restart an engine"
