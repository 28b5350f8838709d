"""Teams so small that the exact value of every turn is known, and a generator that draws from their policies."""

import random
from collections import defaultdict

from marft_trl import AgentSpec, Workflow
from marft_trl.rollout.generator import SampledTurn
from marft_trl.workflows.base import together

import torch

from .enumeration import World, turns_of


TURNS = turns_of(1)
NAMES = {"orchestrated": ["boss", "left", "right"], "graph": ["one", "two", "three"]}


class Team(Workflow):
    """A workflow as a function of the turns so far, with random rewards from a seed."""

    def __init__(self, name: str, seed: int):
        self.name, self.seed, self.earns = name, seed, name == "game"
        self.names = NAMES.get(name, ["one", "two"])

    def next(self, turns: tuple) -> tuple[str, list[int]] | None:
        """The agent that acts after these turns and the positions of the turns that it sees; `None` at the end."""
        if self.name in ("graph", "loop") and len(turns) < 3:
            if self.name == "loop":  # the first agent speaks again
                return ("one", "two", "one")[len(turns)], list(range(len(turns)))
            return ("one", "two", "three")[len(turns)], [[], [], [0, 1]][len(turns)]
        if len(turns) >= 2 or (self.name == "orchestrated" and len(turns) == 1 and turns[0] == TURNS[0]):
            return None
        if self.name == "orchestrated":
            return (("left" if turns[0] == TURNS[1] else "right"), [0]) if turns else ("boss", [])
        if self.name == "parallel":
            return ("one", "two")[len(turns)], []
        return ("one", "two")[len(turns)], list(range(len(turns)))

    def reward(self, turns: tuple) -> float:
        return random.Random(repr((self.seed, turns))).uniform(-1, 2)

    def received(self, agent: str, turns: tuple) -> float:
        """Final reward of an agent."""
        sign = -1.0 if self.name == "game" and agent == "two" else 1.0
        return sign * self.reward(turns)

    async def run(self, episode):
        if self.name == "parallel":  # so alternatives of one are completed with new turns of the other
            await together(episode.turn(name, sees=[]) for name in self.names)
            return
        turns = []
        while (following := self.next(tuple(tuple(turn.completion_ids) for turn in turns))) is not None:
            agent, seen = following
            turns.append(await episode.turn(agent, sees=[turns[index] for index in seen]))
        if self.earns:
            reward = self.reward(tuple(tuple(turn.completion_ids) for turn in turns))
            episode.earn(turns[-1], {"one": reward, "two": -reward})


class Truth:
    """The exact values of a team with its present policies."""

    def __init__(self, team: Team, world: World):
        self._team, self._world = team, world
        self._known: dict[tuple, dict] = {}
        self.reach: dict[tuple, float] = defaultdict(float)  # by agent and observation
        self._sums: dict[tuple, float] = defaultdict(float)
        self._walk((), 1.0)
        self.advantages = {}
        for (agent, seen), chance in self.reach.items():
            values = {turn: self._sums[agent, seen, turn] / chance for turn in TURNS}
            mean = sum(self.policy(agent, seen)[turn] * value for turn, value in values.items())
            for turn, value in values.items():
                self.advantages[agent, seen, turn] = value - mean

    def policy(self, agent: str, seen: tuple) -> dict[tuple, float]:
        """Probability of each turn for what an agent sees."""
        if (agent, seen) not in self._known:
            tokens = tuple(token for turn in seen for token in turn)
            with torch.no_grad():
                probabilities = {turn: self._world.log_prob(agent, tokens, turn).exp().item() for turn in TURNS}
            self._known[agent, seen] = probabilities
        return self._known[agent, seen]

    def _walk(self, turns: tuple, chance: float) -> dict[str, float]:
        """Expected final reward of each agent after these turns."""
        names = self._team.names
        following = self._team.next(turns)
        if following is None:
            return {name: self._team.received(name, turns) for name in names}
        agent, places = following
        # The end token is not shown: an empty turn and no turn look alike
        seen = tuple(turns[index] for index in places if turns[index] != TURNS[0])
        self.reach[agent, seen] += chance
        total = dict.fromkeys(names, 0.0)
        for turn, probability in self.policy(agent, seen).items():
            values = self._walk((*turns, turn), chance * probability)
            self._sums[agent, seen, turn] += chance * values[agent]
            for name in names:
                total[name] += probability * values[name]
        return total

    def gradient(self) -> torch.Tensor:
        """Of the agents' expected returns, with respect to the logits of their policies."""
        return torch.cat(
            [
                self.reach[key] * self.policy(*key)[turn] * torch.tensor([self.advantages[(*key, turn)]])
                for key in self.reach
                for turn in TURNS
            ]
        )

    def of_agents(self, names) -> torch.Tensor:
        """1 for the logits of these agents, else 0."""
        return torch.tensor([float(agent in names) for agent, _ in self.reach for _ in TURNS])

    def score(self, key: tuple, turn: tuple) -> torch.Tensor:
        """Gradient of the log-probability of a turn, with respect to all logits."""
        policy = self.policy(*key)
        gradient = torch.tensor([float(other_turn == turn) - policy[other_turn] for other_turn in TURNS])
        return torch.cat([gradient if other == key else torch.zeros(len(TURNS)) for other in self.reach])


def make(team: Team, folder, frozen=(), **settings) -> World:
    """A trainer of a team, with random policies."""
    world = World(
        folder,
        workflow=team,
        agents=[AgentSpec(name, trainable=name not in frozen) for name in team.names],
        reward_funcs=None
        if team.earns
        else lambda turns, **_: [team.reward(token_ids_of(episode)) for episode in turns],
        **{"level": "action", **settings},
    )
    torch.manual_seed(team.seed + 100)
    for name, parameter in world.trainer.model.named_parameters():
        if "lora_B" in name and "_critic" not in name:
            parameter.data.normal_(std=0.3)
    return world


def token_ids_of(turns) -> tuple:
    return tuple(tuple(turn.completion_ids) for turn in turns)


class Drawing:
    """Samples turns from the enumerated policies, and counts tokens."""

    def __init__(self, world: World, seed: int):
        self._world, self._draw, self.tokens = world, random.Random(seed), 0
        self._known: dict[tuple, list[float]] = {}

    async def __call__(self, observed, **options):
        turns = []
        for request in observed:
            turn = self._draw.choices(TURNS, self._of(request.agent, tuple(request.ids), request.by_reference))[0]
            self.tokens += len(turn)
            turns.append(SampledTurn(list(turn)))
        return turns

    def _of(self, agent, ids, by_reference):
        key = agent, ids, by_reference
        if key not in self._known:
            log_probs = self._world.trainer.parts.log_probs
            scores = log_probs.next_token(agent, ids, by_reference=by_reference)  # a turn is one token
            self._known[key] = [scores[turn[0]].exp().item() for turn in TURNS]
        return self._known[key]


def value_of(row) -> float:
    return float(torch.as_tensor(row.advantage).reshape(-1)[0])


def key_of(row, world) -> tuple:
    """The agent of a row and the turns that it saw, and the turn of the row."""
    seen = tuple((token,) for token in row.prompt_ids.tolist()[1:])
    return (row.agent, seen), tuple(row.completion_ids.tolist())
