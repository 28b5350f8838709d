# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
from .background import in_background
from .code import code_reward, get_code_reward, last_python_block
from .environment import environment_reward
from .jail import JailError, Limits, Outcome, run_python
from .judge import judge_reward
from .math import boxed, math_answer, math_reward
from .steps import get_coder_reward, get_outcome_reward, get_planner_reward, get_solver_reward, get_verifier_reward


__all__ = [
    "JailError",
    "Limits",
    "Outcome",
    "boxed",
    "code_reward",
    "environment_reward",
    "get_code_reward",
    "get_coder_reward",
    "get_outcome_reward",
    "get_planner_reward",
    "get_solver_reward",
    "get_verifier_reward",
    "in_background",
    "judge_reward",
    "last_python_block",
    "math_answer",
    "math_reward",
    "run_python",
]
