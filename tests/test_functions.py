"""Functions in the recorded settings of a run: identified by their source and their parameters."""

import ast
import functools
import gc

from marft_trl.extras.sandbox import get_code_reward
from marft_trl.extras.tasks import get_reasoning_gym_reward
from marft_trl.rewards import math_answer
from marft_trl.rewards.answers import boxed
from marft_trl.runs.resume import compute_fingerprint


def make_reward(bonus, *, scale=1.0, read=len):
    calls, call_counts = 0, []

    def reward(completions, power=2, **columns):
        nonlocal calls
        calls += 1
        call_counts.append(calls)
        return [bonus + scale * read(completion) ** power for completion in completions]

    return reward


def plus(completions, bonus, **columns):
    return [bonus for _ in completions]


def test_the_parameters_of_a_function_are_part_of_it():
    makers = [functools.partial(make_reward, *arguments) for arguments in ((1,), (2,), ((1, "a"),), ((1, "b"),))]
    makers += [functools.partial(make_reward, 1, **arguments) for arguments in ({"scale": 2.0}, {"read": str.count})]
    makers += [
        functools.partial(functools.partial, plus, **arguments) for arguments in ({"bonus": 1}, {"bonus": 2}, {})
    ]
    makers += [lambda: plus, *(functools.partial(get_code_reward, seconds=seconds) for seconds in (10, 120))]
    makers += [functools.partial(get_reasoning_gym_reward, answer=answer) for answer in (math_answer, boxed)]
    first, again = ([compute_fingerprint(make()) for make in makers] for _ in range(2))
    assert first == again and len(set(first)) == len(makers)
    assert compute_fingerprint(compute_fingerprint).startswith("compute_fingerprint (")
    assert compute_fingerprint(len) == "len"


def test_state_of_a_function_does_not_change_the_fingerprint():
    reward = make_reward(1)
    before = compute_fingerprint(reward)
    reward(["a", "b"])
    reward(["a"])
    assert compute_fingerprint(reward) == before

    def again(depth):  # the closure contains the function
        return again(depth - 1) if depth else 0

    assert compute_fingerprint(again) == compute_fingerprint(again)


def test_tables_and_variables_without_a_value_are_read():
    assert compute_fingerprint(functools.partial(plus, bonus={(1, 2): 3, None: 4})) != compute_fingerprint(plus)

    def early(completions):
        return late

    assert compute_fingerprint(early).startswith("early (")
    late = 1
    assert early([]) == late


class Parses:
    """Garbage whose finalizer parses code, as for a logged traceback, and leaves garbage again."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        ast.parse("x = 1")
        Parses()


def test_the_source_of_a_class_is_read_whatever_finalizers_do():
    before = gc.get_threshold()
    expected = compute_fingerprint(Parses())
    try:
        gc.set_threshold(20)
        Parses()
        assert all(compute_fingerprint(Parses()) == expected for _ in range(20))
    finally:
        gc.set_threshold(*before)
        Parses.__del__ = lambda self: None
        gc.collect()
