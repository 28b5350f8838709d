"""
Compare the expected gradient of each estimator with the exact gradient, for a team with few possible episodes.

    python benchmarks/learning/gradient_bias.py

The team is a chain of two agents with random policies and random rewards. Each turn is one of three tokens. All
episodes are enumerated, so the results are exact expectations. The script prints the cosine between the expected and
the exact gradient, and the relative error after the best rescaling.
"""

import argparse
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from transformers.utils import logging


sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.enumeration import World, of_candidates, with_branches


PPO = {"advantage": "gae", "critic": "shared", "num_generations": 2, "gae_lambda": 1.0, "normalize_advantages": "none"}
TURN = {"advantage": "turn", "turn_candidates": 2, "num_generations": 1}
ESTIMATORS = {
    "leave_one_out": {"advantage": "leave_one_out"},
    "group, no scaling": {"advantage": "group", "scale_rewards": "none"},
    "group, scaled by the group (G = 2)": {"advantage": "group"},
    "agent, scaled by the group (G = 2)": {"advantage": "agent"},
    "turn, sampled, no scaling": {**TURN, "scale_rewards": "none", "continue_from": "sampled"},
    "turn, best, no scaling": {**TURN, "scale_rewards": "none", "continue_from": "best"},
    "turn, best, scaled (2 candidates)": {**TURN, "continue_from": "best"},
    "gae, lambda 1": PPO,
    "gae, lambda 0.95, untrained critic": {**PPO, "gae_lambda": 0.95},
    "gae, lambda 0.5, untrained critic": {**PPO, "gae_lambda": 0.5},
    "gae, lambda 1, gamma 0.9": {**PPO, "gamma": 0.9},
    "step_discount 0.5, as returns, none": {"advantage": "none", "credit": "step_discount", "credit_discount": 0.5},
    "counterfactual, leave_one_out": {"advantage": "leave_one_out", "credit": "counterfactual"},
    "removed, leave_one_out": {"advantage": "leave_one_out", "credit": "removed"},
    "removed, agent, scaled (G = 2)": {"advantage": "agent", "credit": "removed"},
    "c3 (2 alternatives)": {"advantage": "c3", "turn_candidates": 2, "num_generations": 1},
}


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    print("| estimator | cosine | relative error |\n|---|---|---|")
    for name, settings in ESTIMATORS.items():
        with tempfile.TemporaryDirectory() as folder:
            world = World(folder, **settings)
            exact = world.exact()
            if settings["advantage"] in ("turn", "c3"):
                got = of_candidates(world)
            elif "credit" in settings and settings["credit"] != "step_discount":
                got = with_branches(world)
            else:
                got = world.of_groups(2)
        cosine = (got @ exact) / (got.norm() * exact.norm())
        error = (got * (got @ exact) / (got @ got) - exact).norm() / exact.norm()
        print(f"| {name} | {cosine:.4f} | {error:.3f} |", flush=True)


if __name__ == "__main__":
    main()
