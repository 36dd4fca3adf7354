# `make tune` finds the fastest configuration of MODEL on this machine; `make test` runs the tests.
MODEL  ?= gpt2-tiny
ARGS   ?=
PYTHON ?= python3
VENV   ?= .venv
# Tested versions; empty for the newest that setup.cfg admits.
CONSTRAINTS ?= constraints.txt

BIN   := $(VENV)/bin
# What decides whether the installation is current: the dependencies, not the sources (the install is editable).
STAMP := $(VENV)/.installed
TEST_STAMP := $(VENV)/.installed-for-tests
PIP   := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix --constraint=,$(CONSTRAINTS))

.PHONY: tune types test test-gpu test-slow test-exhaustive test-portable docs setup clean

tune: $(STAMP)
	$(BIN)/redline tune $(MODEL) $(ARGS)

# Two workers get half of the tests each, in order; the one that is done first takes over tests of the other.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(TEST_STAMP)
	$(PYTEST) -m "not slow and not exhaustive" $(ARGS)

# Whole commands in terminals and on clusters, and the rest of each matrix, which rarely fail: over an hour on two cores.
test-slow: $(TEST_STAMP)
	$(PYTEST) -m "slow and not exhaustive" $(ARGS)

# What needs a CUDA device. On a machine without Ray and Optuna: python -m pytest -m gpu.
test-gpu: $(TEST_STAMP)
	$(BIN)/python -m pytest -m gpu $(ARGS)

# Every combination of what `make test` and `make test-slow` try some of: hours.
test-exhaustive: $(TEST_STAMP)
	$(BIN)/python -m pytest -m exhaustive $(ARGS)

# The numeric tests as other machines would compute them, with many seeds: every two values of the vector instructions (older,
# AVX2, this processor's), MKL for this processor or for any, and one thread or two occur together. Hours on two cores.
NUMERIC := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -q -p no:cacheprovider -m "numeric and not exhaustive"
test-portable: $(TEST_STAMP)
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(NUMERIC) --seeds 0:15 $(ARGS)
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE $(NUMERIC) --seeds 15:30 --threads 2 $(ARGS)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=COMPATIBLE $(NUMERIC) --seeds 0:15 $(ARGS)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(NUMERIC) --seeds 15:30 --threads 2 $(ARGS)
	$(NUMERIC) --seeds 15:30 $(ARGS)
	MKL_CBWR=COMPATIBLE $(NUMERIC) --seeds 0:15 --threads 2 $(ARGS)

# The site in build/site; a broken link ends it.
docs: $(TEST_STAMP)
	$(BIN)/python -m mkdocs build --strict

setup: $(TEST_STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "redline needs Python 3.11 or later")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable ".[dashboard,service,hebo,data]"
	$(PIP) --no-deps HEBO==0.3.6
	@$(MAKE) --no-print-directory types
	touch $(STAMP)

# Type checkers do not run the import hook of an editable install, and the root is not named as the package. As a package of
# stubs they find it, and Python does not: https://peps.python.org/pep-0561/#stub-only-packages. A link to the root itself
# would contain itself, by way of VENV.
types:
	@stubs="$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/redline-stubs"; \
		rm -rf "$$stubs"; mkdir "$$stubs"; \
		ln -s $(addprefix "$(CURDIR)"/,$(patsubst %/__init__.py,%,$(wildcard */__init__.py)) $(wildcard *.py *.pyi) py.typed) "$$stubs"

# What the tests need besides: frameworks that exports are held against, loggers, a browser's driver, the site's builder.
$(TEST_STAMP): $(STAMP)
	@# DeepSpeed compiles what it needs when it is started.
	DS_BUILD_OPS=0 $(PIP) --editable ".[test,docs,loggers,frameworks]"
	@# In a folder that only tests import from: transformers imports an installed torchao, which takes a second and prints.
	@# CUDA builds of torch bring their own triton, which is found first. Of these trainers only the parsers run, at the
	@# versions of docs/check.md; their own requirements exclude each other.
	$(PIP) --upgrade --no-deps --target $(VENV)/beside "torchao>=0.13" "liger-kernel>=0.8" triton \
		"trl==1.16.*" "llamafactory==0.9.5" "axolotl==0.19.*" "litgpt==0.5.13" omegaconf "antlr4-python3-runtime==4.9.*" addict
	touch $(TEST_STAMP)

clean:
	rm -rf $(VENV) build *.egg-info
