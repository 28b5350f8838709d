"""A team so small that all of its episodes can be listed: the exact policy gradient, and what an estimator expects."""

import itertools
import math
import random
from dataclasses import replace

from marft_trl import AgentSpec, Workflow
from marft_trl.learning.adapter_updates import Schedule
from marft_trl.rollout.generator import SampledTurn
from marft_trl.tiny import tiny_model

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .helpers import by_hand, shake, team_trainer


END = 0  # the token that ends a turn; "a" and "b" are the others
TEAM = ["one", "two"]


class Parallel(Workflow):
    def __repr__(self):
        return "parallel"

    async def run(self, episode):
        await episode.turn("one", sees=[])
        await episode.turn("two", sees=[])


def tokenizer() -> PreTrainedTokenizerFast:
    letters = Tokenizer(models.WordLevel({"<end>": END, "a": 1, "b": 2}, unk_token="<end>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>", pad_token="<end>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast


def view(agent, prompt, seen):
    return [{"role": "user", "content": prompt[0]["content"] + "".join(turn.raw_text for turn in seen)}]


def turns_of(length: int) -> list[tuple[int, ...]]:
    complete = [(END,)]
    open_ended: list[tuple[int, ...]] = [()]
    for _ in range(length):
        open_ended = [(*turn, token) for turn in open_ended for token in (1, 2)]
        complete += [(*turn, END) for turn in open_ended if len(turn) < length]
    return complete + open_ended


def reward_of(first, second) -> float:
    return random.Random(repr((tuple(first), tuple(second)))).uniform(-1, 2)


def reward(completions, turns, **kwargs):
    return [reward_of(episode_turns[0].completion_ids, episode_turns[1].completion_ids) for episode_turns in turns]


class World:
    """The team, a chain unless a workflow is given, its trainer and its exact gradient. `length` is of a turn."""

    def __init__(self, folder, length=1, workflow=None, agents=None, reward_funcs=reward, **settings):
        self.is_chain = workflow is None
        model = tiny_model(3, hidden_size=16, intermediate_size=32, head_dim=8, eos_token_id=END, pad_token_id=END)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)  # far from uniform
        defaults = {"per_device_train_batch_size": 4096, "max_completion_length": length, "num_generations": 2}
        defaults |= {"gradient_checkpointing": False, "max_tokens_per_micro_batch": None, "max_steps": 1}
        arguments = {"agents": agents or [AgentSpec(name) for name in TEAM], "workflow": workflow, "view": view}
        arguments |= {"reward_funcs": reward_funcs, "train_dataset": Dataset.from_dict({"prompt": ["a"] * 4096})}
        settings = {**defaults, **settings}
        self.trainer = team_trainer(model, folder, processing_class=tokenizer(), settings=settings, **arguments)
        torch.manual_seed(5)
        shake(self.trainer.model, 0.3)
        if self.trainer.critic is not None:
            # Values as large as rewards, however wide a layer is: rounding of larger ones would be a difference
            for parameter in self.trainer.critic.heads.parameters():
                parameter.data.normal_(std=2 / max(parameter.shape[-1], 16) ** 0.5)
        self.trainer.model.train()
        self.trainer.current_gradient_accumulation_steps = 1
        self.turns = turns_of(length)
        self.episodes = list(itertools.product(self.turns, repeat=2))

    def log_prob(self, agent: str, seen: tuple[int, ...], turn: tuple[int, ...]) -> torch.Tensor:
        """Log-probability of a turn, with gradient, by a plain forward pass of the model."""
        return self.of_agent(agent, [(seen, turn)])[0]

    def of_agent(self, agent: str, pairs: list) -> list[torch.Tensor]:
        """Log-probabilities of several turns, each with the seen tokens, in one pass: no token attends to padding."""
        self.trainer.policies.activate(agent)
        prompts = [[1, *(token for token in seen if token != END)] for seen, _ in pairs]
        rows = [torch.tensor([*prompt, *turn]) for prompt, (_, turn) in zip(prompts, pairs, strict=True)]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        scores = torch.log_softmax(self.trainer.model(input_ids=ids).logits, dim=-1)
        turns = [list(turn) for _, turn in pairs]
        scored = zip(scores, prompts, turns, strict=True)
        return [logps[len(prompt) - 1 :][range(len(turn)), turn].sum() for logps, prompt, turn in scored]

    def log_probs(self) -> tuple[dict, dict]:
        first = self.of_agent("one", [((), turn) for turn in self.turns])
        second = self.of_agent("two", [(a if self.is_chain else (), b) for a, b in self.episodes])
        return dict(zip(self.turns, first, strict=True)), dict(zip(self.episodes, second, strict=True))

    def exact(self) -> torch.Tensor:
        """Gradient of the expected reward, all adapters in one vector."""
        self.trainer.model.zero_grad()
        first, second = self.log_probs()
        expected_reward = sum((first[a] + second[a, b]).exp() * reward_of(a, b) for a, b in self.episodes)
        expected_reward.backward()
        return self._gradient(dict.fromkeys(TEAM, 1.0))

    def probabilities(self) -> tuple[dict, dict]:
        with torch.no_grad():
            first, second = self.log_probs()
        return tuple({turn: logp.exp().item() for turn, logp in logps.items()} for logps in (first, second))

    def expected(self, outcomes, replies, times: int = 1) -> torch.Tensor:
        """
        Minus the gradient of the trainer's loss, in expectation, per episode. `outcomes` has the probability of each
        episode of the batch (of the whole group), which counts as `times` episodes;
        `replies(call, agents, prompt_ids, options)` returns the generator's output of call number `call`.
        """
        trainer, calls = self.trainer, itertools.count()

        def generate(agents, prompt_ids, **options):
            return [SampledTurn(list(turn)) for turn in replies(next(calls), agents, prompt_ids, options)]

        trainer.parts.runner.generator.generate = by_hand(generate)
        trainer.args.per_device_train_batch_size = len(outcomes)
        (slice_,) = trainer.parts.batch_maker.for_training([{"prompt": "a"} for _ in outcomes])
        trainer.model.zero_grad()
        trainer.args.per_device_train_batch_size = 10**6
        schedule = Schedule.from_args(trainer.args, trainer.schedule.adapters)
        trainer.schedule = replace(trainer.schedule, batches=schedule.batches)
        rows = [replace(row, factor=outcomes[row.episode]) for row in slice_.rows if row.is_trained]
        rows = [replace(row, critic=None, value_targets=None) for row in rows]  # the policy's gradient alone
        slice_ = replace(slice_, rows=rows)
        trainer.compute_loss(trainer.model, slice_).backward()
        sizes = slice_.tokens if trainer.args.level == "token" else slice_.rows_per_slice
        return -self._gradient(sizes) / times

    def of_groups(self, size: int) -> torch.Tensor:
        return self.expected_of_groups(self.chances(), size)

    def chances(self) -> dict:
        first, second = self.probabilities()
        return {(a, b): first[a] * second[a, b] for a, b in self.episodes}

    def expected_of_groups(self, chances: dict, size: int, replies=None) -> torch.Tensor:
        """`replies(*rest)` returns the generator's output after the turns of the episodes."""
        groups = list(itertools.product(self.episodes, repeat=size))
        episodes = [episode for group in groups for episode in group]
        outcomes = [math.prod(map(chances.get, group)) for group in groups for _ in group]

        def generated(call, *rest):
            in_episodes = replies is None or call < len(TEAM)
            return [episode[call] for episode in episodes] if in_episodes else replies(*rest)

        return self.expected(outcomes, generated, times=size)

    def _gradient(self, sizes) -> torch.Tensor:
        parts = []
        for name in self.trainer.policies.trained:
            gradients = [p.grad for p in self.trainer.policies.parameters(name).values()]
            parts += [(torch.zeros(1) if g is None else g).flatten() * sizes[name] for g in gradients]
        return torch.cat(parts)


def with_branches(world: World) -> torch.Tensor:
    """As `of_groups(2)`, for counterfactual credit: the reference's replies depend on the observation alone."""

    def replies(agents, prompt_ids, options):
        draws = [random.Random(repr((agent, list(ids)))) for agent, ids in zip(agents, prompt_ids, strict=True)]
        return [draw.choice(world.turns) for draw in draws]

    return world.expected_of_groups(world.chances(), world.trainer.num_generations, replies)


def of_candidates(world: World) -> torch.Tensor:
    """Expectation over all trees of two candidates for each turn of a chain."""
    first, second = world.probabilities()
    best = world.trainer.args.continue_from == "best"
    trees, chances = [], []
    for a1, a2, b1, b2, c1, c2 in itertools.product(world.turns, repeat=6):
        on = a2 if best and reward_of(a2, b2) > reward_of(a1, b1) else a1
        trees.append(((a1, a2), (b1, b2), (c1, c2)))
        chances.append(first[a1] * first[a2] * second[a1, b1] * second[a2, b2] * second[on, c1] * second[on, c2])
    return world.expected(chances, lambda call, *_: [turn for tree in trees for turn in tree[call]])
