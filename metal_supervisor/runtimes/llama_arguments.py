"""Every flag of llama-server, as of b11434, with what a manifest may make of it; and the variables it may set.

Its parser is plain: `_` counts as `-` in what begins with `--`, a value is always the next argument, and nothing is
abbreviated. A flag that a newer release brings is refused until it has a row here; a test compares this table with the
help of the build at hand.
"""

from __future__ import annotations

from metal_supervisor.spec.arguments import (
    TEXT,
    FlagVerdict,
    Grammar,
    Paths,
    ValueCheck,
    choice,
    decimal,
    flags,
    rows,
    whole,
)
from metal_supervisor.spec.environment import COMMON, ELSEWHERE, SWITCH, Environment, Vocabulary, variables

OURS = FlagVerdict.OURS
REFUSED = FlagVerdict.REFUSED
PATH = FlagVerdict.PATH
IGNORED = FlagVerdict.IGNORED
LARGEST = (1 << 31) - 1
COUNT = whole(-1, LARGEST)
ANY_WHOLE = whole(-LARGEST, LARGEST)
REAL = decimal(-1e9, 1e9)
SHARE = decimal(-1, 1)
THREADS = whole(-1, 1024)
BIT = choice("0", "1")
ON_OFF = choice("on", "off", "0", "1", "true", "false", "enabled", "disabled")
ON_OFF_AUTO = choice("on", "off", "auto", "0", "1", "-1", "true", "false", "enabled", "disabled")
MASK = ValueCheck("a hexadecimal mask", r"(0[xX])?[0-9a-fA-F]{1,256}")
RANGE = ValueCheck("a range such as 0-3", r"[0-9]{0,5}-[0-9]{0,5}")
JSON = ValueCheck("a JSON object", r"(?s:\s*\{.*\}\s*)")
NUMBERS = ValueCheck("numbers separated by commas", r"[0-9.]{1,20}([,/][0-9.]{1,20}){0,127}")
DEVICE = r"(?i:(metal|mtl|cpu|blas|vulkan)[0-9]{0,3})"
DEVICES = ValueCheck("devices of this Mac separated by commas, or none", rf"none|{DEVICE}(,{DEVICE}){{0,15}}")
BUFFER = r"(CPU|BLAS|Metal|MTL|Vulkan)[0-9]{0,3}(_[A-Za-z0-9]{1,20}){0,3}"
"""Buffer types of this Mac: the name of another, `RPC[HOST:PORT]`, makes the engine connect to it."""
OVERRIDE = rf"[^,=]{{1,500}}={BUFFER}"
OVERRIDES = ValueCheck("PATTERN=BUFFER, with a buffer of this Mac such as CPU", rf"{OVERRIDE}(,{OVERRIDE}){{0,127}}")
_METADATA = r"[A-Za-z0-9_.-]{1,127}=(int:-?[0-9]{1,18}|float:-?[0-9.eE+-]{1,30}|bool:(true|false)|str:[^,]{0,127})"
METADATA = ValueCheck("KEY=TYPE:VALUE, with int, float, bool or str", rf"{_METADATA}(,{_METADATA}){{0,63}}")
CACHE_TYPE = ValueCheck("a type such as f16 or q8_0", r"[a-z0-9_]{1,20}")
"""Forks have types of their own, and each build lists what it knows."""
KINDS = r"[a-z0-9-]{1,30}"
WORDS = ValueCheck("words separated by commas", rf"{KINDS}(,{KINDS}){{0,15}}")
BIAS = ValueCheck("TOKEN+BIAS or TOKEN-BIAS", r"[0-9]{1,9}[+-]([0-9.]{1,20}|inf)")

MODEL = "the model comes from spec.modelRef"
ONE = "one InferenceService serves one model"
PRINTS = "the engine would print something and end"
SECRET = "every user of this Mac can read a flag"
PLAIN = "the health check and the Service speak plain HTTP"
COMMANDS = "engines may listen on all interfaces, and these run commands"
FETCHES = "the engine would fetch it by itself, and its size is not known before"
PRESET = "a preset brings a model of its own"
READS = "it would read a file of this Mac"
WRITES = "it would write a file of this Mac"
CONNECTS = "it would connect to another machine"
SHOWS = "it would serve the files of a directory to every client"
CORS = "it would let web pages of other hosts use the engine"
GONE = "current builds have no such flag"
LOAD_MODES = choice("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")

