"""Interpretation of Models: the files that a service's Models name for its engine, and a limit on memory.

As with an InferenceService, nothing trusts a type; a field that cannot be used is a `Bad` that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from metal_supervisor.spec import auxiliary_files as companions
from metal_supervisor.spec import fields, sources
from metal_supervisor.spec.fields import Bad
from metal_supervisor.spec.references import OBJECT_NAME
from metal_supervisor.spec.shards import shard_names
from metal_supervisor.spec.sizes import fraction, quantity
from metal_supervisor.spec.sources import Artifact, library_model
from metal_supervisor.spec.types import (
    DIRECTORY_FORMATS,
    MODEL_REFUSED,
    Companion,
    Json,
    Key,
    Model,
    ModelLimit,
    Role,
)

DIGEST = re.compile(r"[0-9A-Fa-f]{64}", re.ASCII)
NOT_OBTAINED = frozenset({"DownloadFailed", "InvalidFileSet"})
"""Reasons of the operator's phase Failed that concern its own download, which no Mac uses."""
LONGEST_TEXT = 500
"""Characters of the operator's message that are quoted."""


def read_model(resource: Json, draft: str = "") -> Model:
    """The Model of a custom resource, with defaults; raises Bad.

    `draft`: name of the draft model that the service has beside it, "" without one.
    """
    metadata, artifact = resource.get("metadata", {}), read_artifact(resource)
    failed = _operator_failure(metadata.get("operatorFailed"), artifact)
    named = fields.get(resource, "spec.mmproj", str, "").strip()
    projector = sources.beside(artifact.source, named, "spec.mmproj") if named else ""
    if artifact.directory and artifact.local:
        for index, name in enumerate(fields.texts(resource, "spec.files", fields.MOST_FILES)):
            sources.inside(name, f"spec.files[{index}]")
    elif not artifact.directory:
        drafts = [companions.draft_beside(artifact, draft).artifact.source] if draft else []
        companions.check_files(resource, artifact.source, (projector, *drafts))
    if fields.get(resource, "spec.refreshPolicy", str, "IfNotPresent") != "IfNotPresent":
        raise Bad("UnsupportedField", "spec.refreshPolicy is not supported yet; leave it at IfNotPresent")
    return Model(
        namespace=metadata.get("namespace", ""),
        name=metadata.get("name", ""),
        uid=metadata.get("uid", ""),
        generation=metadata.get("generation", 0),
        source=fields.get(resource, "spec.source", str, "").strip(),
        format=fields.get(resource, "spec.format", str, "gguf"),
        gpu_layers=fields.get(resource, "spec.hardware.gpu.layers", int, None),
        sha256=artifact.sha256 or None,
        limit=read_limit(resource),
        projector=projector,
        artifact=artifact,
        failed=failed,
    )


def _operator_failure(found: Json | None, artifact: Artifact) -> str:
    """As `Model.failed`. Raises Bad for a Model that LLMKube's operator has rejected.

    Only failures that are known to concern the operator's own access to the files are passed over: under
    `--model-attestation=enforce`, and for source policies, its phase Failed is the only gate.
    """
    if found is None:
        return ""
    reason, text = found["reason"], f"{found['reason'] or 'no reason'}: {found['message'] or 'no message'}"
    if reason in NOT_OBTAINED or (reason == "SourceNotAllowed" and artifact.local):
        return text
    advice = "fix what it names; a Model that it accepts is served again"
    raise Bad(MODEL_REFUSED, f"LLMKube's operator reports phase Failed ({text[:LONGEST_TEXT]}); {advice}")


def _readable(written: Json, draft: str = "") -> Model:
    """A Model whose file this Mac can obtain; raises Bad, which names it."""
    try:
        return read_model(written, draft)
    except Bad as bad:
        raise Bad(bad.reason, f'Model "{written["metadata"]["name"]}": {bad.message}') from None


def model_files(
    namespace: str, written: Json, speculation: Json | None, model_of: Callable[[Key], Json | None]
) -> tuple[Model, tuple[Companion, ...]]:
    """(the Model of a service, the further files that its engine loads); raises Bad."""
    said = speculation or {}
    beside = said.get("draftModel", "")
    model = _readable(written, beside)
    draft = companions.draft_beside(model.artifact, beside) if beside else None
    if name := said.get("draftModelRef"):
        draft = _draft(namespace, name, model_of)
    origin = replace(model.artifact, source=model.projector, sha256="", quantization="")
    projector = Companion(Role.PROJECTOR, f'Model "{model.name}": spec.mmproj', origin)
    return model, tuple(each for each in (projector, draft) if each is not None and each.artifact.source)


def _draft(namespace: str, name: str, model_of: Callable[[Key], Json | None]) -> Companion:
    """The draft model that is a Model of its own; raises Bad, which names the field."""
    path = f"{companions.SPECULATION}.draftModelRef"
    if not OBJECT_NAME.fullmatch(name):
        raise Bad("InvalidSpec", f"{path} {name!r:.80} is not the name of a Model; name one of the same namespace")
    found = model_of((namespace, name))
    if found is None:
        text = f'{path} names "{name}", and namespace "{namespace}" has no such Model; apply it, or change the name'
        raise Bad("DraftModelNotFound", text)
    try:
        model = _readable(found)
    except Bad as bad:
        raise Bad(bad.reason, f"{path}: {bad.message}") from None
    if model.format != "gguf":
        raise Bad("FormatMismatch", f'{path}: Model "{model.name}" has spec.format {model.format!r:.40}, not gguf')
    edition, artifact = f"{model.uid}/{model.generation}", model.artifact
    return Companion(Role.DRAFT, path, artifact, edition, model.gpu_layers)


