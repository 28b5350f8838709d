"""
Every shipped workflow trains: pooled over seeds the team's reward rises by several times its spread, and the weights
of all its agents move.

One tiny model is taught what scripted agents say, half of it at random; reinforcement learning has to find out which
half was right.
"""

import copy
import random

from marft_trl import AgentSpec, Sequential
from marft_trl.prompts import team_view
from marft_trl.tiny import scripted_turns, tiny_model, tiny_tokenizer, warm_up
from marft_trl.workflows import Debate, EnvironmentLoop, Graph, MixtureOfAgents, Orchestrated, UntilApproved
from marft_trl.workflows.orchestrated import parse_route

import pytest
import torch
from datasets import Dataset

from .helpers import lora, moved_by_training, pooled, team_trainer


pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WORDS = ("Say", "number", "call", "done", "APPROVED", "planner", "solver", "critic", "judge", "boss", "left", "right")
TOKENIZER = tiny_tokenizer((*WORDS, "environment", "bad", "wrong"))
SEEDS = (0, 1, 2, 3)


# ---- All agents say a number: the reward is the share of right turns ----


def number_row(draw):
    return {"prompt": f"Say {draw.randint(1, 9)}", "solution": ""}


def number_of(prompt):
    return prompt[-1]


def says_the_number(episode, agent, seen, draw):
    if agent == "critic":
        right = seen[-1].text == number_of(episode.prompt)
        return "APPROVED" if (right if draw.random() < 0.5 else draw.random() < 0.5) else "bad"
    return number_of(episode.prompt) if draw.random() < 0.5 else str(draw.randint(1, 9))


def share_right(completions, prompts, turns, **columns):
    """The share of turns that say the number."""
    return [
        sum(turn.text.strip() == number_of(prompt) for turn in episode_turns) / len(episode_turns)
        for prompt, episode_turns in zip(prompts, turns, strict=True)
    ]


def right_answer(completions, prompts, turns, **columns):
    """1 for the number in the end, less a tenth for every turn."""
    return [
        float(text.strip() == number_of(prompt)) - 0.1 * len(episode_turns)
        for text, prompt, episode_turns in zip(completions, prompts, turns, strict=True)
    ]


class SayIt:
    """Each round is worth 1 if its last turn says the number; the second one ends it."""

    def reset(self, prompt, **row):
        self.number, self.rounds = number_of(prompt), 0

    def step(self, turns):
        self.rounds += 1
        right = turns[-1].text.strip() == self.number
        return "right" if right else "wrong", float(right), self.rounds == 2


def agents(*names):
    return [AgentSpec(name, system_prompt=name, max_completion_length=4) for name in names]


CASES = {
    "sequential": (Sequential(), agents("planner", "solver"), share_right),
    "graph": (
        Graph({"planner": [], "left": ["planner"], "right": ["planner"], "judge": ["left", "right"]}),
        agents("planner", "left", "right", "judge"),
        share_right,
    ),
    "debate": (Debate(["left", "right"], rounds=2, judge="judge"), agents("left", "right", "judge"), share_right),
    "mixture": (MixtureOfAgents([["left", "right"]] * 2, "judge"), agents("left", "right", "judge"), share_right),
    "approved": (UntilApproved("solver", "critic", rounds=2), agents("solver", "critic"), right_answer),
    "environment": (EnvironmentLoop(SayIt, horizon=3), agents("planner", "solver"), None),
}
# What a model that plays its parts half right earns at least; the scripted agents themselves earn a little more.
TAUGHT = {"sequential": 0.45, "graph": 0.45, "debate": 0.45, "mixture": 0.45, "approved": 0.1, "environment": 0.8}


@pytest.fixture(scope="module")
def taught():
    """One model that can play all parts, half of the time at random."""

    def mixed():
        cases = CASES.values()
        parts = [scripted_turns(TOKENIZER, workflow, team, number_row, says_the_number) for workflow, team, _ in cases]
        while True:
            yield from map(next, parts)

    return teach(mixed, steps=600, rate=1.5e-3)


def teach(rows, steps, rate):
    torch.set_num_threads(1)
    model = tiny_model(len(TOKENIZER))
    torch.manual_seed(0)
    warm_up(model, TOKENIZER, steps=steps, learning_rate=rate, rows=rows())
    return model


