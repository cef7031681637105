# Everything a person or CI does here. `make` alone lists it.

PYTHON ?= python3
JOBS ?= 2
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
# Of the packages, what no process of ours imports: a third of their code. It would be compiled when it is first imported.
UNUSED := /(tests|alembic|distlib|joblib|mypy|mypyc|narwhals|sklearn|sqlalchemy|virtualenv|ray/(air|autoscaler|data|llm|rllib|serve|train|tune))/

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes

# A pin file that pip wrote must not depend on who wrote it, so `make pins` ignores the machine's own pip settings.
COMPILE := env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL -u PIP_INDEX_URL PIP_CONFIG_FILE=/dev/null \
	$(BIN)/pip-compile --quiet --generate-hashes --extra dev --strip-extras --allow-unsafe --no-header \
	--no-emit-index-url --no-emit-find-links --no-emit-trusted-host --output-file requirements.txt pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help setup try compare test suite slow lint types check bench pins clean

help: ## list what can be made
	@echo 'Usage: make TARGET [PYTHON=python3] [JOBS=2] [ARGS="..."]'
	@echo
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv with the pinned packages and this project in it

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Cannot set up with $(PYTHON): it is older than Python 3.11. Name a newer one: make setup PYTHON=...' >&2; exit 1; }
	@echo 'Setting up $(VENV): about a hundred packages, 1.5 GB with JAX and Ray. This takes some minutes, once.'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	# pip uses one core, so two of them begin, with half of the packages each. The third one adds pip itself, and checks all.
	@for half in 0 1; do \
		awk -v half=$$half '/^[^ ]/ {mine = !/^(pip|setuptools)==/ && n++ % 2 == half} mine' requirements.txt >$(VENV)/half-$$half; \
		$(PIP) --no-deps --requirement $(VENV)/half-$$half & \
	done; wait
	$(PIP) --requirement requirements.txt
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	# Where Python is told to write no bytecode, every process would compile our files again.
	$(BIN)/python -m compileall -q harness reports simulators tests traces tuners
	# In JOBS processes; pip has one. Some package has files of another Python, or that later ones warn of.
	@PYTHONWARNINGS=ignore $(BIN)/python -m compileall -qq -j $(JOBS) -x '$(UNUSED)' $(VENV)/lib || true
	@touch $@

try: setup ## a first answer: five tuners, three seeds, a few seconds of computing
	$(BIN)/harness compare --quick --resume $(ARGS)
	@echo 'So that your shell finds harness, pytest and `import harness`: source $(VENV)/bin/activate'

compare: setup ## score every tuner on the default scenario; ARGS goes to `harness compare`
	$(BIN)/harness compare --tuners all $(ARGS)

test: setup ## every check, and every test but those that take long
	@$(MAKE) --no-print-directory --jobs 2 check suite

check: lint types

# With one process more than JOBS, because tests of live jobs wait for real time. mypy runs beside them.
# To rewrite assertions so that they show values takes each process half of its time to begin. Only tests that have failed
# need it: these run again, and have failed nevertheless.
suite: setup
	@$(BIN)/python -m pytest -n $$(($(JOBS) + 1)) --dist worksteal --assert plain --durations 30 --durations-min 2 --quick-code -q $(ARGS) || \
		{ echo 'The same again for tests that failed, one after another, with the values of assertions:'; \
		$(BIN)/python -m pytest -n 0 --last-failed --last-failed-no-failures none --quick-code -q; exit 1; }

# Beside other work, a test of 12 s has taken more than the two minutes that `make test` allows.
slow: setup ## tests that take long: whole simulations of what tuners and papers claim
	$(BIN)/python -m pytest -m 'slow or thorough' --timeout 600 --hypothesis-profile thorough -n $(JOBS) --dist worksteal -q $(ARGS)

lint: setup ## style: ruff check and ruff format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## mypy, strict
	$(BIN)/mypy

bench: setup ## speed against the table of reaches, and tuners in simulated seconds against a reference; fails on a miss
	$(BIN)/python -m pytest tests/bench -m benchmark --benchmark-enable --benchmark-storage=tests/bench/reference \
		--benchmark-compare --benchmark-compare-fail=median:5% $(ARGS)

pins: setup ## resolve requirements.txt afresh from pyproject.toml (ARGS=--upgrade for the newest)
	$(COMPILE) $(ARGS)

clean: ## remove the environment and everything that can be made again; results stay
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
