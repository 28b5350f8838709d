"""Rewards: programs behind a fence, code, mathematics, single turns."""

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marft_trl import Turn
from marft_trl.rewards import (
    JailError,
    Limits,
    boxed,
    code_reward,
    get_code_reward,
    get_coder_reward,
    get_outcome_reward,
    get_planner_reward,
    get_solver_reward,
    get_verifier_reward,
    in_background,
    last_python_block,
    math_answer,
    math_reward,
    run_python,
)
from marft_trl.rewards import answers as answers_module
from marft_trl.rewards import code as code_module
from marft_trl.rewards import jail as jail_module
from marft_trl.rewards.code import pass_rate, same_output


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fence is kept by the Linux kernel")
QUICK = Limits(seconds=1, memory=1 << 28)
OUTSIDE = os.path.join(tempfile.gettempdir(), f"marft-outside-{os.getpid()}")

# name: program, how it ends, a pattern of what its error says
HOSTILE = {
    "endless loop": ("while True: pass", "timeout", ""),
    "sleeper": ("import time; time.sleep(60)", "timeout", ""),
    "sleeper without alarm": ("import signal, time; signal.setitimer(0, 0); time.sleep(60)", "timeout", ""),
    "memory bomb": ("x = []\nwhile True: x.append(bytearray(1 << 24))", "error", "MemoryError"),
    "fork bomb": ("import os\nwhile True: os.fork()", "error", "PermissionError"),
    "program": ("import subprocess; subprocess.run(['ls'])", "error", "PermissionError"),
    "shell": ("import os, sys; sys.exit(os.system('ls') and 9)", "error", ""),
    "pool": ("import multiprocessing as m; m.Process(target=print).start()", "error", "PermissionError"),
    "1 GB of output": ("for _ in range(1000): print('x' * 1_000_000)", "error", "File too large"),
    "large file": ("open('f', 'w').write('x' * 10_000_000)", "error", "File too large"),
    "many files": ("x = [open('f', 'w') for _ in range(100)]", "error", "Too many open files"),
    "writes outside": (f"open({OUTSIDE!r}, 'w').write('x')", "error", "Permission|Read-only"),
    "makes a folder outside": (f"import os; os.mkdir({OUTSIDE!r})", "error", "Permission|Read-only"),
    "moves outside": (f"import os; open('f', 'w'); os.rename('f', {OUTSIDE!r})", "error", "Error"),
    "removes": ("import os; os.remove(os.__file__)", "error", "Error"),
    "reads outside": (f"open({__file__!r}).read()", "error", "PermissionError"),
    "network": ("import socket; socket.create_connection(('127.0.0.1', 80))", "error", "PermissionError"),
    "reads the parent's environment": (
        "import os; open(f'/proc/{os.getppid()}/environ').read()",
        "error",
        "PermissionError",
    ),
    "kills the parent": ("import os; os.kill(os.getppid(), 9)", "error", "PermissionError"),
    "_exit": ("import os; os._exit(7)", "error", ""),
    "exit": ("import sys; sys.exit('bye')", "error", "bye"),
    "segfault": ("import ctypes; ctypes.string_at(0)", "killed", ""),
    "abort": ("import os; os.abort()", "killed", ""),
    "recursion": ("def f(): f()\nf()", "error", "RecursionError"),
    "no program": ("print(", "error", "SyntaxError"),
    "locked folder": ("import os; os.mkdir('d', 0); os.mkdir('e'); open('e/f', 'w'); os.mkdir('e/d', 0)", "ok", ""),
    "nested folders": ("import os\nfor _ in range(1500): os.mkdir('x'); os.chdir('x')", "ok", ""),
    "changes a mode": ("import os; os.chmod('/tmp', 0)", "error", "PermissionError"),
    "changes a time": ("import os; os.utime('/tmp')", "error", "PermissionError"),
    "empties a file": (f"import os; os.truncate({__file__!r}, 0)", "error", "PermissionError"),
    "the parent's limits": (
        "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (9, 9))",
        "error",
        "PermissionError",
    ),
    "has the parent signalled": ("import fcntl, os; fcntl.fcntl(0, 8, os.getppid())", "error", "PermissionError"),
    "shared memory": (
        "import ctypes; raise SystemExit('none' if ctypes.CDLL(None).shmget(0, 4096, 0o1666) < 0 else 'some')",
        "error",
        "none",
    ),
    "surrogates": ("print('\ud800')", "ok", ""),
}


