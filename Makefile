# A fresh machine needs Python 3.11, 3.12 or 3.13 and nothing else:
#
#   make quickstart   makes .venv, installs, trains the first model
#   make test         the same, with what the tests need, and runs them
#
# Something is installed only where pyproject.toml has changed. `make PYTHON=/path/to/python3.12 ...` chooses the Python
# of a new .venv; `make test ARGS="-k packing"` and `make quickstart ARGS="seed=1"` hand words on.

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# Test processes. Most of their time goes into compiling, one core each; every one of them takes up to 3 GB.
WORKERS ?= 2

# 3.11 first: it is what the checks run on and what the numbers in this repository were measured with. A name is taken
# only if it starts, is one of the three versions, and can make a virtual environment.
CANDIDATES := python3.11 python3.12 python3.13 python3 python
VERSIONS := 3.11, 3.12 or 3.13
FITS := import sys; (3, 11) <= sys.version_info[:2] <= (3, 13) or sys.exit( \
	"tunix needs Python $(VERSIONS); %s is Python %d.%d" % ((sys.executable,) + sys.version_info[:2]))
SUITABLE := $(FITS); import ensurepip, venv
PYTHON ?= $(shell for name in $(CANDIDATES); do $$name -c '$(SUITABLE)' >/dev/null 2>&1 && echo $$name && break; done)
# What each candidate is, for those of whom none will do.
SEEN = for name in $(CANDIDATES); do command -v $$name >/dev/null && \
	echo "  $$name is $$($$name --version 2>&1 || echo not runnable)"; done
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help quickstart test test-models test-slow test-newest test-worlds lint format house docs notebooks peers device-wheels

help:
	@echo "make quickstart   install and train the first model (minutes)"
	@echo "make test         install what the tests need and run them"
	@echo "make test-models  families of models, adapters, several devices, programs, parity with other libraries, the examples (minutes)"
	@echo "make test-slow    the tests that take minutes or gigabytes"
	@echo "make test-newest  kernels, programs and tiny runs with the newest Python here, jax and tokamax (minutes)"
	@echo "make test-worlds  environments, tools and judges of other packages, each installed beside ours (WORLDS=\"trl\" for some)"
	@echo "make lint         ruff and pyright; make format lets ruff mend what it can"
	@echo "make house        how much of the package a reader has to hold, in numbers"
	@echo "make docs         the pages as a site in build/site; a warning is an error"
	@echo "make notebooks    executes the notebooks and stores what they show (half an hour); ARGS=\"01 03\" for some of them"
	@echo "make peers        the libraries that benchmarks/peers measures beside ours, in environments of their own"
	@echo "make device-wheels  what python -m benchmarks.device needs beside JAX, to take along to a device"

quickstart: $(VENV)/installed
	$(BIN)/tunix run recipes/quickstart.yaml $(ARGS)

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -m "not slow and not models" -n $(WORKERS) --dist worksteal $(ARGS)

test-models: $(VENV)/installed-test
	$(BIN)/python -m pytest -m "models and not slow" -n $(WORKERS) --dist worksteal $(ARGS)

# With the compiler at its best: these run long enough to be worth it (tests/conftest.py turns it down for the others).
test-slow: $(VENV)/installed-test
	XLA_FLAGS= $(BIN)/python -m pytest -m slow -n $(WORKERS) --dist worksteal $(ARGS)

# With what users of the newest Python get, which may be another jax and tokamax than those of $(VENV): kernels, stored
# numbers, a run of each algorithm, and programs for an H100 and a v5p. Tests that need torch are not among them.
NEWEST := .newest
NEWEST_CANDIDATES := python3.13 python3.12 $(foreach minor,13 12,$(wildcard $(HOME)/.pyenv/versions/3.$(minor).*/bin/python3))
NEWEST_PYTHON ?= $(shell for name in $(NEWEST_CANDIDATES); do $$name -c '$(SUITABLE)' >/dev/null 2>&1 && echo $$name && break; done)
NEWEST_TESTS := tests/test_newest.py tests/models/attention tests/models/test_grouped_products.py \
	tests/models/test_expert_gates.py