def read_limit(model: Json) -> ModelLimit:
    """`spec.hardware.memoryBudget` and `memoryFraction` of a Model. Raises Bad, which names the field."""
    hardware = fields.get(model, "spec.hardware", dict, {})
    said, share = hardware.get("memoryBudget"), hardware.get("memoryFraction")
    return ModelLimit(
        bytes=None if said in (None, "") else quantity(said, "spec.hardware.memoryBudget"),
        fraction=None if share is None else fraction(share, "spec.hardware.memoryFraction"),
    )


def read_artifact(resource: Json) -> Artifact:
    """The artifact that a Model's `spec.source` names, with the fields that select a file of it; raises Bad."""
    metadata = resource.get("metadata", {})
    written, named = sources.without_quantization(
        fields.address(fields.get(resource, "spec.source", str, ""), "spec.source").strip()
    )
    place = sources.canonical(written)
    directory = fields.get(resource, "spec.format", str, "gguf") in DIRECTORY_FORMATS
    files = fields.texts(resource, "spec.files", fields.MOST_FILES)
    digest = fields.get(resource, "spec.sha256", str, "").lower()
    if digest and not DIGEST.fullmatch(digest):
        raise Bad("InvalidSpec", f"spec.sha256 must be 64 hexadecimal digits, not {digest!r:.80}")
    if digest and (directory or library_model(place)):
        text = "spec.sha256 has no meaning for what is more than one file; remove it, or use spec.fileSha256"
        raise Bad("UnsupportedField", text)
    name = fields.get(resource, "spec.sourceSecretRef.name", str, "")
    if name and not OBJECT_NAME.fullmatch(name):
        raise Bad("InvalidSpec", f"spec.sourceSecretRef.name {name!r:.80} is not the name of a Secret")
    remote = not place.startswith("/") and not library_model(place)
    if named:
        _check_quantization(named, resource, directory, files)
    quantization = ""
    if directory and remote:
        _check_directory(place, files)
    elif remote and not sources.is_file(place):
        if files:
            place = sources.beside(place, files[0], "spec.files[0]")
        else:
            quantization = (named or fields.word(resource, "spec.quantization") or "").upper()  # as most names have it
    return Artifact(
        place,
        directory,
        files if directory and remote else (),
        quantization,
        digest,
        (metadata.get("namespace", ""), name) if name and remote else None,
        metadata.get("name", ""),
        digests=_digests(resource, place, directory),
    )


def _digests(resource: Json, place: str, directory: bool) -> tuple[tuple[str, str], ...]:
    """As `Artifact.digests`: `spec.fileSha256` of a Model with this canonical source. Raises Bad."""
    written = fields.get(resource, "spec.fileSha256", dict, {})
    named = {*fields.texts(resource, "spec.files", fields.MOST_FILES), fields.get(resource, "spec.mmproj", str, "")}
    found = {}
    for name, digest in written.items():
        where = f"spec.fileSha256[{name!r:.80}]"
        if name not in named:
            text = "is neither in spec.files nor spec.mmproj; add the file there, or remove its digest"
            raise Bad("InvalidSpec", f"{where} {text}")
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise Bad("InvalidSpec", f"{where} must be 64 hexadecimal digits, not {digest!r:.80}")
        if directory:
            file = sources.inside(name, where)
        else:  # the Hub's canonical source of any shard is that of the first
            shards = shard_names(name)
            file = shard_names(sources.beside(place, shards[0], where))[shards.index(name)]
        found[file] = digest.lower()
    return tuple(sorted(found.items()))


def _check_quantization(named: str, model: Json, directory: bool, files: tuple[str, ...]) -> None:
    """Raises Bad if other fields do not go with the `:QUANT` of a source."""
    other = fields.word(model, "spec.quantization")
    if other and other.lower() != named.lower():
        text = f"spec.source names the quantization {named}, and spec.quantization {other!r:.40}; remove one of the two"
        raise Bad("InvalidSpec", text)
    if files or directory:
        what = "spec.files" if files else "a spec.format that is a directory"
        raise Bad("InvalidSpec", f"spec.source ends in :{named}, which has no meaning beside {what}; remove it")


def _check_directory(place: str, files: tuple[str, ...]) -> None:
    """Raises Bad if a directory cannot be fetched from there."""
    if place.startswith("s3://") or (place.startswith("hf://") and not sources.is_file(place)):
        return
    if place.startswith("hf://"):
        text = "names one file of a repository, and this spec.format a directory; name the repository, hf://O/R"
        raise Bad("UnsupportedSource", f"spec.source {place!r:.200} {text}")
    if not files:
        text = "cannot be listed, and this spec.format is a directory; name its files in spec.files, or use hf://O/R"
        raise Bad("UnsupportedSource", f"spec.source {sources.shown(place)!r:.200} {text}")
