"""
Three small environments with their teams, for `play.py`: guess a number, cross a grid and empty a store.

Each world consists of an environment with `reset` and `step`, a team, and scripted agents that make errors. A tiny
model is first trained to imitate the scripted agents. A real model needs only the prompts.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from marft_trl import AgentSpec, Workflow
from marft_trl.prompts import team_view
from marft_trl.workflows import EnvironmentLoop, together


SLIPS = 0.4  # share of the scripted agents' turns that are random


@dataclass
class World:
    """
    A workflow with its team.

    Args:
        workflow ([`Workflow`]):
            Workflow of the team, including its environment.
        agents (`list[AgentSpec]`):
            Agents of the team.
        row (`Callable[[random.Random], dict]`):
            Function `row(draw)` that returns a random dataset row.
        scripted (`Callable[..., str]`):
            Function `scripted(episode, agent, seen, draw)` that returns the text of a scripted agent's turn.
        words (`tuple[str, ...]`):
            Words that the tokenizer of the tiny model needs for this world.
    """

    workflow: Workflow
    agents: list[AgentSpec]
    row: Callable[[random.Random], dict]
    scripted: Callable[..., str]
    words: tuple[str, ...]


# ---- Guess: one agent, several rounds ----


class GuessNumber:
    """Environment in which the team has three guesses to find the `number` of the row, from 1 to 7."""

    def reset(self, number, **row):
        self.number = number

    def step(self, turns):
        guessed = turns[-1].text.strip()
        if guessed == str(self.number):
            return f"{guessed} is right.", 1.0, True
        if guessed not in tuple("1234567"):
            return "Not a number from 1 to 7.", 0.0, False
        return f"{guessed} is too {'low' if int(guessed) < self.number else 'high'}.", 0.0, False


def guess():
    def scripted(episode, agent, seen, draw):
        if draw.random() < SLIPS:
            return str(draw.randint(1, 7))
        low, high = 1, 7
        for observation in episode.feedback:
            if not observation.text[0].isdecimal():
                continue
            tried = int(observation.text[0])
            low, high = (max(low, tried + 1), high) if "low" in observation.text else (low, min(high, tried - 1))
        return str((low + high) // 2)

    agents = [AgentSpec("guesser", system_prompt="Guess a number from 1 to 7.", max_completion_length=4)]
    words = ("guesser", "environment", "Guess", "number", "Find", "from", "is", "too", "low", "high", "to")
    row = lambda draw: {"prompt": "Find the number.", "number": draw.randint(1, 7)}  # noqa: E731
    return World(EnvironmentLoop(GuessNumber, horizon=3), agents, row, scripted, words)


# ---- Grid: the planner sees position and goal, the mover sees only the planner's turn ----


STEPS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}


class Grid:
    """
    Environment in which the team moves to a goal on a grid of 4 x 4 squares. The reward of a round is the decrease of
    the distance to the goal.
    """

    def reset(self, start, goal, **row):
        self.place, self.goal = tuple(start), tuple(goal)
        return self._where()

    def step(self, turns):
        before = self._distance()
        move = {"n": "north", "s": "south", "e": "east", "w": "west"}.get(turns[-1].text.strip())
        if move is not None:
            self.place = tuple(min(3, max(0, at + by)) for at, by in zip(self.place, STEPS[move], strict=True))
        return self._where(), float(before - self._distance()), self._distance() == 0

    def _distance(self):
        return sum(abs(at - to) for at, to in zip(self.place, self.goal, strict=True))

    def _where(self):
        return f"at {self.place[0]},{self.place[1]} goal {self.goal[0]},{self.goal[1]}"


def directions(place, goal):
    """Directions that decrease the distance to the goal."""
    across, up = goal[0] - place[0], goal[1] - place[1]
    return [name for name, (dx, dy) in STEPS.items() if dx * across > 0 or dy * up > 0]


def grid():
    def scripted(episode, agent, seen, draw):
        if agent == "mover":
            return draw.choice("nsew") if draw.random() < SLIPS else seen[-1].text[0]
        world = episode.environment
        return draw.choice(list(STEPS) if draw.random() < SLIPS else directions(world.place, world.goal))

    def row(draw):
        start, goal = draw.sample([[x, y] for x in range(4) for y in range(4)], k=2)
        return {"prompt": "Reach the goal.", "start": start, "goal": goal}

    def last_alone(agent, prompt, seen):
        return team_view(agent, [], seen[-1:])

    agents = [
        AgentSpec("planner", system_prompt="Say where to go.", max_completion_length=4, view=last_alone),
        AgentSpec("mover", system_prompt="Say n, s, e or w.", max_completion_length=4, view=last_alone),
    ]
    words = ("planner", "mover", "environment", "at", "goal", "Say", "where", "go", "north", "south", "east", "west")
    return World(EnvironmentLoop(Grid, horizon=4), agents, row, scripted, words)


# ---- Store: an orchestrator distributes the work between two executors, which act on the environment ----


class Store:
    """Environment in which two executors take `apples` and `pears` from a store. Each right number earns 0.5, once."""

    def reset(self, apples, pears, **row):
        self.wanted = {"left": apples, "right": pears}

    def step(self, turns):
        rewards = {}
        for turn in turns:
            is_right = turn.agent in self.wanted and turn.text.strip() == str(self.wanted[turn.agent])
            if is_right:
                del self.wanted[turn.agent]
            rewards[turn.agent] = 0.5 * is_right
        feedback = ", ".join(f"{name} {'wrong' if name in self.wanted else 'done'}" for name in rewards)
        return feedback, rewards, not self.wanted


class Crew(Workflow):
    """The boss reads the task and gives an order, both executors act simultaneously, and all agents get feedback."""

    earns = True

    def __init__(self, horizon=2):
        self.horizon = horizon

    async def run(self, episode):
        store = episode.environment = Store()
        store.reset(**episode.row)
        heard = []
        for _ in range(self.horizon):
            order = await episode.turn("boss", sees=heard)
            acts = await together(episode.turn(name, sees=[*heard, order]) for name in ("left", "right"))
            feedback, rewards, is_done = store.step(acts)
            for act in acts:
                episode.earn(act, rewards[act.agent])
            heard = [order, episode.observe(feedback, after=acts)]
            if is_done:
                break
        episode.answer = acts[-1]


def store():
    def scripted(episode, agent, seen, draw):
        if draw.random() < SLIPS:
            return f"{draw.randint(1, 9)};{draw.randint(1, 9)}" if agent == "boss" else str(draw.randint(1, 9))
        if agent == "boss":
            return f"{episode.row['apples']};{episode.row['pears']}"
        return seen[-1].text.split(";")[agent == "right"]

    def row(draw):
        apples, pears = draw.randint(1, 9), draw.randint(1, 9)
        return {"prompt": f"{apples} apples and {pears} pears.", "apples": apples, "pears": pears}

    def without_the_task(agent, prompt, seen):
        return team_view(agent, [], seen)

    agents = [
        AgentSpec("boss", system_prompt="Tell left and right how many to take.", max_completion_length=6),
        AgentSpec("left", system_prompt="Take the first.", max_completion_length=4, view=without_the_task),
        AgentSpec("right", system_prompt="Take the second.", max_completion_length=4, view=without_the_task),
    ]
    words = ("boss", "left", "right", "environment", "apples", "pears", "done", "wrong", "Tell", "how", "to", "Take")
    return World(Crew(), agents, row, scripted, (*words, "take", "first", "second"))


WORLDS = {"guess": guess, "grid": grid, "store": store}
