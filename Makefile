# make run     set up, measure the smoke suite on the GPU or CPU found here, write the dated report
# make test    set up, then lint, types and tests: what CI runs
PYTHON ?= python3
VENV ?= .venv
SUITE ?= suites/$(if $(shell nvidia-smi -L 2>/dev/null),smoke-gpu,smoke).yaml

# pip's warnings about an index are not about this project; its errors are shown.
INSTALL = began=$$(date +%s); \
	$(VENV)/bin/python -m pip install -qq --constraint constraints.txt --editable $(1) && \
	echo "Installed in $$(($$(date +%s) - began)) s." && touch $@

# For editors.
SCHEMAS = $(VENV)/bin/harness schema > suites/suite.schema.json && \
	$(VENV)/bin/harness schema --gate > ci/gate.schema.json

.PHONY: run test clean

run: $(VENV)/.run
	@$(SCHEMAS)
	$(VENV)/bin/harness run $(SUITE)

test: $(VENV)/.test
	PATH="$(abspath $(VENV))/bin:$$PATH" ci/check.sh

$(VENV)/.run: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || \
	  { echo "error: $$($(PYTHON) --version 2>&1) has no wheels of torch here; 3.11 to 3.14 have: make PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing torch and 14 packages into $(VENV): about a minute on a fast network."
	@$(call INSTALL,.)

$(VENV)/.test: $(VENV)/.run
	@echo "Installing what the tests need: a few seconds."
	@$(call INSTALL,'.[test]')

clean:
	rm -rf $(VENV) build *.egg-info nsa/build nsa/*.egg-info
