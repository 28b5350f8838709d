"""Rewards: programs in the sandbox, code, mathematics, single turns."""

import asyncio
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from marft_trl import Turn, rewards
from marft_trl.extras.sandbox import code as code_module
from marft_trl.extras.sandbox import code_reward, get_code_reward, run_python
from marft_trl.extras.sandbox.code import _equals, pass_rate, same_output
from marft_trl.rewards import answers as answers_module
from marft_trl.rewards import functions as math_module
from marft_trl.tiny import exact_answer as exact

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .helpers import grows_linearly


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fence is kept by the Linux kernel")


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
        ("def add(a, b): return (a, b)", {**CALLS, "outputs": [[1, 2], [3, 4]]}, 1.0),
        ("def add(a, b):\n    if a == 3: raise ValueError\n    return 3", CALLS, 0.5),
        ("def other(a, b): return a + b", CALLS, 0.0),
        ("def add(a, b): return 0", {**CALLS, "outputs": [float("inf"), float("-inf")]}, 0.0),
        ("def add(a, b): return float('inf')", {**CALLS, "outputs": [float("inf"), float("-inf")]}, 0.5),
        ("def add(a, b): return True", {**CALLS, "outputs": [1.0, 1.0]}, 0.0),
        ("print(3); exit()", ADD, 0.5),
        ("def add(a, b): return 10**400", {**CALLS, "outputs": [1.5, 2.5]}, 0.0),
        ("print(", ADD, 0.0),
        ("print(1)", {"inputs": [], "outputs": []}, None),
        ("print(1)", None, None),
    ],
)
def test_pass_rates(code, tests, rate):
    conversational = [{"role": "assistant", "content": block(code)}]
    none = None if rate is None else 0.0
    assert code_reward([block(code), conversational, "no code"], [tests] * 3) == [rate, rate, none]


def test_a_solution_that_hangs_costs_only_the_time_limit():
    start = time.monotonic()
    reward, tests = get_code_reward(seconds=1), {"inputs": ["a"], "outputs": ["a"]}
    assert reward([block("while True: pass"), block("print(input())")], [tests] * 2) == [0.0, 1.0]
    assert time.monotonic() - start < 10


def test_the_last_closed_block_counts():
    assert rewards.last_python_block("```python\n1\n```\n```py\n2\n```\n```python\n3") == "2"
    assert rewards.last_python_block("```\n1\n```") is None
    assert rewards.last_python_block("```python\nx = '''\n```\n") == "x = '''"


def test_outputs_are_compared_by_words():
    assert same_output("1.0  2\n\n", "1 2.00") and same_output("a\nb", "a \nb\n")
    assert not same_output("a b", "a\nb") and not same_output("1", "1 1") and not same_output("nan", "1")
    assert same_output("2e0 -1.50", "2 -1.5") and same_output("007", "007") and same_output("nan", "nan")
    for other in ("007", "+7", "7.", "0x7", "7_0", "\u0667", "1e99999"):
        assert not same_output(other, "7") and not same_output("7", other), other
    with pytest.raises(ValueError, match="must have `inputs` and `outputs`"):
        pass_rate("x", {"input": []})
    with pytest.raises(ValueError, match="as many inputs as outputs, got 1 and 2"):
        pass_rate("x", {"inputs": ["a"], "outputs": ["a", "b"]})


# ---- Mathematics ----


MARKS = ["\\boxed{", "\\frac", "```python\n", "\n```", "```", "python", *"{}1,.-x$\n "]


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
    assert rewards.math_reward([text], [solution]) == [score]
    assert rewards.math_reward([[{"role": "assistant", "content": text}]], [solution]) == [score]


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_text_makes_an_answer_or_a_block_raise(count):
    @settings(max_examples=count)
    @given(st.lists(st.one_of(st.sampled_from(MARKS), st.characters()), max_size=30).map("".join))
    def check(text):
        inside, answer, code = rewards.boxed(text), rewards.math_answer(text), rewards.last_python_block(text)
        assert inside is None or f"\\boxed{{{inside}}}" in text
        assert answer is None or answer in text.replace(",", "") or answer == inside
        assert code is None or code in text

    check()