MINOR = import sys; print(sys.version_info[1])
# Of every Python: "jax (0.12.0.1)" comes first.
NEWEST_JAX = $(BIN)/python -m pip index versions jax --ignore-requires-python --disable-pip-version-check 2>/dev/null | head -1

test-newest: | $(BIN)/pip
	@here=$$($(BIN)/python -c '$(MINOR)'); there=$$(test -z "$(NEWEST_PYTHON)" || $(NEWEST_PYTHON) -c '$(MINOR)'); \
	if [ "$${there:-0}" -gt "$$here" ]; then $(MAKE) --no-print-directory newest-environment && \
		$(NEWEST)/bin/python -m pytest -m "newest or not slow" -n $(WORKERS) --dist worksteal $(ARGS) $(NEWEST_TESTS); \
	else $(MAKE) --no-print-directory $(VENV)/installed; \
		jax=$$($(BIN)/python -c 'import jax; print(jax.__version__)'); newest="$$($(NEWEST_JAX))"; \
		echo "make test-newest: no Python here is newer than that of $(VENV) (3.$$here), which has jax $$jax; the newest is $$newest"; \
		test "$$newest" = "jax ($$jax)"; \
	fi

.PHONY: newest-environment
newest-environment: $(NEWEST)/installed

$(NEWEST)/installed: pyproject.toml
	@echo "Installing tunix, the newest jax and the plan's compilers into $(NEWEST) (about 2 GB; minutes) ..."
	@$(NEWEST_PYTHON) -m venv --clear $(NEWEST)
	@$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[plan-gpu,plan-tpu]" \
		pytest pytest-xdist beartype
	@touch $@

# Each package of an extra in an environment of its own, which sees what $(VENV) has; offline once they are installed.
WORLDS ?= reasoning-gym textarena gymnasium trl verifiers openenv mcp openai mini-swe-agent tinker lm-eval inspect
WORLD_FOLDERS := .worlds
# Its recipes run against the Tinker door. It asks for a tml-renderers that only some indexes have, and which only
# models need that are not trained here.
COOKBOOK := tinker-cookbook==0.6.1 tml-renderers
COOKBOOK_NEEDS := aiohttp blobfile chz pylatexenc pyrage termcolor tiktoken

test-worlds: $(WORLDS:%=$(WORLD_FOLDERS)/%/installed)
	@for name in $(WORLDS); do \
		$(WORLD_FOLDERS)/$$name/bin/python -m pytest -m worlds $(ARGS) tests/worlds/test_$$(echo $$name | tr - _).py || exit 1; \
	done

$(WORLD_FOLDERS)/%/installed: pyproject.toml | $(VENV)/installed-test
	@echo "Installing the extra $* into $(WORLD_FOLDERS)/$* ..."
	@$(BIN)/python -m venv --clear $(WORLD_FOLDERS)/$*
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		$$($(WORLD_FOLDERS)/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth
	@$(WORLD_FOLDERS)/$*/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$*]" \
		$(if $(filter tinker,$*),$(COOKBOOK_NEEDS))
	@$(if $(filter tinker,$*),$(WORLD_FOLDERS)/$*/bin/python -m pip install --quiet --no-deps $(COOKBOOK))
	@touch $@

# pyright would ask the network for a newer version of itself.
lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# How much of the package a reader has to hold; ARGS=once, lonely, bundled or banned lists the places.
house: $(VENV)/installed-test
	$(BIN)/python -m tests.house $(ARGS)

# Read from the sources: nothing of tunix is imported, and nothing is fetched. The variable silences an advertisement.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/site/index.html"

notebooks: $(VENV)/installed-test
	$(BIN)/python -m notebooks.execute $(ARGS)

# Beside ours in `python -m benchmarks.peers`; several GB. vLLM's builds of torchvision and the like do not fit a torch
# for CPUs, and text needs none of them.
PEERS := .peers
PEER_PIP = $(PEERS)/$(@F:installed-%=%)/bin/python -m pip install --quiet --disable-pip-version-check

peers: $(PEERS)/installed-tunix $(PEERS)/installed-trl $(PEERS)/installed-vllm

