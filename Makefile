# All tasks of developers and CI; `make help` lists them. A fresh machine needs only Python >= 3.11 and pip.
#
#   PYTHON=python3.12       another interpreter for the virtual environment
#   PIP_EXTRA_INDEX_URL=…   additional package index; on x86-64 Linux, PyTorch's index of CPU builds saves gigabytes
#   TESTS="tests/k8s -k x"  arguments for pytest
#   JOBS=0                  number of test processes; 0 runs the tests in pytest's own process, for `-s` and debuggers

PYTHON ?= python3
TESTS ?=
JOBS ?= 3

BIN := .venv/bin
# The exit status of pytest when no test was selected.
NO_TESTS := 5
INSTALLED := .venv/.installed
TRITON := .venv/triton
TORCHVISION := .venv/torchvision
# Folders and files with tests of families that need torchvision.
TORCHVISION_TESTS := tests/test_tiny_models.py tests/parity tests/lookonce/families tests/lookonce/model \
	tests/lookonce/local tests/e2e/test_torchvision_families.py tests/decoder_svc/runner/cuda/test_families.py \
	tests/decoder_svc/runner/cuda/test_recurrent_families.py \
	tests/decoder_svc/runner/cpu/test_quantized_folders.py tests/decoder_svc/runner/cpu/test_quantized_models.py \
	tests/decoder_svc/test_adapters.py
AXE := .venv/axe-core
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar off --constraint constraints/cpu.txt
WHEEL := $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist
ARM_CXX := aarch64-linux-gnu-g++
PROTOS := $(wildcard protos/lookonce/*/*/*.proto)
RELEASED_CONTRACT := protos/released.binpb

# No test, benchmark or demo may download a model.
export HF_HUB_OFFLINE := 1
export PYTHONUNBUFFERED := 1
# Python keeps the modules that it compiles, as it does by default; git ignores them. The tests start hundreds of processes.
# Where each compiles the repository's modules again, the start of a service takes 4.6 instead of 4.1 s of CPU
# (2 × AMD EPYC, 2026-11-23).
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test parity image-test check format lint types imports contract rules release-contract bench bench-gpu bench-peer wheels docs docs-site screenshots families clean
.DELETE_ON_ERROR:

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

venv: $(INSTALLED) ## create the virtual environment .venv with everything installed

demo: $(INSTALLED) ## start all services, draw three pictures, ask six questions
	@$(BIN)/python -m demo.run

test: $(INSTALLED) ## all tests, and at the end why some were skipped
	@$(BIN)/python -m pytest -m "not image and not torchvision" -rfEs --numprocesses $(JOBS) --dist loadfile \
		--no-loadscope-reorder $(TESTS)
	@PYTHONPATH=$(CURDIR)/$(TORCHVISION) $(BIN)/python -m pytest -m torchvision -rfEs --numprocesses $(JOBS) \
		--dist loadfile --no-loadscope-reorder $(or $(TESTS),$(TORCHVISION_TESTS)) || test $$? = $(NO_TESTS)

parity: $(INSTALLED) ## tests of answers and kernels, once at each level of kernels that this processor has
	@$(BIN)/python -m tests.at_each_level -rfEs --numprocesses $(JOBS) --dist loadfile

image-test: $(INSTALLED) ## build and run both images with buildah, as root, from LOOKONCE_IMAGE_BASE
	@$(BIN)/python -m pytest -m image -rs tests/k8s/test_image_build.py

check: lint types imports contract rules ## check format, lint, types, imports, the gRPC contract, layout and prose; changes nothing

format: $(INSTALLED) ## format the code and the gRPC contract
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix
	@$(BIN)/buf format --write

lint: $(INSTALLED)
	@$(BIN)/ruff format --check
	@$(BIN)/ruff check

types: $(INSTALLED)
	@$(BIN)/mypy
	@$(BIN)/mypy -p docs -p benchmarks -p observability
	@$(BIN)/mypy examples/python/ask.py

imports: $(INSTALLED)
	@$(BIN)/lint-imports --no-logo

# The tests of the repository's own rules take seconds, so they do not wait for `make test`.
rules: $(INSTALLED)
	@$(BIN)/python -m pytest -q -p no:cacheprovider tests/test_rooms.py tests/test_prose.py tests/contract/test_contract_changes.py

contract: $(INSTALLED)
	@$(BIN)/buf lint
	@$(BIN)/buf format --diff --exit-code
	@$(BIN)/buf breaking --against $(RELEASED_CONTRACT)

release-contract: $(INSTALLED) ## at a release: keep its gRPC contract, which `make check` protects from then on
	@$(BIN)/buf breaking --against $(RELEASED_CONTRACT)
	@$(BIN)/buf build --exclude-source-info --output $(RELEASED_CONTRACT)