@pytest.mark.parametrize("piece", ["\\boxed{", "1", "1,", "{", "1.", "-"])
def test_long_texts_are_read_in_linear_time(piece):
    assert grows_linearly(lambda size: rewards.math_answer(piece * (size // len(piece))), 400_000)


# ---- Single turns ----


def says(text, index=0):
    return Turn("solver", text, index)


def test_step_rewards_of_planners_solvers_coders_and_verifiers():
    plan = says("1. add\n2. halve\n3. check")
    half = says("- add\nthen halve")
    columns = {"solution": ["7", "7"], "completions": ["x", "y"], "prompts": ["", ""]}
    columns |= {"answer_turn": [says("7", 1), says("8", 1)], "turns": [[], []]}
    assert rewards.get_planner_reward(exact)(turn=[plan, half], **columns) == [1.0, 0.25]
    assert rewards.get_planner_reward(exact, steps=3)(turn=[half, plan], **columns) == [0.5 / 3 + 0.5, 0.5]
    with pytest.raises(ValueError, match="does not exist yet for a candidate turn"):
        rewards.get_planner_reward(exact)(turn=[plan], answer_turn=[None], solution=["7"])
    # by the episode's outcome, 1 and 0; nothing without the required format
    assert rewards.get_solver_reward(exact)(turn=[says("\\boxed{6}")] * 2, **columns) == [1.0, 0.1]
    assert rewards.get_solver_reward(exact)(turn=[says("7"), says("7")], **columns) == [0.0, 0.0]
    coded = [says(block("1")), says("```\n1\n```")]
    assert rewards.get_coder_reward(exact)(turn=coded, **columns) == [1.0, 0.0]
    assert rewards.get_verifier_reward(exact)(turn=[says("8"), says("7")], **columns) == [1.0, 0.0]
    outcome = rewards.get_outcome_reward(exact)
    assert outcome(turn=[says("8"), says("7")], **columns) == [1.0, 0.0]
    assert outcome.__name__ == "exact_answer"  # metrics and transcripts show it
    candidates = {**columns, "answer_turn": [None, None]}
    assert rewards.get_verifier_reward(exact)(turn=[says("8"), says("7")], **candidates) == [0.0, 1.0]


def test_a_program_runs_once_for_repeated_requests(monkeypatch):
    runs = []
    monkeypatch.setattr(code_module, "run_python", lambda *a, **k: runs.append(a) or run_python(*a, **k))
    reward = get_code_reward(seconds=1)
    completions = [block("print(3)")] * 3 + [block("print(7)")]
    assert [reward(completions, [ADD] * 4) for _ in range(2)] == [[0.5, 0.5, 0.5, 0.5]] * 2
    assert len(runs) == 4  # two programs, two tests
    hangs = block("import time; time.sleep(60)")
    assert reward([hangs], [{"inputs": ["a"] * 9, "outputs": ["a"] * 9}]) == [0.0]
    assert len(runs) == 6


def test_two_threads_may_share_the_scores_of_programs(monkeypatch):
    def slow(program, tests, *limits):
        time.sleep(0.05 * float(program))
        return float(program)

    monkeypatch.setattr(code_module, "pass_rate", slow)
    monkeypatch.setattr(code_module, "_MOST_KNOWN", 1)
    reward = get_code_reward()
    reward([block("1")], [ADD])
    with ThreadPoolExecutor(2) as pool:  # while the first waits for 8, the second evicts the score of 1
        first = pool.submit(reward, [block("1"), block("8")], [ADD, ADD])
        second = pool.submit(reward, [block("2")], [ADD])
    assert (first.result(), second.result()) == ([1, 8], [2])


@pytest.mark.slow
def test_mathematics_in_the_background_has_a_time_limit(comparer, comparing, monkeypatch):
    comparing("\n_SECONDS = 5 ", "\n_SECONDS = 1 ")
    monkeypatch.setattr(math_module, "_COMPARER", comparer)
    reward = rewards.in_background(rewards.math_reward)
    assert asyncio.iscoroutinefunction(reward) and reward.__name__ == "math_reward"
    completions = ["\\boxed{9^{9^{9}}}", "\\boxed{7}", "7"]
    start = time.monotonic()
    assert asyncio.run(reward(completions=completions, solution=["7", "7", None])) == [0.0, 1.0, None]
    assert time.monotonic() - start < 60


@pytest.fixture
def comparer():
    pytest.importorskip("math_verify")
    comparer = answers_module.AnswerComparer()
    yield comparer
    comparer.close()


@pytest.fixture
def comparing(tmp_path, monkeypatch):
    """A function that makes comparers run a modified copy of their script."""

    def compare_by(old, new):
        script, text = tmp_path / "answers.py", Path(answers_module.__file__).read_text()
        assert old in text
        script.write_text(text.replace(old, new))
        monkeypatch.setattr(answers_module, "__file__", str(script))

    return compare_by


BEGIN = "    gold = _gold(solution)\n"


def test_equal_answers_are_compared_once(comparer, comparing, tmp_path):
    comparing(BEGIN, f"    with open({str(tmp_path / 'count')!r}, 'a') as f: f.write('x')\n{BEGIN}")
    pairs = [("so 7", "7"), ("\\boxed{7}", "7"), ("8", "7"), ("7", "7"), ("7", "8"), ("", "7")]
    assert comparer.scores(pairs) == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0] == comparer.scores(pairs)
    assert (tmp_path / "count").read_text() == "x" * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["while True: pass", "x = []\n        while True: x.append(bytearray(1 << 24))", "import os; os._exit(1)"]
)
def test_a_pair_that_never_ends_scores_nothing(comparer, comparing, monkeypatch, fault):
    comparing(BEGIN, f"    if answer == '13':\n        {fault}\n{BEGIN}")
    monkeypatch.setattr(answers_module, "_SECONDS", 3 if "pass" in fault else 60)
    assert comparer.scores([("1", "1")]) == [1.0]
    process = comparer._process
    assert comparer.scores([("13", "13"), ("3", "3"), ("4", "3")]) == [0.0, 1.0, 0.0]
    assert (comparer._process is process) == ("bytearray" in fault)  # memory is limited from within


def test_a_comparer_that_does_not_start_is_an_error(comparer, comparing):
    comparing("\n_SECONDS = 5 ", "\nimport nothing_of_this_name\n_SECONDS = 5 ")
    with pytest.raises(RuntimeError, match=r"did not start \(exit code 1\)"):
        comparer.scores([("1", "1")])


@pytest.mark.slow
def test_an_interrupted_comparison_answers_no_later_request(comparer, comparing):
    comparing(BEGIN, f"    if answer == '13':\n        time.sleep(1)\n{BEGIN}")
    assert comparer.scores([("1", "1")]) == [1.0]

    def interrupt(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(TimeoutError):
            comparer.scores([("13", "13")])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert comparer.scores([("13", "12"), ("13", "13")]) == [0.0, 1.0]


def test_a_forked_process_compares_by_itself(comparer):
    assert comparer.scores([("1", "1")]) == [1.0]
    parent_pid = comparer._process.pid
    comparer._lock.acquire()  # as if a thread were comparing
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        right = comparer.scores([("2", "2"), ("3", "2")]) == [1.0, 0.0]
        os._exit(not (right and comparer._process.pid != parent_pid))
    comparer._lock.release()
    assert os.waitpid(pid, 0)[1] == 0
    assert comparer.scores([("4", "2"), ("5", "5")]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ({"inputs": [["3", "4"]], "outputs": ["7"]}, "`inputs` .* list of strings"),
        ({"inputs": ["3"], "outputs": [7]}, "`outputs` .* list of strings"),
        ({"inputs": None, "outputs": []}, "`inputs` .* list of strings"),
        ({"inputs": ["3"], "outputs": ["7"], "function": "f"}, "`inputs` .* list of lists of arguments"),
        ({"inputs": [[3]], "outputs": [7], "function": 3}, "`function` .* a string"),
        ("[" * 100_000, "must be valid JSON"),
        ("{", r"must be valid JSON \(Expecting property name"),
    ],
    ids=str,
)
def test_malformed_tests_are_named(tests, message):
    with pytest.raises(ValueError, match=message):
        code_module.pass_rate("print(7)", tests)
    with pytest.raises(ValueError, match=message):
        get_code_reward()([block("print(7)")], [tests])


def test_long_outputs_and_arrays_are_scored():
    long = "x" * 3_000_000
    assert code_module.pass_rate("print('x' * 3_000_000)", {"inputs": [""], "outputs": [long]}) == 1.0
    tests = {"inputs": [[1], [2]], "outputs": [[1, 2], 3.0], "function": "f"}
    program = "import numpy as np\ndef f(x): return np.array([1, 2]) if x == 1 else np.float64(3)"
    assert code_module.pass_rate(program, tests) == 1.0


@pytest.mark.parametrize(
    ("got", "wanted", "is_right"),
    [
        (0.1 + 0.2, 0.3, True), (1e-17, 0.0, True), (0.0, 1e-12, False), (1.1e-12, 1e-12, False),
        (1e9 + 0.5, 1e9, True),
        ({"x": True}, {"x": 1}, False), ({"x": 1.0}, {"x": 1}, True), ({"x": [0.3]}, {"x": [0.1 + 0.2]}, True),
        ({"x": 1}, {"y": 1}, False), ([True], [1], False), (float("nan"), 1.0, False),
    ],
    ids=str,
)  # fmt: skip
def test_values_of_programs_are_compared_by_size_and_type(got, wanted, is_right):
    assert _equals(got, wanted) == is_right
