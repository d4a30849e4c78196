# `make demo` and `make test` need nothing but a Python >= 3.10: they make .venv and install into it.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= test
PYTEST_ARGS ?=
DEMO_ARGS ?=
# Two tests at a time: most use one core, or wait for ranks to start.
PARALLEL ?= --numprocesses=2
PUBLISH ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help venv demo test test-all test-rest test-slow test-nightly test-releases test-oldest test-newest test-cuda-rehearsal \
    test-kernels \
    test-frameworks conformance models checkouts verdicts runs report release-check mutation lint format bench gpu gpu-wheels docs \
    docs-version pages changelog screenshots clean

help:
	@echo "make TARGET            what it does                                             time on two cores"
	@sed -n 's/^#: /  /p' $(firstword $(MAKEFILE_LIST))
	@echo "variables: PYTHON=$(PYTHON) VENV=$(VENV) EXTRAS=$(EXTRAS) PYTEST_ARGS=$(PYTEST_ARGS) DEMO_ARGS=$(DEMO_ARGS)"

#: venv                 the environment .venv, with this tree and all tools      minutes: downloads torch
venv: $(INSTALLED)-$(EXTRAS)

#: demo                 train on real Megatron-core, without and with patches    less than a minute
demo: $(INSTALLED)-none
	$(BIN)/megatron-rl-patches demo $(DEMO_ARGS)

# What to run before every commit: a few minutes. After a failure: make test PYTEST_ARGS=--lf
#: test                 before every commit: lint, and tests that are not slow   a few minutes
test: lint
	$(BIN)/python -m pytest $(PARALLEL) --dist=loadfile $(PYTEST_ARGS)

# Everything that needs neither a GPU nor checkouts of frameworks: 25 to 50 minutes on two cores.
#: test-all             what CI runs: test, and test-rest                        25 to 50 minutes
test-all:
	$(MAKE) test
	$(MAKE) --keep-going test-rest

#: test-rest            test-slow, test-oldest, test-newest, docs                part of test-all
test-rest: test-slow test-oldest test-newest docs

#: test-slow            slow tests                                               part of test-all
test-slow: venv
	$(BIN)/python -m pytest -m "slow and not nightly" $(PARALLEL) --dist=worksteal $(PYTEST_ARGS)

#: test-nightly         slow tests that CI leaves out                            every night
test-nightly: venv
	$(BIN)/python -m pytest -m nightly $(PARALLEL) --dist=worksteal $(PYTEST_ARGS)

# Re-entry, inference-only models and losses on other releases of megatron-core, unpacked from their wheels: the
# oldest and the newest.
OLDEST_CORE := 0.14.0
NEWEST_CORE := 0.19.2
RELEASE_TESTS := models release reentry training_warnings expert_norm finite_step router_replay inference_builder \
    inference_checkpoint scoring scoring_policy loss_func lean_head transformer_engine optimizer_step self_ratio
ON_RELEASE = -m pytest $(PARALLEL) --dist=worksteal $(PYTEST_ARGS) $(RELEASE_TESTS:%=tests/real/test_%.py) --megatron-core
RELEASES ?= $(OLDEST_CORE) $(NEWEST_CORE)
#: test-releases        real models on the oldest and the newest megatron-core   minutes
test-releases: venv
	set -e; for release in $(RELEASES); do $(BIN)/python $(ON_RELEASE) $$release -m "not nightly"; done

# Every model on every layout takes seven minutes for each release, and is recorded every night. Megatron-LM's main takes
# the same command with --megatron-core FOLDER in an environment of Python 3.12; that is recorded when somebody runs it.
#: models               every model on every layout, on three releases           about 40 minutes
models: venv
	set -e; for release in $(OLDEST_CORE) 0.16.1 $(NEWEST_CORE); do for layers in local transformer_engine; do \
	    $(BIN)/python -m pytest -m "" $(PARALLEL) --dist=worksteal --megatron-core $$release --layers $$layers \
	        --record-models tests/real/models.json tests/real/test_models.py $(PYTEST_ARGS); done; \
	    $(BIN)/python -m pytest -m "" --megatron-core $$release \
	        --record-stand-in tests/real/stand_in.json tests/real/test_transformer_engine.py $(PYTEST_ARGS); done

