"""
Train the agents of an existing application without changing it: offline, on a CPU, in minutes.

    python examples/train_application.py                                     # on the client of OpenAI
    python examples/train_application.py --quick                             # a few steps of everything
    python examples/train_application.py --app anthropic                     # on the client of Anthropic
    python examples/train_application.py --app langgraph --seeds 0 1 2       # on LangGraph
    python examples/train_application.py --app agents_sdk                    # on the OpenAI Agents SDK

The applications in `examples/applications` ask two models, `reasoner` and `actor`, for the steps of a small sum and
for its answer. Each request is a turn of the agent of that name. Both agents start from the embedded model of
`quickstart.py`. Install the clients that you use:
`pip install openai anthropic langgraph langchain-openai openai-agents`.
"""

import argparse
import statistics
import sys
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
from marft_trl.extras.apps import ExternalApp
from marft_trl.reporting import team_exact_match
from marft_trl.tiny import exact_answer, tiny_dataset, tiny_team_model

from openai import AsyncOpenAI
from peft import LoraConfig
from transformers.utils import logging


sys.path.insert(0, str(Path(__file__).parent / "applications"))


async def on_plain(row, endpoint):
    from plain import answer

    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        await answer(row["prompt"], client)


async def on_langgraph(row, endpoint):
    from on_langgraph import answer

    await answer(row["prompt"], base_url=endpoint.base_url, api_key=endpoint.api_key)


async def on_agents_sdk(row, endpoint):
    from on_agents_sdk import answer

    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        await answer(row["prompt"], client)


async def on_anthropic(row, endpoint):
    from anthropic import AsyncAnthropic
    from on_anthropic import answer

    async with AsyncAnthropic(base_url=endpoint.root_url, api_key=endpoint.api_key) as client:
        await answer(row["prompt"], client)


APPS = {"plain": on_plain, "anthropic": on_anthropic, "langgraph": on_langgraph, "agents_sdk": on_agents_sdk}


def steps_are_right(answers, solution, turns, **columns):
    """Share of episodes in which the last number of the reasoner's steps is the right answer."""
    ends = [episode[0].text.rpartition("=")[2] for episode in turns]
    return {"reasoner": statistics.mean(end == target for end, target in zip(ends, solution, strict=True))}


def reads_the_steps(answers, turns, **columns):
    """Share of episodes in which the actor repeats the last number of the steps, right or wrong."""
    ends = [episode[0].text.rpartition("=")[2] for episode in turns]
    return {"actor": statistics.mean(end == answer for end, answer in zip(ends, answers, strict=True))}


def train(base, app, seed, options, folder):
    """Metrics before and after training."""
    args = MARFTConfig(
        str(folder),
        per_device_train_batch_size=64,  # 8 questions with 8 episodes each
        num_generations=8,
        num_generations_eval=1,
        per_device_eval_batch_size=100,
        max_steps=options.max_steps,
        learning_rate=1.5e-3,
        gradient_checkpointing=False,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        seed=seed,
    )
    trainer = MARFTTrainer(
        model=base,
        agents=[AgentSpec("reasoner", max_completion_length=24), AgentSpec("actor", max_completion_length=6)],
        workflow=ExternalApp(app),
        reward_funcs=exact_answer,
        args=args,
        train_dataset=tiny_dataset(4000, seed=seed),
        eval_dataset=tiny_dataset(options.questions, seed=1000),  # held out: their numbers never occur in training
        eval_metrics=[team_exact_match(), steps_are_right, reads_the_steps],
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    before = trainer.evaluate()
    trainer.train()
    trainer.save_model()
    return before, trainer.evaluate()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--app", choices=APPS, default="plain")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--questions", type=int, default=200, help="number of evaluation questions")
    parser.add_argument("--output_dir", type=Path, default=Path("application-output"))
    parser.add_argument("--quick", action="store_true", help="a few steps of everything")
    options = parser.parse_args()
    if options.quick:
        options.max_steps, options.questions = 2, 20
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    names = {"team: right answers": "exact_match", "reasoner: right steps": "reasoner", "actor: reads them": "actor"}
    base, gains = tiny_team_model(steps=100 if options.quick else 800), {title: [] for title in names}
    for seed in options.seeds:
        folder = options.output_dir / f"{options.app}-{seed}"
        before, after = train(base, APPS[options.app], seed, options, folder)
        for title, name in names.items():
            start, end = (100 * metrics[f"eval_{name}"] for metrics in (before, after))
            gains[title].append(end - start)
            print(f"{options.app}, seed {seed}, {title:22} {start:5.1f} % -> {end:5.1f} %", flush=True)
    for title, points in gains.items():
        spread = f", standard error {statistics.stdev(points) / len(points) ** 0.5:.1f}" if len(points) > 1 else ""
        print(f"{options.app}, {title:22} {statistics.mean(points):+5.1f} points over {len(points)} seeds{spread}")
    print(f"saved team: {folder} (base: {base})")


if __name__ == "__main__":
    main()
