"""
The experiments of `choose.py`: one function for each grid. Its arguments are a setting of the grid.
"""

import dataclasses
import functools
import hashlib
import inspect
import json
import os
import re
import sys
import warnings
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig, Workflow, tiny
from marft_trl.extras.report import Experiment
from marft_trl.prompts import team_view
from marft_trl.rewards import math_answer
from marft_trl.workflows import Debate, MixtureOfAgents, Sequential, UntilApproved
from marft_trl.workflows.base import together

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import real


SHORT = {"max_completion_length": 8}
WORK = "Work out the answer in a few words."


def make(*args, **settings):
    """The experiment of `examples/real.py`, which sets the precision of products for a model in float32."""
    experiment = real.make(*args, **settings)
    torch.set_float32_matmul_precision("highest")
    if torch.backends.mkldnn.is_available() and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        multiply_in_float32()  # in the whole process
    return experiment


@functools.cache
def multiply_in_float32():
    """
    Multiply matrices of bfloat16 in float32 and round the products. On a CPU without AVX512, this takes a fraction of
    the time of PyTorch's kernels. Only the order of the sums differs. Attention keeps its own kernel.
    """
    library = torch.library.Library("aten", "IMPL")

    def rounded(product):
        def kernel(*matrices, **scales):
            *_, left, right = matrices
            is_half = all(matrix.dtype == torch.bfloat16 for matrix in matrices)
            out = torch.empty((*left.shape[:-1], right.shape[-1]), dtype=torch.float32 if is_half else left.dtype)
            product(*(matrix.float() if is_half else matrix for matrix in matrices), **scales, out=out)
            return out.to(left.dtype)

        return kernel

    with warnings.catch_warnings(action="ignore"):  # PyTorch warns of replaced kernels
        for product in (torch.mm, torch.addmm, torch.bmm, torch.baddbmm):
            library.impl(product.__name__, rounded(product), "CPU")
    return library  # the kernels last as long as this object


def settings(max_steps, preset=None, **changes):
    """Training arguments: those of `examples/real.py` in bfloat16, with a preset or other changes."""
    args = make(max_steps=max_steps).args
    same = (
        *("learning_rate", "lr_scheduler_type", "warmup_steps", "per_device_train_batch_size", "num_generations"),
        *("per_device_eval_batch_size", "num_generations_eval", "eval_k", "temperature", "eval_right_by"),
        *("gradient_checkpointing", "logging_steps", "save_steps", "save_total_limit", "use_cpu", "max_steps"),
    )
    values = {name: getattr(args, name) for name in same} | {"preset": preset, "num_completions_to_print": 0}
    values |= {"bf16": True, "model_init_kwargs": {"dtype": "bfloat16"}, **changes}
    return MARFTConfig("unused", **{name: value for name, value in values.items() if value is not None})


# ---- Presets ----

# PPO with five updates per batch has half the learning rate. Presets that sample candidates for turns have fewer
# episodes per batch, so that the same number of tokens gives about the same number of updates.
ONE_EACH = {"num_generations": None, "num_generations_eval": 2}
PPO = {**ONE_EACH, "learning_rate": 5e-4, "critic_learning_rate": 1e-3}
PRESETS = {
    "grpo": {},
    "dr-mas": {},
    "magrpo": {},
    "rloo": {},
    "marft-t": PPO,
    "mappo": PPO,
    "at-grpo": {**ONE_EACH, "per_device_train_batch_size": 4},
    "c3": {**ONE_EACH, "per_device_train_batch_size": 2},
}


def presets(team="chain", family="chain_sum", max_steps=16):
    """
    Presets next to the configuration without one. Presets with five updates per batch take four times as long, and
    run in only one setting.
    """
    experiment = make(family, max_steps)
    if team == "judge":
        experiment = experiment.changed(
            agents=[
                AgentSpec("solver", system_prompt=real.ONLY, **SHORT),
                AgentSpec("judge", system_prompt="Give only the right answer.", max_completion_length=10),
            ],
            workflow=MixtureOfAgents([["solver", "solver"]], "judge"),
        )

    def variant(name):
        return lambda experiment: experiment.changed(args=settings(max_steps, name, **PRESETS[name]))

    chosen = [name for name in PRESETS if PRESETS[name] is not PPO or (team, family) == ("chain", "chain_sum")]
    return experiment.changed(args=settings(max_steps), variants={name: variant(name) for name in chosen})


