#!/usr/bin/env python3
"""Tests need a model that a real llama-server loads in milliseconds and that answers something predictable.

Downloaded models are too large for that, and random weights don't work either: they sample raw bytes, which are not
UTF-8, and llama-server answers 500. So this makes a model with real (random) attention layers and, laid over them, a
Markov chain: whatever the prompt says, the answer is REPLY and then end-of-text. With `ignore_eos: true` it goes round
for ever. Same arguments, same bytes. About 0.6 MB; `pad_mib` makes it larger for tests that need a load to take time.

How the chain is laid: dimension 0 of every embedding is a constant, each word of the reply has a dimension of its own
that marks it, and the layers write next to nothing back, so the last hidden state still shows the token that was read
last. The output row of each word looks for the mark of the word before it; the first word needs none, and all other
tokens are held down through dimension 0. The margins are some 20 logits, so any seed and any temperature will do.

    python tools/tiny_gguf.py OUT [--n-layer 2] [--n-embd 64] [--vocab 320] [--dtype f32|f16] [--seed 0] [--pad-mib 0]

Needs `gguf` and `numpy` (the `dev` extra).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPLY = "hello world from tiny"
HEAD_DIM = 32  # a multiple of 32, or llama.cpp refuses a quantized KV cache
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPACE = "\u2581"  # how SentencePiece writes the space before a word
UNK = 0
BOS = 1
EOS = 2
MIB = 1 << 20


@dataclass(frozen=True)
class Recipe:
    """Everything that the bytes depend on."""

    arch: str = "llama"
    """Key of ARCHITECTURES."""
    n_layer: int = 2
    """Transformer blocks."""
    n_embd: int = 64
    """Width of the embedding; a multiple of 32."""
    n_ff: int = 128
    """Width of the feed-forward part, before padding."""
    n_head: int = 4
    """Attention heads of HEAD_DIM each."""
    n_head_kv: int = 2
    """Heads of the KV cache (grouped-query attention)."""
    vocab: int = 320
    """Tokens; at least as many as the fixed ones."""
    context: int = 2048
    """Context that the model claims to be trained for, in tokens."""
    dtype: str = "f32"
    """Type of the matrices, f32 or f16. Vectors are always f32, as llama.cpp wants them."""
    seed: int = 0
    """Seed of the random weights."""
    pad_mib: int = 0
    """Size to add, in MiB. It is real feed-forward weights: llama.cpp refuses tensors that it doesn't know."""
    reply: str = REPLY
    """What the model says: different words, one token each."""

    def text(self) -> str:
        """The recipe as the file carries it, with a digest of this program, so that a change of either is seen."""
        maker = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
        return json.dumps({"maker": maker, **asdict(self)}, sort_keys=True)

    def padded_ff(self) -> int:
        """n_ff with the padding spread over the three matrices of every layer; a multiple of 32."""
        bytes_each = 2 if self.dtype == "f16" else 4
        extra = self.pad_mib * MIB // (3 * self.n_layer * self.n_embd * bytes_each)
        return self.n_ff + (extra + 31) // 32 * 32


