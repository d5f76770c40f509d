"""Flags and variables that a manifest may give to servers of MLX models: mlx_lm's, the Swift one, and vLLM's.

All three read their command line as Python's argparse does, or more strictly. vLLM has some three hundred flags, of
which many load code, open ports or join other machines; only those that tune one engine on one Mac are known here.
"""

from __future__ import annotations

from metal_supervisor.spec.arguments import TEXT, FlagVerdict, Grammar, ValueCheck, choice, decimal, flags, rows, whole
from metal_supervisor.spec.environment import COMMON, ELSEWHERE, SWITCH, Environment, Vocabulary, variables

OURS = FlagVerdict.OURS
REFUSED = FlagVerdict.REFUSED
IGNORED = FlagVerdict.IGNORED
LARGEST = (1 << 63) - 1
COUNT = whole(0, LARGEST)
SHARE = decimal(0, 1)
REAL = decimal(-1000, 1000)
JSON = ValueCheck("a JSON object", r"(?s:\s*\{.*\}\s*)")
WORD = ValueCheck("one word", r"[A-Za-z0-9_-]{1,60}")

BIND = "engines listen where this Mac's setting --bind says"
PORT = "the port is chosen by this Mac; set spec.containerPort to prefer one"
MODEL = "the model comes from spec.modelRef"
NAME = "the served name is the InferenceService's"
CODE = "it would run code, or load files, that have not been judged"
ALONE = "one InferenceService is served by one process on one Mac"
OPEN = "it would change who can reach the engine, or what it tells of this Mac"
AWAY = "it would send prompts to another program"
CORS = "it would let web pages of other hosts use the engine"

MLX = Vocabulary(
    "MLX servers",
    Grammar(
        rows(
            flags("--temp", values=[REAL]),
            flags("--top-p", "--min-p", values=[SHARE]),
            flags(
                "--top-k",
                "--max-tokens",
                "--num-draft-tokens",
                "--decode-concurrency",
                "--prompt-concurrency",
                "--prefill-step-size",
                "--prompt-cache-size",
                "--prompt-cache-bytes",
                "--kv-group-size",
                "--quantized-kv-start",
                values=[COUNT],
            ),
            flags("--kv-bits", values=[choice("2", "3", "4", "5", "6", "8")]),
            flags("--log-level", values=[choice("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")]),
            flags("--chat-template", values=[TEXT]),
            flags("--chat-template-args", values=[JSON]),
            flags("--use-default-chat-template"),
            flags("--tool-call-format", "--reasoning", values=[WORD]),
            flags("--host", values=[TEXT], verdict=OURS, why=BIND),
            flags("--port", values=[TEXT], verdict=OURS, why=PORT),
            flags("--model", values=[TEXT], verdict=OURS, why=MODEL),
            flags("--alias", values=[TEXT], verdict=OURS, why=NAME),
            flags("--context", values=[TEXT], verdict=OURS, why="set spec.contextSize"),
            flags("--max-slots", values=[TEXT], verdict=OURS, why="set spec.parallelSlots"),
            flags("-h --help", verdict=OURS, why="the engine would print something and end"),
            flags("--pipeline", verdict=OURS, why=ALONE),
            flags("--trust-remote-code", verdict=OURS, why=CODE),
            flags("--adapter-path", "--draft-model", values=[TEXT], verdict=OURS, why=CODE),
            flags("--allowed-origins", values=[TEXT], verdict=REFUSED, why=CORS),
        ),
        argparse=True,
    ),
    Environment(
        {
            **COMMON,
            **variables("MLX_METAL_DEBUG MLX_DISABLE_COMPILE MLX_ENABLE_TF32 MLX_METAL_FAST_SYNCH", SWITCH),
            **variables("MLX_BFS_MAX_WIDTH MLX_MAX_OPS_PER_BUFFER MLX_MAX_MB_PER_BUFFER", whole(1, 1_000_000)),
            **variables("TOKENIZERS_PARALLELISM", SWITCH),
            **variables("MLX_HOSTFILE MLX_RANK MLX_MPI_LIBNAME", verdict=OURS, why=ALONE),
            **variables("PYTHONPATH PYTHONHOME PYTHONSTARTUP OPENSSL_CONF", verdict=OURS, why=CODE),
            **variables("HF_HUB_OFFLINE HF_HUB_CACHE TRANSFORMERS_OFFLINE", verdict=OURS, why=MODEL),
        },
        ignored=ELSEWHERE,
    ),
)