# ---- Learning rates ----

RATES = {"1e-4": 1e-4, "3e-4": 3e-4, "1e-3": 1e-3, "3e-3": 3e-3}


def rates(preset=None, family="chain_sum", max_steps=16):
    """Learning rates of LoRAs with ranks 8 and 32; the scale of what they add, `lora_alpha / r`, is 2."""
    of_preset = {key: value for key, value in PRESETS.get(preset, {}).items() if key != "learning_rate"}

    updates = max_steps // 2 * 5 if preset else max_steps  # half as many batches, each used five times

    def changed(experiment, rank, rate):
        peft = dataclasses.replace(experiment.peft_config, r=rank, lora_alpha=2 * rank)
        return experiment.changed(peft_config=peft, args=settings(updates, preset, **of_preset, learning_rate=rate))

    def variant(rank, rate):
        return lambda experiment: changed(experiment, rank, rate)

    ranks = (8,) if preset else (8, 32)  # five updates of a batch take long
    first, *others = [(rank, name) for name in ("1e-3", "1e-4", "3e-4", "3e-3") for rank in ranks]
    named = {f"r={rank}, {name}": variant(rank, RATES[name]) for rank, name in others}
    return changed(make(family, max_steps), first[0], RATES[first[1]]).changed(variants=named)


# ---- Adapters ----


class OrchestratorAndWorkers(Workflow):
    """An orchestrator assigns the task, workers do it in parallel, and the orchestrator answers."""

    def __init__(self, workers):
        self.workers = workers

    async def run(self, episode):
        task = await episode.turn("orchestrator")
        done = await together(episode.turn(worker, sees=[task]) for worker in self.workers)
        episode.answer = await episode.turn("orchestrator", sees=[task, *done])

    def named_agents(self):
        return ["orchestrator", *self.workers]


def says_yes(review):
    return "yes" in review.text.lower()


THREE = ["first", "second", "third"]
TEAMS = {
    "evaluator": (
        [
            AgentSpec("writer", system_prompt=real.ONLY, **SHORT),
            AgentSpec("evaluator", system_prompt="Is the answer right? Say yes or no.", **SHORT),
        ],
        UntilApproved("writer", "evaluator", rounds=1, approves=says_yes),
    ),
    "voting": (
        [AgentSpec(name, system_prompt=real.ONLY, **SHORT) for name in THREE],
        Debate(THREE, rounds=1, vote=math_answer),
    ),
    "orchestrator": (
        [
            AgentSpec("orchestrator", system_prompt=WORK, **SHORT),
            *(AgentSpec(name, system_prompt=real.ONLY, **SHORT) for name in THREE[:2]),
        ],
        OrchestratorAndWorkers(THREE[:2]),
    ),
}


def sharing(team="voting", family="chain_sum", max_steps=20, held_out=None):
    """
    Own adapters, one shared by all, and one shared by all with the same weight for each agent; all held-out questions
    or the first of them.
    """
    agents, workflow = TEAMS[team]
    shared = [dataclasses.replace(agent, adapter="team") for agent in agents]
    experiment = make(family, max_steps)
    if held_out is not None:
        experiment = experiment.changed(eval_dataset=experiment.eval_dataset.select(range(held_out)))
    return experiment.changed(
        agents=agents,
        workflow=workflow,
        args=settings(max_steps),
        variants={
            "shared, equal weights": lambda experiment: experiment.changed(
                agents=shared, args=settings(max_steps, agent_weight="equal")
            ),
        },
    )


# ---- Is a team worth it? ----


def right(completions, answer, **kwargs):
    """1 if the last number of the answer is the right one."""
    return [float(math_answer(text) == target) for text, target in zip(map(text_of, completions), answer, strict=True)]