GRAMMAR = Grammar(
    rows(
        # Switches.
        flags(
            "--swa-full LLAMA_ARG_SWA_FULL",
            "--perf --no-perf LLAMA_ARG_PERF",
            "-e --escape --no-escape",
            "-kvo --kv-offload -nkvo --no-kv-offload LLAMA_ARG_KV_OFFLOAD",
            "--repack -nr --no-repack LLAMA_ARG_REPACK",
            "--no-host LLAMA_ARG_NO_HOST",
            "--mlock LLAMA_ARG_MLOCK",
            "--mmap --no-mmap LLAMA_ARG_MMAP",
            "-dio --direct-io -ndio --no-direct-io LLAMA_ARG_DIO",
            "-cmoe --cpu-moe LLAMA_ARG_CPU_MOE",
            "--check-tensors",
            "--op-offload --no-op-offload",
            "--log-disable",
            "-v --verbose --log-verbose",
            "--offline LLAMA_ARG_OFFLINE",
            "--log-prefix --no-log-prefix LLAMA_ARG_LOG_PREFIX",
            "--log-timestamps --no-log-timestamps LLAMA_ARG_LOG_TIMESTAMPS",
            "--log-jsonl --no-log-jsonl LLAMA_ARG_LOG_JSONL",
            "--ignore-eos",
            "-bs --backend-sampling LLAMA_ARG_BACKEND_SAMPLING",
            "--spec-draft-cpu-moe -cmoed --cpu-moe-draft LLAMA_ARG_SPEC_DRAFT_CPU_MOE",
            "--spec-draft-backend-sampling --no-spec-draft-backend-sampling LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING",
            "-kvu --kv-unified -no-kvu --no-kv-unified LLAMA_ARG_KV_UNIFIED",
            "--cache-idle-slots --no-cache-idle-slots LLAMA_ARG_CACHE_IDLE_SLOTS",
            "--context-shift --no-context-shift LLAMA_ARG_CONTEXT_SHIFT",
            "-sp --special",
            "--warmup --no-warmup",
            "--spm-infill",
            "-cb --cont-batching -nocb --no-cont-batching LLAMA_ARG_CONT_BATCHING",
            "--mmproj-auto --no-mmproj --no-mmproj-auto LLAMA_ARG_MMPROJ_AUTO",
            "--mmproj-offload --no-mmproj-offload LLAMA_ARG_MMPROJ_OFFLOAD",
            "--ui --webui --no-ui --no-webui LLAMA_ARG_UI",
            "--cache-prompt --no-cache-prompt LLAMA_ARG_CACHE_PROMPT",
            "--metrics LLAMA_ARG_ENDPOINT_METRICS",
            "--slots --no-slots LLAMA_ARG_ENDPOINT_SLOTS",
            "--jinja --no-jinja LLAMA_ARG_JINJA",
            "--reasoning-preserve --no-reasoning-preserve LLAMA_ARG_REASONING_PRESERVE",
            "--skip-chat-parsing --no-skip-chat-parsing LLAMA_ARG_SKIP_CHAT_PARSING",
            "--prefill-assistant --no-prefill-assistant LLAMA_ARG_PREFILL_ASSISTANT",
            "--lora-init-without-apply",
            "--spec-default",
        ),
        flags("--embedding --embeddings", "--rerank --reranking"),
        # Numbers.
        flags(
            "-t --threads LLAMA_ARG_THREADS",
            "-tb --threads-batch",
            "--spec-draft-threads -td --threads-draft",
            "--spec-draft-threads-batch -tbd --threads-batch-draft",
            "--threads-http LLAMA_ARG_THREADS_HTTP",
            values=[THREADS],
        ),
        flags(
            "-c --ctx-size LLAMA_ARG_CTX_SIZE",
            "-n --predict --n-predict LLAMA_ARG_N_PREDICT",
            "-b --batch-size LLAMA_ARG_BATCH",
            "-ub --ubatch-size LLAMA_ARG_UBATCH",
            "--keep",
            "--yarn-orig-ctx LLAMA_ARG_YARN_ORIG_CTX",
            "-ncmoe --n-cpu-moe LLAMA_ARG_N_CPU_MOE",
            "-ncffn --n-cpu-ffn LLAMA_ARG_N_CPU_FFN",
            "-fitc --fit-ctx LLAMA_ARG_FIT_CTX",
            "--top-k LLAMA_ARG_TOP_K",
            "-lv --verbosity --log-verbosity LLAMA_ARG_LOG_VERBOSITY",
            "--repeat-last-n",
            "--dry-allowed-length",
            "--dry-penalty-last-n",
            "--spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE",
            "--spec-draft-n-max LLAMA_ARG_SPEC_DRAFT_N_MAX",
            "--spec-draft-n-min LLAMA_ARG_SPEC_DRAFT_N_MIN",
            "--spec-ngram-mod-n-min",
            "--spec-ngram-mod-n-max",
            "--spec-ngram-mod-n-match",
            *(
                f"--spec-ngram-{kind}-{name}"
                for kind in ("simple", "map-k", "map-k4v")
                for name in ("size-n", "size-m", "min-hits")
            ),
            "-ctxcp --ctx-checkpoints --swa-checkpoints LLAMA_ARG_CTX_CHECKPOINTS",
            "-cms --checkpoint-min-step LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT",
            "-cram --cache-ram LLAMA_ARG_CACHE_RAM",
            "--kv-unified-per-slot LLAMA_ARG_KV_UNIFIED_PER_SLOT",
            "-np --parallel LLAMA_ARG_N_PARALLEL",
            "--image-min-tokens LLAMA_ARG_IMAGE_MIN_TOKENS",
            "--image-max-tokens LLAMA_ARG_IMAGE_MAX_TOKENS",
            "--mtmd-batch-max-tokens LLAMA_ARG_MTMD_BATCH_MAX_TOKENS",
            "--embd-normalize",
            "-to --timeout LLAMA_ARG_TIMEOUT",
            "--sse-ping-interval LLAMA_ARG_SSE_PING_INTERVAL",
            "--cache-reuse LLAMA_ARG_CACHE_REUSE",
            "--reasoning-budget LLAMA_ARG_THINK_BUDGET",
            "--sleep-idle-seconds",
            "--video-timestamp-interval LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL",
            "--mirostat",
            values=[COUNT],
        ),
        flags("-s --seed", values=[whole(-1, (1 << 32) - 1)]),
        flags("--control-vector-layer-range", values=[ANY_WHOLE, ANY_WHOLE]),
        flags(
            "--prio",
            "--prio-batch",
            "--spec-draft-prio --prio-draft",
            "--spec-draft-prio-batch --prio-batch-draft",
            values=[whole(-1, 3)],
        ),
        flags("--poll", values=[whole(0, 100)]),
        flags(
            "--cpu-strict",
            "--cpu-strict-batch",
            "--poll-batch",
            "--spec-draft-cpu-strict --cpu-strict-draft",
            "--spec-draft-poll --poll-draft",
            "--spec-draft-cpu-strict-batch --cpu-strict-batch-draft",
            "--spec-draft-poll-batch --poll-batch-draft",
            values=[BIT],
        ),
        flags(
            "-C --cpu-mask",
            "-Cb --cpu-mask-batch",
            "--spec-draft-cpu-mask -Cd --cpu-mask-draft",
            "--spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft",
            values=[MASK],
        ),
        flags(
            "-Cr --cpu-range", "-Crb --cpu-range-batch", "--spec-draft-cpu-range -Crd --cpu-range-draft", values=[RANGE]
        ),
        flags(
            "--rope-scale LLAMA_ARG_ROPE_SCALE",
            "--rope-freq-base LLAMA_ARG_ROPE_FREQ_BASE",
            "--rope-freq-scale LLAMA_ARG_ROPE_FREQ_SCALE",
            "--yarn-ext-factor LLAMA_ARG_YARN_EXT_FACTOR",
            "--yarn-attn-factor LLAMA_ARG_YARN_ATTN_FACTOR",
            "--yarn-beta-slow LLAMA_ARG_YARN_BETA_SLOW",
            "--yarn-beta-fast LLAMA_ARG_YARN_BETA_FAST",
            "-dt --defrag-thold LLAMA_ARG_DEFRAG_THOLD",
            "--temp --temperature LLAMA_ARG_TEMPERATURE",
            "--top-p LLAMA_ARG_TOP_P",
            "--min-p LLAMA_ARG_MIN_P",
            "--top-nsigma --top-n-sigma",
            "--xtc-probability",
            "--xtc-threshold",
            "--typical --typical-p",
            "--repeat-penalty LLAMA_ARG_REPEAT_PENALTY",
            "--presence-penalty LLAMA_ARG_PRESENCE_PENALTY",
            "--frequency-penalty LLAMA_ARG_FREQUENCY_PENALTY",
            "--dry-multiplier",
            "--dry-base",
            "--adaptive-target",
            "--adaptive-decay",
            "--dynatemp-range",
            "--dynatemp-exp",
            "--mirostat-lr",
            "--mirostat-ent",
            "--spec-synth-len LLAMA_ARG_SPEC_SYNTH_LEN",
            "--video-fps LLAMA_ARG_VIDEO_FPS",
            values=[REAL],
        ),
        flags(
            "--spec-draft-p-split --draft-p-split LLAMA_ARG_SPEC_DRAFT_P_SPLIT",
            "--spec-draft-p-min --draft-p-min LLAMA_ARG_SPEC_DRAFT_P_MIN",
            "-sps --slot-prompt-similarity",
            values=[SHARE],
        ),
        flags(
            "-ngl --gpu-layers --n-gpu-layers LLAMA_ARG_N_GPU_LAYERS",
            "--spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft LLAMA_ARG_N_GPU_LAYERS_DRAFT",
            values=[whole(-1, LARGEST, "auto", "all")],
        ),
        flags(
            "-fitt --fit-target LLAMA_ARG_FIT_TARGET", "--spec-synth-rates LLAMA_ARG_SPEC_SYNTH_RATES", values=[NUMBERS]
        ),
        # Words.
        flags("-fit --fit LLAMA_ARG_FIT", values=[ON_OFF]),
        flags(
            "-fa --flash-attn LLAMA_ARG_FLASH_ATTN",
            "-rea --reasoning LLAMA_ARG_REASONING",
            "--log-colors LLAMA_ARG_LOG_COLORS",
            "-lzm --lazy-mode LLAMA_ARG_LAZY_MODE",
            values=[ON_OFF_AUTO],
        ),
        flags("--rope-scaling LLAMA_ARG_ROPE_SCALING_TYPE", values=[choice("none", "linear", "yarn")]),
        flags(
            "-ctk --cache-type-k LLAMA_ARG_CACHE_TYPE_K",
            "-ctv --cache-type-v LLAMA_ARG_CACHE_TYPE_V",
            "--spec-draft-type-k -ctkd --cache-type-k-draft LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
            "--spec-draft-type-v -ctvd --cache-type-v-draft LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
            values=[CACHE_TYPE],
        ),
        flags("-lm --load-mode LLAMA_ARG_LOAD_MODE", values=[LOAD_MODES]),
        flags("--pooling LLAMA_ARG_POOLING", values=[choice("none", "mean", "cls", "last", "rank")]),
        flags("--spec-type LLAMA_ARG_SPEC_TYPE", values=[WORDS]),
        flags("--spec-draft-sampling LLAMA_ARG_SPEC_DRAFT_SAMPLING", values=[choice("greedy", "probabilistic")]),
        flags(
            "--reasoning-format LLAMA_ARG_THINK",
            "--reasoning-effort LLAMA_ARG_REASONING_EFFORT",
            values=[ValueCheck("one word", r"[A-Za-z0-9_-]{1,40}")],
        ),
        flags("--samplers", values=[ValueCheck("samplers separated by ;", r"[A-Za-z_;-]{1,400}")]),
        flags("--sampler-seq --sampling-seq", values=[ValueCheck("letters", r"[A-Za-z]{1,64}")]),
        flags("-l --logit-bias", values=[BIAS]),
        flags(
            "-dev --device LLAMA_ARG_DEVICE",
            "--spec-draft-device -devd --device-draft",
            "-mmdev --mmproj-device MTMD_BACKEND_DEVICE",
            values=[DEVICES],
        ),
        flags(
            "-ot --override-tensor LLAMA_ARG_OVERRIDE_TENSOR",
            "--spec-draft-override-tensor -otd --override-tensor-draft",
            values=[OVERRIDES],
        ),
        flags("--override-kv", values=[METADATA]),
        # Texts, which the engine does not take for the name of anything.
        flags(
            "--dry-sequence-breaker",
            "--grammar",
            "-r --reverse-prompt",
            "--tags LLAMA_ARG_TAGS",
            "--reasoning-budget-message LLAMA_ARG_THINK_BUDGET_MESSAGE",
            "--chat-template LLAMA_ARG_CHAT_TEMPLATE",
            values=[TEXT],
        ),
        flags("-j --json-schema", "--chat-template-kwargs LLAMA_ARG_CHAT_TEMPLATE_KWARGS", values=[JSON]),
        # Files, which are judged and fetched as the model's are.
        flags("--lora", "--control-vector", values=[TEXT], verdict=PATH, paths=Paths.LIST),
        flags("--lora-scaled", "--control-vector-scaled", values=[TEXT], verdict=PATH, paths=Paths.SCALED),
        flags(
            "-mm --mmproj LLAMA_ARG_MMPROJ",
            "--spec-draft-model -md --model-draft LLAMA_ARG_SPEC_DRAFT_MODEL",
            values=[TEXT],
            verdict=PATH,
            paths=Paths.ONE,
        ),
        # A Mac has one GPU, and no NUMA.
        flags(
            "--numa LLAMA_ARG_NUMA",
            "-sm --split-mode LLAMA_ARG_SPLIT_MODE",
            "-ts --tensor-split LLAMA_ARG_TENSOR_SPLIT",
            "-mg --main-gpu LLAMA_ARG_MAIN_GPU",
            values=[TEXT],
            verdict=IGNORED,
        ),
        # Set by this Mac.
        flags(
            "--host LLAMA_ARG_HOST",
            values=[TEXT],
            verdict=OURS,
            why="engines listen where this Mac's setting --bind says",
        ),
        flags(
            "--port LLAMA_ARG_PORT",
            values=[TEXT],
            verdict=OURS,
            why="the port is chosen by this Mac; set spec.containerPort to prefer one",
        ),
        flags(
            "--reuse-port LLAMA_ARG_REUSE_PORT", verdict=OURS, why="two servers on one port would answer for each other"
        ),
        flags(
            "-m --model LLAMA_ARG_MODEL",
            "-mu --model-url LLAMA_ARG_MODEL_URL",
            "-hf -hfr --hf-repo LLAMA_ARG_HF_REPO",
            "-hff --hf-file LLAMA_ARG_HF_FILE",
            "-dr --docker-repo LLAMA_ARG_DOCKER_REPO",
            values=[TEXT],
            verdict=OURS,
            why=MODEL,
        ),
        flags(
            "-a --alias LLAMA_ARG_ALIAS", values=[TEXT], verdict=OURS, why="the served name is the InferenceService's"
        ),
        flags(
            "--models-dir LLAMA_ARG_MODELS_DIR",
            "--models-preset LLAMA_ARG_MODELS_PRESET",
            "--models-max LLAMA_ARG_MODELS_MAX",
            values=[TEXT],
            verdict=OURS,
            why=ONE,
        ),
        flags("--models-autoload --no-models-autoload LLAMA_ARG_MODELS_AUTOLOAD", verdict=OURS, why=ONE),
        flags("--api-prefix LLAMA_ARG_API_PREFIX", values=[TEXT], verdict=OURS, why="it would move the health check"),
        flags("--api-key", values=[TEXT], verdict=OURS, why=f"{SECRET}; set LLAMA_API_KEY in spec.env"),
        flags("-hft --hf-token", values=[TEXT], verdict=OURS, why=f"{SECRET}; set HF_TOKEN in spec.env"),
        flags(
            "--ssl-key-file LLAMA_ARG_SSL_KEY_FILE",
            "--ssl-cert-file LLAMA_ARG_SSL_CERT_FILE",
            values=[TEXT],
            verdict=OURS,
            why=PLAIN,
        ),
        flags(
            "-h --help --usage",
            "--version",
            "--list-devices",
            "-cl --cache-list",
            "--completion-bash",
            verdict=OURS,
            why=PRINTS,
        ),
        flags(
            "--embd-gemma-default",
            "--fim-qwen-1.5b-default",
            "--fim-qwen-3b-default",
            "--fim-qwen-7b-default",
            "--fim-qwen-7b-spec",
            "--fim-qwen-14b-spec",
            "--fim-qwen-30b-default",
            "--gpt-oss-20b-default",
            "--gpt-oss-120b-default",
            "--vision-gemma-4b-default",
            "--vision-gemma-12b-default",
            verdict=OURS,
            why=PRESET,
        ),
        # Reach beyond the engine.
        flags("-ag --agent -no-ag --no-agent LLAMA_ARG_AGENT", verdict=REFUSED, why=COMMANDS),
        flags(
            "--tools LLAMA_ARG_TOOLS",
            "--tools-runtime LLAMA_ARG_TOOLS_RUNTIME",
            "--mcp-servers-config LLAMA_ARG_MCP_SERVERS_CONFIG",
            "--mcp-servers-json LLAMA_ARG_MCP_SERVERS_JSON",
            values=[TEXT],
            verdict=REFUSED,
            why=COMMANDS,
        ),
        flags(
            "--ui-mcp-proxy --webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy LLAMA_ARG_UI_MCP_PROXY",
            verdict=REFUSED,
            why="engines may listen on all interfaces, and it would forward requests of any client",
        ),
        flags(
            "-mmu --mmproj-url LLAMA_ARG_MMPROJ_URL",
            "--spec-draft-hf -hfd -hfrd --hf-repo-draft LLAMA_ARG_SPEC_DRAFT_HF_REPO",
            "-hfv -hfrv --hf-repo-v",
            values=[TEXT],
            verdict=REFUSED,
            why=FETCHES,
        ),
        flags("--rpc LLAMA_ARG_RPC", values=[TEXT], verdict=REFUSED, why=CONNECTS),
        flags("--path LLAMA_ARG_STATIC_PATH", "--media-path", values=[TEXT], verdict=REFUSED, why=SHOWS),
        flags("--slot-save-path", values=[TEXT], verdict=REFUSED, why="every client of the engine could write files"),
        flags("-lcd --lookup-cache-dynamic", values=[TEXT], verdict=REFUSED, why=WRITES),
        flags(
            "--log-file LLAMA_ARG_LOG_FILE",
            values=[TEXT],
            verdict=REFUSED,
            why=f"{WRITES}; the engine's log is kept and rotated without it",
        ),
        flags("--log-prompts-dir", values=[TEXT], verdict=REFUSED, why="it would write down each prompt"),
        flags(
            "--video-ffmpeg-dir LLAMA_ARG_VIDEO_FFMPEG_DIR",
            values=[TEXT],
            verdict=REFUSED,
            why="it would run programs of that directory",
        ),
        flags(
            "--api-key-file LLAMA_ARG_API_KEY_FILE",
            values=[TEXT],
            verdict=REFUSED,
            why=f"{READS}; set LLAMA_API_KEY in spec.env",
        ),
        flags(
            "--chat-template-file LLAMA_ARG_CHAT_TEMPLATE_FILE",
            values=[TEXT],
            verdict=REFUSED,
            why=f"{READS}; write the template itself behind --chat-template",
        ),
        flags(
            "--grammar-file", values=[TEXT], verdict=REFUSED, why=f"{READS}; write the grammar itself behind --grammar"
        ),
        flags(
            "-jf --json-schema-file",
            values=[TEXT],
            verdict=REFUSED,
            why=f"{READS}; write the schema itself behind --json-schema",
        ),
        flags(
            "-lcs --lookup-cache-static",
            "--ui-config-file --webui-config-file LLAMA_ARG_UI_CONFIG_FILE",
            "-mv --model-vocoder",
            values=[TEXT],
            verdict=REFUSED,
            why=READS,
        ),
        flags(
            "--ui-config --webui-config LLAMA_ARG_UI_CONFIG",
            values=[TEXT],
            verdict=REFUSED,
            why="it would configure a page that engines do not serve here",
        ),
        flags("--props LLAMA_ARG_ENDPOINT_PROPS", verdict=REFUSED, why="every client could change how it answers"),
        flags(
            "--cors-origins LLAMA_ARG_CORS_ORIGINS",
            "--cors-methods LLAMA_ARG_CORS_METHODS",
            "--cors-headers LLAMA_ARG_CORS_HEADERS",
            values=[TEXT],
            verdict=REFUSED,
            why=CORS,
        ),
        flags("--cors-credentials --no-cors-credentials LLAMA_ARG_CORS_CREDENTIALS", verdict=REFUSED, why=CORS),
        flags(
            "--draft --draft-n --draft-max LLAMA_ARG_DRAFT_MAX",
            "--draft-min --draft-n-min LLAMA_ARG_DRAFT_MIN",
            "--spec-ngram-size-n",
            "--spec-ngram-size-m",
            "--spec-ngram-min-hits",
            values=[TEXT],
            verdict=REFUSED,
            why=GONE,
        ),
    ),
    folds=True,
)

