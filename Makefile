# Every target creates .venv and installs what it needs; nothing is reinstalled until a requirements file changes.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# spinning threads slow down a busy machine tenfold
export OMP_WAIT_POLICY ?= PASSIVE
# or every process that tests start compiles what it imports
unexport PYTHONDONTWRITEBYTECODE

.PHONY: venv demo demo-gpu demo-people study figures test test-all golden chaos lint clean

venv: $(STAMP)

$(STAMP): requirements.txt requirements-dev.txt requirements-ocr.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	@echo "installing the requirements into .venv (a minute or two, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-ocr.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

demo: venv
	$(BIN)/python post_train.py --config configs/tiny_cpu.yaml --overwrite

demo-gpu: venv
	$(BIN)/python post_train.py --config configs/tiny_gpu.yaml --device cuda --overwrite

# label, learn a reward, post-train with it, compare blindly; the raters are simulated
demo-people: venv
	$(BIN)/python -m research.people.demo --output outputs/people

study: venv
	$(BIN)/python -m research.studies.sde_study --output outputs/sde_study

# regenerates the figures of README.md, docs/results.md and docs/method.md
figures: demo
	$(BIN)/python -m research.studies.readme_figures outputs/tiny_cpu --output docs/figures
	$(BIN)/python -m research.studies.sde_study --output docs/figures

# every promise once
test: venv
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

# and with the real classes, more ranks, more cases: what each slow test adds is in its docstring
test-all: venv
	$(BIN)/python -m pytest -n auto --dist worksteal

golden: venv
	$(BIN)/python -m tests.golden.test_golden

chaos: venv
	rm -rf outputs/chaos
	$(BIN)/python -m tests.chaos.chaos --seed 0 --output outputs/chaos

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv outputs *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