def alone(completions, answer, **kwargs):
    """1 if the answer is the right number and nothing else."""
    return [float(text.strip() == target) for text, target in zip(map(text_of, completions), answer, strict=True)]


def text_of(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def questions(kind, count, seed, without=()):
    """Distinct questions of a kind with their answers; none of `without`."""
    draws, rows, used_texts = np.random.default_rng(seed), [], {*without}
    while len(rows) < count:
        text, answer = KINDS[kind](draws)
        if text not in used_texts:
            used_texts.add(text)
            rows.append({"prompt": [{"role": "user", "content": text}], "answer": str(answer)})
    return Dataset.from_list(rows)


ASKED = "State the final answer to the following arithmetic problem:"


def difference(draws):
    """Solved by subtraction, checked by addition."""
    solution, term = draws.integers(1, 13, size=2)
    return f"{ASKED} {solution + term} - {term} =", solution


def two_numbers(draws):
    """Two numbers; each agent sees one of them."""
    first, second = draws.integers(1, 13, size=2)
    return f"{first}\n\n{ASKED} {second} + ?", first + second


NAMES = ["Ann", "Bob", "Cid", "Dan", "Eva", "Fay", "Gus", "Ida"]


def table_of_numbers(draws):
    """A table, half of which fits into the prompt of an agent."""
    numbers = draws.integers(10, 100, size=len(NAMES))
    name = draws.integers(len(NAMES))
    rows = [f"{person}: {number}" for person, number in zip(NAMES, numbers, strict=True)]
    question = f"What is the number of {NAMES[name]}?"
    return "\n\n".join(f"{', '.join(half)}\n{question}" for half in (rows[:4], rows[4:])), numbers[name]


KINDS = {"difference": difference, "two numbers": two_numbers, "table": table_of_numbers}


def first_part(agent, prompt, seen):
    """A view of the first part."""
    return part(agent, prompt, seen, 0)


def second_part(agent, prompt, seen):
    """A view of the second part."""
    return part(agent, prompt, seen, 1)


def part(agent, prompt, seen, number):
    return team_view(agent, [{"role": "user", "content": prompt[0]["content"].split("\n\n")[number]}], seen)


def added(messages):
    """Reply of the checking program to a draft: it adds what was subtracted."""
    question, _, draft = messages[-1]["content"].partition(" =")
    whole, term = map(int, re.search(r"(\d+) - (\d+)$", question).groups())
    number = math_answer(draft)
    if not re.fullmatch(r"-?\d{1,4}", number or ""):
        return "That is no number."
    value = int(number) + term
    return APPROVED if value == whole else f"{number} + {term} is {value}, not {whole}."


APPROVED = "That is right."
TELL = "Give only the number."
WORTH = {
    # Own questions or a family of reasoning-gym, agents, workflow, the agent alone, turns of an episode
    "half of it fits": (
        "table",
        [
            AgentSpec("reader", system_prompt=TELL, view=first_part, **SHORT),
            AgentSpec("answerer", system_prompt=TELL, view=second_part, **SHORT),
        ],
        None,
        AgentSpec("solo", system_prompt=TELL, view=second_part, max_completion_length=16),
        2,
    ),
    "three votes": (
        "chain_sum",
        *TEAMS["voting"],
        AgentSpec("solo", system_prompt=real.ONLY, max_completion_length=24),
        3,
    ),
    "checked by a program": (
        "difference",
        [AgentSpec("solver", system_prompt=real.ONLY, **SHORT), AgentSpec("checker", reply=added)],
        UntilApproved("solver", "checker", rounds=1, approves=APPROVED),
        AgentSpec("solo", system_prompt=real.ONLY, max_completion_length=16),
        2,
    ),
    "each knows a part": (
        "two numbers",
        [
            AgentSpec("scout", system_prompt="Repeat the number.", view=first_part, **SHORT),
            AgentSpec("answerer", system_prompt=real.ONLY, view=second_part, **SHORT),
        ],
        None,
        AgentSpec("solo", system_prompt=real.ONLY, view=second_part, max_completion_length=16),
        2,
    ),
    "checked by an agent": (
        "chain_sum",
        *TEAMS["evaluator"],
        AgentSpec("solo", system_prompt=real.ONLY, max_completion_length=24),
        3,
    ),
}


def worth(setting="three votes", max_steps=20):
    """
    A team, compared with one agent that has the same number of tokens, the same number of turns and, where the agent
    saw only a part of the question, the whole question. A setting that ends in "longer" has three times as many steps,
    and no arm with the same number of turns.
    """
    name, _, longer = setting.partition(", ")
    kind, agents, workflow, solo, calls = WORTH[name]
    max_steps *= 3 if longer else 1
    experiment = make("chain_sum", max_steps)
    if kind in KINDS:
        held_out = questions(kind, 64, seed=1)
        held_out_texts = [prompt[0]["content"] for prompt in held_out["prompt"]]
        drawn = questions(kind, 1000 if kind == "table" else 70, seed=0, without=held_out_texts)
        experiment = experiment.changed(
            train_dataset=drawn, eval_dataset=held_out, reward_funcs=[right, alone],
        )  # fmt: skip
    by = "number_is_right" if kind not in KINDS else "right"
    measured = {"eval_right_by": by, "num_generations_eval": 3, "per_device_eval_batch_size": 192}
    others = {}
    if not longer:
        others["solo, equal turns"] = lambda experiment: experiment.changed(
            agents=[solo], workflow=None, args=settings(calls * max_steps, **measured)
        )
    if solo.view is not None:
        informed_solo = dataclasses.replace(solo, view=None)
        others["solo, told all"] = lambda experiment: experiment.changed(agents=[informed_solo], workflow=None)
    return experiment.changed(
        agents=agents,
        workflow=workflow,
        solo=solo,
        args=settings(max_steps, **measured),
        options={"eval_vote": math_answer},
        variants=others,
    )


# ---- Own adapters, or just more turns? ----


def parts(setting="each knows a part", max_steps=20):
    """
    A team of two agents that each see a part of the question, for three times as many steps as in `worth`, compared
    with one adapter that takes both turns (the same prompts, turns and tokens), with one agent that sees the second
    part, and with one agent that sees the whole question. Each arm trains until it has generated as many tokens as the
    team.

    Fixed before the runs: both settings, all four arms, seeds 0 to 4, 64 held-out questions with three samples, the
    learning rate of `worth` for every arm. Own adapters are better if the interval of the team minus one adapter is
    above 0 over both settings. Otherwise, turns may explain what the team gains. They do if the interval of one
    adapter minus the agent that sees one part is above 0.
    """
    experiment = worth(f"{setting}, longer", max_steps)
    shared = [dataclasses.replace(agent, adapter="team") for agent in experiment.agents]
    variants = {"one adapter, both turns": lambda experiment: experiment.changed(agents=shared)}
    return experiment.changed(variants=variants | experiment.variants)


# ---- Which agent deserves the large model? ----

# 445 and 38 thousand weights, taught alike
SIZES = {"large": {}, "small": {"hidden_size": 32, "intermediate_size": 96, "head_dim": 8}}
DUOS = {
    # What the first agent writes, its instruction, and tokens of both prompts with their turns
    "the first computes": (lambda row: row["steps"], "Write the steps.", (54, 37)),
    "the second computes": (lambda row: re.sub(r"=\d+;\d+(-\d+)=.*", r"\1", row["steps"]), "Write the sum.", (50, 30)),
}


def message_alone(agent, prompt, seen):
    """A view of what the first agent wrote, without the question."""
    return team_view(agent, [], seen)


def duo(setting):
    """Two agents, of which the second sees only what the first wrote."""
    return [
        AgentSpec("first", system_prompt=DUOS[setting][1], max_completion_length=24),
        AgentSpec("second", system_prompt="Write the answer.", view=message_alone, max_completion_length=6),
    ]


def taught(setting, size):
    """The folder of a model that has learned both roles from demonstrations, a quarter of them with a wrong number."""

    def reply(episode, agent, seen, draw):
        if agent == "first":
            text = DUOS[setting][0](episode.row)
        else:  # the number after the last "=", or the value of the sum
            text = str(sum(map(int, re.findall(r"[+-]?\d+", seen[-1].text.rpartition("=")[2]))))
        wrong = lambda last: str(max(int(last[0]) + draw.choice((-3, -2, -1, 1, 2, 3)), 0))  # noqa: E731
        return re.sub(r"\d+$", wrong, text) if draw.random() < tiny.SLIPS else text

    def row(draw):
        return tiny.questions(1, seed=2 * draw.randrange(10**9))[0]  # an even seed: a training question

    machine = (torch.__version__, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability())
    recipe = inspect.getsource(taught) + Path(tiny.__file__).read_text() + repr((SIZES[size], machine))
    name = f"{setting}-{size}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}".replace(" ", "-")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "marft_trl" / name
    if not (folder / "config.json").exists():
        tokenizer = tiny.tiny_tokenizer()
        model = tiny.tiny_model(len(tokenizer), **SIZES[size])
        rows = tiny.scripted_turns(tokenizer, Sequential(["first", "second"]), duo(setting), row, reply)
        tiny.warm_up(model, tokenizer, 1500, rows=rows)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return str(folder)


def multiplications(setting, sizes):
    """Multiplications of the matrix products of a pass over an episode, by models of these sizes."""
    total = 0
    for size, tokens in zip(sizes, DUOS[setting][2], strict=True):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(taught(setting, size))).to("meta")
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, tokens, dtype=torch.long, device="meta"))
        total += counter.get_total_flops() // 2
    return total


