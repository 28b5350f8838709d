import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TQDM_DISABLE", "1")
# The same device everywhere: tolerances are those of a CPU. `MARFT_TEST_CUDA=1` leaves GPUs visible.
if not os.environ.get("MARFT_TEST_CUDA"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import contextlib
import fcntl
import functools
import gc
import math
import resource
import time
import warnings
from pathlib import Path

from marft_trl.tiny import tiny_model, tiny_tokenizer, warm_up

import jinja2
import pytest
import torch
from accelerate.utils import imports, memory, other
from hypothesis import settings

from .helpers import SIZES


MEMORY: list[int] = []
SECONDS: list[float] = []
STARTED: list[None] = []  # tests of this process
DEADLINE = time.monotonic() + float(os.environ.get("MARFT_TEST_SECONDS", math.inf))
# No test may depend on the samples of one tiny model: `MARFT_TEST_SEED=1 make test` uses other weights
tiny_model.__defaults__ = (int(os.environ.get("MARFT_TEST_SEED", "0")),)

# Skip a fifth of the time of all tests, which changes no result: metadata and modules that accelerate reads for
# every model that it unwraps, garbage that it collects before a training, the template of each adapter's card, which
# PEFT compiles again each time, the certificates that each HTTP client reads, the stack that torch formats for every
# seed of a GPU that is not there, and the disk (whether a file survives a power cut is nothing that a test could see).
imports._is_package_available = functools.cache(imports._is_package_available)
other.has_compiled_regions = lambda model: False
memory.clear_device_cache = lambda garbage_collection=False: None
jinja2.Template = functools.cache(jinja2.Template)
with contextlib.suppress(ImportError):  # openai before 3 has another client
    import httpcore2

    httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)
if not os.environ.get("MARFT_TEST_CUDA"):
    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.manual_seed_all = lambda seed: None
os.fsync = lambda descriptor: None

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("ci")


def pytest_collection_modifyitems(items):
    """Triple the timeout of slow tests, so that a slow machine does not fail them."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


def pytest_collection_finish():
    """Leave what was imported out of every later collection: a trainer collects whenever it starts to train."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    """Freeze once more after late imports. No test begins after the deadline."""
    if time.monotonic() > DEADLINE:
        pytest.skip("the time for these tests is used up")
    STARTED.append(None)
    if len(STARTED) == 30:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _quiet():
    torch.set_num_threads(1)  # two threads on a shared machine are slower than one
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_float32_matmul_precision("highest")  # `make` of examples/real.py changes it


@pytest.fixture(scope="session")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def built_once(tmp_path_factory):
    """A function that calls `build(folder)` in the first process that asks for the folder, and returns its path."""
    root = tmp_path_factory.getbasetemp()
    root = Path(root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root)

    def built(name: str, build) -> str:
        with open(root / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (root / name).exists():
                torch.set_num_threads(1)
                build(root / f"{name}.part")
                (root / f"{name}.part").rename(root / name)
        return str(root / name)

    return built


def _warm(built_once, tokenizer, name: str, **sizes) -> str:
    def build(folder):
        model = tiny_model(len(tokenizer), **sizes)
        torch.manual_seed(0)
        warm_up(model, tokenizer, steps=60)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)

    return built_once(name, build)


@pytest.fixture(scope="session")
def model_folder(built_once, tokenizer) -> str:
    """A model of one layer after a few warm-up steps: its completions end by themselves, at different lengths."""
    return _warm(built_once, tokenizer, "warm-model", **SIZES)


@pytest.fixture(scope="session")
def deep_folder(built_once, tokenizer) -> str:
    """The same with two layers, for tests that need several."""
    return _warm(built_once, tokenizer, "deep-model", **{**SIZES, "num_hidden_layers": 2})


@pytest.fixture(scope="session")
def small_model(built_once, tokenizer) -> str:
    """An untrained model of one small layer, for tests that train many times."""

    def build(folder):
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
        tokenizer.save_pretrained(folder)
        tiny_model(len(tokenizer), **sizes).save_pretrained(folder)

    return built_once("small-model", build)


def pytest_sessionfinish(session):
    """Report a worker's peak memory, in kB, and CPU seconds, including those of its child processes."""
    if hasattr(session.config, "workeroutput"):
        usages = [resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        session.config.workeroutput["memory"] = usages[0].ru_maxrss
        session.config.workeroutput["seconds"] = sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    output = getattr(node, "workeroutput", {})
    MEMORY.append(output.get("memory", 0))
    SECONDS.append(output.get("seconds", 0.0))


def pytest_terminal_summary(terminalreporter):
    """Print the peak memory and CPU time of workers, the number of exact resumes, and whether a GPU was unused."""
    if not os.environ.get("MARFT_TEST_CUDA") and Path("/dev/nvidia0").exists():
        terminalreporter.write_line("This machine has a GPU, and these tests ran on the CPU: `make test-gpu` uses it.")
    if any(MEMORY):
        terminalreporter.write_line(f"Memory of the largest worker: {max(MEMORY) / 1e6:.2f} GB.")
        terminalreporter.write_line(f"CPU time of all workers: {sum(SECONDS):.0f} s.")
    properties = [pair for report in terminalreporter.stats.get("passed", []) for pair in report.user_properties]
    points = sum(count for name, count in properties if name == "exact_points")
    if points:
        terminalreporter.write_line(f"Resumed exactly at {points} points.")
