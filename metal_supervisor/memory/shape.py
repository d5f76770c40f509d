"""Sizes of a model's caches and states, block by block, from its hyperparameters.

The common formula `layers x embedding x context` is several times too much: most models share keys among heads, many
look back only a window in most blocks, some keep one compressed row for all heads, and some keep a state of fixed size
instead. llama.cpp decides the kind of each block, so this follows its rules: by the keys of the header and, where those
are missing, by the architectures that have a rule of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from metal_supervisor.spec.gguf import MAX_LAYERS, BadGguf, Header, Value

MAX_NUMBER = (1 << 31) - 1

PERIODS: Mapping[str, tuple[int, bool]] = {
    "gemma2": (2, False),
    "gemma3": (6, False),
    "gemma3n": (5, False),
    "gemma-embedding": (6, False),
    "gpt-oss": (2, False),
    "cohere2": (4, False),
    "cohere2moe": (4, True),
    "olmo2": (4, False),
    "exaone4": (4, False),
    "exaone-moe": (4, False),
    "llama4": (4, False),
    "plamo3": (8, False),
    "afmoe": (4, False),
    "mellum": (4, False),
    "smallthinker": (4, True),
    "modern-bert": (3, True),
    "laguna": (4, True),
    "muse-glimmer": (4, False),
}
"""Architecture -> (N, first): one of N blocks sees the whole context, the first of them if True, else the last."""

LISTED = frozenset(
    {
        "gemma4",
        "gemma4-assistant",
        "mimo2",
        "step35",
        "cohere2moe",
        "mellum",
        "muse-glimmer",
        "dflash",
    }
)
"""Architectures whose header may list which blocks have a window; for others llama.cpp passes over such a list."""

WINDOWS: Mapping[str, int] = {"gemma2": 4096, "exaone4": 4096, "exaone-moe": 128, "llama4": 8192}
"""Window of architectures whose header may lack it."""

FIXED_WINDOWS: Mapping[str, int] = {"llama4": 8192, "smallthinker": 4096}
"""Window of architectures whose header only says whether there is one."""

CACHELESS = frozenset(
    {
        "bert",
        "jina-bert-v2",
        "jina-bert-v3",
        "nomic-bert",
        "nomic-bert-moe",
        "neo-bert",
        "eurobert",
        "modern-bert",
        "gemma-embedding",
        "wavtokenizer-dec",
        "dream",
        "llada",
        "llada-moe",
        "rnd1",
    }
)
"""Encoders and diffusion models, which have no KV cache: they read the whole input anew each time."""

UNGATED = frozenset({"bert"})
"""Architectures whose feed-forward part has one matrix up, not two; measured for widths from 128 to 768."""

RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
INTERVALS: Mapping[str, int] = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8}
"""Hybrids -> N: every N-th block attends, and the others keep a state."""
BOTH = frozenset({"falcon-h1"})
NEMOTRON = frozenset({"nemotron_h", "nemotron_h_moe"})
NEXTN = frozenset(
    {
        "qwen3next",
        "qwen35",
        "qwen35moe",
        "deepseek32",
        "deepseek4",
        "glm-dsa",
        "hy_v3",
        "mimo2",
        "step35",
        "gemma4-assistant",
    }
)
"""Architectures whose blocks for multi-token prediction have no cache. Others have such blocks too (glm4moe, exaone4,
deepseek2), but builds differ: b10434 reserves a cache for them all the same, b11549 does not."""
MLA = frozenset(
    {
        "deepseek2",
        "glm4moelite",
        "mistral4",
        "deepseek32",
        "glm-dsa",
        "bailingmoe3",
        "kimi-linear",
        "kimi-k3",
    }
)
STATE_KEYS = ("ssm.inner_size", "shortconv.l_cache", "kda.head_dim", "wkv.head_size")

READ_BY: Mapping[str, frozenset[str]] = {
    "attention.sliding_window": LISTED | frozenset({*PERIODS, "lfm2"}),
    "attention.recurrent_layers": frozenset(INTERVALS),
    "full_attention_interval": frozenset(INTERVALS),
    "attention.shared_kv_layers": frozenset({"gemma4"}),
    "attention.key_length_mla": MLA,
    "attention.value_length_mla": MLA,
    "nextn_predict_layers": NEXTN,
}
"""Key that makes a cache smaller -> the architectures for which llama.cpp reads it. Any file may hold it, and for other
architectures it changes nothing, so there it must not make the charge smaller either."""
GEMMA3N_LAYERS_WITH_KV = 20


@dataclass(frozen=True)
class Layer:
    """Cache and state of one block."""

    key: int = 0
    """Numbers per token in the cache of keys, 0 if it has none."""
    value: int = 0
    """Numbers per token in the cache of values; 0 if they are computed from the keys' row (MLA)."""
    windowed: bool = False
    """True if it keeps a window of the context, not all of it."""
    state: int = 0
    """Numbers of the recurrent state of one sequence, of 4 bytes each."""
    indexer: int = 0
    """Numbers per token in the indexer's cache of a sparse attention, which is another cache of keys."""