def sizes(setting="the first computes", max_steps=40):
    """
    Teams of a large and a small model in both orders, of two large and of two small ones. Both models have learned
    both roles. Arms train until they have generated as many tokens as two large models, or, with "equal compute", for
    as many updates as the multiplications of two large models allow. A pass of generation and one of training cost the
    same in all arms, relative to the models.

    Fixed before the runs: both settings, all arms, seeds 0 to 4, 400 held-out questions, one learning rate for all.
    An order of the models is better in a setting if the interval of the difference between the two orders does not
    contain 0. The expectation that the large model belongs to the agent that computes is refuted by a setting in which
    the other order is better, and stays open where the interval contains 0.
    """

    def arm(models, updates):
        agents = [
            dataclasses.replace(agent, model=taught(setting, size))
            for agent, size in zip(duo(setting), models, strict=True)
        ]
        return lambda experiment: experiment.changed(agents=agents).with_args(max_steps=updates)

    variants, spent = {}, multiplications(setting, ("large", "large"))
    for name, models in TEAMS_OF_SIZES.items():
        variants[name] = arm(models, max_steps)
        updates = round(max_steps * spent / multiplications(setting, models))
        variants[f"{name}, equal compute"] = arm(models, updates)
    return Experiment(
        model=taught(setting, "large"),
        agents=duo(setting),
        reward_funcs=tiny.exact_answer,
        train_dataset=tiny.tiny_dataset(4000, seed=0),
        eval_dataset=tiny.tiny_dataset(400, seed=1),
        args=MARFTConfig(
            "unused",
            per_device_train_batch_size=64,
            num_generations=8,
            num_generations_eval=1,
            per_device_eval_batch_size=200,
            max_steps=max_steps,
            learning_rate=1.5e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            num_completions_to_print=0,
        ),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        variants=variants,
    )


