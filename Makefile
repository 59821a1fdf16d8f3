# make demo     install into .venv, then train, and evaluate before and after, on a CPU
# make demo-video-qa  the same on questions about generated videos
# make test     install, then everything: formatting, lint, types, import arrows, all tests
# make check    the same without the slow tests; what to run before a commit
# make install  only install
#
# Needs Python 3.11 or newer (with venv), git and make; no system package beyond these.
# On the command line: PYTHON, VENV, EXTRA (cpu or gpu), SEED, RANKS and OVERRIDES, as in make demo SEED=3 OVERRIDES='steps=5'

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo demo-video-qa test check static clean

find_python = for name in python3.11 python3.12 python3.13 python3; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$name; break; }; done
PYTHON ?= $(shell $(find_python))
VENV ?= .venv
SEED ?= 0
RANKS ?= 2
EXTRA ?= cpu

BIN := $(VENV)/bin
SHIM := tools/torchvision-cpu-shim
STAMP := $(VENV)/.installed-$(EXTRA)

help:
	@sed -n 's/^# \(make .*\)/\1/p' $(firstword $(MAKEFILE_LIST))

install: $(STAMP)

# Written last, so that an interrupted install is taken up again; newer pins make it stale.
$(STAMP): pyproject.toml constraints/$(EXTRA).txt $(wildcard $(SHIM)/*.*)
	@test -n "$(PYTHON)" || { echo "Rollplex needs Python 3.11 or newer; none found. Name one: make PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "$(PYTHON) cannot make a virtual environment; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV): some minutes and 4 GB the first time"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check \
		--constraint constraints/$(EXTRA).txt --editable '.[$(EXTRA),sim,dev]' ./$(SHIM)
	@$(BIN)/python -m pip check
	@touch $@

# Begins afresh each time: a run refuses a folder that holds another run's checkpoints.
demo: install
	rm -rf runs/demo
	$(BIN)/python -m torch.distributed.run --standalone --nproc_per_node $(RANKS) \
		run.py train configs/demo.yaml run_dir=runs/demo seed=$(SEED) $(OVERRIDES)

demo-video-qa: install
	rm -rf runs/demo_video_qa
	$(BIN)/python run.py train configs/demo_video_qa.yaml run_dir=runs/demo_video_qa seed=$(SEED) $(OVERRIDES)

test: static
	$(BIN)/pytest

check: static
	$(BIN)/pytest -m 'not slow and not gpu and not multigpu'

static: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
