"""A team so small that all of its episodes can be listed: the exact policy gradient, and what an estimator expects."""

import itertools
import random
from dataclasses import replace

from marft_trl import AgentSpec, Workflow
from marft_trl.learning.adapter_updates import Schedule
from marft_trl.rollout.generator import SampledTurn
from marft_trl.tiny import tiny_model

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .helpers import by_hand, lora, team_trainer


END = 0  # the token that ends a turn; "a" and "b" are the others
TEAM = ["one", "two"]


class Parallel(Workflow):
    """Neither agent sees the other."""

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
    """Every turn of at most `length` tokens."""
    whole = [(END,)]
    open_ended: list[tuple[int, ...]] = [()]
    for _ in range(length):
        open_ended = [(*turn, token) for turn in open_ended for token in (1, 2)]
        whole += [(*turn, END) for turn in open_ended if len(turn) < length]
    return whole + open_ended


def reward_of(first, second) -> float:
    return random.Random(repr((tuple(first), tuple(second)))).uniform(-1, 2)


def reward(completions, turns, **kwargs):
    return [reward_of(its[0].completion_ids, its[1].completion_ids) for its in turns]


class World:
    """
    The team, its trainer and its exact gradient.

    Args:
        folder: where the trainer may write.
        length (`int`): longest turn.
        workflow: a chain unless given.
        agents (`list[AgentSpec]`): the team.
        reward_funcs: of the team.
        settings: of the trainer.
    """

    def __init__(self, folder, length=1, workflow=None, agents=None, reward_funcs=reward, **settings):
        from datasets import Dataset

        self.is_chain = workflow is None
        model = tiny_model(3, hidden_size=16, intermediate_size=32, head_dim=8, eos_token_id=END, pad_token_id=END)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)  # far from uniform
        defaults = {"per_device_train_batch_size": 4096, "max_completion_length": length, "num_generations": 2}
        defaults |= {"gradient_checkpointing": False, "max_tokens_per_micro_batch": None, "max_steps": 1}
        self.trainer = team_trainer(
            model,
            folder,
            agents=agents or [AgentSpec(name) for name in TEAM],
            workflow=workflow,
            reward_funcs=reward_funcs,
            processing_class=tokenizer(),
            train_dataset=Dataset.from_dict({"prompt": ["a"] * 4096}),
            view=view,
            peft_config=lora(),
            settings={**defaults, **settings},
        )
        torch.manual_seed(5)
        for name, parameter in self.trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.3)
        if self.trainer.critic is not None:
            # Values as large as rewards, however wide a layer is: rounding of larger ones would be a difference
            for parameter in self.trainer.critic.heads.parameters():
                parameter.data.normal_(std=2 / max(parameter.shape[-1], 16) ** 0.5)
        self.trainer.model.train()
        self.trainer.current_gradient_accumulation_steps = 1
        self.turns = turns_of(length)
        self.episodes = list(itertools.product(self.turns, self.turns))

    def log_prob(self, agent: str, seen: tuple[int, ...], turn: tuple[int, ...]) -> torch.Tensor:
        """Log-probability of a turn, with gradient, by a plain forward pass of the model."""
        return self.of_agent(agent, [(seen, turn)])[0]

    def of_agent(self, agent: str, pairs: list) -> list[torch.Tensor]:
        """Of several turns, each with what was seen, in one pass: padding at the end is seen by no token."""
        self.trainer.policies.activate(agent)
        prompts = [[1, *(token for token in seen if token != END)] for seen, _ in pairs]
        rows = [torch.tensor([*prompt, *turn]) for prompt, (_, turn) in zip(prompts, pairs, strict=True)]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        scores = torch.log_softmax(self.trainer.model(input_ids=ids).logits, dim=-1)
        return [
            its[range(len(prompt) - 1, len(prompt) - 1 + len(turn)), list(turn)].sum()
            for its, prompt, (_, turn) in zip(scores, prompts, pairs, strict=True)
        ]

    def log_probs(self) -> tuple[dict, dict]:
        first = self.of_agent("one", [((), turn) for turn in self.turns])
        second = self.of_agent("two", [(a if self.is_chain else (), b) for a, b in self.episodes])
        return dict(zip(self.turns, first, strict=True)), dict(zip(self.episodes, second, strict=True))

    def exact(self) -> torch.Tensor:
        """Gradient of the expected reward, all adapters in one vector."""
        self.trainer.model.zero_grad()
        first, second = self.log_probs()
        value = sum((first[a] + second[a, b]).exp() * reward_of(a, b) for a, b in self.episodes)
        value.backward()
        return self._gradient(dict.fromkeys(TEAM, 1.0))

    def probabilities(self) -> tuple[dict, dict]:
        with torch.no_grad():
            first, second = self.log_probs()
        return {k: v.exp().item() for k, v in first.items()}, {k: v.exp().item() for k, v in second.items()}

    def expected(self, outcomes, replies, times: int = 1) -> torch.Tensor:
        """
        Minus the gradient of the trainer's loss, in expectation, per episode.

        Args:
            outcomes (`list[float]`): probability of each episode of the batch (of its whole group).
            replies (`Callable`): `replies(call, agents)` is what the generator says in its n-th call.
            times (`int`): episodes for which an outcome's probability counts.
        """
        trainer, calls = self.trainer, itertools.count()
        trainer.parts.runner.generator.generate = by_hand(
            lambda agents, prompt_ids, **options: [
                SampledTurn(list(turn)) for turn in replies(next(calls), agents, prompt_ids, options)
            ]
        )
        trainer.args.per_device_train_batch_size = len(outcomes)
        (slice_,) = trainer.parts.experience.for_training([{"prompt": "a"} for _ in outcomes])
        trainer.model.zero_grad()
        trainer.args.per_device_train_batch_size = 10**6
        trainer.schedule = replace(
            trainer.schedule, batches=Schedule.from_args(trainer.args, trainer.schedule.adapters).batches
        )
        rows = [
            replace(row, factor=outcomes[row.episode], critic=None, value_targets=None)  # the policy's gradient alone
            for row in slice_.rows
            if row.is_trained
        ]
        slice_ = replace(slice_, rows=rows)
        trainer.compute_loss(trainer.model, slice_).backward()
        sizes = slice_.tokens if trainer.args.level == "token" else slice_.rows_per_slice
        return -self._gradient(sizes) / times

    def of_groups(self, size: int) -> torch.Tensor:
        """Expectation over all groups of `size` episodes."""
        first, second = self.probabilities()
        groups = list(itertools.product(self.episodes, repeat=size))
        episodes = [episode for group in groups for episode in group]
        outcomes = []
        for group in groups:
            chance = 1.0
            for a, b in group:
                chance *= first[a] * second[a, b]
            outcomes += [chance] * size
        return self.expected(outcomes, lambda call, *_: [episode[call] for episode in episodes], times=size)

    def _gradient(self, sizes) -> torch.Tensor:
        parts = []
        for name in self.trainer.policies.trained:
            gradients = [p.grad for p in self.trainer.policies.parameters(name).values()]
            parts += [(torch.zeros(1) if g is None else g).flatten() * sizes[name] for g in gradients]
        return torch.cat(parts)


