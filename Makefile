# Two commands are enough: `make serve` and `make test`. Everything they need is set up on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
MODEL  ?=
EXTRAS ?= dev
SECONDS_TO_SOAK ?= 600

.PHONY: setup serve chat test check soak bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Outrider needs Python 3.11 or newer; this is `$(PYTHON) --version`. Try: make setup PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing Outrider and its dependencies into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	@touch $@

serve: $(STAMP)
	$(BIN)/outrider serve $(MODEL)

chat: $(STAMP)
	$(BIN)/outrider chat $(MODEL)

check: $(STAMP)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

test: $(STAMP) check
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

soak: $(STAMP)
	OUTRIDER_SOAK_SECONDS=$(SECONDS_TO_SOAK) $(BIN)/python -m pytest -m soak --timeout=0 -s tests

bench: $(STAMP)
	$(BIN)/python -m benchmarks.decode
	$(BIN)/outrider bench $(MODEL)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
