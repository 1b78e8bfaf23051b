# Two commands: `make demo` and `make test`. Both make .venv on their first run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := build/demo

.PHONY: demo test lint types unit detection mutation robustness libraries zoo references scan installs test-engines clean

demo: $(VENV)/installed
	rm -rf $(DEMO)
	$(BIN)/fsdp2 spec check examples/quickstart.yaml
	$(BIN)/fsdp2 new examples/quickstart.yaml $(DEMO)/project
	$(BIN)/fsdp2 verify $(DEMO)/project --report json=$(DEMO)/report.json --report text

test: lint types unit

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-test
	mkdir -p $(VENV)/types && ln -sfn $(CURDIR) $(VENV)/types/verified_fsdp2
	cd $(VENV)/types && MYPYPATH=. ../bin/mypy --config-file $(CURDIR)/pyproject.toml -p verified_fsdp2.skill -p verified_fsdp2.verifier

unit: $(VENV)/installed-test
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Real packages in pinned versions, published faults and their fixes; FOLDER takes the environments (network, gigabytes).
libraries: $(VENV)/installed-test
	$(BIN)/python benchmarks/libraries.py $(FOLDER)
	$(BIN)/python benchmarks/library_blocks.py $(FOLDER)

# Every seeded fault and every right script through the whole verifier: recall and false alarms.
detection: $(VENV)/installed-test
	$(BIN)/python benchmarks/detection.py --out benchmarks/results/corpus.json --table references/verify.md

# The right scripts shown right without the verifier: equal weights on 1, 2 and 4 ranks, and after a resume.
zoo: $(VENV)/installed-test
	$(BIN)/python benchmarks/zoo_is_right.py --out benchmarks/results/zoo_is_right.json

# The grader of the evals on every reference solution, untouched start and seeded wrong solution.
grader: $(VENV)/installed-test
	$(BIN)/python evals/check_grader.py --out benchmarks/results/grader.json

# Each rule switched off in turn: the tests must notice.
mutation: $(VENV)/installed-test
	$(BIN)/python benchmarks/mutation.py --out benchmarks/results/mutation.json

# Damaged inputs, hostile scripts, signals, parallel starts: nothing may be left, nothing may be our own fault (half an hour).
robustness: $(VENV)/installed-test
	$(BIN)/python benchmarks/robustness.py --out benchmarks/results/robustness.json

# The installed copy before a skill scanner, which is a heavy package and gets an environment of its own (network).
scan: $(VENV)/installed-test
	test -x $(VENV)-scan/bin/skill-scanner || $(PYTHON) -m venv $(VENV)-scan
	$(VENV)-scan/bin/python -m pip install --quiet --disable-pip-version-check cisco-ai-skill-scanner==2.3.2
	$(BIN)/python benchmarks/skill_scanner.py --scanner $(VENV)-scan/bin/skill-scanner

# Every way to install the skill, and what the copies do; CLIENTS is a folder into which npm has put the agents' command lines.
installs: $(VENV)/installed-test
	$(BIN)/python benchmarks/install_matrix.py $(if $(CLIENTS),--clients $(CLIENTS))

# What `launch` writes, on the real thing, disturbed: root, Debian's iproute2, slurm-wlm and munge; environments of their own (network).
test-engines: $(VENV)/installed-test
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

clean:
	rm -rf $(VENV) $(VENV)-scan $(VENV)-ray $(VENV)-sky build *.egg-info .pytest_cache .mypy_cache .ruff_cache

references: $(VENV)/installed
	$(BIN)/python -m verified_fsdp2.skill.reference > references/contract.md
