# Thin calls of the `builder` program; `make` alone lists them. Everything is set up on first use.
BUILDER := .venv/bin/builder
CELLS ?=
MAX_DISK ?= 60GB
GPU ?= auto

.DEFAULT_GOAL := help
.PHONY: help images nightly test lint unit integration browser facts lock plan render build rebase push check doctor engine bench clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 22

.venv/.ready: locks/uv.txt locks/builder.txt pyproject.toml builder/bootstrap.sh
	@sh builder/bootstrap.sh

engine: .venv/.ready ## find a Docker Engine, or install and start one
	@$(BUILDER) engine

images: engine ## build, test and tag the default images (CELLS='pt-*' for others; GPU=require: not without GPU tests)
	@$(BUILDER) images $(CELLS) --gpu $(GPU)

nightly: engine ## build, test and tag every image within MAX_DISK of disk (default 60GB)
	@$(BUILDER) images all --max-disk $(MAX_DISK)

test: lint unit integration ## all tests of the project: lint, unit, integration

lint: .venv/.ready ## ruff, mypy, hadolint, shellcheck, workflow checks, rendered files up to date
	@.venv/bin/python tests/lint.py

unit: .venv/.ready ## unit tests: no engine, no network
	@.venv/bin/pytest -q tests/unit

integration: engine ## integration tests: the real engine, tiny wheels
	@.venv/bin/pytest tests/integration

facts: .venv/.ready ## check builder/facts.yaml against the real wheels (asks the index)
	@$(BUILDER) facts

lock: .venv/.ready ## resolve every cell to exact wheels (asks the index)
	@$(BUILDER) lock $(CELLS)

plan: .venv/.ready ## what would be built
	@$(BUILDER) plan $(CELLS)

render: .venv/.ready ## write images/ from templates/ and locks/
	@$(BUILDER) render

build: engine ## build without testing or tagging
	@$(BUILDER) build $(CELLS)

rebase: engine ## the same images on today's Debian packages
	@$(BUILDER) rebase $(CELLS)

push: .venv/.ready ## publish what passed its tests to the registry of matrix.yaml
	@$(BUILDER) push $(CELLS)

check: engine ## run the image tests again on what is built
	@$(BUILDER) test $(CELLS) --gpu $(GPU)

doctor: .venv/.ready ## what this machine has and what it lacks
	@$(BUILDER) doctor

browser: engine ## Jupyter and TensorBoard in a real Chromium, with the newest Jupyter image of PyTorch
	@.venv/bin/pytest tests/browser

bench: engine ## cold builds to a registry by both methods, wheel to layer, no-op, per-step times
	@.venv/bin/python tests/bench.py

clean: .venv/.ready ## remove this checkout's untagged images, containers, logs
	@$(BUILDER) clean