def with_branches(world: World) -> torch.Tensor:
    """As `of_groups(2)`, for counterfactual credit: the reference's replies depend on the observation alone."""
    first, second = world.probabilities()
    size = world.trainer.num_generations
    groups = list(itertools.product(world.episodes, repeat=size))
    episodes = [episode for group in groups for episode in group]
    chances = []
    for group in groups:
        chance = 1.0
        for a, b in group:
            chance *= first[a] * second[a, b]
        chances += [chance] * size

    def replies(call, agents, prompt_ids, options):
        if call < len(TEAM):
            return [episode[call] for episode in episodes]
        draws = [random.Random(repr((agent, list(ids)))) for agent, ids in zip(agents, prompt_ids, strict=True)]
        return [draw.choice(world.turns) for draw in draws]

    return world.expected(chances, replies, times=size)


def of_candidates(world: World) -> torch.Tensor:
    """Expectation over all trees of two candidates for each turn of a chain."""
    first, second = world.probabilities()
    best = world.trainer.args.continue_from == "best"
    trees, chances = [], []
    for a1, a2 in itertools.product(world.turns, repeat=2):
        for b1, b2 in itertools.product(world.turns, repeat=2):
            on = a2 if best and reward_of(a2, b2) > reward_of(a1, b1) else a1
            for c1, c2 in itertools.product(world.turns, repeat=2):
                trees.append(((a1, a2), (b1, b2), (c1, c2)))
                chances.append(
                    first[a1] * first[a2] * second[a1, b1] * second[a2, b2] * second[on, c1] * second[on, c2]
                )
    return world.expected(chances, lambda call, *_: [turn for tree in trees for turn in tree[call]])
