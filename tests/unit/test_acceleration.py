"""`status.acceleration` by the log of llama-server: what it has on the GPU, and nothing where it does not say so."""

from __future__ import annotations

import pytest

from metal_supervisor.sidecar.acceleration import acceleration
from metal_supervisor.spec.types import Json

LOAD = "0.00.006.766 I srv    load_model: loading model '/models/m.gguf'"
INFO = "0.00.005.054 I cmn  common_param: device_info:"
LISTED = "0.00.005.305 I   - MTL0    : Apple M4 Max (110100 MiB, 110100 MiB free)"
USED = "0.00.020.008 I llama_model_load_from_file_impl: using device MTL0 (Apple M4 Max) (unknown id) - 110100 MiB free"
OFFLOADED = "0.00.023.245 I load_tensors: offloaded 33/33 layers to GPU"
ON_GPU = "0.00.023.246 I load_tensors:  MTL0_Mapped model buffer size =  4076.43 MiB"
ON_CPU = "0.00.023.247 I load_tensors:   CPU_Mapped model buffer size =     0.53 MiB"
WHOLE = {"device": "MTL0 (Apple M4 Max)", "layersOffloaded": 33, "layersTotal": 33}
COUNTS = {"layersOffloaded": 33, "layersTotal": 33}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([INFO, LISTED, LOAD, USED, OFFLOADED, ON_GPU, ON_CPU], WHOLE),
        ([INFO, LISTED, LOAD, OFFLOADED, ON_GPU], WHOLE),
        ([LOAD, USED.replace(" (unknown id)", ""), OFFLOADED], WHOLE),
        ([LOAD, OFFLOADED, ON_GPU], COUNTS),
        ([INFO, LISTED, LISTED.replace("MTL0", "MTL1"), LOAD, OFFLOADED, ON_GPU], COUNTS),
        ([LOAD, OFFLOADED, ON_CPU], {"device": "CPU", "layersOffloaded": 0, "layersTotal": 33}),
        ([LOAD, USED, OFFLOADED.replace("33/", "12/"), ON_GPU, ON_CPU], {**WHOLE, "layersOffloaded": 12}),
        ([LOAD, USED, OFFLOADED, ON_GPU, OFFLOADED.replace("33", "5"), ON_CPU], WHOLE),  # a draft model follows
        ([LOAD, USED, OFFLOADED, ON_GPU, LOAD], {}),  # it was started again, and says nothing
        ([INFO, LISTED, LOAD], {}),
        ([OFFLOADED, ON_GPU], {}),
        ([LOAD, OFFLOADED.replace("33/33", "34/33")], {}),
        ([LOAD, OFFLOADED.replace("33/33", "99999/99999")], {}),
        ([LOAD, USED.replace("Apple M4 Max", "Apple \x1b[31m"), OFFLOADED], COUNTS),
        ([LOAD, USED.replace("MTL0", "SOMETHING"), OFFLOADED], COUNTS),
        ([], {}),
    ],
)
def test_layers_and_device_are_what_the_latest_load_says(lines: list[str], expected: Json) -> None:
    assert acceleration(lines) == expected