bench: $(INSTALLED) ## run the short benchmarks and rewrite benchmarks/RESULTS.md
	@$(BIN)/python -m benchmarks.scheduler_cost
	@$(BIN)/python -m benchmarks.host_step
	@$(BIN)/python -m benchmarks.encode_once
	@$(BIN)/python -m benchmarks.hit_cost --pictures 10
	@$(BIN)/python -m benchmarks.rows_moved
	@$(BIN)/python -m benchmarks.fetch_speed --rounds 5
	@$(BIN)/python -m benchmarks.frozen_redis --rounds 5 --pictures 10
	@$(BIN)/python -m benchmarks.overlap --images 4 --rounds 5
	@$(BIN)/python -m benchmarks.image_light --rounds 5 --requests 10
	@$(BIN)/python -m benchmarks.plot

bench-peer: $(INSTALLED) ## run the benchmarks against vLLM (LOOKONCE_PEER_PYTHON names its interpreter); takes long
	@$(BIN)/python -m benchmarks.prefix_reuse
	@$(BIN)/python -m benchmarks.two_replicas
	@$(BIN)/python -m benchmarks.startup
	@$(BIN)/python -m benchmarks.decode_speed
	@$(BIN)/python -m benchmarks.encode_speed
	@$(BIN)/python -m benchmarks.plot

bench-gpu: $(INSTALLED) ## check correctness and measure speed on a GPU
	@$(BIN)/python -m benchmarks.gpu

wheels: $(INSTALLED) ## build wheels with compiled CPU kernels into dist/; for Arm, too, with a cross compiler
	@LOOKONCE_NATIVE_WHEEL=$(shell uname -m) $(WHEEL) .
	@if command -v $(ARM_CXX) >/dev/null; then \
		CXX=$(ARM_CXX) LOOKONCE_NATIVE_WHEEL=aarch64 $(WHEEL) .; fi
	@ls dist

docs: $(INSTALLED) ## rewrite the generated parts of documentation and dashboards
	@$(BIN)/python docs/generate_settings.py
	@$(BIN)/python -m docs.generate_metrics
	@$(BIN)/python -m docs.generate_gateway
	@$(BIN)/python -m docs.generate_commands
	@$(BIN)/python -m docs.generate_contract
	@$(BIN)/python -m observability.generate_dashboards

docs-site: $(INSTALLED) ## build the documentation as a site in build/site, for reading without a network
	@$(BIN)/python -m docs.build_site

screenshots: $(INSTALLED) ## photograph the playground for the README; needs chromium and chromium-driver
	@$(BIN)/python -m docs.screenshots

families: $(INSTALLED) ## run the conformance suite of all families and write its table into docs/models.md
	@HF_HUB_OFFLINE=1 $(BIN)/python -m docs.generate_families

clean: ## remove all installed and generated files
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf lookonce/common lookonce/encoder lookonce/decoder gen
	rm -rf examples/*/gen examples/*/dist examples/*/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch is installed first and alone, so that no package with a version range fetches another build of it. Triton is
# installed where only the tests of kernels look (the extra `gpu-test` says why), and torchvision and timm where only the
# tests of models that need them do (tests/torchvision_families.py says why). axe-core, which checks that the
# playground is accessible, is no Python package: npm has it.
$(INSTALLED): pyproject.toml constraints/cpu.txt hatch_build.py $(PROTOS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is no Python >= 3.11; say make PYTHON=…" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing PyTorch into .venv; this may take a few minutes …"
	@$(PIP) "$$(grep '^torch==' constraints/cpu.txt)"
	@echo "Installing Lookonce and its tools …"
	@$(PIP) --editable ".[serve,gateway,heic,dev]"
	@test "$$(uname -s)" != Linux || { rm -rf $(TRITON) \
		&& $(PIP) --no-deps --target $(TRITON) "$$(grep '^triton==' constraints/cpu.txt)"; }
	@rm -rf $(TORCHVISION) && $(PIP) --no-deps --target $(TORCHVISION) "$$(grep '^torchvision==' constraints/cpu.txt)" \
		"$$(grep '^timm==' constraints/cpu.txt)"
	@rm -rf $(AXE) && mkdir $(AXE) && if command -v npm >/dev/null; then \
		npm pack --silent --pack-destination $(AXE) axe-core@4.14.1 >/dev/null \
			&& tar -xzf $(AXE)/axe-core-4.14.1.tgz -C $(AXE) package/axe.min.js \
			|| echo "axe-core could not be fetched; the test with it is skipped" >&2; fi
	@touch $@
