"""The choice of a context that a spec leaves open."""

from __future__ import annotations

from dataclasses import replace

import pytest

from metal_supervisor.controller.prerequisites.context_choice import (
    DEFAULT,
    OPEN,
    Composition,
    choose,
    known,
    to_try,
    with_context,
)
from metal_supervisor.models.metadata import Demand, Reading
from metal_supervisor.runtimes import llama_server
from metal_supervisor.spec.gguf import Header
from metal_supervisor.spec.record import Record
from metal_supervisor.spec.types import Endpoint, Engine, Model, Probe, Service
from tests.support.records import a_record

MODEL = Model("default", "phi", "m", 1, "/models/m.gguf", "gguf", None, None)
ENDPOINT = Endpoint("tiny", 8080, "/v1/chat/completions", "ClusterIP", None)
SERVICE = Service("default", "tiny", "u", 1, MODEL, "llama-server", 1, False, ENDPOINT, "chat", "normal", None, {})
EDITED = replace(SERVICE, generation=2, options={"parallelSlots": 2})
RECORD = replace(a_record(), admitted_at=1.0, asked=SERVICE.asked)


@pytest.mark.parametrize(
    ("record", "service", "expected"),
    [
        (None, SERVICE, OPEN),
        (replace(RECORD, admitted_at=0.0, slot_context=4096), SERVICE, OPEN),  # it waits for room
        (replace(RECORD, slot_context=4096), SERVICE, 4096),
        (replace(RECORD, slot_context=4096), EDITED, 4096),
        (RECORD, SERVICE, DEFAULT),  # of a release that chose none
        (RECORD, EDITED, OPEN),
    ],
)
def test_it_is_chosen_once(record: Record | None, service: Service, expected: int) -> None:
    assert known(service, record) == expected


@pytest.mark.parametrize(
    ("before", "offered", "expected"),
    [
        (OPEN, (8192, 4096), (8192, 4096)),
        (OPEN, (), (DEFAULT,)),
        (DEFAULT, (8192, 4096), (DEFAULT,)),
        (4096, (8192, 4096), (4096,)),
        (8192, (512,), (512,)),  # another model, trained for less
    ],
)
def test_contexts_to_try(before: int, offered: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert to_try(before, offered) == expected


def test_it_is_for_each_slot() -> None:
    service = replace(SERVICE, options={"parallelSlots": 3})
    assert with_context(service, 4096).options == {"parallelSlots": 3, "contextSize": 12_288}
    assert with_context(service, DEFAULT) is service


@pytest.mark.parametrize(
    ("free", "budget", "expected"),
    [
        (100, 100, 8192),
        (70, 100, 4096),
        (50, 100, 2048),
        (10, 100, 8192),  # it waits for the most that could fit
        (10, 60, 4096),
        (10, 20, 2048),
    ],
)
def test_the_most_that_fits(free: int, budget: int, expected: int) -> None:
    engine = Engine(argv=("x",), env={}, cwd="/", probe=Probe())
    sizes = {8192: 80, 4096: 60, 2048: 50}
    made = [Composition(tokens, engine, Demand(size)) for tokens, size in sizes.items()]
    assert choose(made, free, budget).slot_context == expected


@pytest.mark.parametrize(("trained", "expected"), [(32_768, (8192, 4096, 2048)), (4096, (4096, 2048)), (512, (512,))])
def test_llama_server_offers_no_more_than_the_model_was_trained_for(trained: int, expected: tuple[int, ...]) -> None:
    assert llama_server.contexts(SERVICE, trained_for(trained)) == expected


def trained_for(tokens: int) -> Reading:
    keys = {
        "general.architecture": "llama",
        "llama.block_count": 8,
        "llama.embedding_length": 2048,
        "llama.attention.head_count": 16,
        "llama.context_length": tokens,
        "llama.feed_forward_length": 8192,
    }
    return Reading(1 << 30, Header(keys, 1 << 30, 4096, 1 << 30))


def test_llama_server_leaves_no_choice_to_a_spec_that_names_one() -> None:
    reading = trained_for(8192)
    assert llama_server.contexts(replace(SERVICE, options={"contextSize": 512}), reading) == ()
    assert llama_server.contexts(replace(SERVICE, extra_args=("-c", "512")), reading) == ()
    assert llama_server.contexts(replace(SERVICE, env=(("LLAMA_ARG_CTX_SIZE", "512"),)), reading) == ()
    slots = replace(SERVICE, env=(("LLAMA_ARG_N_PARALLEL", "4"),))
    assert llama_server.contexts(slots, reading) == tuple(4 * each for each in llama_server.contexts(SERVICE, reading))
    assert llama_server.contexts(SERVICE, Reading(1)) == ()
