# make run     set up, run the smoke suite on the device found here, write the dated report
# make test    set up, then lint, types and tests: what CI runs
PYTHON ?= python3
VENV ?= .venv
SUITE ?= suites/smoke.yaml

.PHONY: run test clean

run: $(VENV)/.installed
	$(VENV)/bin/harness run $(SUITE)

test: $(VENV)/.installed
	PATH="$(abspath $(VENV))/bin:$$PATH" ci/check.sh

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $$($(PYTHON) --version 2>&1) is too old; 3.11 or newer is needed: make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info nsa/build nsa/*.egg-info
