"""The sentences of `metal-supervisor explain`: what they are made of, and that nothing breaks them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_supervisor.cli.explain import lines
from metal_supervisor.cli.explanation import Case, explain, numbers
from metal_supervisor.cluster.report import report
from metal_supervisor.controller.plan import Action, Step
from metal_supervisor.controller.reasons import LONGEST_TEXT, MOST, Reasons
from metal_supervisor.controller.snapshot import Snapshot
from metal_supervisor.spec.processes import Observed, RunNote
from metal_supervisor.spec.record import Record, Verdict
from metal_supervisor.spec.types import Endpoint, Key, Standing
from tests.support.records import a_record

MIB = 1 << 20
GIB = 1 << 30
NOW = 1_800_000_000.0
SPEC = "0123456789ab"
RECORD = a_record(
    generation=3,
    priority="high",
    verdict=Verdict(Standing.RUN, "Admitted", "", NOW - 60),
    endpoint=Endpoint("tiny", 8080, "/v1", "ClusterIP", None),
    port=18100,
    host="127.0.0.1",
    edition=SPEC,
    reserved_bytes=3 * GIB,
    memory="3.0 GiB = weights 2.0 GiB + KV cache 1.0 GiB",
)
ENDED = "exit status 1"
UP = Observed(
    "default.tiny", 41, True, NOW - 50, "RUNNING", memory_bytes=2 * GIB, restarts=2, last_exit=ENDED, confined=False
)
NOTE = RunNote(41, 41, "x", {"edition": SPEC}, (NOW - 55,), 0.0, "", "")
FILE = {"phase": "Ready", "path": "/m/phi.gguf", "size_bytes": 2 * GIB, "message": "", "got_bytes": 0, "total_bytes": 0}
TOLD: dict[str, Any] = {
    "at": NOW - 5,
    "memory": {"budget": 8 * GIB, "charged": 7 * GIB, "left": GIB, "because": "8.0 GiB (75 % of 10.7 GiB)"},
    "models": {"default/phi": {"uid": "m", "generation": 1, "source": "https://secret@host/x", "file": FILE}},
    "reasons": {"default.tiny": {"runtime": "spec.runtime names it", "step": "wait: held after crashes"}},
}
EVIL = "x\nevil/other  Ready\r\x1b[2J\u202egpj\u2028\x9b31m\0\t`id`"
CASE = Case(RECORD, UP, NOTE, "/bin/llama-server", TOLD, NOW)


def texts(case: Case, topic: str) -> list[str]:
    return [text for each, text in explain(case)[1] if each == topic]


def waiting(**more: Any) -> Case:
    message = "needs 3.0 GiB, 1.0 GiB of 8.0 GiB left (queue position 2)"
    verdict = Verdict(Standing.WAIT, "InsufficientMemory", message, NOW - 9)
    record = replace(RECORD, verdict=verdict, edition=None, queue_position=2, queued_at=NOW - 9, **more)
    return Case(record, None, None, "", TOLD, NOW, ("default/first",))


CRASHING = replace(
    CASE,
    record=replace(RECORD, retry_at=NOW + 35),
    observed=Observed("default.tiny", 0, False, 1.0, "FATAL", message="exit status 1; boom", restarts=4),
    note=replace(NOTE, pid=0, starts=(NOW - 9, NOW - 6, NOW - 3)),
)
REFUSED = replace(
    CASE, record=replace(RECORD, verdict=Verdict(Standing.FAILED, "InvalidSpec", "spec.x is bad", NOW), edition=None)
)
STOPPED = replace(CASE, record=replace(RECORD, verdict=Verdict(Standing.STOPPED, "ManuallyScaledToZero", "", NOW)))


@pytest.mark.parametrize("case", [CASE, waiting(), CRASHING, REFUSED, STOPPED])
def test_the_first_sentence_is_the_message_of_the_condition(case: Case) -> None:
    told, sentences = explain(case)
    assert told == report(case.record, case.observed)
    (condition,) = (each for each in told.conditions if each.type == "MetalReady")
    assert sentences[0][1] == condition.message != ""


def test_one_that_serves_tells_of_every_stage() -> None:
    assert {topic for topic, _ in explain(CASE)[1]} == {
        "now",
        "wanted",
        "model",
        "runtime",
        "memory",
        "port",
        "process",
        "confined",
        "probe",
        "published",
        "restarts",
        "next",
    }
    assert texts(CASE, "wanted")[1] == (
        "generation 3, mode chat, priority high, replicas 1 (slot 0 here, 0 others ready)"
    )
    assert texts(CASE, "model") == ["Model phi, Ready, /m/phi.gguf, 2.0 GiB"]
    assert texts(CASE, "runtime")[0] == "llama-server: spec.runtime names it"
    assert texts(CASE, "memory") == [
        "estimate: 3.0 GiB = weights 2.0 GiB + KV cache 1.0 GiB",
        "measured: 2.0 GiB, charged: 3.0 GiB",
        "budget of this Mac: 8.0 GiB (75 % of 10.7 GiB); 7.0 GiB charged, 1.0 GiB left",
    ]
    assert texts(CASE, "process") == [
        "pid 41, started at 2027-01-15T07:59:05Z; supervisord reports RUNNING",
    ]
    assert texts(CASE, "confined") == ["no; it was started without; its next start is confined"]
    assert texts(CASE, "restarts") == ["2 unplanned; last: exit status 1"]
    assert texts(CASE, "next") == ["latest step of the controller: wait: held after crashes"]


def test_one_that_waits_for_memory_says_what_was_compared_with_what_and_who_is_ahead() -> None:
    assert texts(waiting(), "now")[0].startswith("needs 3.0 GiB, 1.0 GiB of 8.0 GiB left")
    told = texts(waiting(), "memory")
    assert "position in the queue: 2, since 2027-01-15T07:59:51Z, behind default/first" in told
    over = texts(waiting(limit_bytes=GIB), "memory")
    assert any("needs 3.0 GiB, its Model allows 1.0 GiB" in each for each in over)


def test_one_that_holds_more_than_was_estimated_is_charged_that() -> None:
    case = replace(CASE, observed=replace(UP, memory_bytes=5 * GIB))
    assert "measured: 5.0 GiB, charged: 5.0 GiB" in texts(case, "memory")


def test_a_crash_loop_says_how_often_how_it_ended_and_when_it_is_tried_again() -> None:
    assert explain(CRASHING)[0].reason == "CrashLoopBackOff"
    assert texts(CRASHING, "restarts") == [
        "4 unplanned",
        "starts that count towards a crash loop: 3, the latest at 2027-01-15T07:59:57Z",
        "next attempt: 2027-01-15T08:00:35Z",
    ]
    assert numbers(CRASHING)["nextAttempt"] == NOW + 35
    due = replace(CRASHING, record=replace(RECORD, retry_at=NOW - 1))
    assert texts(due, "restarts")[-1] == "next attempt: 2027-01-15T07:59:59Z, due"


def test_a_download_says_how_far_it_is() -> None:
    file = {**FILE, "phase": "Downloading", "path": "", "size_bytes": 0, "got_bytes": GIB, "total_bytes": 4 * GIB}
    case = replace(waiting(), told={**TOLD, "models": {"default/phi": {"file": file}}})
    assert texts(case, "model") == ["Model phi, Downloading, 1.0 GiB of 4.0 GiB (25 %)"]


def test_an_engine_of_another_spec_or_behind_a_stand_in_or_a_taken_port_is_told() -> None:
    other = replace(CASE, note=replace(NOTE, spec={"edition": "other"}, launcher_pid=7))
    told = texts(other, "process")
    assert "launcher 7 stands in" in told[1] and told[2] == "runs as before the last edit, until it is restarted"
    refused = replace(NOTE, pid=0, refused="PortInUse", refused_message="port 18100 is taken by x")
    gone = replace(CASE, observed=replace(UP, pid=0, state="BACKOFF"), note=refused)
    assert texts(gone, "process")[-1].endswith("PortInUse: port 18100 is taken by x")


@pytest.mark.parametrize(("at", "words"), [(NOW - 300, "is 5 min old"), (None, "no report of the controller")])
def test_a_report_that_is_old_or_missing_is_said_to_be(at: float | None, words: str) -> None:
    assert words in texts(replace(CASE, told={**TOLD, "at": at}), "next")[-1]


def test_sources_are_not_told() -> None:
    assert "secret" not in str(lines(CASE))


WORDS = st.one_of(st.text(), st.just(EVIL), st.text(st.characters(categories=["Cc", "Cf", "Zl", "Zp", "Cs"])))
ANY: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=6,
)
REPORTS = st.fixed_dictionaries(
    {},
    optional={
        "at": ANY,
        "reasons": st.one_of(ANY, st.fixed_dictionaries({"default.tiny": ANY})),
        "memory": st.one_of(ANY, st.dictionaries(st.sampled_from(["budget", "charged", "left", "because"]), ANY)),
        "models": st.one_of(
            ANY,
            st.fixed_dictionaries(
                {
                    "default/phi": st.fixed_dictionaries(
                        {"file": st.one_of(ANY, st.dictionaries(st.sampled_from(sorted(FILE)), ANY))}
                    )
                }
            ),
        ),
    },
)


@given(WORDS, st.sampled_from(Standing), REPORTS, st.floats())
def test_whatever_is_written_no_line_moves_the_cursor(
    word: str, standing: Standing, told: dict[str, Any], number: float
) -> None:
    record = replace(
        RECORD,
        name=word,
        model=word if "models" not in told else "phi",
        runtime=word,
        mode=word,
        priority=word,
        memory=word,
        guessed=word,
        warning=(word, word),
        verdict=Verdict(standing, word, word, number),
        retry_at=number,
        queued_at=number,
        evicted_at=number,
        evicted_why=word,
        evictions=2,
        pressure=(word, word),
        queue_position=1,
        displaced_by=word,
        edit_queued_at=number,
    )
    observed = Observed("default.tiny", 41, False, number, word, word, last_exit=word, published=word, hung=word)
    note = replace(NOTE, starts=(number, number), not_before=number, refused=word, refused_message=word)
    found = lines(Case(record, observed, note, word, told, NOW, (word,)))
    assert found and all("".join(line).isprintable() for line in found)


# ── what the controller keeps of its reasons ─────────────────────────────────────────────────────


def written(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "tiny"}, "spec": spec}


def world(services: dict[Key, Any], models: dict[Key, Any]) -> Snapshot:
    return Snapshot(1.0, services, True, models, {}, {}, {})


def why(item: dict[str, Any], model: dict[str, Any], record: Record = RECORD, default: str = "llama-server") -> str:
    found = Reasons(default).told([record], world({("default", "tiny"): item}, {("default", "phi"): model}), ())
    return str(found.get("default.tiny", {}).get("runtime", ""))


def test_why_a_service_has_its_runtime() -> None:
    model = written(source="file:///m")
    assert why(written(), model).endswith("it serves spec.format gguf of its Model, and it is --runtime")
    assert "the first of --runtimes" in why(written(), model, default="omlx")
    annotated = {**written(), "metadata": {"annotations": {"metal-supervisor.io/runtime": "llama-server"}}}
    assert why(annotated, model) == "annotation metal-supervisor.io/runtime names it"
    assert why(written(), annotated) == 'annotation metal-supervisor.io/runtime of Model "phi" names it'
    library = written(source="https://ollama.com/library/smollm")
    assert why(written(), library) == "its Model is of Ollama's library, which no other serves"


@pytest.mark.parametrize("item", [written(runtime="omlx"), written(runtime=7)])
def test_what_is_written_otherwise_by_now_is_no_reason(item: dict[str, Any]) -> None:
    assert why(item, written(source="x")) == ""


def test_a_model_that_nobody_can_read_is_no_hindrance(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why(written(), {"spec": 7}).startswith("nothing names one; it serves spec.format gguf")

    def fails(*_: object) -> Any:
        raise RecursionError

    monkeypatch.setattr("metal_supervisor.spec.resources.named_runtime", fails)
    assert why(written(), written(source="file:///m")) == "", "each pass failed at its end, without a report"


def test_the_latest_steps_are_kept_and_all_of_it_is_bounded() -> None:
    steps = [Step(Action.WAIT, "default.tiny", "held after crashes"), Step(Action.STOP, "other", "x" * 999)]
    assert Reasons("").told([RECORD], world({}, {}), steps) == {"default.tiny": {"step": "wait: held after crashes"}}
    many = [replace(RECORD, program=f"p{number:04}") for number in range(MOST + 9)]
    told = Reasons("").told(many, world({}, {}), [Step(Action.STOP, each.program, "x" * 999) for each in many])
    assert len(told) == MOST and all(len(each["step"]) == LONGEST_TEXT for each in told.values())


def test_the_reason_of_a_runtime_follows_its_record_and_its_resources() -> None:
    kept, item, model = Reasons("llama-server"), written(), written(source="file:///m")

    def now(record: Record = RECORD) -> str:
        found = kept.told([record], world({("default", "tiny"): item}, {("default", "phi"): model}), ())
        return str(found.get("default.tiny", {}).get("runtime", ""))

    first = now()
    assert "it is --runtime" in first and now() == first
    model = written(source="https://ollama.com/library/smollm")
    assert "Ollama's library" in now()
    item, model = {**written(), "metadata": {"annotations": {"metal-supervisor.io/runtime": "llama-server"}}}, written()
    assert now() == "annotation metal-supervisor.io/runtime names it"
    assert now(replace(RECORD, runtime="omlx")) == ""
