"""
Train a coding harness without changing it: a main agent, a sub-agent that searches files, and two tools.

    python examples/harness.py                       # train, and run the same harness on the served team
    python examples/harness.py --quick               # a few steps of everything
    python examples/harness.py --seeds 0 1 2         # the gain over seeds

`applications/coding_harness.py` uses Anthropic's client and contains no training code. All its agents have one model
name. `BySystemPrompt` identifies each agent by its system prompt, and each agent gets its own adapter. The puzzles are
generated. A tiny model first imitates agents that get a quarter of their numbers wrong. Everything runs offline on a
CPU: about five minutes for the model, once, and eight minutes per seed.

To train your own harness, replace `solve` (starts the harness), `right` (the reward), the model and the puzzles.

`pip install -e ".[all]" anthropic`. Programs run in a sandbox, which needs Linux.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer, Team
from marft_trl.extras.apps import AppEndpoint, BySystemPrompt, ExternalApp, application
from marft_trl.tiny import tiny_model, tiny_tokenizer, warm_up

import torch
from aiohttp import web
from anthropic import AsyncAnthropic
from datasets import Dataset
from peft import LoraConfig
from transformers.utils import logging
from trl.chat_template_utils import qwen3_template


sys.path.insert(0, str(Path(__file__).parent / "applications"))

from coding_harness import CODER, READ, RUN, SEARCH, SEARCHER, Harness


# ---- Puzzles ----

THINGS = ("apples", "books", "coins", "pens", "cards", "shells")


def puzzle(draw, held_out=False):
    """Each file holds a count. The task says how many more are bought. Some sums are held out."""
    files, thing = {name: str(draw.randint(1, 9)) for name in THINGS}, draw.choice(THINGS)
    count = int(files[thing])
    more = draw.choice([more for more in range(1, 10) if ((count + 2 * more) % 5 == 0) == held_out])
    return {
        "prompt": f"Ann buys {more} {thing}. How many {thing}?",
        "files": json.dumps(files),
        "solution": str(count + more),
        "parts": json.dumps([thing, count, more]),
    }


def puzzles(count, seed, held_out=False):
    draw = random.Random(seed)
    return Dataset.from_list([puzzle(draw, held_out) for _ in range(count)])


# ---- A model that knows the format ----

ARGUMENTS = ("query", "code", "path", "name", "arguments")
WORDS = ("tools", "search", "run", "read", "print", "tool_call", "buys", "many", *ARGUMENTS)
# This template shows only the names of tools. Templates of pretrained models show their schemas.
TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + call.function.name }}
{{- '", "arguments": ' + (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{%- if loop.first and tools %}{% for tool in tools %}{{ ' ' + tool.function.name }}{% endfor %}{% endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
SLIPS = 0.25  # share of demonstrations with a wrong number


def tokenizer():
    tok = tiny_tokenizer(WORDS)
    tok.chat_template, tok.response_template = TEMPLATE, qwen3_template
    return tok


def slip(number, draw):
    """A number that is wrong in a quarter of the cases."""
    return max(0, number + draw.choice((-2, -1, 1, 2))) if draw.random() < SLIPS else number


def call(tool, argument):
    """A call as agents write it, in the format of Qwen."""
    (name,) = tool["input_schema"]["required"]
    return {"name": tool["name"], "arguments": {name: argument}}


def conversations(row, draw):
    """System prompt, task, tools and steps of each conversation: calls with their results, and the answer."""
    thing, count, more = json.loads(row["parts"])
    program = f"print({slip(count, draw)}+{more})"
    search_step = call(SEARCH, thing), str(count)
    return [
        (CODER, row["prompt"], [SEARCH, RUN], [search_step, (call(RUN, program), row["solution"]), row["solution"]]),
        (SEARCHER, thing, [READ], [(call(READ, thing), str(count)), str(slip(count, draw))]),
    ]


def turns_of(row, tok, draw):
    """The turns of the agents in a puzzle: `(prompt_ids, completion_ids)`."""
    for system, task, tools, steps in conversations(row, draw):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": task}]
        schemas = [{"type": "function", "function": {"name": tool["name"]}} for tool in tools]
        for step in steps:
            prompt = tok.apply_chat_template(messages, tools=schemas, add_generation_prompt=True, return_dict=True)
            text = step
            if isinstance(step, tuple):
                text = f"<tool_call>\n{json.dumps(step[0])}\n</tool_call>"
                calls = [{"type": "function", "function": step[0]}]
                messages.append({"role": "assistant", "content": "", "tool_calls": calls})
                messages.append({"role": "tool", "content": step[1], "name": step[0]["name"]})
            yield prompt["input_ids"], [*tok(text)["input_ids"], tok.eos_token_id]


def demonstrations(tok, seed=0):
    """Endless turns of agents that make mistakes."""
    draw = random.Random(seed)
    while True:
        batch = [turn for _ in range(64) for turn in turns_of(puzzle(draw), tok, draw)]
        draw.shuffle(batch)
        yield from batch


def base_model(folder, steps=800):
    """Build the model once. It knows the format, and makes the mistakes of the demonstrations."""
    if not (folder / "config.json").exists():
        print("Teaching the model the format (once, about five minutes) ...", flush=True)
        tok = tokenizer()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = tiny_model(len(tok))
            warm_up(model, tok, steps, rows=demonstrations(tok))
        tok.save_pretrained(folder)
        model.save_pretrained(folder)
    return str(folder)


# ---- Training, with the unchanged harness ----


async def solve(row, endpoint):
    """Solve a puzzle with the harness. `endpoint` serves the model."""
    async with AsyncAnthropic(base_url=endpoint.root_url, api_key=endpoint.api_key) as client:
        return await Harness(client, json.loads(row["files"])).solve(row["prompt"])


async def app(row, endpoint):
    await solve(row, endpoint)


def right(completions, solution, **kwargs):
    """1 if the coder's last message is the solution."""
    return [float(text.strip() == target) for text, target in zip(completions, solution, strict=True)]