def train(model, folder, workflow, team, rows, reward_funcs, steps, seed, eval_metrics=None, rate=3e-3, episodes=64):
    """Train a copy of the model. Returns the evaluations before and after and the names of weights that moved."""
    draw = random.Random(seed)
    settings = {"per_device_train_batch_size": episodes, "num_generations": 8, "num_generations_eval": 1, "seed": seed}
    settings |= {"max_steps": steps, "learning_rate": rate, "per_device_eval_batch_size": 200, "logging_steps": 10}
    trainer = team_trainer(
        *(copy.deepcopy(model), folder),
        **{"agents": team, "workflow": workflow, "reward_funcs": reward_funcs, "eval_metrics": eval_metrics},
        train_dataset=Dataset.from_list([rows(draw) for _ in range(1000)]),
        eval_dataset=Dataset.from_list([rows(draw) for _ in range(200)]),
        processing_class=TOKENIZER,
        peft_config=lora(16),
        settings={**settings, "gradient_checkpointing": False},
    )
    before = trainer.evaluate()
    changed = moved_by_training(trainer)
    return before, trainer.evaluate(), changed


@pytest.mark.parametrize(
    "name", [n if n == "sequential" else pytest.param(n, marks=pytest.mark.exhaustive) for n in CASES]
)
def test_a_team_gets_better_in_every_workflow(taught, tmp_path, name):
    workflow, team, reward = CASES[name]
    figures = []
    for seed in SEEDS:
        # Half of the turns of "approved" are reviews, which earn nothing themselves: its gain varies most
        options = {"episodes": 128, "rate": 1.5e-3} if name == "approved" else {}
        before, after, changed = train(taught, tmp_path, workflow, team, number_row, reward, 50, seed, **options)
        figures.append((before["eval_reward"], after["eval_reward"]))
        for agent in team:
            assert any(f".{agent.name}." in weight_name for weight_name in changed), agent.name
    print(name, [(round(first, 2), round(last, 2)) for first, last in figures])
    assert all(first > TAUGHT[name] for first, _ in figures), f"the model was not taught its parts: {figures}"
    mean, distance = pooled([last - first for first, last in figures])
    assert mean > 0.15 and distance > 3, figures


# ---- Only one of two specialists can answer ----


def thing_row(draw):
    return {"prompt": f"{draw.choice(('coins', 'pens'))} {draw.randint(1, 9)}", "solution": ""}


def kind_alone(agent, prompt, seen):
    """The boss sees what the task is about, and who has spoken."""
    return team_view(agent, [{"role": "user", "content": prompt[0]["content"].split()[0]}], seen)


def number_if_mine(agent, prompt, seen):
    """A specialist sees the number where the task is about its own things."""
    about, number = prompt[0]["content"].split()
    return team_view(agent, [{"role": "user", "content": number if about == agent.name else "?"}], [])


ROUTED = Orchestrated("boss", max_turns=2)
ROUTED_TEAM = [
    AgentSpec("boss", system_prompt="call", max_completion_length=16, view=kind_alone),
    AgentSpec("coins", system_prompt="Say", max_completion_length=4, view=number_if_mine),
    AgentSpec("pens", system_prompt="Say", max_completion_length=4, view=number_if_mine),
]


def routes(episode, agent, seen, draw):
    """The boss repeats what it is about and calls at random; specialists say the number if they know it."""
    about, number = episode.prompt.split()
    if agent == "boss":
        return f"{about}<call>{draw.choice(('coins', 'pens'))}</call>"
    return number if about == agent else str(draw.randint(1, 9))


def answered(completions, prompts, **columns):
    return [float(text.strip() == prompt[-1]) for text, prompt in zip(completions, prompts, strict=True)]


def routing_accuracy(answers, prompt, turns, **columns):
    """The share of episodes whose first call goes to the one who can answer."""
    first = [parse_route(episode_turns[0].text, ["coins", "pens"]).agent for episode_turns in turns]
    return {"routing": sum(agent == task.split()[0] for agent, task in zip(first, prompt, strict=True)) / len(prompt)}


@pytest.fixture(scope="module")
def taught_to_route():
    return teach(lambda: scripted_turns(TOKENIZER, ROUTED, ROUTED_TEAM, thing_row, routes), steps=400, rate=3e-3)


def test_an_orchestrator_learns_whom_to_call(taught_to_route, tmp_path):
    figures, rewards = [], []
    for seed in SEEDS:
        arguments = (taught_to_route, tmp_path, ROUTED, ROUTED_TEAM, thing_row, answered, 60, seed, routing_accuracy)
        # At 2e-3, with half of the episodes, two of four seeds call one specialist for everything
        before, after, changed = train(*arguments, rate=1e-3, episodes=128)
        figures.append((before["eval_routing"], after["eval_routing"]))
        assert any(".boss." in weight_name for weight_name in changed)
        rewards.append(after["eval_reward"] - before["eval_reward"])
    print("routing", [(round(first, 2), round(last, 2)) for first, last in figures])
    assert all(0.35 < first < 0.65 for first, _ in figures), figures
    mean, distance = pooled([last - first for first, last in figures])
    assert mean > 0.25 and distance > 3, figures
    mean, distance = pooled(rewards)
    assert mean > 0 and distance > 3, rewards