@dataclass(frozen=True)
class Shape:
    """The sizes that decide how much memory an engine needs for a model."""

    architecture: str
    layers: tuple[Layer, ...]
    window: int
    """Tokens that a windowed block looks back, 0 if there is no such block."""
    context: int
    """Tokens of the context that it was trained for, 0 if the header does not say."""
    vocabulary: int
    heads: int
    attention: int
    """Numbers per token that are alive at once in a block's attention."""
    forward: int
    """Numbers per token that are alive at once in the rest of a block: feed-forward, experts, recurrent part."""
    assumptions: tuple[str, ...] = ()

    @property
    def cached(self) -> tuple[Layer, ...]:
        """Blocks that have a KV cache."""
        return tuple(layer for layer in self.layers if layer.key or layer.value)


class _Keys:
    """Hyperparameters of one architecture, checked, because the file is untrusted. Its methods raise BadGguf."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self.architecture = header.architecture
        if not self.architecture:
            raise BadGguf("general.architecture is missing, so nothing else can be understood")
        self.ignored = tuple(name for name in READ_BY if self._stored(name) is not None and not self._is_read(name))

    def _stored(self, name: str) -> Value | None:
        return self._header.metadata.get(f"{self.architecture}.{name}")

    def _is_read(self, name: str) -> bool:
        return name not in READ_BY or self.architecture in READ_BY[name]

    def _get(self, name: str) -> Value | None:
        """The value that llama.cpp would find for this architecture, unchecked; None if it finds none."""
        return self._stored(name) if self._is_read(name) else None

    def _checked(self, name: str, value: object) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or not 0 <= value <= MAX_NUMBER:
            raise BadGguf(f"{self.architecture}.{name} must be a number from 0 to {MAX_NUMBER}, not {value!r:.80}")
        return int(value)

    def has(self, name: str) -> bool:
        return self._get(name) is not None

    def is_list(self, name: str) -> bool:
        return isinstance(self._get(name), tuple)

    def number(self, name: str, default: int | None = None) -> int:
        """A number; the largest of a list."""
        value = default if (found := self._get(name)) is None else found
        if value is None:
            raise BadGguf(f"{self.architecture}.{name} is missing")
        if isinstance(value, tuple):
            return max((self._checked(name, each) for each in value), default=0)
        return self._checked(name, value)

    def each(self, name: str, layers: int, default: int) -> tuple[int, ...]:
        """A number for each block, from a list or from one number for all."""
        value = default if (found := self._get(name)) is None else found
        if not isinstance(value, tuple):
            return (self._checked(name, value),) * layers
        if len(value) < layers:
            raise BadGguf(f"{self.architecture}.{name} has {len(value)} numbers for {layers} blocks")
        return tuple(self._checked(name, each) for each in value[:layers])


def _windowed(keys: _Keys, layers: int, window: int) -> tuple[bool, ...]:
    """For each block, True if it looks back only a window."""
    name = "attention.sliding_window_pattern"
    if not window:
        return (False,) * layers
    if keys.is_list(name) and keys.architecture in LISTED:
        return tuple(map(bool, keys.each(name, layers, 0)))
    if keys.architecture not in PERIODS:
        return (False,) * layers
    period, dense_first = PERIODS[keys.architecture]
    period = period if keys.is_list(name) else keys.number(name, period)
    if period == 0:
        return (True,) * layers
    dense = 0 if dense_first else period - 1
    return tuple(index % period != dense for index in range(layers))


def _window(keys: _Keys, layers: int) -> int:
    """Tokens of the window, 0 if there is none, or if llama.cpp ignores it for this architecture."""
    window = keys.number("attention.sliding_window", WINDOWS.get(keys.architecture, 0))
    if keys.architecture in FIXED_WINDOWS:
        return FIXED_WINDOWS[keys.architecture] if window else 0
    if keys.architecture == "exaone4" and layers != 64:
        return 0
    return window


def _recurrent(keys: _Keys, header: Header, layers: int, heads_kv: tuple[int, ...]) -> tuple[tuple[bool, ...], bool]:
    """For each block, True if it keeps a state; then True if that is a guess on the safe side.

    In a guess every block keeps a state, and has a cache as well.
    """
    architecture, name = keys.architecture, "attention.recurrent_layers"
    if architecture in RECURRENT or architecture in BOTH:
        return (True,) * layers, False
    if architecture in INTERVALS:
        if keys.has(name):
            return tuple(map(bool, keys.each(name, layers, 0))), False
        interval = max(1, keys.number("full_attention_interval", INTERVALS[architecture]))
        return tuple((index + 1) % interval != 0 for index in range(layers)), False
    if not any(keys.number(key, 0) for key in STATE_KEYS):
        return (False,) * layers, False
    if architecture in NEMOTRON:
        forward = keys.each("feed_forward_length", layers, 0)
        return tuple(not kv and not ff for kv, ff in zip(heads_kv, forward, strict=True)), False
    if 0 in heads_kv:
        return tuple(kv == 0 for kv in heads_kv), False
    if header.recurrent_layers and header.attention_layers:
        return tuple(index in header.recurrent_layers for index in range(layers)), False
    return (True,) * layers, True


def _cached(keys: _Keys, recurrent: tuple[bool, ...], guessed: bool) -> tuple[bool, ...]:
    """For each block, True if it has a KV cache. `guessed`: see `_recurrent`."""
    layers, architecture = len(recurrent), keys.architecture
    if architecture in CACHELESS:
        return (False,) * layers
    with_cache = layers - keys.number("attention.shared_kv_layers", 0)
    if architecture == "gemma3n":
        with_cache = GEMMA3N_LAYERS_WITH_KV
    forward = keys.each("feed_forward_length", layers, 0) if architecture in NEMOTRON else (0,) * layers
    both = guessed or architecture in BOTH  # a block with a state has a cache as well
    return tuple(
        index < with_cache and (both or not recurrent[index]) and not forward[index] for index in range(layers)
    )


def _assumptions(keys: _Keys, guessed: bool) -> Iterator[str]:
    """What is assumed on the safe side. `guessed`: see `_recurrent`."""
    if keys.ignored:
        named = ", ".join(keys.ignored)
        by = f"llama.cpp may not save memory by it for {keys.architecture:.80}"
        yield f"charged in full despite {named}: {by}"
    if guessed:
        yield f"{keys.architecture} does not say which blocks attend: every one is charged for both"


def _state(keys: _Keys, embedding: int, heads: int) -> int:
    """Numbers that one recurrent block keeps for one sequence: those of its convolution and of its state.

    Of the kinds of states that the header has keys for, the largest: llama.cpp reads one architecture's alone.
    """
    kernel = max(keys.number("ssm.conv_kernel", 0) - 1, 0)
    inner, state = keys.number("ssm.inner_size", 0), keys.number("ssm.state_size", 0)
    sizes = [kernel * (inner + 2 * keys.number("ssm.group_count", 0) * state) + state * inner]
    if size := keys.number("wkv.head_size", 0):
        shifts = keys.number("token_shift_count", 1 if keys.architecture in ("rwkv6qwen2", "arwkv7") else 2)
        sizes.append(embedding * (shifts + size))
    if cache := keys.number("shortconv.l_cache", 0):
        sizes.append(embedding * (cache - 1))
    if size := keys.number("kda.head_dim", 0):
        sizes.append(3 * (kernel or 3) * heads * size + size * size * heads)
    return max(sizes)


def _widest(keys: _Keys, embedding: int) -> int:
    """Numbers per token alive at once in the larger feed-forward part; fitted to the engine's own logs."""
    forward = keys.number("feed_forward_length", 0)
    dense = 3 * embedding + forward if keys.architecture in UNGATED else embedding + 4 * forward
    if not (used := keys.number("expert_used_count", 0)):
        return dense
    return max(dense, 2 * embedding + 2 * used * (embedding + keys.number("expert_feed_forward_length", forward)))


