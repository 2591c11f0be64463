# Two commands do everything on a fresh clone, the virtual environment included:
#   make demo   trains a small GPT with torch.optim.Muon and fused_lw.Muon side by side (about 3 minutes)
#   make test   lint, types and the whole test suite
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint clean

demo: $(INSTALLED)
	$(BIN)/fused-lw demo

test: lint
	$(BIN)/python -m pytest -q -n $${PYTEST_WORKERS:-2}

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[plot,bench,trainers,test,dev]'
	touch $@

clean:
	rm -rf .venv build dist demo-out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