def train(base, folder, seed, options):
    """Train one seed, and return the shares of right answers before and after."""
    trainer = MARFTTrainer(
        model=base,
        agents=[AgentSpec("coder", max_completion_length=64), AgentSpec("searcher", max_completion_length=64)],
        workflow=ExternalApp(
            app,
            answer="coder",
            tools=True,
            agent_of=BySystemPrompt({CODER: "coder", SEARCHER: "searcher"}),  # the harness has one model name
        ),
        reward_funcs=right,
        args=MARFTConfig(
            str(folder),
            per_device_train_batch_size=64,  # 8 puzzles with 8 episodes each
            num_generations=8,
            num_generations_eval=1,
            per_device_eval_batch_size=50,
            max_steps=options.max_steps,
            learning_rate=1.5e-3,
            gradient_checkpointing=False,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            seed=seed,
        ),
        train_dataset=puzzles(2000, seed=seed),
        eval_dataset=puzzles(options.questions, seed=1000, held_out=True),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    before = trainer.evaluate()["eval_reward"]
    trainer.train()
    after = trainer.evaluate()["eval_reward"]
    trainer.save_model()
    return before, after


async def on_the_served_team(team, rows):
    """The share of puzzles that the same harness solves on `marft serve`'s application."""
    runner = web.AppRunner(application(team), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    endpoint = AppEndpoint(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "none")
    answers = await asyncio.gather(*(solve(row, endpoint) for row in rows))
    await runner.cleanup()
    return statistics.mean(right(answers, [row["solution"] for row in rows]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--teaching_steps", type=int, default=800, help="supervised steps for the tiny model")
    parser.add_argument("--questions", type=int, default=200, help="number of held-out puzzles")
    parser.add_argument("--output_dir", type=Path, default=Path("harness-output"))
    parser.add_argument("--quick", action="store_true", help="a few steps of everything")
    options = parser.parse_args()
    if options.quick:
        options.teaching_steps, options.max_steps, options.questions = 30, 1, 8
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    base, gains = base_model(options.output_dir / f"base-{options.teaching_steps}", options.teaching_steps), []
    for seed in options.seeds:
        folder = options.output_dir / f"seed-{seed}"
        before, after = train(base, folder, seed, options)
        gains.append(100 * (after - before))
        print(f"seed {seed}: {before:.1%} of held-out puzzles before, {after:.1%} after", flush=True)
    error = f", standard error {statistics.stdev(gains) / len(gains) ** 0.5:.1f}" if len(gains) > 1 else ""
    print(f"{statistics.mean(gains):+.1f} points over {len(gains)} seeds{error}")
    with Team.from_pretrained(folder, model=base) as team:
        share = asyncio.run(on_the_served_team(team, puzzles(options.questions, seed=1000, held_out=True)))
        print(f"the same harness on the served team: {share:.1%}")
    print(f"saved team: {folder} (base: {base})")


if __name__ == "__main__":
    main()
