# `make demo` and `make test` do all the set-up that they need. README.md explains TORCH_INDEX_URL and PYTHON.

BIN := .venv/bin
SETUP := pyproject.toml scripts/setup

.PHONY: demo test lint law clean

demo: .venv/.installed
	$(BIN)/paceline demo

test: lint
	$(BIN)/pytest -m "not gpu and not slow" -n auto

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The whole table of the law, and what else is long. What is finished is kept under benchmarks/law and not run again.
law: .venv/.installed-dev
	$(BIN)/python -m paceline.bench.law
	$(BIN)/pytest -m slow

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/.installed: $(SETUP)
	scripts/setup
	touch $@

.venv/.installed-dev: $(SETUP)
	scripts/setup dev
	touch $@ .venv/.installed
