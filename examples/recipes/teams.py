"""Teams of the recipes, for mathematics and programs, of 1 to 4 agents, with rewards of single turns."""

from marft_trl import AgentSpec
from marft_trl.rewards import (
    get_coder_reward,
    get_outcome_reward,
    get_planner_reward,
    get_solver_reward,
    get_verifier_reward,
    math_answer,
)
from marft_trl.workflows import Debate, MixtureOfAgents, Orchestrated, UntilApproved


PROMPTS = {
    "reasoner": "You are the reasoner of a team. Analyse the problem and work out the intermediate results.",
    "actor": "You are the actor of a team. Use the reasoning before you, check it, and give the final answer.",
    "decomposer": "You are the decomposer of a team. Split the problem into smaller ones. Solve none of them.",
    "planner": "You are the planner of a team. Write numbered steps that lead to the solution. Do not carry them out.",
    "executor": "You are the executor of a team. Carry out the plan step by step and give the answer.",
    "solver": "You are the solver of a team. Follow the plan, show your work and give the final answer.",
    "coder": "You are the coder of a team. Follow the plan and write the whole program.",
    "reflector": "You are the reflector of a team. Say briefly what is wrong or missing in the work before you.",
    "verifier": "You are the verifier of a team. Check the work before you, mend it, and give the final answer.",
    "judge": "You are the judge of a team. Compare the solutions before you, and give the best one as final answer.",
    "solver_1": "You are a solver of a team. Show your work and give the final answer.",
    "solver_2": "You are a solver of a team. Show your work and give the final answer.",
    "solver_3": "You are a solver of a team. Show your work and give the final answer.",
    "solver_4": "You are a solver of a team. Show your work and give the final answer.",
    "writer": "You are the writer of a team. Show your work and give the final answer. Mend what a review has found.",
    "evaluator": "You are the evaluator of a team. Check the solution before you. If it is right, write APPROVED. "
    "Else say what is wrong, and do not write that word.",
    "tester": "You are the verifier of a team. Check the program before you, mend it, and give the final program.",
}
# Roles of a team: of the original repository ("duo"), of MARFT v2 for mathematics and for programs, and solvers with
# a judge, with a vote, or with a review.
ROLES = {
    "duo": {
        1: ["actor"],
        2: ["reasoner", "actor"],
        3: ["reasoner", "actor", "verifier"],
        4: ["decomposer", "planner", "executor", "verifier"],
    },
    "math": {
        1: ["solver"],
        2: ["planner", "solver"],
        3: ["planner", "solver", "verifier"],
        4: ["planner", "solver", "reflector", "verifier"],
    },
    "code": {
        1: ["coder"],
        2: ["planner", "coder"],
        3: ["planner", "coder", "verifier"],
        4: ["planner", "coder", "reflector", "verifier"],
    },
    "judge": {
        1: ["solver_1"],
        2: ["solver_1", "judge"],
        3: ["solver_1", "solver_2", "judge"],
        4: ["solver_1", "solver_2", "solver_3", "judge"],
    },
    "vote": {count: [f"solver_{index + 1}" for index in range(count)] for count in (1, 2, 3, 4)},
    "review": {1: ["writer"], 2: ["writer", "evaluator"]},
}
WORKFLOWS = ["chain", "orchestrated", "evaluated", "voting", "judged"]


# The team that a workflow requires. Other teams have agents that do not answer, or do not approve
NEEDED = {"evaluated": "review", "voting": "vote"}


def make_workflow(name, profile, count, kind="math"):
    """
    The workflow of a team: `"chain"` or another one of `WORKFLOWS`. `kind` is that of the problems, whose answers are
    compared in a vote.
    """
    roles = ROLES[profile][count]
    if name not in WORKFLOWS:
        raise ValueError(f"`workflow` must be one of {', '.join(WORKFLOWS)}, got {name!r}.")
    if profile == "review" and count > 1 and name != "evaluated":
        raise ValueError(f"`profile=review` needs `workflow=evaluated`, got {name!r}: an evaluator does not answer.")
    if profile != NEEDED.get(name, profile):
        raise ValueError(f"`workflow={name}` needs the team `profile={NEEDED[name]}`, got {profile!r}.")
    if name == "chain":
        return None
    if count == 1:
        raise ValueError(f"`workflow={name}` needs at least two agents. Set `num_agents`, or leave `workflow` out.")
    if name == "orchestrated":
        return Orchestrated(roles[0], roles[1:], max_turns=2 * count, fallback=roles[-1])
    if name == "evaluated":
        return UntilApproved(roles[0], roles[1], rounds=2)
    if name == "voting":
        return Debate(roles, rounds=1, vote=vote_of(kind))
    return MixtureOfAgents([roles[:-1]], roles[-1])


def vote_of(kind):
    """The function that extracts answers for a vote: from the box or tag, or `None` for the whole text."""
    if kind == "gym":
        from marft_trl.extras.tasks import reasoning_gym_answer

        return reasoning_gym_answer
    return math_answer if kind == "math" else None


def check_team(profile, count):
    """Raise if the team does not exist."""
    if profile not in ROLES:
        raise ValueError(f"`profile` must be one of {', '.join(ROLES)}, got {profile!r}.")
    if count not in ROLES[profile]:
        raise ValueError(f"`num_agents` must be one of {', '.join(map(str, ROLES[profile]))}, got {count}.")


def make_team(profile, count, outcome=None, shared_adapter=False):
    """
    The agents of a team.

    Args:
        profile: `"duo"`, `"math"`, `"code"`, `"judge"`, `"vote"` or `"review"`.
        count: 1 to 4 agents.
        outcome: the reward of the answer if turns have their own rewards, else `None`.
        shared_adapter: whether all act with one LoRA.
    """
    check_team(profile, count)
    return [
        AgentSpec(
            role,
            system_prompt=PROMPTS["tester" if (profile, role) == ("code", "verifier") else role],
            adapter="team" if shared_adapter else None,
            reward_funcs=own_reward(role, outcome, profile),
        )
        for role in ROLES[profile][count]
    ]


def own_reward(role, outcome, profile):
    """MARFT v2's reward for the turns of a role; the reward of the episode for roles without one."""
    if outcome is None:
        return None
    if role in ("planner", "decomposer"):
        return get_planner_reward(outcome, steps=3 if profile == "code" else 2)
    if role in ("solver", "actor", "executor", "writer") or role.startswith("solver_"):
        return get_solver_reward(outcome)
    if role == "coder":
        return get_coder_reward(outcome)
    return get_verifier_reward(outcome) if role == "verifier" else get_outcome_reward(outcome)
