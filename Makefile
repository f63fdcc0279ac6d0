# make demo | test | test-all | lint | format | clean. Each makes the virtual environment first if it is missing or out
# of date.
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
# Inside the environment, so that deleting the environment also forgets that it was complete.
STAMP := $(VENV)/.carpool-installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format docs package install clean

help:
	@echo "make demo    train a small MoE on 4 CPU ranks and write its report (nothing is downloaded for it)"
	@echo "make test    run the tests"
	@echo "make test-all, and one more of each kind that takes long: every architecture, every mesh"
	@echo "make lint    check style, formatting and types"
	@echo "make format  fix style and formatting"
	@echo "make docs    build the guides and the reference into build/site; a warning is an error"
	@echo "make package build the source archive and the wheel into dist/, and check them"
	@echo "make install make the environment, as those above do if it is missing"
	@echo "make clean   delete the environment, caches and builds; runs/ is kept"

# Leaves off half-way and resumes, to show that it can.
demo: $(STAMP)
	rm -rf runs/demo
	$(BIN)/carpool train training.stop_at_step=90
	$(BIN)/carpool train training.resume_from_checkpoint=last --compare alltoall
	OMP_NUM_THREADS=1 $(BIN)/carpool generate runs/demo --prompt "def " --max-new-tokens 200
	$(BIN)/carpool report runs/demo

# Two workers keep two cores busy; each takes whole files, and has four ranks of its own. One thread for each process,
# or they fight for the cores. What is compiled is kept, for the dozens of processes that the tests start.
test: MARKED := -m 'not slow'
test test-all: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile \
	  --no-loadscope-reorder $(MARKED)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy carpool carpool_systems

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python -m tools.draw_rooms --check

# The wheel must hold what is not Python: templates, styles, recipes, py.typed.
package: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt build twine
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m tools.check_wheel dist/*.whl

install: $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find carpool carpool_systems tests -type d -name __pycache__ -prune -exec rm -rf {} +

# torch goes first and alone: a range such as "torch>=2.11", met while other packages are resolved, can pull a newer
# build together with gigabytes of CUDA libraries; the version pinned in constraints.txt is then already there.
# pip would compile on one core; this does it on all. Some files are of newer Pythons and fail.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "'$(PYTHON)' was not found: install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@if [ -x $(BIN)/python ]; then python=$(BIN)/python; else python=$(PYTHON); fi; \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Carpool needs Python 3.11 or newer, but $$python is $$($$python --version 2>&1)." >&2; \
	  echo "Name another one: make clean && make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[train,placement,dev,docs]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@