@pytest.fixture(params=["the fence alone", "bubblewrap"])
def walls(request, monkeypatch):
    """What keeps programs in: bubblewrap is used on top of the fence only where it works."""
    if request.param == "the fence alone":
        monkeypatch.setattr(jail_module, "_working_bubblewrap", lambda: ())
    elif not jail_module._working_bubblewrap():
        pytest.skip("bubblewrap is not installed here, or the machine forbids its namespaces")


UNPRIVILEGED = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
for capability in range(64):
    libc.prctl(24, capability, 0, 0, 0)  # out of the bounding set: what is run next has none of them
os.execv(sys.executable, [sys.executable, "-W", "ignore", *sys.argv[1:]])
"""
LEAVING = """
import sys, tempfile, types
tempfile.tempdir, package, walls, *programs = sys.argv[1:]
sys.modules["marft_trl"] = types.ModuleType("marft_trl")  # without the trainer, which takes long to import
sys.modules["marft_trl"].__path__ = [package]
from marft_trl.rewards import jail
if not walls:
    jail._working_bubblewrap = lambda: ()
for program in programs:
    assert jail.run_python(program).status == "ok", program
"""


def test_what_a_program_leaves_is_removed_by_a_user_without_privileges(walls, tmp_path):
    """Root may remove anything, so the capabilities that make it root are dropped."""
    victim = tmp_path / "victim"
    victim.write_text("x")
    victim.chmod(0o400)
    programs = [
        "import os; os.mkdir('x', 0)",
        "import os; os.mkdir('x'); os.mkdir('x/y'); os.mkdir('x/y/z'); os.open('x/y/f', 64, 0); os.mkdir('x/0', 0)",
        "import os\nfor _ in range(1500): os.mkdir('x'); os.chdir('x')",
        f"import os; os.mkdir('x', 0); os.symlink({str(victim)!r}, 'y'); os.symlink('/etc', 'z')",
    ]
    package = str(Path(jail_module.__file__).parent.parent)
    arguments = [str(tmp_path), package, "bubblewrap" if jail_module._working_bubblewrap() else "", *programs]
    command = [sys.executable, "-c", UNPRIVILEGED, "-c", LEAVING, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert os.listdir(tmp_path) == ["victim"] and victim.stat().st_mode & 0o777 == 0o400


def test_a_folder_that_cannot_be_removed_is_no_error(monkeypatch, tmp_path, caplog):
    def fails(*args, **kwargs):
        raise OSError("no shell")

    monkeypatch.setattr(jail_module.subprocess, "run", fails)
    (tmp_path / "left").touch()
    jail_module._remove(str(tmp_path))
    assert "could not be removed: no shell" in caplog.text and tmp_path.exists()


def test_programs_cannot_fill_the_disk(walls):
    program = "for i in range(50): open(f'f{i}', 'w').write('x' * 1_000_000)"
    outcome = run_python(program, limits=Limits(seconds=5, disk=1 << 23))
    if jail_module._working_bubblewrap():
        assert outcome.status == "error" and "No space left" in outcome.stderr
    else:
        assert outcome.status == "ok"  # each file is bounded, not all of them


def test_an_interpreter_below_the_temporary_folder_keeps_the_limit_on_the_disk(monkeypatch):
    if not (command := jail_module._working_bubblewrap()):
        pytest.skip("bubblewrap is not installed here, or the machine forbids its namespaces")
    sized = jail_module._has_sized_folders(command)
    monkeypatch.setattr(tempfile, "tempdir", os.path.dirname(sys.prefix))
    jail_module._has_sized_folders.cache_clear()
    try:
        assert jail_module._has_sized_folders(command) == sized
    finally:
        jail_module._has_sized_folders.cache_clear()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_survive_nothing_and_are_reported(name, walls):
    program, status, says = HOSTILE[name]
    outcome = run_python(program, limits=QUICK)
    assert outcome.status == status and re.search(says, outcome.stderr), outcome
    assert outcome.seconds < 10 and not os.path.exists(OUTSIDE)
    assert len(outcome.stdout) <= QUICK.output


def test_what_a_program_may_do(walls):
    program = (
        "import threading, os\nopen('a', 'w').write('4')\n"
        "t = threading.Thread(target=lambda: print(open('a').read() + input())); t.start(); t.join()\n"
        "print(sorted(os.environ))"
    )
    outcome = run_python(program, stdin="2\n")
    assert outcome.status == "ok", outcome
    assert outcome.stdout.splitlines()[0] == "42"
    assert "HOME" not in outcome.stdout and "PATH" not in outcome.stdout


@pytest.mark.slow
def test_two_hundred_hostile_programs_leave_nothing_behind(tmp_path, monkeypatch, walls):
    monkeypatch.setattr(jail_module.tempfile, "tempdir", str(tmp_path))
    programs = [list(HOSTILE.values())[index % len(HOSTILE)][0] for index in range(200)]
    with ThreadPoolExecutor(1) as pool:  # a process that lives is found
        sleeper = pool.submit(run_python, "import time; time.sleep(60)", limits=Limits(seconds=2))
        time.sleep(1)
        assert _jailed(tmp_path)
        assert sleeper.result().status == "timeout"
    before = set(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(4) as pool:
        statuses = [
            outcome.status for outcome in pool.map(lambda program: run_python(program, limits=QUICK), programs)
        ]
    assert len(statuses) == 200 and statuses.count("timeout") >= 3 * (200 // len(HOSTILE))
    assert not os.listdir(tmp_path)
    assert set(os.listdir("/proc/self/fd")) == before
    assert not _jailed(tmp_path)


def _jailed(folder):
    """Processes that work in a folder below this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            found += [path] if str(path.readlink()).startswith(str(folder)) else []
        except OSError:
            continue
    return found


