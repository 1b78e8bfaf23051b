# `make demo` and `make test` are where to start; each makes .venv on its first run. `make help` lists all targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := build/demo
unexport PYTHONDONTWRITEBYTECODE  # each of many launchers would compile the probe again

.PHONY: help demo test test-all lint types unit unit-all references docs detection zoo grader mutation launchers robustness isolation versions libraries plan scan installs test-engines version clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-14s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/installed  ## quickstart: check a spec, write its project, verify it
	rm -rf $(DEMO)
	$(BIN)/fsdp2 spec check examples/quickstart.yaml
	$(BIN)/fsdp2 new examples/quickstart.yaml $(DEMO)/project
	$(BIN)/fsdp2 verify $(DEMO)/project --report json=$(DEMO)/report.json --report text

test: lint types unit  ## lint, types and the tests that decide: 6 to 13 minutes on 2 cores

test-all: lint types unit-all  ## and the tests marked `full`: 45 minutes on 2 cores

lint: $(VENV)/installed-test  ## ruff check, ruff format, word list
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/word_list.py

types: $(VENV)/installed-test  ## mypy --strict on skill/ and verifier/
	mkdir -p $(VENV)/types && ln -sfn $(CURDIR) $(VENV)/types/verified_fsdp2
	cd $(VENV)/types && MYPYPATH=. ../bin/mypy --config-file $(CURDIR)/pyproject.toml -p verified_fsdp2.skill -p verified_fsdp2.verifier

unit: $(VENV)/installed-test  ## the tests of `make test` alone
	$(BIN)/python -m pytest -n 2 --dist worksteal

unit-all: $(VENV)/installed-test  ## the tests of `make test-all` alone
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow'

references: $(VENV)/installed  ## write references/contract.md again, after a change to a rule's docstring
	$(BIN)/python -m verified_fsdp2.skill.reference > references/contract.md

docs: $(VENV)/installed  ## the documentation site in build/site; a broken link is an error
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

detection: $(VENV)/installed-test  ## every seeded fault and right script through all rules: recall, false alarms (2 hours)
	$(BIN)/python benchmarks/detection.py --out benchmarks/results/corpus.json --table references/reliability.md

zoo: $(VENV)/installed-test  ## the right scripts shown right without the verifier: equal weights on 1, 2, 4 ranks and after a resume
	$(BIN)/python benchmarks/zoo_is_right.py --out build/zoo_is_right.json

grader: $(VENV)/installed-test  ## the grader of the evals on every solution, start and wrong solution (half an hour)
	$(BIN)/python evals/check_grader.py --out benchmarks/results/grader.json

mutation: $(VENV)/installed-test  ## each rule switched off in turn: the tests must fail
	$(BIN)/python benchmarks/mutation.py --out benchmarks/results/mutation.json

launchers: $(VENV)/installed-test  ## verdicts through Slurm of two nodes and network namespaces, a node killed (root, slurm-wlm, munge, iproute2; half an hour)
	$(BIN)/python benchmarks/launchers.py --out benchmarks/results/launchers.json

robustness: $(VENV)/installed-test  ## damaged inputs, hostile scripts, signals, parallel starts (half an hour)
	$(BIN)/python benchmarks/robustness.py --out benchmarks/results/robustness.json

isolation: $(VENV)/installed-test  ## what runs do to a user's files: ways, kills, jobs beside, by each mechanism (an hour, two cores to itself)
	mkdir -p build/isolation
	for how in overlay copy guard; do \
		$(BIN)/python benchmarks/isolation/ways.py --fsdp2 $(CURDIR)/$(BIN)/fsdp2 --isolation $$how --out build/isolation/ways.$$how.json; done
	for how in overlay copy; do \
		$(BIN)/python benchmarks/isolation/kills.py --fsdp2 $(CURDIR)/$(BIN)/fsdp2 --isolation $$how --moments 40 --out build/isolation/kills.$$how.json; \
		$(BIN)/python benchmarks/isolation/beside.py --fsdp2 $(CURDIR)/$(BIN)/fsdp2 --isolation $$how --out build/isolation/beside.$$how.json; done
	$(BIN)/python benchmarks/isolation/table.py build/isolation --out benchmarks/results/isolation.json