class Builder:
    """Collects tensors under llama.cpp's names; every shape is numpy's (rows out, columns in)."""

    def __init__(self, writer: Any, recipe: Recipe, tokens: list[str]) -> None:
        import numpy

        self.np = numpy
        self.writer = writer
        self.recipe = recipe
        self.tokens = tokens
        self.random = numpy.random.default_rng(recipe.seed)

    def add(self, name: str, array: Any) -> None:
        half = self.recipe.dtype == "f16" and array.ndim > 1
        self.writer.add_tensor(name, array.astype(self.np.float16 if half else self.np.float32, order="C"))

    def ones(self, name: str, size: int) -> None:
        self.add(name, self.np.ones(size))

    def noise(self, *shape: int, scale: float = 0.05) -> Any:
        """Normal noise. Large matrices repeat their first rows: drawing each number would take seconds."""
        rows = min(shape[0], 1024)
        block = self.random.standard_normal((rows, *shape[1:]), dtype=self.np.float32) * scale
        return self.np.resize(block, shape)

    def matrix(self, name: str, rows: int, columns: int) -> None:
        self.add(name, self.noise(rows, columns))

    def write_back(self, name: str, rows: int, columns: int) -> None:
        """A matrix that feeds the residual stream: so small that the stream keeps showing the last token read."""
        self.add(name, self.noise(columns, rows, scale=0.05e-3 * HEAD_DIM / columns).T)

    def chain(self) -> None:
        """token_embd and output, which together speak the reply."""
        np, recipe = self.np, self.recipe
        words = [self.tokens.index(SPACE + word) for word in recipe.reply.split()]
        marks = range(1, 1 + len(words))
        embedding = self.random.standard_normal((recipe.vocab, recipe.n_embd), dtype=np.float32)
        embedding[:, : marks.stop] = 0.0
        embedding[:, 0] = 4.0
        output = self.noise(recipe.vocab, recipe.n_embd, scale=0.01)
        output[:, 0] = -10.0
        output[[*words, EOS]] = 0.0
        output[words[0], 0] = 4.0
        for mark, before, after in zip(marks, words, [*words[1:], EOS], strict=True):
            embedding[before, mark] = 8.0
            output[after, mark] = 8.0
            output[after, 0] = -4.0
        self.add("token_embd.weight", embedding)
        self.add("output.weight", output)


def build_llama(b: Builder) -> None:
    """Plain llama: RMS norm, rotary positions, grouped-query attention, gated feed-forward."""
    recipe, width, ff = b.recipe, b.recipe.n_embd, b.recipe.padded_ff()
    b.writer.add_context_length(recipe.context)
    b.writer.add_embedding_length(width)
    b.writer.add_block_count(recipe.n_layer)
    b.writer.add_feed_forward_length(ff)
    b.writer.add_head_count(recipe.n_head)
    b.writer.add_head_count_kv(recipe.n_head_kv)
    b.writer.add_key_length(HEAD_DIM)
    b.writer.add_value_length(HEAD_DIM)
    b.writer.add_rope_dimension_count(HEAD_DIM)
    b.writer.add_rope_freq_base(10000.0)
    b.writer.add_layer_norm_rms_eps(1e-5)
    b.writer.add_vocab_size(recipe.vocab)
    b.chain()
    b.ones("output_norm.weight", width)
    for layer in range(recipe.n_layer):
        block = f"blk.{layer}."
        b.ones(block + "attn_norm.weight", width)
        b.matrix(block + "attn_q.weight", recipe.n_head * HEAD_DIM, width)
        b.matrix(block + "attn_k.weight", recipe.n_head_kv * HEAD_DIM, width)
        b.matrix(block + "attn_v.weight", recipe.n_head_kv * HEAD_DIM, width)
        b.write_back(block + "attn_output.weight", width, recipe.n_head * HEAD_DIM)
        b.ones(block + "ffn_norm.weight", width)
        b.matrix(block + "ffn_gate.weight", ff, width)
        b.matrix(block + "ffn_up.weight", ff, width)
        b.write_back(block + "ffn_down.weight", width, ff)


ARCHITECTURES: dict[str, Callable[[Builder], None]] = {"llama": build_llama}
"""general.architecture → the function that writes its hyperparameters and tensors."""


