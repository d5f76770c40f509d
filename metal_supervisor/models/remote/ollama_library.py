"""URL of a model in Ollama's library: its registry keeps the model as one GGUF blob, which can be read in ranges.

So its header is read before 40 GB are pulled, as for any other model on a web server.
"""

from __future__ import annotations

import json
import re

from metal_supervisor.models.listing import Unusable
from metal_supervisor.models.remote.web import Client
from metal_supervisor.spec.sources import library_model

REGISTRY = "https://registry.ollama.ai"
MODEL = "application/vnd.ollama.image.model"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
TIMEOUT_S = 10.0
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def blob_url(source: str, registry: str, client: Client) -> str:
    """URL of the GGUF of a library model. `registry`: a mirror, "" for the library itself. Raises Unusable."""
    name, _, tag = library_model(source).partition(":")
    path = name if "/" in name else f"library/{name}"
    base = f"{(registry or REGISTRY).rstrip('/')}/v2/{path}"
    try:
        answer = client.page("GET", f"{base}/manifests/{tag}", {"Accept": MANIFEST}, TIMEOUT_S)
    except Unusable as error:
        raise Unusable("SourceNotFound", f"Ollama's library does not answer: {error}") from None
    if answer.status != 200:
        raise Unusable("SourceNotFound", f"Ollama's library has no {name}:{tag} (it answered {answer.status})")
    try:
        layers = json.loads(answer.body)["layers"]
        digest = next(each["digest"] for each in layers if each.get("mediaType") == MODEL)
        if not DIGEST.fullmatch(digest):
            raise ValueError(digest)
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, RecursionError):
        raise Unusable("SourceNotFound", f"what Ollama's library says of {name}:{tag} names no model") from None
    return f"{base}/blobs/{digest}"