def test_a_machine_that_cannot_fence_in_is_refused(tmp_path, monkeypatch):
    weak = tmp_path / "fence.py"
    source = jail_module._FENCE.read_text()
    weak.write_text(source.replace("abi = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)", "abi = -1"))
    broken = tmp_path / "broken.py"
    broken.write_text("raise OSError('no such call')")
    try:
        for fence, lack in [(weak, "Landlock"), (broken, r"a Python that runs an empty program \(.*no such call\)")]:
            jail_module._missing.cache_clear()
            monkeypatch.setattr(jail_module, "_FENCE", fence)
            with pytest.raises(JailError, match=rf"(?s)it lacks {lack}. Run in a container .* `strict=False`"):
                run_python("print(1)")
        monkeypatch.setattr(jail_module, "_FENCE", weak)
        assert run_python("print(1)", limits=Limits(strict=False)).stdout == "1\n"
    finally:
        jail_module._missing.cache_clear()


def test_a_program_cannot_make_the_machine_look_unfit():
    forged = (
        'import os\nfor n in range(3, 20):\n    try: os.write(n, b\'{"missing": ["x"]}\\n\')\n'
        "    except OSError: pass\nos._exit(3)"
    )
    assert run_python(forged, limits=QUICK).status == "error"
    assert pass_rate(forged, ADD) == 0.0 and pass_rate(forged, CALLS) == 0.0


def test_arguments_may_be_long():
    program = "def add(a): return len(a)"
    assert run_python(program, function="add", arguments=[[list(range(100_000))]]).returned == [{"value": 100_000}]


def test_a_bubblewrap_that_does_not_work_is_left_out(tmp_path, monkeypatch):
    script = tmp_path / "bwrap"
    script.write_text(f"#!/bin/sh\necho run >> {tmp_path}/runs\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    jail_module._working_bubblewrap.cache_clear()
    try:
        assert [run_python("print(1)").stdout for _ in range(2)] == ["1\n"] * 2
        assert (tmp_path / "runs").read_text() == "run\n"
    finally:
        jail_module._working_bubblewrap.cache_clear()


# ---- Code ----


ADD = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
CALLS = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 8], "function": "add"}


def block(code):
    return f"I think\n```python\n{code}\n```\nis right."


