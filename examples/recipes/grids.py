"""The experiments of publications as grids. Each cell names a recipe and changes some of its settings."""

import itertools


def product(**axes):
    """All combinations of the values of options."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def marft_v2():
    """MARFT v2: data x 1 to 4 agents x own or shared LoRA x critic x names, and orchestrated teams."""
    cells = []
    for recipe in ("deepscaler", "deepcoder", "codeforces", "math_duo", "gsm8k_duo"):
        critics, names = ["shared", "multi_head", "per_agent", "frozen"], ["no", "numbered", "none"]
        for cell in product(num_agents=[1, 2, 3, 4], shared_adapter=[False, True], critic=critics, anonymous=names):
            if cell["num_agents"] > 1 or not cell["shared_adapter"]:
                cells.append({"recipe": recipe, **cell, **length_of(recipe, cell["num_agents"])})
        for cell in product(num_agents=[3, 4], shared_adapter=[False, True], critic=critics):
            # Up to two turns for each agent
            length = length_of(recipe, cell["num_agents"], turns=2 * cell["num_agents"])
            cells.append({"recipe": recipe, "workflow": "orchestrated", **cell, **length})
    return cells


# New tokens of a turn by the number of agents, and tokens of all turns that fit into the model's window. Lengths
# of DeepScaleR with 2 to 4 agents and of DeepCoder with 3 and 4 are published; the others have the same sum.
LENGTHS = {
    "deepscaler": ({1: 24576, 2: 12288, 3: 8192, 4: 6144}, 120_000),
    "deepcoder": ({1: 27648, 2: 13824, 3: 9216, 4: 6912}, 30_000),
    "codeforces": ({1: 27648, 2: 13824, 3: 9216, 4: 6912}, 120_000),
}


def length_of(recipe, count, turns=None):
    """New tokens of a turn where they depend on the number of agents, or of turns, as an option of a cell."""
    if recipe not in LENGTHS:
        return {}
    lengths, window = LENGTHS[recipe]
    return {"max_completion_length": min(lengths[count], window // turns if turns else lengths[count])}


def marft():
    """
    The first paper: one and two agents x untrained, PPO and MARFT at both levels. PPO updates all agents in each
    update, MARFT one agent for ten steps, then the next. With one agent they are the same, and run once.
    """
    kinds = {
        "untrained": {"train": False},
        "ppo-a": {"preset": "marft-a"},
        "ppo-t": {"preset": "marft-t"},
        "marft-a": {"preset": "marft-a", "agent_iteration_interval": 10},
        "marft-t": {"preset": "marft-t", "agent_iteration_interval": 10},
    }
    return [
        {"recipe": recipe, "num_agents": count, "kind": kind, **settings}
        for recipe in ("math_duo", "gsm8k_duo")
        for count in (1, 2)
        for kind, settings in kinds.items()
        if count > 1 or "agent_iteration_interval" not in settings
    ]


def at_grpo():
    """AT-GRPO (2510.11062): planning with one and two agents, own and shared policies, on games of reasoning-gym."""
    games = ["sokoban", "mini_sudoku", "shortest_path"]
    return [
        {"recipe": "planning", **cell}
        for cell in product(
            problems=games, num_agents=[1, 2], shared_adapter=[False, True], preset=["at-grpo", "grpo"]
        )
        if cell["num_agents"] > 1 or not cell["shared_adapter"]
    ]


def c3():
    """C3 (2603.06859): a duo with credit by alternatives, a central critic, or a group."""
    return [
        {"recipe": "c3_duo", **cell} for cell in product(problems=["math", "gsm8k"], preset=["c3", "mappo", "magrpo"])
    ]


def collapses():
    """2605.24202: three workflows, one policy for all or one for each, with and without equal weight."""
    teams = {
        "evaluated": {"profile": "review", "num_agents": 2},
        "voting": {"profile": "vote", "num_agents": 3},
        "orchestrated": {"profile": "math", "num_agents": 3},
    }
    return [
        {"recipe": "workflows", "workflow": workflow, **team, **cell}
        for workflow, team in teams.items()
        for cell in product(shared_adapter=[True, False], agent_weight=["size", "equal"])
        if cell["shared_adapter"] or cell["agent_weight"] == "size"
    ]


def solver_judge():
    """rLLM's solver-judge on countdown: two solvers and a judge, next to one solver."""
    return [{"recipe": "solver_judge", "num_agents": 1, "workflow": "chain"}] + [
        {"recipe": "solver_judge", "workflow": "judged", **cell}
        for cell in product(num_agents=[3, 4], shared_adapter=[True, False])
    ]


GRIDS = {
    "marft-v2": marft_v2,
    "marft": marft,
    "at-grpo": at_grpo,
    "c3": c3,
    "collapses": collapses,
    "solver-judge": solver_judge,
}


def name_of(cell):
    """Name of a cell: its recipe and its changes, without settings that follow from them."""
    follows = ("profile", "max_completion_length")
    return "-".join(_word(name, value) for name, value in cell.items() if name not in follows)


def _word(name, value):
    if isinstance(value, bool):
        return name if value else f"no_{name}"
    return str(value) if name in ("recipe", "kind", "preset", "problems", "workflow") else f"{name}_{value}"
