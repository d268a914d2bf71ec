# `make figures` and `make test` need Python >= 3.11 and make; the rest is installed into .venv.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
READY := $(VENV)/.ready
ENGINES := llama.cpp sglang vllm

.PHONY: help figures notebooks site test lab lint compat conformance clean
.DELETE_ON_ERROR:

help:
	@echo "make figures      draw every design-review figure into notebooks/figures (SVG and PDF)"
	@echo "make notebooks    run every notebook again, and keep what it shows"
	@echo "make site         write the course as static pages into build/site"
	@echo "make test         run every test"
	@echo "make lab          open the notebooks in JupyterLab"
	@echo "make lint         check style and types"
	@echo "make compat       run the kernel's interpreted tests under triton 3.6, 3.7.1 and 3.9"
	@echo "make conformance  put random cases to running engines, in environments that are thrown away"
	@echo "make clean        remove what these commands made, .venv included"

# Made once, and made anew when the requirements change; a broken install leaves no READY.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python %d.%d is too old; expected 3.11 or newer. Try: make PYTHON=python3.11 $(MAKECMDGOALS)" % sys.version_info[:2])'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(RUN) pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[notebooks,models,cluster,dev]'
	@touch $@

figures: $(READY)
	@$(RUN) mambackpt figures

notebooks: $(READY)
	@$(RUN) mambackpt site --in-place

site: $(READY)
	@$(RUN) mambackpt site

test: $(READY)
	$(RUN) pytest -n auto --maxprocesses 4 --dist loadfile $(ARGS)

lab: $(READY)
	$(RUN) jupyter lab notebooks

lint: $(READY)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

compat: $(READY)
	$(VENV)/bin/python tests/kernels/compat.py

conformance: $(READY)
	@$(RUN) mambackpt conformance $(foreach engine,$(ENGINES),--engine $(engine)) $(ARGS)

clean:
	rm -rf $(VENV) .compat build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