TEAMS_OF_SIZES = {
    "large first, small second": ("large", "small"),
    "small first, large second": ("small", "large"),
    "two small": ("small", "small"),
}


# ---- Own or shared adapters, each at its own rate ----

ADAPTERS = ("own", "shared")
SEARCHED = ("3e-4", "1e-3", "3e-3")
SEARCH_FILE = Path(__file__).parents[2] / "docs" / "reports" / "data" / "search.json"


def of_adapters(team, updates):
    """A team of `sizes`, with three times as many updates, or one of `sharing`; and its variants by kind and rate."""
    if team in DUOS:
        experiment = sizes(team, 3 * updates)
    else:
        experiment = make("chain_sum", updates).changed(workflow=TEAMS[team][1], args=settings(updates))
    own = experiment.agents if team in DUOS else TEAMS[team][0]
    agents = {"own": own, "shared": [dataclasses.replace(agent, adapter="team") for agent in own]}

    def variant(kind, rate):
        return lambda experiment: experiment.changed(agents=agents[kind]).with_args(learning_rate=RATES[rate])

    return experiment, {(kind, rate): variant(kind, rate) for kind in ADAPTERS for rate in SEARCHED}


def search(team="voting", updates=10):
    """
    Three learning rates of own and of shared adapters. Two seeds that `tuned` does not use, and half of its updates.

    Fixed before the runs: the rate of an arm is the one with the highest mean reward of the last five batches.
    """
    experiment, variants = of_adapters(team, updates)
    first = variants.pop(("own", "1e-3"))
    return first(experiment).changed(variants={", ".join(name): variant for name, variant in variants.items()})


