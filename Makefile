# Two commands are enough: `make serve` and `make test`. Everything they need is set up on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP     = $(BIN)/python -m pip install --quiet --disable-pip-version-check
MODEL  ?=
EXTRAS ?= dev
SECONDS_TO_SOAK ?= 600
CODE   := src tests benchmarks recipes deploy docs .ci/wheel
AGENTS ?= .agents
RECORD ?=

# Exact versions with hashes, for every supported Python on Linux and macOS. The lock is complete, so pip resolves no
# dependencies (its older versions take newer releases for `package[extra]` than the lock allows, and fail).
# `make setup LOCK=` installs the newest versions within the bounds of pyproject.toml instead.
LOCK   ?= requirements.lock
UV      = uv>=0.13,<0.14
UPGRADE ?=
BEYOND  ?=

# Tools that look at the dependencies, in an environment of their own: they must not change the versions under test.
TOOLS   := .venv-tools
CYCLONEDX = cyclonedx-bom>=7.5,<8
PIP_AUDIT = pip-audit>=2.10.1,<3
PIPX    = pipx>=1.18,<2
SBOM    ?= sbom.cdx.json

.PHONY: setup serve chat test test-agents check docs pictures test-wheel soak bench bench-gate lock newest sbom audit clean

setup: $(STAMP)

$(STAMP): pyproject.toml $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Outrider needs Python 3.11 or newer; this is `$(PYTHON) --version`. Try: make setup PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(LOCK),)
	@echo "Installing Outrider and the newest dependencies within its bounds into $(VENV), without a lock ..."
	@$(PIP) --editable '.[$(EXTRAS)]'
else
	@echo "Installing Outrider and the dependencies in $(LOCK) into $(VENV) ..."
	@$(PIP) --no-deps --require-hashes --requirement $(LOCK) || \
	  { echo "$(LOCK) cannot be installed here. To install without exact versions and hashes: make setup LOCK="; exit 1; }
	@$(PIP) --no-deps --no-build-isolation --editable .
ifneq ($(EXTRAS),dev)
	@echo "The lock covers EXTRAS=dev. Other packages of $(EXTRAS) are installed within the bounds of pyproject.toml."
	@$(PIP) --no-build-isolation --editable '.[$(EXTRAS)]'
endif
endif
	@touch $@

serve: $(STAMP)
	$(BIN)/outrider serve $(MODEL)

chat: $(STAMP)
	$(BIN)/outrider chat $(MODEL)

check: $(STAMP)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy --num-workers 2
	$(BIN)/mkdocs build --strict --quiet

# Python stores compiled files: otherwise each of the hundred processes that tests start would compile the package
# again.
test: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP) check
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The docs as a site, in site/.
docs: $(STAMP)
	$(BIN)/mkdocs build --strict

# The pictures of the page in the docs, made by its tests with the default model. Needs Chromium or Chrome.
pictures: $(STAMP)
	OUTRIDER_PICTURES=docs/pictures $(BIN)/python -m pytest tests/browser/test_first_minutes.py
	$(BIN)/python -m tests.browser.page_files docs/pictures

# The wheel, installed by uv and by pipx into an empty home. Needs the network.
test-wheel: $(STAMP) $(TOOLS)/.installed
	.ci/wheel $(BIN)/python $(TOOLS)

# The real coding agents, headless, against a server with a scripted model. They are installed into $(AGENTS), at the
# versions in tests/agents/tools; what cannot be installed is skipped. RECORD=1 makes fixtures of their requests.
test-agents: $(STAMP)
	.ci/agents $(AGENTS)
	AGENT_TOOLS=$(abspath $(AGENTS)) RECORD_AGENTS=$(RECORD) $(BIN)/python -m pytest -n 2 -rs tests/agents

soak: $(STAMP)
	OUTRIDER_SOAK_SECONDS=$(SECONDS_TO_SOAK) $(BIN)/python -m pytest -m soak --timeout=0 -s tests

bench: $(STAMP)
	$(BIN)/python -m benchmarks.decode
	$(BIN)/outrider bench $(MODEL)

# Red if a change has made rows slower: ratios with lower bounds, some two minutes on two idle cores.
bench-gate: $(STAMP)
	$(BIN)/python -m benchmarks.gate

# After a change of the dependencies in pyproject.toml. `make lock UPGRADE=--upgrade` takes all newer versions.
lock: $(STAMP)
	$(PIP) '$(UV)'
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --extra dev --generate-hashes $(UPGRADE) \
	  --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
	  --output-file requirements.lock pyproject.toml

# The tests with the newest versions within the bounds, in an environment of their own. BEYOND=1: without upper bounds.
newest:
	.ci/newest $(if $(BEYOND),--beyond)

# The packages of requirements.lock with versions and hashes, as a CycloneDX document.
sbom: $(TOOLS)/.installed
	$(TOOLS)/bin/cyclonedx-py requirements requirements.lock --pyproject pyproject.toml --output-reproducible \
	  --output-file $(SBOM)

# Known vulnerabilities of the packages in requirements.lock; needs the network.
audit: $(TOOLS)/.installed
	.ci/audit $(TOOLS)

$(TOOLS)/.installed: Makefile
	@$(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check '$(CYCLONEDX)' '$(PIP_AUDIT)' '$(UV)' '$(PIPX)'
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-newest $(TOOLS) $(AGENTS) .pytest_cache .mypy_cache .ruff_cache .hypothesis site
