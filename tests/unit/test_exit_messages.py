"""The line of an engine's log that tells why it ended."""

from __future__ import annotations

import pytest

from metal_supervisor.sidecar.exit_messages import cause


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["main: loading", 'error while handling argument "--temp": stof', "usage:", "--temp N  (on error 0)",
          "to show complete usage, run with -h"], 'error while handling argument "--temp": stof'),
        (["error: of a request before", "GGML_ASSERT(n > 0) failed", "bye"], "GGML_ASSERT(n > 0) failed"),
        (["0.1 I load_model: loading", "0.2 E llama_model_load: error loading model: corrupted",
          "0.3 E common_init_: failed to load", "0.4 I cleaning up", "0.5 E exiting due to model loading error"],
         "0.2 E llama_model_load: error loading model: corrupted"),
        (["0.5 E exiting due to an error before", "0.1 I load_model: loading", "0.2 I warming up", "0.3 E failed now"],
         "0.3 E failed now"),
        (["one", "two"], "two"),
        ([], ""),
        (["error " + "x" * 999], "error " + "x" * 294),
    ],
)  # fmt: skip
def test_the_cause_is_the_last_error_and_not_the_usage_text(lines: list[str], told: str) -> None:
    assert cause(lines) == told