def _scanning(keys: _Keys, embedding: int) -> int:
    """Numbers per token alive at once in a recurrent part; in Mamba 2, each group of heads has its own inputs."""
    grouped = keys.number("ssm.group_count", 0) * keys.number("ssm.state_size", 0)
    return embedding + 6 * (keys.number("ssm.inner_size", 0) + grouped)


def shape_of(header: Header) -> Shape:
    """Shape of a model, from its header. Raises BadGguf for hyperparameters that are missing or make no sense."""
    keys = _Keys(header)
    total, embedding = keys.number("block_count"), keys.number("embedding_length")
    if not 1 <= total <= MAX_LAYERS:
        raise BadGguf(f"{keys.architecture}.block_count is {total}; between 1 and {MAX_LAYERS} are possible")
    # Blocks for multi-token prediction come last.
    layers = max(total - keys.number("nextn_predict_layers", 0), 1)
    heads = keys.number("attention.head_count", 0)
    heads_kv = keys.each("attention.head_count_kv", layers, heads)
    head = embedding // heads if heads else 0
    key, value = keys.number("attention.key_length", head), keys.number("attention.value_length", head)
    window = _window(keys, layers)
    recurrent, guessed = _recurrent(keys, header, layers, heads_kv)
    windowed = _windowed(keys, layers, window)
    if keys.architecture == "lfm2" and window:
        windowed = tuple(not each for each in recurrent)
    compressed = keys.has("attention.key_length_mla") and keys.has("attention.value_length_mla")
    dims = {
        False: (key, value),
        True: (keys.number("attention.key_length_swa", key), keys.number("attention.value_length_swa", value)),
    }
    cached = _cached(keys, recurrent, guessed)
    state, indexer = _state(keys, embedding, heads), keys.number("attention.indexer.key_length", 0)
    made = []
    for index in range(layers):
        wide_key, wide_value = dims[windowed[index]]
        made.append(
            Layer(
                key=wide_key * heads_kv[index] if cached[index] else 0,
                value=wide_value * heads_kv[index] if cached[index] and not compressed else 0,
                windowed=windowed[index],
                state=state if recurrent[index] else 0,
                indexer=indexer if cached[index] and heads_kv[index] else 0,
            )
        )
    return Shape(
        architecture=keys.architecture,
        layers=tuple(made),
        window=window if any(windowed) else 0,
        context=keys.number("context_length", 0),
        vocabulary=header.tokens,
        heads=heads,
        attention=3 * embedding + heads * (2 * key + value),
        forward=max(_widest(keys, embedding), _scanning(keys, embedding)),
        assumptions=(*header.assumptions, *_assumptions(keys, guessed)),
    )