$(PEERS)/installed-tunix $(PEERS)/installed-trl $(PEERS)/installed-vllm: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv $(PEERS)/$(@F:installed-%=%)
	$(PEER_PIP) $$(grep '^$(@F:installed-%=%):' $< | cut -d: -f2)
	test $(@F) != installed-vllm || $(PEERS)/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# What `python -m benchmarks.device` needs beside Python 3.12 and JAX, as wheels that install without a network
# (docs/devices/README.md). What JAX brings is left out; the rest has to stay below 64 MiB.
WHEELS := build/device-wheels
DEVICE_JAX ?= 0.11.2
DEVICE_PYTHON ?= 3.12
DEVICE_TOKAMAX ?= 0.0.17
PLATFORMS := manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_24_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64
FROM_JAX := jax jaxlib ml_dtypes numpy opt_einsum scipy
WEIGH := import pathlib, sys; size = sum(x.stat().st_size for x in pathlib.Path("$(WHEELS)").glob("*.whl")) / 2**20; \
	print(f"$(WHEELS): {size:.1f} MiB"); sys.exit("error: 64 MiB is the most that may be taken along" if size > 64 else 0)

DOWNLOAD = $(BIN)/python -m pip download --quiet --disable-pip-version-check --dest $(WHEELS) --only-binary=:all: \
	--python-version $(DEVICE_PYTHON) --implementation cp $(PLATFORMS:%=--platform %)

device-wheels: | $(BIN)/pip
	rm -rf $(WHEELS)
	$(DOWNLOAD) jax==$(DEVICE_JAX) --requirement benchmarks/device/requirements.txt
	$(DOWNLOAD) --no-deps tokamax==$(DEVICE_TOKAMAX)
	rm -f $(FROM_JAX:%=$(WHEELS)/%-*.whl)
	@$(BIN)/python -c '$(WEIGH)'

# pip arrives last, so that a .venv that was cut short is made again; one that could not be made is not left behind.
$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "tunix needs Python $(VERSIONS) with its venv module, and none was found (tried: $(CANDIDATES)). Install one, on Debian and Ubuntu with 'apt install python3 python3-venv', or name it: make PYTHON=/path/to/python3.11" >&2; $(SEEN) >&2; exit 2; }
	@$(PYTHON) -c '$(FITS)' || exit 2
	@$(PYTHON) -c '$(SUITABLE)' 2>/dev/null || { echo "$(PYTHON) cannot make a virtual environment: it lacks the module venv or ensurepip. Install it, on Debian and Ubuntu with 'apt install python3-venv', or name another: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@test -e $(VENV) || cleaning=yes; echo "$(PYTHON) -m venv $(VENV)"; $(PYTHON) -m venv $(VENV) || { test -z "$$cleaning" || rm -rf $(VENV); exit 2; }

# Another's .venv may hold any Python, and that of a .venv may have been taken away since.
SOUND = @$(BIN)/python -c '$(FITS)' || { echo "$(VENV) cannot be used. Remove it and call make again, which makes another: rm -r $(VENV)" >&2; exit 2; }

$(VENV)/installed: pyproject.toml | $(BIN)/pip
	$(SOUND)
	@echo "Installing tunix into $(VENV) (about 1.5 GB; a minute or two) ..."
	@$(PIP) --editable .
	@touch $@

$(VENV)/installed-test: pyproject.toml | $(BIN)/pip
	$(SOUND)
	@echo "Installing tunix and what its tests need into $(VENV) (torch is the largest part; some minutes) ..."
	@$(PIP) --editable ".[test]"
	@touch $@ $(VENV)/installed

$(VENV)/installed-dev: pyproject.toml | $(BIN)/pip
	$(SOUND)
	@echo "Installing tunix and the developers' tools into $(VENV) ..."
	@$(PIP) --editable ".[test,dev]"
	@touch $@ $(VENV)/installed $(VENV)/installed-test

$(VENV)/installed-docs: pyproject.toml | $(BIN)/pip
	$(SOUND)
	@echo "Installing tunix and what builds its site into $(VENV) ..."
	@$(PIP) --editable ".[docs]"
	@touch $@ $(VENV)/installed
