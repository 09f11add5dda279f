# Two commands for a fresh machine with Python 3.11+, make and a C compiler. Each makes its own environment in .venv.
#   make demo   trains dense, STE and SR-STE networks on real digits, ten seeds each, on the CPU, and compares them: about 80 s
#   make test   checks style, types and rooms, then runs the tests, in two processes (PROCESSES=8 for more)
PYTHON ?= python3
PROCESSES ?= 2
BIN := .venv/bin

.PHONY: demo test check mutants clean

demo: .venv/demo.done
	@rm -rf runs/demo
	$(BIN)/nofm train digits --seeds 10 --out runs/demo/dense --sparsity.method.kind dense
	$(BIN)/nofm train digits --seeds 10 --out runs/demo/ste --sparsity.method.kind ste
	$(BIN)/nofm train digits --seeds 10 --out runs/demo/srste
	$(BIN)/nofm report runs/demo/dense/* runs/demo/ste/* runs/demo/srste/* --out runs/demo/report.html --picture

test: check
	$(BIN)/python -m pytest -n $(PROCESSES) --dist worksteal

check: .venv/dev.done
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Break each contract on purpose and see its test fail (tests/mutants lists how).
mutants: .venv/dev.done
	$(BIN)/python tests/mutants

.venv/%.done: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "nofm needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@echo "installing into .venv what this needs: a few minutes and 6 GB, most of it torch"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$*]"
	touch $@

clean:
	rm -rf .venv runs
