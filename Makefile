# `make tune` finds the fastest configuration of MODEL on this machine; `make test` runs the tests.
MODEL  ?= gpt2-tiny
ARGS   ?=
PYTHON ?= python3
VENV   ?= .venv

BIN   := $(VENV)/bin
# What decides whether the installation is current: the dependencies, not the sources (the install is editable).
STAMP := $(VENV)/.installed

.PHONY: tune test test-slow bench docs setup clean

tune: $(STAMP)
	$(BIN)/redline tune $(MODEL) $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(ARGS)

# The site in build/site; a broken link ends it.
docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[docs]"
	$(BIN)/python -m mkdocs build --strict

setup: $(STAMP)

$(STAMP): setup.cfg pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "redline needs Python 3.11 or later")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch>=2.11,<2.14"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test,dashboard,hebo]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps HEBO==0.3.6
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info
