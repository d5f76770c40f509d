"""What a build's own help says that it takes, and the two spellings of how a model is loaded."""

from __future__ import annotations

import subprocess
from functools import lru_cache

import pytest

from metal_supervisor.runtimes.llama_arguments import GRAMMAR
from metal_supervisor.runtimes.llama_flags import accepted, as_built, options_of
from metal_supervisor.spec.arguments import parse
from tests.support.system import engine_path, free_ports

HELP = """\
----- common params -----

-h,    --help, --usage                  print usage and exit
-c,    --ctx-size N                     size of the context (default: 0), see --not-a-flag
                                        --neither-is-this
-fa,   --flash-attn [on|off|auto]       set it ('on', 'off')
-kvu,  --kv-unified, -no-kvu, --no-kv-unified
                                        one buffer
-ctk,  --cache-type-k TYPE              type of K
                                        allowed values: f32, f16, q8_0
                                        (default: f16)
--control-vector-layer-range START END  layers
-otd,  --override-tensor-draft <tensor name pattern>=<buffer type>,...
                                        where
--spec-type none,draft-simple,ngram-mod
                                        kinds
--draft, --draft-max N                  the argument has been removed. use
                                        --spec-draft-n-max

----- example-specific params -----
--embd-gemma-default                    a preset
"""
OLD = HELP + "--mlock    lock\n--mmap, --no-mmap    map\n-dio, --direct-io, -ndio, --no-direct-io\n"
NEW = HELP + "-lm,   --load-mode MODE                 how to load\n"


def test_every_name_of_every_flag_is_read_with_how_many_values_it_takes() -> None:
    found = {name: option.values for name, option in options_of(HELP).items()}
    assert found == {
        **dict.fromkeys(("-h", "--help", "--usage", "--embd-gemma-default"), 0),
        **dict.fromkeys(("-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"), 0),
        **dict.fromkeys(("-c", "--ctx-size", "-fa", "--flash-attn", "-ctk", "--cache-type-k"), 1),
        **dict.fromkeys(("-otd", "--override-tensor-draft", "--spec-type"), 1),
        "--control-vector-layer-range": 2,
    }


def test_what_a_value_may_be_is_read_where_the_help_lists_it() -> None:
    options = options_of(HELP)
    assert options["-ctk"].choices == "f32,f16,q8_0"
    assert options["--spec-type"].choices == "none,draft-simple,ngram-mod"
    assert not options["-c"].choices and not options["-otd"].choices


@pytest.mark.parametrize("text", ["", "--metrics --alias STRING", "usage: it [--ctx-size N]", "\n\n \n-"])
def test_a_help_that_is_not_llama_servers_tells_nothing(text: str) -> None:
    assert options_of(text) == {}


@lru_cache(maxsize=1)
def real_help() -> str:
    done = subprocess.run([str(engine_path()), "--help"], capture_output=True, check=False, timeout=20)
    return done.stdout.decode("utf-8", "replace")


def test_the_help_of_the_real_engine_is_understood_whole() -> None:
    options = options_of(real_help())
    assert len(options) > 60
    for name in ("-m", "--model", "-c", "-np", "--parallel", "--port", "-fa", "-ctk", "--lora", "-md", "--spec-type"):
        assert options[name].values == 1, name
    for name in ("--jinja", "--no-warmup", "--metrics", "-kvu", "--no-slots", "--embedding"):
        assert options[name].values == 0, name
    assert "q8_0" in (options["-ctk"].choices or "q8_0")


@pytest.mark.parametrize("line", ["-t 1", "--temp -1", "--chat_template --x", "--kv_unified", "--no-such", "stray"])
def test_the_real_engine_takes_what_is_said_to_be_known_and_ends_at_the_rest(line: str) -> None:
    arguments, options = line.split(), options_of(real_help())
    known = all(each.name in options for each in parse(tuple(arguments), GRAMMAR).items)
    line_of_all = [str(engine_path()), *arguments, "-m", "/nowhere.gguf", "--port", str(*free_ports(1))]
    done = subprocess.run(line_of_all, capture_output=True, check=False, timeout=20)
    said = (done.stdout + done.stderr).decode("utf-8", "replace")
    assert ("invalid argument" in said) is not known, said[-500:]


def test_values_are_told_from_flags() -> None:
    found = parse(("--ctx_size", "--help", "-h", "x", "-c"), GRAMMAR)
    assert [(each.index, each.name, each.values) for each in found.items] == [
        (0, "--ctx-size", ("--help",)),
        (2, "-h", ()),
        (3, "x", ()),
        (4, "-c", ()),
    ]


@pytest.mark.parametrize(
    ("old", "mode"),
    [
        ("--mlock", "mmap+mlock"),
        ("--no-mmap", "none"),
        ("--mlock --no-mmap", "mlock"),
        ("--mmap", "mmap"),
        ("--no-mmap --mmap", "mmap"),
        ("--direct-io", "dio"),
        ("-dio -ndio", "auto"),
        ("--no_mmap", "none"),
    ],
)
def test_a_build_with_load_modes_is_told_one_instead_of_switches(old: str, mode: str) -> None:
    said = as_built(["-c", "--mlock", *old.split(), "-fa", "on"], options_of(NEW))
    assert said == ("-c", "--mlock", "--load-mode", mode, "-fa", "on")
    assert all(each.name in options_of(NEW) for each in parse(said, GRAMMAR).items)


def test_what_is_said_later_still_wins() -> None:
    options = options_of(NEW)
    assert as_built(["--mlock", "-lm", "none"], options) == ("--load-mode", "mmap+mlock", "-lm", "none")
    assert as_built(["-lm", "none", "--mlock"], options) == ("-lm", "none", "--load-mode", "mmap+mlock")


def test_nothing_is_touched_where_no_mode_is_known() -> None:
    for options in (options_of(OLD), options_of(HELP), {}):
        assert as_built(["-lm", "dio", "--mlock"], options) == ("-lm", "dio", "--mlock")
        assert accepted(options) == options