VLLM = Vocabulary(
    "vllm-swift",
    Grammar(
        rows(
            flags("--gpu-memory-utilization", values=[SHARE]),
            flags("--seed", values=[whole(-1, LARGEST)]),
            flags(
                "--max-num-batched-tokens",
                "--block-size",
                "--max-logprobs",
                "--max-log-len",
                "--swap-space",
                "--kv-cache-memory-bytes",
                values=[COUNT],
            ),
            flags("--dtype", values=[choice("auto", "half", "float16", "bfloat16", "float", "float32")]),
            flags("--tool-call-parser", "--reasoning-parser", "--uvicorn-log-level", values=[WORD]),
            flags("--generation-config", values=[choice("auto", "vllm")]),
            flags("--chat-template-content-format", values=[choice("auto", "string", "openai")]),
            flags("--default-chat-template-kwargs", "--limit-mm-per-prompt", values=[JSON]),
            flags(
                "--enable-auto-tool-choice",
                "--enable-prefix-caching --no-enable-prefix-caching",
                "--enable-chunked-prefill --no-enable-chunked-prefill",
                "--enforce-eager --no-enforce-eager",
                "--enable-log-requests --no-enable-log-requests",
                "--disable-log-requests",
                "--disable-log-stats",
                "--enable-prompt-tokens-details",
                "--enable-force-include-usage",
                "--return-tokens-as-token-ids",
            ),
            flags("--host", values=[TEXT], verdict=OURS, why=BIND),
            flags("--port", values=[TEXT], verdict=OURS, why=PORT),
            flags("--model", "--model-tag", "--tokenizer", "--hf-config-path", values=[TEXT], verdict=OURS, why=MODEL),
            flags("--served-model-name", values=[TEXT], verdict=OURS, why=NAME),
            flags("--max-model-len", values=[TEXT], verdict=OURS, why="set spec.contextSize"),
            flags("--max-num-seqs", values=[TEXT], verdict=OURS, why="set spec.parallelSlots"),
            flags("--additional-config", values=[TEXT], verdict=OURS, why="set spec.cacheTypeCustomK"),
            flags(
                "--api-key",
                values=[TEXT],
                verdict=OURS,
                why="every user of this Mac can read a flag; set VLLM_API_KEY in spec.env",
            ),
            flags(
                "--uds",
                "--grpc",
                "--root-path",
                "--allowed-origins",
                "--allowed-methods",
                "--allowed-headers",
                "--allowed-local-media-path",
                "--allowed-media-domains",
                values=[TEXT],
                verdict=OURS,
                why=OPEN,
            ),
            flags(
                "--ssl-keyfile",
                "--ssl-certfile",
                "--ssl-ca-certs",
                "--ssl-cert-reqs",
                "--ssl-ciphers",
                values=[TEXT],
                verdict=OURS,
                why=OPEN,
            ),
            flags("--enable-ssl-refresh", "--allow-credentials", verdict=OURS, why=OPEN),
            flags("--headless", "--enable-expert-parallel", verdict=OURS, why=ALONE),
            flags(
                "--api-server-count",
                "--tensor-parallel-size",
                "--pipeline-parallel-size",
                "--data-parallel-size",
                "--nnodes",
                "--node-rank",
                "--master-addr",
                "--master-port",
                "--distributed-executor-backend",
                "--kv-transfer-config",
                values=[TEXT],
                verdict=OURS,
                why=ALONE,
            ),
            flags(
                "--trust-remote-code",
                "--trust-request-chat-template",
                "--enable-lora",
                "--enable-prompt-embeds",
                "--enable-mm-embeds",
                verdict=OURS,
                why=CODE,
            ),
            flags(
                "--config",
                "--middleware",
                "--logits-processors",
                "--tool-server",
                "--tool-parser-plugin",
                "--worker-cls",
                "--download-dir",
                "--lora-modules",
                "--model-loader-extra-config",
                "--hf-overrides",
                "--compilation-config",
                "--speculative-config",
                "--chat-template",
                values=[TEXT],
                verdict=OURS,
                why=CODE,
            ),
            flags("--enable-longctx", verdict=OURS, why=AWAY),
            flags(
                "--retrieval-endpoint",
                "--otlp-traces-endpoint",
                "--kv-events-config",
                values=[TEXT],
                verdict=OURS,
                why=AWAY,
            ),
        ),
        folds=True,
        argparse=True,
    ),
    Environment(
        {
            **COMMON,
            **variables("VLLM_API_KEY"),
            **variables("VLLM_LOGGING_LEVEL", choice("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")),
            **variables("TOKENIZERS_PARALLELISM MLX_METAL_DEBUG", SWITCH),
            **variables("PYTHONPATH PYTHONHOME PYTHONSTARTUP OPENSSL_CONF VLLM_PLUGINS", verdict=OURS, why=CODE),
            **variables("HF_HUB_OFFLINE HF_HUB_CACHE TRANSFORMERS_OFFLINE", verdict=OURS, why=MODEL),
        },
        ignored=ELSEWHERE,
    ),
)