def best_rates(arms):
    """The rate of each kind of adapters, from the results of a setting of `search`."""
    return {kind: max(SEARCHED, key=lambda rate: end_reward(arms, kind, rate)) for kind in ADAPTERS}


def end_reward(arms, kind, rate):
    """Mean reward of the last five batches of the runs of an arm of `search`, of which "own, 1e-3" is the team."""
    runs = arms["team" if (kind, rate) == ("own", "1e-3") else f"{kind}, {rate}"]
    return float(np.mean([run["rewards"][-5:] for run in runs]))


def tuned(team="voting", updates=20):
    """
    Own adapters and one shared by all, each at the learning rate that `search` chose for it in this team.

    Fixed before the runs: four teams, two of the pretrained model and two of the tiny one; both arms; seeds 0 to 4;
    64 held-out questions with two samples, or 400. One kind of adapters is better in a team, or over the two teams of
    a model, if the interval of the difference does not contain 0. Otherwise the question stays open. The third team of
    `sharing` takes too long.

    Added after the runs, because own adapters at their rate learned sooner and ended lower: own adapters at the rate
    of one adapter, in teams of the tiny model.

    Raises:
        ValueError: `choose.py search --page` has not run for this team.
    """
    experiment, variants = of_adapters(team, updates)
    searched = json.loads(SEARCH_FILE.read_text(encoding="utf-8"))
    if team not in searched:
        raise ValueError(f"There are no rates for {team!r}. Run `choose.py search --settings {team!r} --page` before.")
    rates = best_rates(searched[team])
    arms = {"one adapter": variants["shared", rates["shared"]]}
    if team in DUOS and rates["own"] != rates["shared"]:
        arms["own, rate of one adapter"] = variants["own", rates["shared"]]
    return variants["own", rates["own"]](experiment).changed(variants=arms)


TEAMS_OF_ADAPTERS = [{"team": team} for team in (*DUOS, "voting", "evaluator")]


GRIDS = {
    "presets": (
        presets,
        [{"team": "chain", "family": "chain_sum"}, {"team": "judge", "family": "chain_sum"},
         {"team": "chain", "family": "basic_arithmetic"}],
        [0, 1, 2],
    ),
    "rates": (rates, [{"preset": None}, {"preset": "marft-t"}], [0, 1, 2]),
    "sharing": (sharing, [{"team": team} for team in TEAMS], [0, 1, 2]),
    "search": (search, TEAMS_OF_ADAPTERS, [5, 6]),
    "tuned": (tuned, TEAMS_OF_ADAPTERS, [0, 1, 2, 3, 4]),
    "worth": (worth, [{"setting": setting} for setting in (*WORTH, "half of it fits, longer")], [0, 1, 2, 3, 4]),
    "sizes": (sizes, [{"setting": setting} for setting in DUOS], [0, 1, 2, 3, 4]),
    "parts": (parts, [{"setting": "each knows a part"}, {"setting": "half of it fits"}], [0, 1, 2, 3, 4]),
}  # fmt: skip