@pytest.mark.parametrize(
    ("code", "tests", "rate"),
    [
        ("print(sum(map(int, input().split())))", ADD, 1.0),
        ("print(sum(map(int, input().split())))", json.dumps(ADD), 1.0),
        ("print(3)", ADD, 0.5),
        ("import os; print(3, flush=True); os._exit(1)", ADD, 0.0),
        ("def add(a, b): return a + b", CALLS, 0.5),
        ("class Solution:\n    def add(self, a, b): return a + b", CALLS, 0.5),
        ("def add(a, b): return True", {**CALLS, "outputs": [1, 1]}, 0.0),
        ("def add(a, b): return (a, b)", {**CALLS, "outputs": [[1, 2], [3, 4]]}, 1.0),
        ("def add(a, b):\n    if a == 3: raise ValueError\n    return 3", CALLS, 0.5),
        ("def add(a, b):\n    if a == 3: exit()\n    return 3", CALLS, 0.5),
        ("def other(a, b): return a + b", CALLS, 0.0),
        ("def add(a, b): return 10**400", {**CALLS, "outputs": [1.5, 2.5]}, 0.0),
        ("print(", ADD, 0.0),
        ("print(1)", {"inputs": [], "outputs": []}, None),
        ("print(1)", None, None),
    ],
)
def test_pass_rates(code, tests, rate):
    conversational = [{"role": "assistant", "content": block(code)}]
    assert code_reward([block(code), conversational, "no code"], [tests] * 3) == [
        *[rate] * 2,
        None if rate is None else 0.0,
    ]


def test_a_solution_that_hangs_costs_its_time_only():
    start = time.monotonic()
    reward = get_code_reward(seconds=1)
    assert reward([block("while True: pass"), block("print(input())")], [{"inputs": ["a"], "outputs": ["a"]}] * 2) == [
        0.0,
        1.0,
    ]
    assert time.monotonic() - start < 10


def test_the_last_closed_block_counts():
    assert last_python_block("```python\n1\n```\n```py\n2\n```\n```python\n3") == "2"
    assert last_python_block("```\n1\n```") is None
    assert last_python_block("```python\nx = '''\n```\n") == "x = '''"


@given(st.lists(st.sampled_from(["```", "python", "\n", "x", " ", "```python\n"]), max_size=30).map("".join))
def test_blocks_never_raise(text):
    found = last_python_block(text)
    assert found is None or found in text


def test_outputs_are_compared_by_words():
    assert same_output("1.0  2\n\n", "1 2.00") and same_output("a\nb", "a \nb\n")
    assert not same_output("a b", "a\nb") and not same_output("1", "1 1") and not same_output("nan", "1")
    with pytest.raises(ValueError, match="needs `inputs` and `outputs`"):
        pass_rate("x", {"input": []})
    with pytest.raises(ValueError, match="has 1 inputs and 2 outputs"):
        pass_rate("x", {"inputs": ["a"], "outputs": ["a", "b"]})


# ---- Mathematics ----


MARKS = ["\\boxed{", "}", "{", "1", ",", "```python\n", "\n```"]


