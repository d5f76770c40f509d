#!/usr/bin/env python3
"""Tests of MLX engines need a model that takes no time: a directory of half a megabyte that always says the same.

    python tests/support/tiny_mlx.py DIRECTORY [--context TOKENS] [--endless]

Needs numpy and safetensors, so the interpreter that has mlx_lm runs it (see find_mlx.py). A Llama whose attention
and feed-forward layers add next to nothing, so that the next token follows from the last one alone: the rows of the
output matrix are the embeddings of the tokens that come before. Every prompt is answered `hello world from tiny`;
an endless one says so again and again, until it is cut off by `max_tokens`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy
from safetensors.numpy import save_file

LAYERS = 2
WIDTH = 64
INNER = 128
HEADS = 4
KV_HEADS = 2
HEAD = 16
VOCABULARY = 320
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
BLANK = "\u2581"
ANSWER = tuple(BLANK + word for word in ("hello", "world", "from", "tiny"))
TEMPLATE = (
    "{% for each in messages %}<|im_start|>{{ each['role'] }}\n{{ each['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vocabulary() -> dict[str, int]:
    """Token -> number: the special ones, every byte, the words of the answer, and words that are never said."""
    tokens = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), BLANK, *ANSWER]
    tokens += [f"{BLANK}w{number}" for number in range(VOCABULARY - len(tokens))]
    return {token: number for number, token in enumerate(tokens)}


def tokenizer(words: dict[str, int]) -> dict[str, Any]:
    """tokenizer.json: whatever is no token of its own is spelled in bytes."""
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": words[token], "content": token, **added} for token in SPECIAL],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": BLANK},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": BLANK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": words,
            "merges": [],
        },
    }


def weights(words: dict[str, int], endless: bool) -> dict[str, Any]:
    """The tensors, by their names in a Llama."""
    chance = numpy.random.default_rng(7)

    def small(rows: int, columns: int, scale: float) -> Any:
        return (chance.standard_normal((rows, columns)) * scale).astype(numpy.float32)

    embeddings = small(VOCABULARY, WIDTH, 1.0)
    embeddings[:, 0] = 4.0  # alike in all, so that a row of the output can favour or shun its token whatever was last
    output = small(VOCABULARY, WIDTH, 0.01)
    output[:, 0] = -10.0
    said = [words[word] for word in ANSWER]
    output[said[0]] = 0.0
    output[said[0], 0] = 1.0  # where nothing else follows: the answer's beginning
    after = said[0] if endless else words["</s>"]
    for last, following in zip(said, [*said[1:], after], strict=True):
        if following != said[0]:
            output[following] = embeddings[last]
            output[following, 0] = -2.0
    made = {
        "model.embed_tokens.weight": embeddings,
        "lm_head.weight": output,
        "model.norm.weight": numpy.ones(WIDTH, numpy.float32),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        made |= {
            f"{name}.self_attn.q_proj.weight": small(HEADS * HEAD, WIDTH, 0.05),
            f"{name}.self_attn.k_proj.weight": small(KV_HEADS * HEAD, WIDTH, 0.05),
            f"{name}.self_attn.v_proj.weight": small(KV_HEADS * HEAD, WIDTH, 0.05),
            f"{name}.self_attn.o_proj.weight": small(WIDTH, HEADS * HEAD, 5e-5),
            f"{name}.mlp.gate_proj.weight": small(INNER, WIDTH, 0.05),
            f"{name}.mlp.up_proj.weight": small(INNER, WIDTH, 0.05),
            f"{name}.mlp.down_proj.weight": small(WIDTH, INNER, 5e-5),
            f"{name}.input_layernorm.weight": numpy.ones(WIDTH, numpy.float32),
            f"{name}.post_attention_layernorm.weight": numpy.ones(WIDTH, numpy.float32),
        }
    return made


def write_tiny_mlx(directory: Path, context: int = 4096, endless: bool = False) -> None:
    """Writes the whole directory."""
    directory.mkdir(parents=True, exist_ok=True)
    words = vocabulary()
    ends = {"bos_token_id": words["<s>"], "eos_token_id": words["</s>"]}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": context,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        **ends,
    }
    words_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    files = {
        "config.json": config,
        "generation_config.json": ends,
        "tokenizer.json": tokenizer(words),
        "tokenizer_config.json": words_config,
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=1), "utf-8")
    save_file(weights(words, endless), directory / "model.safetensors", metadata={"format": "mlx"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--endless", action="store_true")
    asked = parser.parse_args()
    write_tiny_mlx(asked.directory, asked.context, asked.endless)
