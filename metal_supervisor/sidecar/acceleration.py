"""Layers that an engine has on the GPU, by its log, for `status.acceleration`.

llama-server says that nowhere else, and builds since mid-2026 only with `--log-verbosity 4`. It counts layers that it
was to offload, even if it found no GPU: then all its buffers are the CPU's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

LLAMA = "llama-server"
"""The only runtime whose log has it."""
LOAD_LINES = 4000
LOAD_BYTES = 256 << 10
"""End of the log in which the load is looked for, just after it."""
LOADS = re.compile(r"load_model: loading model '")
"""First line of a load; a draft model's has `draft`."""
LAYERS = re.compile(r"load_tensors: offloaded (\d{1,4})/(\d{1,4}) layers to GPU")
BUFFER = re.compile(r"load_tensors: +(\w{1,32}) model buffer size = ")
DEVICE = r"((?:MTL|Metal|Vulkan|CUDA|ROCm|SYCL)\d{0,2})"
NAME = r"([\w .+@/-]{1,80})"
USED = re.compile(rf"using device {DEVICE} \({NAME}\) (?:\([^()]*\) )?- \d+ MiB free")
LISTED = re.compile(rf"  - {DEVICE} *: {NAME} \(\d+ MiB, \d+ MiB free\)")


def acceleration(lines: Iterable[str]) -> dict[str, str | int]:
    """`status.acceleration` by the latest load in a log of llama-server, {} if it does not say how many layers.

    The first count of a load is the model's, a second one the draft model's.
    """
    listed, used, counts, buffers = list[str](), list[str](), list[tuple[int, int]](), list[str]()
    loading = False
    for line in lines:
        if "device_info:" in line:
            listed = []
        elif found := LISTED.search(line):
            listed.append(f"{found[1]} ({found[2]})")
        elif LOADS.search(line):
            loading, used, counts, buffers = True, [], [], []
        elif found := USED.search(line):
            used.append(f"{found[1]} ({found[2]})")
        elif found := LAYERS.search(line):
            counts.append((int(found[1]), int(found[2])))
        elif (found := BUFFER.search(line)) and len(counts) == 1:
            buffers.append(found[1])
    if not loading or not counts or counts[0][0] > counts[0][1]:
        return {}
    layers, total = counts[0]
    if buffers and all(each.startswith("CPU") for each in buffers):
        return {"device": "CPU", "layersOffloaded": 0, "layersTotal": total}
    named = list(dict.fromkeys(used or listed))
    known = {"device": named[0]} if len(named) == 1 else {}
    return {**known, "layersOffloaded": layers, "layersTotal": total}
