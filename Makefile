# Sets up the environment on first use, then calls `builder` or a program of this repository; `make` alone lists the targets.
# `builder --help` lists all commands, with more options.
BUILDER := .venv/bin/builder

.DEFAULT_GOAL := help
.PHONY: $(shell sed -nE 's/^([a-z-]+):.*## .*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

.venv/.ready: locks/uv.txt locks/builder.txt pyproject.toml builder/bootstrap.sh
	@sh builder/bootstrap.sh

images: .venv/.ready ## build, test and tag the default images (CELLS='pt-*' for others)
	@$(BUILDER) images $(CELLS) --start-engine

engine: .venv/.ready ## find a Docker Engine, or install and start one
	@$(BUILDER) engine

lock: .venv/.ready ## choose the exact wheels and Debian packages of every cell (queries the index and Debian's archives)
	@$(BUILDER) lock $(CELLS)

plan: .venv/.ready ## what would be built
	@$(BUILDER) plan $(CELLS)

render: .venv/.ready ## write images/ from templates/ and locks/
	@$(BUILDER) render

refresh: .venv/.ready ## lock today's Debian packages of the default images, then build, test and stage what changed (CELLS=all: of all)
	@$(BUILDER) refresh $(CELLS) --start-engine

stage: .venv/.ready ## push what passed its tests to staging, by digest, with the test results
	@$(BUILDER) stage $(CELLS)

test-staged: .venv/.ready ## run the tests that staged images lack, such as GPU tests, and attach the results (STAMP=20261122)
	@$(BUILDER) test $(CELLS) --staged $(or $(STAMP),newest) --start-engine

release: .venv/.ready ## publish a staged release whose images are all tested: sign them, set the tags (STAMP=20261122)
	@$(BUILDER) release $(STAMP)

status: .venv/.ready ## the state of each cell: locked, built, tested, staged, released
	@$(BUILDER) status $(CELLS)

verify: .venv/.ready ## check who signed an image, and its plan (IMAGE=registry.example.com/org/pt-cuda:2.9)
	@$(BUILDER) verify $(or $(IMAGE),$(error IMAGE is not set))

check: lint unit ## lint, types and unit tests: no engine, no network

test: check local integration ## what a contributor runs: lint, unit, local and integration tests; the last need an engine

test-all: test nightly ## also the tests that run each night: other engines and registries, the workflows

ci: test demo ## what CI runs for every change: all tests of the project, then the demo

lint: .venv/.ready ## ruff, mypy, hadolint, shellcheck, workflow checks, rendered files up to date
	@.venv/bin/python tests/lint.py

# Keeps what each failed test printed, after the terminal is gone.
PYTEST = .venv/bin/pytest --junit-xml .builder/tests/$@.xml

unit: .venv/.ready ## unit tests: no engine, no network
	@$(PYTEST) -q -n auto tests/unit

local: .venv/.ready ## tests with programs and servers of this machine: no engine
	@$(PYTEST) -q -n auto tests/local

PARALLEL := -n 4 --dist loadfile --no-loadscope-reorder --durations 15
NIGHTLY := tests/integration/nightly

integration: engine ## integration tests: the real engine, tiny wheels
	@$(PYTEST) $(PARALLEL) --ignore $(NIGHTLY) tests/integration

nightly: engine ## further integration tests (FILES=test_podman.py): other engines and registries, the workflows
	@$(PYTEST) $(PARALLEL) $(addprefix $(NIGHTLY)/,$(FILES)) $(if $(FILES),,$(NIGHTLY))

browser: engine ## Jupyter and TensorBoard in a real Chromium, with the newest Jupyter image of PyTorch
	@$(PYTEST) tests/browser

arm64: engine ## a tiny image for arm64, made on this machine by emulation: takes minutes
	@$(PYTEST) tests/emulation

packages: engine ## install what people add into the images on this machine, check it, write docs/packages.md (PACKAGES='cupy-cuda12x')
	@.venv/bin/python -m tools.packages --cells '$(CELLS)' --packages '$(PACKAGES)'

demo: engine ## two tiny images through the whole pipeline, to a release and a roll-back, in under two minutes
	@.venv/bin/python -m tests.demo

bench: engine ## cold builds to a registry by both methods, wheel to layer, no-op, per-step times
	@.venv/bin/python -m benchmarks.build
