# Two commands do everything on a fresh Debian machine: `make demo` and `make test`.
VENV ?= .venv
export VENV

.PHONY: demo test check format reference clean

demo: $(VENV)/.bench  ## Install, serve SmolLM2 with prompts apart, measure it with LoadGen, say where the report lies
	$(VENV)/bin/pelton demo --out demo-report

test: $(VENV)/.dev  ## Every test that needs no GPU
	OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/pytest tests --ignore tests/e2e -n 2 --dist worksteal
	OMP_WAIT_POLICY=PASSIVE $(VENV)/bin/pytest tests/e2e

check: $(VENV)/.dev  ## Format, lint, types, import contract, generated pages
	$(VENV)/bin/ruff format --check src tests benchmarks scripts
	$(VENV)/bin/ruff check src tests benchmarks scripts
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python scripts/make_reference.py --check
	$(VENV)/bin/python scripts/make_results.py --check

format: $(VENV)/.dev  ## Format and fix what can be fixed
	$(VENV)/bin/ruff format src tests benchmarks scripts
	$(VENV)/bin/ruff check --fix src tests benchmarks scripts

reference: $(VENV)/.dev  ## Write docs/configuration.md, docs/metrics.md and the tables of results anew
	$(VENV)/bin/python scripts/make_reference.py
	$(VENV)/bin/python scripts/make_results.py

clean:
	rm -rf $(VENV) demo-report build dist

$(VENV)/.bench: pyproject.toml constraints.txt scripts/setup
	scripts/setup bench
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt scripts/setup
	scripts/setup bench,otel,kv,cluster,dev
	touch $@ $(VENV)/.bench