versions: $(VENV)/installed-test  ## each version of torch and Python in an environment of its own; FOLDER=... (network, 30 gigabytes, an hour)
	$(BIN)/python benchmarks/versions.py $(FOLDER) --out benchmarks/results/versions.json --table references/reliability.md

libraries: $(VENV)/installed-test  ## published faults of libraries and their fixes in pinned versions; FOLDER=... (network, gigabytes)
	$(BIN)/python benchmarks/libraries.py $(FOLDER)
	$(BIN)/python benchmarks/library_blocks.py $(FOLDER)

plan: $(VENV)/installed-test  ## `fsdp2 plan` beside real tensors, published figures of GPUs, torch's trackers; seeded faults and right scripts (an hour)
	$(BIN)/python benchmarks/plan/real.py
	$(BIN)/python benchmarks/plan/zoo.py
	$(BIN)/python benchmarks/plan/trust.py
	$(BIN)/python benchmarks/plan/trackers.py llama llama2-7b-8-full
	$(BIN)/python benchmarks/plan/seeded.py

scan: $(VENV)/installed-test  ## a skill scanner on the installed copy, in an environment of its own (network)
	test -x $(VENV)-scan/bin/skill-scanner || $(PYTHON) -m venv $(VENV)-scan
	$(VENV)-scan/bin/python -m pip install --quiet --disable-pip-version-check cisco-ai-skill-scanner==2.3.2
	$(BIN)/python benchmarks/skill_scanner.py --scanner $(VENV)-scan/bin/skill-scanner

installs: $(VENV)/installed-test  ## every way to install the skill; CLIENTS=folder into which npm has put the agents' command lines
	$(BIN)/python benchmarks/install_matrix.py $(if $(CLIENTS),--clients $(CLIENTS))

# Root, Debian's iproute2, slurm-wlm and munge; environments of their own (network).
test-engines: $(VENV)/installed-test  ## what `launch` writes, under torchrun, Slurm, Ray, Kubeflow and SkyPilot, disturbed
	test -x $(VENV)-ray/bin/ray || $(PYTHON) -m venv $(VENV)-ray
	$(VENV)-ray/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt . 'ray[train]==2.60.0' kubeflow_trainer_api==2.3.0
	test -x $(VENV)-sky/bin/sky || $(PYTHON) -m venv $(VENV)-sky
	$(VENV)-sky/bin/python -m pip install --quiet --disable-pip-version-check skypilot==0.14.1
	$(BIN)/python benchmarks/engines.py --out benchmarks/results/engines.json --table references/scaling.md \
		--ray $(VENV)-ray/bin/python --kubeflow $(VENV)-ray/bin/python --sky $(VENV)-sky/bin/python

$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/installed-test: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@ $(VENV)/installed

version:  ## write V=x.y.z wherever the version stands
	test -n '$(V)'
	sed -i -E 's/^(version = |__version__ = |  version: )"[^"]+"/\1"$(V)"/' pyproject.toml __init__.py SKILL.md
	sed -i -E 's/^version: .*/version: $(V)/' CITATION.cff
	sed -i -E 's/^( *"version": )"[^"]+"/\1"$(V)"/' .claude-plugin/marketplace.json
	sed -i -E 's/(@|rev: )v[0-9]+\.[0-9]+\.[0-9]+/\1v$(V)/' references/verify-project.md
	sed -i -E 's/^## \[Unreleased\]/## [Unreleased]\n\n## [$(V)]/' CHANGELOG.md

clean:  ## remove environments, builds and caches
	rm -rf $(VENV) $(VENV)-scan $(VENV)-ray $(VENV)-sky build *.egg-info .pytest_cache .mypy_cache .ruff_cache