def vocabulary(recipe: Recipe) -> list[tuple[str, float, int]]:
    """(text, score, type) of each token: control tokens, all 256 bytes so that any text can be read, then words."""
    from gguf import TokenType

    words = recipe.reply.split()
    if not words or len(set(words)) != len(words):
        raise ValueError(f"the reply must be different words, not {recipe.reply!r}")
    tokens = [("<unk>", 0.0, TokenType.UNKNOWN), ("<s>", 0.0, TokenType.CONTROL), ("</s>", 0.0, TokenType.CONTROL)]
    tokens += [(f"<0x{byte:02X}>", 0.0, TokenType.BYTE) for byte in range(256)]
    tokens += [("<|im_start|>", 0.0, TokenType.CONTROL), ("<|im_end|>", 0.0, TokenType.CONTROL)]
    texts = [SPACE + word for word in words] + [SPACE] + list("etaoinshrdlu")
    tokens += [(text, -float(rank), TokenType.NORMAL) for rank, text in enumerate(texts)]
    if recipe.vocab < len(tokens):
        raise ValueError(f"the vocabulary needs at least {len(tokens)} tokens, not {recipe.vocab}")
    spare = recipe.vocab - len(tokens)
    tokens += [(f"{SPACE}spare{rank}", -100.0 - rank, TokenType.NORMAL) for rank in range(spare)]
    return [(text, score, int(kind)) for text, score, kind in tokens]


def _write(path: Path, recipe: Recipe) -> None:
    import gguf

    tokens = vocabulary(recipe)
    writer = gguf.GGUFWriter(path, recipe.arch)
    writer.add_string("tiny.recipe", recipe.text())  # first, so that `is_made` finds it in the head of the file
    writer.add_type("model")
    writer.add_name(f"tiny-{recipe.arch}")
    writer.add_license("cc0-1.0")
    writer.add_file_type(1 if recipe.dtype == "f16" else 0)
    writer.add_quantization_version(2)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([text for text, _, _ in tokens])
    writer.add_token_scores([score for _, score, _ in tokens])
    writer.add_token_types([kind for _, _, kind in tokens])
    writer.add_unk_token_id(UNK)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    ARCHITECTURES[recipe.arch](Builder(writer, recipe, [text for text, _, _ in tokens]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def is_made(path: Path, recipe: Recipe) -> bool:
    """Whether the file is there and was made with this recipe. Files only ever appear whole, so the head tells."""
    try:
        with path.open("rb") as file:
            head = file.read(8192)
    except OSError:
        return False
    return recipe.text().encode() in head


def write_tiny_gguf(path: str | Path, **options: Any) -> int:
    """Makes the model at path, unless it is there already, and returns its size in bytes.

    Options are the fields of Recipe. The file appears at once and whole (temporary file, rename), so a server never
    sees half of it. Raises ValueError for options that no model can be made of.
    """
    path = Path(path)
    recipe = Recipe(**options)
    if recipe.arch not in ARCHITECTURES:
        raise ValueError(f"architecture must be one of {', '.join(sorted(ARCHITECTURES))}, not {recipe.arch!r}")
    if recipe.dtype not in ("f32", "f16"):
        raise ValueError(f"dtype must be f32 or f16, not {recipe.dtype!r}")
    if recipe.n_embd < 32 or recipe.n_embd % 32:
        raise ValueError(f"n_embd must be a multiple of 32, not {recipe.n_embd}")
    if len(recipe.reply.split()) > recipe.n_embd // 2:
        raise ValueError(f"a reply of more than {recipe.n_embd // 2} words needs a larger n_embd")
    if not is_made(path, recipe):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            _write(part, recipe)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    return path.stat().st_size


def main(argv: list[str]) -> int:
    default = Recipe()
    parser = argparse.ArgumentParser(description="Makes a tiny GGUF model that answers a fixed sentence.")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--arch", default=default.arch, choices=sorted(ARCHITECTURES))
    parser.add_argument("--dtype", default=default.dtype, choices=["f32", "f16"])
    parser.add_argument("--reply", default=default.reply, help="different words that the model answers with")
    for name in ("n_layer", "n_embd", "n_ff", "n_head", "n_head_kv", "vocab", "context", "seed", "pad_mib"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    options = vars(parser.parse_args(argv))
    out = options.pop("out")
    try:
        size_bytes = write_tiny_gguf(out, **options)
    except ValueError as error:
        print(f"tiny_gguf: {error}", file=sys.stderr)
        return 2
    print(f"{out}: {size_bytes} bytes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
