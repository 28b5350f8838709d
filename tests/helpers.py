"""Shared helpers of the tests."""

import functools
import itertools
import statistics
import time
from dataclasses import replace
from types import SimpleNamespace

from marft_trl import MARFTConfig, MARFTTrainer
from marft_trl.episodes import collector
from marft_trl.episodes.records import Episode, Request, RequestedTurn, TeamContext
from marft_trl.episodes.tools import ToolLimits
from marft_trl.prompts.builder import Observation
from marft_trl.system.event_loop import finished
from marft_trl.tiny import tiny_agents, tiny_dataset

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback


# Sizes of the model that most tests train
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 1}
SETTINGS = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_steps": 2,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "max_completion_length": 8,
    "save_strategy": "no",
    "disable_tqdm": True,
    "report_to": [],
    "bf16": False,  # the default with a GPU, and tests compare float32 results
}


def by_hand(generate):
    """The method `generate` from a function `generate(agents, prompt_ids, ...)`, called separately for references."""

    async def adapted(requests, **options):
        turn_by_place = {}
        for by_reference in (False, True):
            places = [place for place, request in enumerate(requests) if request.by_reference == by_reference]
            group = [requests[place] for place in places]
            option = {"by_reference": True} if by_reference else {}
            if places:
                agents, prompt_ids = [request.agent for request in group], [request.ids for request in group]
                turns = generate(agents, prompt_ids, **options, **option)
                turn_by_place |= dict(zip(places, turns, strict=True))
        return [turn_by_place[place] for place in sorted(turn_by_place)]

    return adapted


def calling(generate):
    """A function `generate(agents, prompt_ids, ...)` from a generator's method that never waits."""

    def called(agents, prompt_ids, by_reference=False, **options):
        observations = [
            Observation("", ids, agent=agent, by_reference=by_reference)
            for agent, ids in zip(agents, prompt_ids, strict=True)
        ]
        return finished(generate(observations, **options))

    return called


def pairs(*factors: list) -> list:
    """
    Cases in which any two values of different factors meet at least once; the rest of the product is `exhaustive`.
    They find every fault that depends on at most two values.
    """
    product = list(itertools.product(*(range(len(values)) for values in factors)))
    met = [set(itertools.combinations(enumerate(case), 2)) for case in product]
    missing, chosen = set().union(*met), set()
    while missing:
        best = max(range(len(product)), key=lambda index: len(met[index] & missing))  # the first of equals
        chosen.add(best)
        missing -= met[best]
    cases = [tuple(values[i] for values, i in zip(factors, case, strict=True)) for case in product]
    return [
        pytest.param(*case, marks=() if index in chosen else pytest.mark.exhaustive)
        for index, case in enumerate(cases)
    ]


def in_turn(cases: list[tuple], *options) -> list:
    """Each case with one of the options, in turn; the rest of the product is `exhaustive`."""
    return [
        pytest.param(*case, option, marks=() if place == index % len(options) else pytest.mark.exhaustive)
        for index, case in enumerate(cases)
        for place, option in enumerate(options)
    ]


tiny_dataset = functools.cache(tiny_dataset)  # as it never changes


def lora(r: int = 4, target_modules="all-linear", **settings) -> LoraConfig:
    return LoraConfig(r=r, lora_alpha=2 * r, target_modules=target_modules, **settings)


def varied_reward(completions, **kwargs):
    """A reward that differs between the completions of an untrained model, so that there is something to learn."""
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]


def config(output_dir, **settings) -> MARFTConfig:
    return MARFTConfig(str(output_dir), **{**SETTINGS, **settings})


def team_trainer(model, output_dir, *, settings=None, **arguments) -> MARFTTrainer:
    defaults = {
        "agents": tiny_agents(),
        "reward_funcs": varied_reward,
        "args": config(output_dir, **(settings or {})),
        "train_dataset": tiny_dataset(64),
        "peft_config": lora(),
    }
    trainer = MARFTTrainer(model=model, **{**defaults, **arguments})
    trainer.add_callback(Beginning())
    return trainer


class Beginning(TrainerCallback):
    """Records the optimizer step that training began at."""

    step: int | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.step = state.global_step


def began_at(trainer) -> int | None:
    """The optimizer step that the last training of a trainer began at."""
    return next(callback.step for callback in trainer.callback_handler.callbacks if isinstance(callback, Beginning))


def pooled(gains) -> tuple[float, float]:
    """
    Mean gain of several seeds and its distance from 0 in standard errors: a seed draws other
    samples on each machine, as rounding differs.
    """
    mean = statistics.mean(gains)
    return mean, mean / (statistics.stdev(gains) / len(gains) ** 0.5 + 1e-9)