# The oldest of everything that is allowed, and the newest of everything, in environments of their own. Their torch is
# built with CUDA, as on an ordinary Linux machine, which needs no GPU: about 3 GB to download and 5 GB on disk, each.
# What does not depend on megatron-core runs on the usual release. Left out is what none of these packages can change,
# and which `make test` runs: how sites are found, judged and named in files, how settings are read, startup files,
# interrupts of our own code, arithmetic on sizes and positions, texts. What has differed stays: losses and what they
# hold, re-entry, checkpoints, adapters of frameworks, and wrappers, as wrapt is an old one, too.
SAME_EVERYWHERE := $(addprefix tests/unit/,common inference/memory losses/test_bad_arguments.py \
    $(patsubst %,engine/test_%.py,announce judge sources third_party threads) \
    $(patsubst %,test_%.py,architecture doctor settings startup_trigger)) \
    $(patsubst %,tests/faults/test_%.py,environment interrupts)
OLDEST := $(VENV)-oldest
#: test-oldest          the oldest of everything that is supported               part of test-all; 3 GB
test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python $(ON_RELEASE) $(OLDEST_CORE)
	$(OLDEST)/bin/python -m pytest $(PARALLEL) --dist=loadfile $(PYTEST_ARGS) \
	    $(SAME_EVERYWHERE:%=--ignore=%) tests/faults \
	    $(addprefix tests/unit/,engine patches reentry inference losses frameworks test_every_patch.py)

# The newest also rehearses the losses for a GPU; all else of the rehearsal takes longer, and runs every night. The newest
# packages of all kinds are here, so that the command line, of typer, stays.
NEWEST := $(VENV)-newest
#: test-newest          the newest of everything                                 part of test-all; 3 GB
test-newest: $(NEWEST)/.installed
	mkdir -p $(RECORDS)
	$(NEWEST)/bin/python -m pip freeze --exclude-editable > $(RECORDS)/newest.txt
	$(NEWEST)/bin/python $(ON_RELEASE) $(NEWEST_CORE)
	$(NEWEST)/bin/python -m pytest $(PARALLEL) --dist=loadfile --junitxml=$(RECORDS)/newest.xml $(PYTEST_ARGS) \
	    $(SAME_EVERYWHERE:%=--ignore=%) tests/unit \
	    tests/lab/rehearsal/test_rehearsal.py::test_a_gpu_would_run_the_losses
	$(NEWEST)/bin/megatron-rl-patches demo --rollouts=2 --ranks=1

# What losses and models would ask of a GPU, on fake tensors of the oldest and of the newest torch, every night. It needs
# a C compiler, and no GPU.
#: test-cuda-rehearsal  what a GPU would be asked for, on fake tensors           minutes
test-cuda-rehearsal: $(OLDEST)/.installed $(NEWEST)/.installed
	for bin in $(OLDEST)/bin $(NEWEST)/bin; do $$bin/python -m pytest $(PYTEST_ARGS) tests/lab/rehearsal || exit 1; done

# What the compiler makes of the functions that read logits, for three GPUs: registers, instructions, and digits in
# triton's interpreter, every night. It needs a C compiler, and no GPU.
KERNELS := $(VENV)-kernels
#: test-kernels         kernels for GPUs that are not here                       four minutes; 3 GB
test-kernels: $(KERNELS)/.installed $(NEWEST)/.installed
	for bin in $(KERNELS)/bin $(NEWEST)/bin; do \
	    $$bin/python -m pytest -m "" $(PARALLEL) --dist=worksteal $(PYTEST_ARGS) tests/lab/kernels || exit 1; done

# Plugins that pytest loads wherever they are installed, as in environments of users.
BESIDE_newest := anyio pytest-asyncio pytest-cov
$(VENV)-%/.installed: constraints/%.txt pyproject.toml setup.cfg
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --quiet --constraint $< --editable ".[test]" $(BESIDE_$*)
	@touch $@

# Checkouts of real frameworks: make test-frameworks SLIME_DIR=... VIME_DIR=... MILES_DIR=... MEGATRON_LM_DIR=... VERL_DIR=...
export SLIME_DIR VIME_DIR MILES_DIR MEGATRON_LM_DIR VERL_DIR FRAMEWORK_REPOSITORIES
#: test-frameworks      checkouts of frameworks: SLIME_DIR=... and others        minutes
test-frameworks: venv
	$(BIN)/python -m pytest -m frameworks tests/frameworks $(PYTEST_ARGS)

