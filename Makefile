# What a contributor runs, in the environment that is active. .ci/run does all of it in a fresh one.
.PHONY: setup test fast slow lint format golden docs

PARALLEL ?= -n 2 --dist loadfile

setup:  ## everything that the others need
	pip install -e ".[lint]"

test:  ## every test, as the README says
	pytest $(PARALLEL)

fast:  ## the tests that take a second or two each at most
	pytest $(PARALLEL) -m "not slow"

slow:  ## the others: real training, brute force, real models
	pytest $(PARALLEL) -m slow

lint:
	ruff check
	ruff format --check
	mypy

format:
	ruff check --fix
	ruff format

golden:  ## rewrites the expected tables: read the diff
	PPLAN_UPDATE_GOLDEN=1 pytest $$(grep -rl "golden:" tests --include="test_*.py")

docs:  ## the site, in .site/html; needs pip install -e ".[docs]"
	python docs/draw_images.py
	python docs/site_pages.py
	zensical build --strict
