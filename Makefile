# make demo    everything from nothing to a trained model: environment, job from the template, simulator, table
# make test    everything that must hold before a change lands
# make check   the quick part of it, in less than two minutes
# make fuzz    the tests of whatever parses, with many new inputs
# make chaos   a job of 20 rounds whose processes and hosts go at random; SEED=... repeats the faults of an earlier one
# make docs    the documentation, in site/
# make dist    the two archives of a release, in dist/
# make release the same, checked, and installed and tried in a clean environment
# make support TORCH=2.14.1   the same with another version of torch, and a job in the simulator; or with another Python,
#              INTERPRETER=python3.13
# make bench   what is measured, into benchmarks/RESULTS.md; SECTIONS="nodes warm" measures these again

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := demo-workspace
UNIT_WORKERS ?= auto
REAL_WORKERS ?= 2
COVERAGE_FLOOR := 88

# Tools that are started by name, NVFlare's among them, are the environment's own.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: venv demo test lint check fuzz chaos bench docs dist release support clean distclean

venv: $(READY)

$(READY): setup.cfg setup.py pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed, make PYTHON=... chooses it" if sys.version_info < (3, 10) else 0)'
	@echo 'Installing NVFlare, PyTorch and the tools into $(VENV), which takes some minutes.'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test,docs]'
	touch $(READY)

demo: venv
	rm -rf $(DEMO)
	mkdir $(DEMO)
	nvflare job create -j $(DEMO)/job -w "$$(python -m nvflare_torchrun_plugin.templates)/torchrun_fedavg_pt" \
	  -sd examples/digits \
	  -f config_fed_client.conf app_script=client.py 'app_config="--sites 2 --device cpu"' nodes=2 \
	  -f config_fed_server.conf num_rounds=3 num_clients=2
	nvflare simulator $(DEMO)/job -w $(DEMO)/run -n 2 -t 2
	python examples/digits/summary.py $(DEMO)/run

lint: venv
	ruff check .
	ruff format --check .
	mypy

check: lint
	python -m pytest -q -n $(UNIT_WORKERS) -m "not slow" tests/unit

fuzz: venv
	python -m pytest -q -n $(UNIT_WORKERS) -m hypothesis --hypothesis-profile=new tests/unit

chaos: venv
	PYTHONPATH=tests/real python -m chaos $(if $(SEED),--seed $(SEED)) $(if $(ROUNDS),--rounds $(ROUNDS))

# Unit tests side by side; of the real ones, which start whole federations, two at a time, and those that are marked
# for it one after another. These are not measured: what they run of the package the unit tests run as well, and their
# many processes would take twice the time.
# Their folder has a short name: a socket's path has 107 bytes at most, and two workers have a folder each.
# Compiled first: where Python may not write what it compiles, each of their thousands of processes would do it again.
test: lint
	python -m compileall -q nvflare_torchrun_plugin
	coverage erase
	coverage run -m pytest -n $(UNIT_WORKERS) tests/unit
	coverage combine -q
	coverage report --fail-under=$(COVERAGE_FLOOR)
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	  python -m pytest --durations=40 -n $(REAL_WORKERS) --dist loadfile --basetemp "$$folder/t" -m "not alone" tests/real
	python -m pytest --durations=40 -m alone tests/real

# Compiled, as pip leaves an installed package: an agent starts in less time than it takes to compile its code.
bench: venv
	python -m compileall -q nvflare_torchrun_plugin
	python -m benchmarks.run $(SECTIONS)

docs: venv
	NO_MKDOCS_2_WARNING=1 python -m mkdocs build -q --strict

dist: venv
	rm -rf dist
	python -m build --no-isolation --outdir dist .
	python -m twine check --strict dist/*

release: dist
	DIST=dist python -m pytest -q tests/real/test_release.py

support: dist
	@test -n "$(TORCH)$(INTERPRETER)" || { echo 'make support TORCH=2.14.1 INTERPRETER=python3.13' >&2; exit 2; }
	DIST=dist TORCH=$(TORCH) INTERPRETER=$(INTERPRETER) python -m pytest -q tests/real/test_release.py

clean:
	rm -rf build dist *.egg-info $(DEMO) .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find nvflare_torchrun_plugin tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