# Megatron-LM's own unit tests on CPU ranks, without and with patches: make conformance MEGATRON_LM_DIR=...
# CONFORMANCE_ARGS="--ranks 1,2 --select tests/unit_tests/models": see tests/lab/conformance/README.md.
CONFORMANCE_ARGS ?=
#: conformance          Megatron-LM's own unit tests: MEGATRON_LM_DIR=...        more than an hour
conformance: venv
	$(BIN)/python -m tests.lab.conformance $(CONFORMANCE_ARGS) $(MEGATRON_LM_DIR)

# main of each framework, every night: fetched, judged, run for real. The last two write docs/compatibility.md anew.
CHECKOUTS ?= checkouts
#: checkouts            fetch main of every framework                            minutes
checkouts: venv
	$(BIN)/python -m tests.frameworks.mains fetch $(CHECKOUTS)

#: verdicts             check the patches on these checkouts                     minutes
verdicts: venv
	$(BIN)/python -m tests.frameworks.mains judge $(CHECKOUTS)

#: runs                 run them for real                                        minutes
runs: venv
	$(BIN)/python -m tests.frameworks.mains run $(CHECKOUTS) $(PYTEST_ARGS)

# A pull request with the records in $(RECORDS), unless one is open: then its branch is renewed. It needs git and gh, and
# nothing is installed for it. Nothing else is taken from there, because code of frameworks has run beside it.
RECORDS ?= records
FILES := docs/compatibility.md tests/frameworks/runs.json tests/frameworks/verdicts.json
BOT := user.name='github-actions[bot]' -c user.email='41898282+github-actions[bot]@users.noreply.github.com'
#: report               a pull request with the records of the night (CI)        seconds
report:
	for file in $(FILES); do cp $(RECORDS)/$$file $$file; done
	git diff --quiet -- $(FILES) || { \
	    git switch --quiet --force-create nightly-records && \
	    git -c $(BOT) commit --quiet --message="Verdicts and runs of the frameworks' main" -- $(FILES) && \
	    gh auth setup-git && git push --quiet --force origin nightly-records && \
	    { gh pr list --head=nightly-records --json=number | grep -q number || gh pr create --fill; }; }

# How much of engine, reentry and frameworks may break before a unit test sees it: [tool.mutmut] in pyproject.toml.
#: mutation             how many faults the unit tests see                       hours
mutation: $(INSTALLED)-mutation venv
	$(BIN)/mutmut run --max-children 2
	$(BIN)/mutmut results

# Before a release: sdist and wheel in dist/, and everything that is tested about them (docs/development/releasing.md).
#: release-check        sdist and wheel, and all tests of them                   minutes
release-check: venv
	$(BIN)/python -m tests.packaging.publishable
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m pytest -m "" $(PARALLEL) --dist=loadfile --artifacts=dist tests/packaging $(PYTEST_ARGS)

#: lint                 ruff and mypy                                            a minute
lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

#: format               correct what ruff can correct                            seconds
format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# BENCH_ARGS="head topk" runs some of them, BENCH_ARGS=--quick all at small sizes, writing nothing.
#: bench                all benchmarks; some: BENCH_ARGS="head topk"             tens of minutes
bench: venv
	$(BIN)/python -m benchmarks.run $(BENCH_ARGS)

# On a machine with a GPU and without a network, whose Python 3.12 has torch 2.11: the card, the output layer, the
# losses and the tests in under ten minutes; the rest with GPU_ARGS=--second. `make gpu DRY=1` does the same at a small
# size on the CPU. GPU_ARGS="--folder FOLDER --only STEP"
GPU_VENV ?= $(VENV)-gpu
GPU_WHEELS ?= gpu-wheels
#: gpu                  benchmarks and tests on a GPU; DRY=1: on the CPU          10 minutes; DRY=1: 2
gpu: $(GPU_VENV)/.installed
	$(GPU_VENV)/bin/python -m benchmarks.gpu $(if $(DRY),--dry) $(GPU_ARGS)

