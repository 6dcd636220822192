# Thin calls of the `builder` program; `make` alone lists them. Everything is set up on first use.
BUILDER := .venv/bin/builder
CELLS ?=
MAX_DISK ?= free
GPU ?= auto
PRUNE_CACHE ?=
JUNIT ?=
SINCE ?= HEAD
STAGED ?=
DELETE ?=

.DEFAULT_GOAL := help
.PHONY: $(shell sed -nE 's/^([a-z-]+):.*## .*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 26

.venv/.ready: locks/uv.txt locks/builder.txt pyproject.toml builder/bootstrap.sh
	@sh builder/bootstrap.sh

engine: .venv/.ready ## find a Docker Engine, or install and start one
	@$(BUILDER) engine

images: .venv/.ready ## build, test and tag the default images (CELLS='pt-*' for others; GPU=require: fail if GPU tests cannot run)
	@$(BUILDER) images $(CELLS) --start-engine --gpu $(GPU) $(if $(JUNIT),--junit $(JUNIT))

nightly: .venv/.ready ## build, test and tag every image, with at most MAX_DISK of disk space, e.g. 60GB (default: the free space; PRUNE_CACHE=1: empty the build cache too)
	@$(BUILDER) images all --start-engine --max-disk $(MAX_DISK) $(if $(PRUNE_CACHE),--prune-cache)

check: lint unit ## lint, types and unit tests: no engine, no network

test: check integration ## all tests of the project, including those that need an engine

ci: test demo ## what CI runs for every change: all tests of the project, then the demo

lint: .venv/.ready ## ruff, mypy, hadolint, shellcheck, workflow checks, rendered files up to date
	@.venv/bin/python tests/lint.py

unit: .venv/.ready ## unit tests: no engine, no network
	@.venv/bin/pytest -q -n auto tests/unit

mutations: .venv/.ready ## in a copy of the checkout, remove each check of a release, then change 100 places, one at a time; list the changes after which all unit tests still pass
	@nice .venv/bin/python -m tests.mutations.gates
	@nice .venv/bin/python -m tests.mutations

integration: engine ## integration tests: the real engine, tiny wheels
	@.venv/bin/pytest -n 4 --dist loadfile --no-loadscope-reorder --durations 15 tests/integration

facts: .venv/.ready ## check builder/matrix/facts.yaml against the real wheels (queries the index)
	@$(BUILDER) facts

upstream: .venv/.ready ## newer releases of the frameworks, as lines for matrix.yaml (queries the index)
	@$(BUILDER) upstream

lock: .venv/.ready ## choose the exact wheels and Debian packages of every cell (queries the index and Debian's archives)
	@$(BUILDER) lock $(CELLS)

plan: .venv/.ready ## what would be built
	@$(BUILDER) plan $(CELLS)

render: .venv/.ready ## write images/ from templates/ and locks/
	@$(BUILDER) render

build: .venv/.ready ## build without testing or tagging
	@$(BUILDER) build $(CELLS) --start-engine

refresh: .venv/.ready ## lock today's Debian packages of the default images, then build, test and stage what changed (CELLS=all: of all)
	@$(BUILDER) refresh $(CELLS) --start-engine --gpu $(GPU)

stage: .venv/.ready ## push what passed its tests to staging, by digest, with the test results
	@$(BUILDER) stage $(CELLS)

stage-images: .venv/.ready ## push images to staging without listing them as a release; afterwards run `make stage` on one machine
	@$(BUILDER) stage $(CELLS) --images-only

test-staged: .venv/.ready ## run the tests that staged images lack, such as GPU tests, and attach the results (STAMP=20261122)
	@$(BUILDER) test $(CELLS) --staged $(or $(STAMP),newest) --start-engine --gpu $(GPU) $(if $(JUNIT),--junit $(JUNIT))

release: .venv/.ready ## publish a staged release whose images are all tested: sign them, set the tags (STAMP=20261122)
	@$(BUILDER) release $(STAMP)

status: .venv/.ready ## the state of each cell: locked, built, tested, staged, released
	@$(BUILDER) status $(CELLS)

roll-back: .venv/.ready ## move the tags back to an earlier release, after the same checks (STAMP=20261122)
	@$(BUILDER) release $(or $(STAMP),$(error STAMP is not set)) --roll-back

verify: .venv/.ready ## check the signature and contents of an image (IMAGE=registry.example.com/org/pt-cuda:2.9)
	@$(BUILDER) verify $(or $(IMAGE),$(error IMAGE is not set))

registry-list: .venv/.ready ## the staged releases, and tags that are not in the matrix or not published
	@$(BUILDER) registry ls
	@$(BUILDER) registry diff

registry-check: .venv/.ready ## hash every blob in the registry, with what is attached to images
	@$(BUILDER) registry check

prune: .venv/.ready ## list what is no longer needed in staging (DELETE=1: delete it)
	@$(BUILDER) registry prune $(if $(DELETE),--delete)

scan: .venv/.ready ## scan the released images for vulnerabilities, with the scanner of matrix.yaml
	@$(BUILDER) scan $(CELLS)

summary: .venv/.ready ## sizes, test results, test times and GPU state of the images on this machine, as Markdown (STAGED=1: of those in staging)
	@printf '```\n' && $(BUILDER) plan $(CELLS) && echo && $(BUILDER) status $(if $(STAGED),,--here) $(CELLS) && printf '```\n'

changes: .venv/.ready ## packages that changed since the revision SINCE, as Markdown
	@printf '```\n' && $(BUILDER) diff "$(SINCE)" && printf '```\n'

# What a workflow of GitHub Actions reads as the outputs of a step.
LIMIT = $(if $(filter released,$(SINCE)),--unreleased,--changed-since "$(SINCE)")
parts: .venv/.ready ## the images that changed (SINCE=REVISION) or are not released yet (SINCE=released), in parts for GitHub Actions
	@parts=$$($(BUILDER) plan all $(LIMIT) --format github) && echo "parts=$$parts"
	@cells=$$($(BUILDER) plan all $(LIMIT) --format ids) && echo "cells=$$(echo $$cells)"

stage-release: .venv/.ready ## like `stage`, but print the stamp for GitHub Actions
	@$(BUILDER) stage $(CELLS) --format github

update-debian: .venv/.ready ## lock current Debian packages of all images, and render
	@$(BUILDER) lock --os 2>&1
	@$(BUILDER) render 2>&1

update-wheels: .venv/.ready ## lock current wheels of all images, and render; list newer releases of the frameworks
	@$(BUILDER) lock --upgrade 2>&1
	@$(BUILDER) render 2>&1
	@echo
	-@$(BUILDER) upstream 2>&1 # a failure must not lose the new locks

push: .venv/.ready ## publish what passed its tests here to the registry of matrix.yaml, without staging
	@$(BUILDER) push $(CELLS)

retest: .venv/.ready ## run the image tests again on what is built
	@$(BUILDER) test $(CELLS) --start-engine --gpu $(GPU)

doctor: .venv/.ready ## what this machine has and what it lacks
	@$(BUILDER) doctor

demo: engine ## two tiny images through the whole pipeline, to a release and a roll-back, in under two minutes
	@.venv/bin/python -m tests.demo

registry: .venv/.ready ## a registry on the loopback (Debian's docker-registry), to try staging and releases: 127.0.0.1:5000
	@.venv/bin/python -m tests.demo registry

browser: engine ## Jupyter and TensorBoard in a real Chromium, with the newest Jupyter image of PyTorch
	@.venv/bin/pytest tests/browser

bench: engine ## cold builds to a registry by both methods, wheel to layer, no-op, per-step times
	@.venv/bin/python -m benchmarks.build

bench-frameworks: engine ## PyTorch, TensorFlow and JAX inside their images: start, memory, a training step
	@.venv/bin/python -m benchmarks.frameworks

clean: .venv/.ready ## remove this checkout's untagged images, containers, logs
	@$(BUILDER) clean