@pytest.mark.parametrize(
    ("text", "solution", "score"),
    [
        ("so \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("so \\boxed{72}.", "72", 1.0),
        ("so \\boxed{72}, not 73", "We get \\boxed{72}.", 1.0),
        ("that makes 1,072 apples", "1072", 1.0),
        ("that makes 72.", "72", 1.0),
        ("that makes 72", "73", 0.0),
        ("\\boxed{1", "1", 1.0),
        ("nothing", "1", 0.0),
        ("", "1", 0.0),
        ("\\boxed{x^2+2x+1}", "$(x+1)^2$", 1.0),
    ],
)
def test_math(text, solution, score):
    pytest.importorskip("math_verify")
    assert math_reward([text], [solution]) == [score]
    assert math_reward([[{"role": "assistant", "content": text}]], [solution]) == [score]


@given(
    st.lists(st.sampled_from(["\\boxed{", "}", "{", "1", ",", ".", "-", "x", "\\frac", "$"]), max_size=30).map("".join)
)
def test_answers_never_raise(text):
    check_answers(text)
    assert boxed(text) is None or boxed(text) in text


@pytest.mark.slow
@settings(max_examples=10_000)
@given(st.lists(st.one_of(st.sampled_from(MARKS), st.characters()), max_size=30).map("".join))
def test_none_of_ten_thousand_texts_makes_an_answer_raise(text):
    check_answers(text)
    block_found = last_python_block(text)
    assert block_found is None or block_found in text


def check_answers(text):
    inside, answer = boxed(text), math_answer(text)
    assert inside is None or f"\\boxed{{{inside}}}" in text
    assert answer is None or answer in text.replace(",", "") or answer == inside


@pytest.mark.parametrize("piece", ["\\boxed{", "1", "1,", "{", "1.", "-"])
def test_a_megabyte_is_read_in_under_a_second(piece):
    start = time.process_time()
    math_answer(piece * (1_000_000 // len(piece)))
    assert time.process_time() - start < 1


# ---- Single turns ----


def says(text, index=0):
    return Turn("solver", text, index)


def exact(completions, solution, **kwargs):
    return [float(text == right) for text, right in zip(completions, solution, strict=True)]


def test_step_rewards_of_planners_solvers_coders_and_verifiers():
    plan = says("1. add\n2. halve\n3. check")
    half = says("- add\nthen halve")
    columns = {"solution": ["7", "7"], "completions": ["x", "y"], "prompts": ["", ""]}
    columns |= {"answer_turn": [says("7", 1), says("8", 1)], "turns": [[], []]}
    assert get_planner_reward(exact)(turn=[plan, half], **columns) == [1.0, 0.25]
    assert get_planner_reward(exact, steps=3)(turn=[half, plan], **columns) == [0.5 / 3 + 0.5, 0.5]
    with pytest.raises(ValueError, match="a candidate turn does not have yet"):
        get_planner_reward(exact)(turn=[plan], answer_turn=[None], solution=["7"])
    # by the episode's outcome, 1 and 0; nothing without the form
    assert get_solver_reward(exact)(turn=[says("\\boxed{6}")] * 2, **columns) == [1.0, 0.1]
    assert get_solver_reward(exact)(turn=[says("7"), says("7")], **columns) == [0.0, 0.0]
    assert get_coder_reward(exact)(turn=[says(block("1")), says("```\n1\n```")], **columns) == [1.0, 0.0]
    assert get_verifier_reward(exact)(turn=[says("8"), says("7")], **columns) == [1.0, 0.0]
    assert get_outcome_reward(exact)(turn=[says("8"), says("7")], **columns) == [1.0, 0.0]
    candidates = {**columns, "answer_turn": [None, None]}
    assert get_verifier_reward(exact)(turn=[says("8"), says("7")], **candidates) == [0.0, 1.0]


def test_a_program_runs_once_for_its_tests_however_many_ask(monkeypatch):
    runs = []
    monkeypatch.setattr(code_module, "run_python", lambda *a, **k: runs.append(a) or run_python(*a, **k))
    reward = get_code_reward(seconds=1)
    completions = [block("print(3)")] * 3 + [block("print(7)")]
    assert [reward(completions, [ADD] * 4) for _ in range(2)] == [[0.5, 0.5, 0.5, 0.5]] * 2
    assert len(runs) == 4  # two programs, two tests
    hangs = block("while True: pass")
    assert reward([hangs], [{"inputs": ["a"] * 9, "outputs": ["a"] * 9}]) == [0.0]
    assert len(runs) == 6


def test_mathematics_in_the_background_has_a_time_limit():
    pytest.importorskip("math_verify")
    reward = in_background(math_reward)
    completions = ["\\boxed{9^{9^{9}}}", "\\boxed{7}", "7"]
    start = time.monotonic()
    assert asyncio.run(reward(completions=completions, solution=["7", "7", None])) == [0.0, 1.0, None]
    assert time.monotonic() - start < 60


def test_a_pair_that_never_ends_scores_nothing(monkeypatch):
    pytest.importorskip("math_verify")
    process, calls = subprocess.Popen, []

    def endless(command, **kwargs):
        calls.append(command)
        program = "print(1.0, flush=True)\nwhile True: pass" if len(calls) == 1 else "print(0.5)"
        return process([sys.executable, "-c", program], **kwargs)

    monkeypatch.setattr(answers_module.subprocess, "Popen", endless)
    monkeypatch.setattr(answers_module, "_STARTUP_SECONDS", 3)
    monkeypatch.setattr(answers_module, "_SECONDS", 0)
    assert answers_module.compare_elsewhere([("1", "1"), ("2", "2"), ("3", "3")]) == [1.0, 0.0, 0.5]


def test_in_background():
    reward = in_background(exact)
    assert asyncio.iscoroutinefunction(reward) and reward.__name__ == "exact"
    assert asyncio.run(reward(completions=["1"], solution=["1"])) == [1.0]