# The wheels that it needs besides torch, about 25 MB, for Linux on x86-64; to be brought along. torch would come
# as a dependency of megatron-core, which is therefore downloaded alone, as Liger is. Its CuTe kernel needs
# nvidia-cutlass-dsl, which is four times as large as all of these wheels.
GPU_DOWNLOAD = $(PYTHON) -m pip download --quiet --dest $(GPU_WHEELS) --only-binary=:all: --python-version=3.12 \
    $(addprefix --platform=manylinux,$(addsuffix _x86_64,_2_28 _2_27 _2_26 _2_24 _2_17 2014 2010 1))
#: gpu-wheels           what `make gpu` needs without a network, 25 MB           a minute
gpu-wheels:
	$(GPU_DOWNLOAD) --requirement benchmarks/gpu-requirements.txt
	$(GPU_DOWNLOAD) --no-deps --constraint constraints/cpu.txt megatron-core liger-kernel==0.8.5

# machine.pth: if PYTHON is that of a virtual environment, its torch is not among the system's packages.
$(GPU_VENV)/.installed: pyproject.toml setup.cfg benchmarks/gpu-requirements.txt
	mkdir -p $(GPU_WHEELS)
	$(PYTHON) -m venv --clear --without-pip --system-site-packages $(GPU_VENV)
	$(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	    "$$($(GPU_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/machine.pth"
	$(GPU_VENV)/bin/python -m pip install --quiet --no-index --find-links=$(GPU_WHEELS) \
	    --requirement benchmarks/gpu-requirements.txt megatron-core
	for wheel in $(GPU_WHEELS)/liger_kernel-*.whl; do \
	    test ! -e $$wheel || $(GPU_VENV)/bin/python -m pip install --quiet --no-index --no-deps $$wheel || exit 1; done
	$(GPU_VENV)/bin/python -m pip install --quiet --no-index --no-deps --no-build-isolation --editable .
	@touch $@

# What the next release has: changelog.d, as CHANGELOG.md will have it. RELEASE=1 writes it there.
#: changelog            what the next release has; RELEASE=1 writes it           seconds
changelog: $(INSTALLED)-docs
	$(BIN)/towncrier build $(if $(RELEASE),--yes,--draft) --version $(VERSION)

# Writes what stands on pages by the code and the records: options, tables, log lines, messages, compatibility.
#: pages                write the parts of pages that code and records say      seconds
pages: venv
	$(BIN)/python docs/options.py
	$(BIN)/python docs/written.py
	$(BIN)/python -m tests.frameworks.verdicts

#: docs                 build the site; PUBLISH=1 refuses what is not to be      10 seconds
docs: $(INSTALLED)-docs
	$(BIN)/mkdocs build --strict

# Adds the site of this version to the branch gh-pages, with a menu of versions; push that branch to publish it.
# Needs a clone with all branches. What stands there already: mike list
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' megatron_rl_patches/__init__.py)
DOCS_VERSION = $(shell sed -n 's/^__version__ = "\([0-9]*\.[0-9]*\).*/\1/p' megatron_rl_patches/__init__.py)
#: docs-version         commit the site of this version to gh-pages              a minute
docs-version: $(INSTALLED)-docs
	PATH="$(abspath $(BIN)):$$PATH" mike deploy --update-aliases $(DOCS_VERSION) latest
	PATH="$(abspath $(BIN)):$$PATH" mike set-default latest

# Draws what docs/images has of the command line, of the estimate and of benchmarks, whose records it reads.
#: screenshots          draw the pictures of the pages                           a minute
screenshots: venv
	$(BIN)/python docs/screenshots.py
	$(BIN)/python -m docs.plots

#: clean                remove environments, caches and builds                   seconds
clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) $(RECORDS) $(CHECKOUTS) $(GPU_VENV) $(GPU_WHEELS) build dist site mutants *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# One stamp per set of extras, "none" for the package alone; all of them live in the same environment.
$(INSTALLED)-%: pyproject.toml setup.cfg constraints/cpu.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints/cpu.txt --editable "$(patsubst .[none],.,.[$*])"
	@touch $@

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: set PYTHON")'
	$(PYTHON) -m venv $(VENV)