_DEBUG = "it would write what is computed to the log"
ENVIRONMENT = Environment(
    {
        **COMMON,
        **variables("LLAMA_API_KEY"),
        **variables("LLAMA_ARG_EMBEDDINGS LLAMA_ARG_RERANKING", verdict=OURS, why="set spec.mode"),
        **variables(
            "GGML_METAL_NO_RESIDENCY GGML_METAL_NDEBUG GGML_METAL_CONCURRENCY_DISABLE GGML_METAL_FUSION_DISABLE "
            "GGML_METAL_GRAPH_OPTIMIZE_DISABLE GGML_METAL_BF16_DISABLE GGML_METAL_TENSOR_DISABLE "
            "GGML_METAL_TENSOR_ENABLE GGML_METAL_SHARED_BUFFERS_DISABLE GGML_CPU_DISABLE_FUSION GGML_NO_BACKTRACE "
            "LLAMA_GRAPH_REUSE_DISABLE LLAMA_ATTN_ROT_DISABLE",
            SWITCH,
        ),
        **variables("GGML_METAL_RESIDENCY_KEEP_ALIVE_S GGML_OP_OFFLOAD_MIN_BATCH", whole(0, 1_000_000)),
        **variables("GGML_BACKEND_PATH", verdict=REFUSED, why="the engine would load the library that it names"),
        **variables(
            "GGML_METAL_PATH_RESOURCES", verdict=REFUSED, why="the engine would load the shaders that it names"
        ),
        **variables("GGML_METAL_CAPTURE_COMPUTE", verdict=REFUSED, why=WRITES),
        **variables(
            "LLAMA_CACHE HF_HOME HF_HUB_CACHE HUGGINGFACE_HUB_CACHE XDG_CACHE_HOME", verdict=REFUSED, why=WRITES
        ),
        **variables("HF_ENDPOINT HTTP_PROXY HTTPS_PROXY ALL_PROXY", verdict=REFUSED, why=CONNECTS),
        **variables(
            "LLAMA_TRACE LLAMA_BATCH_DEBUG LLAMA_KV_CACHE_DEBUG LLAMA_GRAPH_INPUT_DEBUG LLAMA_GRAPH_RESULT_DEBUG "
            "LLAMA_SERVER_SLOTS_DEBUG GGML_SCHED_DEBUG MTMD_DEBUG_EMBEDDINGS",
            verdict=REFUSED,
            why=_DEBUG,
        ),
    },
    ignored=ELSEWHERE,
)

VOCABULARY = Vocabulary("llama-server", GRAMMAR, ENVIRONMENT)