def grows_linearly(work, size: int) -> bool:
    """
    Whether work on a text of this many characters takes CPU time in proportion to its length: 8 times that of an
    eighth of it, where quadratic work takes 64 times as long. Busy and slow machines do not change the ratio.
    """

    def seconds(length: int) -> float:
        start = time.process_time()
        work(length)
        return time.process_time() - start

    small, large = (min(seconds(length) for _ in range(3)) for length in (size // 8, size))
    return large < 25 * max(small, 1e-4)


def eventually(condition, seconds: float = 60) -> bool:
    """Whether a condition comes true within this time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


class StopAt(TrainerCallback):
    """Ends training after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def weights(trainer) -> dict:
    """A copy of all weights by name."""
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def moved(before: dict, after: dict) -> set[str]:
    """Names of weights that are not bitwise the same."""
    return {name for name in before if not before[name].equal(after[name])}


def moved_by_training(trainer) -> set[str]:
    """Names of weights that training changes."""
    before = weights(trainer)
    trainer.train()
    return moved(before, weights(trainer))


def logged_steps(trainer) -> list[dict]:
    """The logs of training steps."""
    return [log for log in trainer.state.log_history if "loss" in log]


def shake(model, std: float, part: str = "lora_B") -> None:
    """Randomize the weights whose names contain `part`, as fresh adapters change nothing."""
    for name, parameter in model.named_parameters():
        if part in name:
            parameter.data.normal_(std=std)


def only_slice(trainer, rows):
    """The slice of a generation batch that has only one, as a training step gets it."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    (slice_,) = trainer.parts.batch_maker.for_training(rows)
    return slice_


def plain_scores(trainer, row):
    """Log-probabilities of all tokens at each place of a row's completion, by a plain pass on this row alone."""
    trainer.policies.activate(row.agent)
    ids = torch.cat([row.prompt_ids, row.completion_ids]).unsqueeze(0)
    return trainer.model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1].float().log_softmax(-1)


def plain_logps(trainer, row):
    """Log-probabilities of the completion's tokens, with a gradient to the adapter."""
    return plain_scores(trainer, row).gather(1, row.completion_ids.unsqueeze(1)).squeeze(1)


def chi_square_deviation(counts, expected) -> float:
    """
    Standard deviations by which the chi-square statistic of counts is above its mean. Rare outcomes are pooled.
    """
    assert counts[expected == 0].sum() == 0, "an outcome without probability was drawn"
    often, rare = expected >= 5, (expected < 5) & (expected > 0)
    seen = torch.cat([counts[often], counts[rare].sum()[None]])
    awaited = torch.cat([expected[often], expected[rare].sum()[None]])
    seen, awaited = seen[awaited > 0], awaited[awaited > 0]
    degrees = len(seen) - 1
    assert degrees >= 3, "the distribution has too few outcomes"
    return (((seen - awaited) ** 2 / awaited).sum().item() - degrees) / (2 * degrees) ** 0.5


def sampling_deviation(trainer, agent="reasoner", count=1200) -> float:
    """
    Deviation of the first tokens of an agent's turns from the policy's probabilities, as [`chi_square_deviation`].
    The base must be trained: the distributions of a random base are nearly uniform, and so is any power of them.
    """
    temperature = trainer.parts.runner.generator.settings(agent)["temperature"]
    torch.manual_seed(0)
    shake(trainer.model, 0.2)
    turns = [episode.turns[0] for episode in trainer.team.run([{"prompt": "What is 3+4?"}] * count, seed=0)]
    prompt_ids, completion_ids = (torch.tensor(ids, device=trainer.model.device) for ids in (turns[0].prompt_ids, [0]))
    row = SimpleNamespace(agent=agent, prompt_ids=prompt_ids, completion_ids=completion_ids)
    with torch.no_grad():
        logps = plain_scores(trainer, row)[0].double()
    probabilities = (logps / temperature).softmax(-1).cpu()
    drawn = torch.tensor([turn.completion_ids[0] for turn in turns])
    return chi_square_deviation(torch.bincount(drawn, minlength=len(probabilities)).double(), count * probabilities)


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def build_observation(prompts, agent, prompt, seen=(), functions=(), after=None, messages=None):
    """Return what a prompt builder shows to an agent, an `AgentSpec`."""
    prompts.agents[agent.name] = agent
    requested_turn = None if messages is None else RequestedTurn(messages)
    episode = Episode(prompt, {}, 0)
    request = Request(episode, agent.name, tuple(seen), tuple(functions), after, requested_turn=requested_turn)
    (observation,) = prompts.build([request])
    return observation


def ended(episodes, cut=()):
    """Episodes with all turns marked as ended, except for those of the episodes `cut`: tiny models end at random."""
    return [
        replace(episode, turns=tuple(replace(turn, truncated=index in cut) for turn in episode.turns))
        for index, episode in enumerate(episodes)
    ]


def collect(workflow, rows, agents, answer, reruns=None, tools=None, limits=None, aliases=None, workflow_timeout=None):
    """Runs a workflow on rows with agents of these names."""
    context = TeamContext(tuple(agents), tools or {}, limits or ToolLimits(), aliases or {})
    return collector.collect(workflow, rows, context, answer, reruns, workflow_timeout)


def earned(episode):
    """The nonzero rewards of an episode's turns, by index."""
    return {index: reward for index, reward in enumerate(episode.earned) if reward}


def echo(waves=None):
    """Answer requests with the texts they see; append the agents of each call to `waves`."""

    def answer(requests):
        if waves is not None:
            waves.append([request.agent for request in requests])
        texts = [f"{request.agent}({','.join(turn.text for turn in request.seen)})" for request in requests]
        return [request.make_turn(text) for request, text in zip(requests, texts, strict=True)]

    return answer
