"""
Self-play in Nim: two players take one to three stones in turn, and whoever takes the last one wins.

    python examples/self_play.py                              # one policy plays both sides; two minutes on a CPU
    python examples/self_play.py --quick                      # a few steps of everything
    python examples/self_play.py --opponent copies            # against past copies of the policy
    python examples/self_play.py --opponent perfect           # against a perfect player
    python examples/self_play.py --model HuggingFaceTB/SmolLM2-135M-Instruct --device cuda

A tiny model first imitates players who move at random three times in four. Then the players learn from their own
returns: one gains what the other loses. Each game begins with 4 to 12 stones. At the end, the trained player meets a
perfect player in 200 winnable games: a single error loses a game.
"""

import argparse
import random
import re
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer, Team
from marft_trl.prompts import team_view
from marft_trl.reporting import save_learning_curve
from marft_trl.tiny import scripted_turns, tiny_model, tiny_tokenizer, warm_up
from marft_trl.workflows import EnvironmentLoop

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from transformers.utils import logging


SLIPS = 0.75  # share of random moves among those that the tiny model is taught
OTHER = {"player": "rival", "rival": "player"}
WORDS = (
    *("player", "rival", "environment", "stones", "stone", "Take", "one"),
    *("to", "three", "The", "end", "Not", "move"),
)


class Nim:
    """Environment with the columns `stones` and `first`, the name of the agent that begins."""

    def reset(self, stones, first, **row):
        self.stones, self.next = stones, first
        return f"{stones} stones"

    def whose_turn(self):
        return self.next

    def step(self, turns):
        (turn,) = turns
        self.next = other = OTHER[turn.agent]
        move = turn.text.strip()
        if move not in ("1", "2", "3") or int(move) > self.stones:
            return "Not a move", {turn.agent: -1.0, other: 0.0}, True
        self.stones -= int(move)
        if self.stones == 0:
            return "The end", {turn.agent: 1.0, other: -1.0}, True
        return f"{self.stones} stones", 0.0, False


WORKFLOW = EnvironmentLoop(Nim, turns="one", horizon=12)


def last_alone(agent, prompt, seen):
    """The number of stones is all that matters."""
    return team_view(agent, [], seen[-1:])


def a_move(stones, draw):
    return str(draw.randint(1, min(3, stones)))


def perfect(messages):
    """Leave a multiple of four, or take anything where that is not possible."""
    stones = int(re.findall(r"(\d+) stones", messages[-1]["content"])[-1])
    return str(stones % 4) if stones % 4 else a_move(stones, random)


def players(opponent):
    """Two agents, of which `player` is trained."""
    common = {"system_prompt": "Take one to three.", "max_completion_length": 3, "view": last_alone}
    rival = {
        "self": AgentSpec("rival", adapter="player", **common),
        "copies": AgentSpec("rival", trainable=False, **common),  # its weights are those of `PastSelves`
        "perfect": AgentSpec("rival", reply=perfect, **common),
    }
    return [AgentSpec("player", **common), rival[opponent]]


class PastSelves(TrainerCallback):
    """
    Fictitious self-play (1710.03748): before each step, the frozen agent `rival` gets the weights that `player` had at
    some earlier step. A copy joins the pool every `every` steps, and the latest `size` are kept. A resumed run begins
    with the weights of its checkpoint.
    """

    def __init__(self, trainer, player, rival, every=10, size=4):
        adapters = {agent.name: agent.adapter for agent in trainer.agents}
        self.player, self.rival = (trainer.policies.parameters(adapters[name]) for name in (player, rival))
        self.every, self.size, self.pool = every, size, []
        trainer.add_callback(self)

    def take(self):
        self.pool = [*self.pool, [weight.detach().clone() for weight in self.player.values()]][-self.size :]

    def on_train_begin(self, args, state, control, **kwargs):
        self.take()

    def on_step_begin(self, args, state, control, **kwargs):
        copied = random.Random(f"{args.seed} {state.global_step}").choice(self.pool)  # the same on all processes
        for weight, value in zip(self.rival.values(), copied, strict=True):
            weight.data.copy_(value)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0:
            self.take()


def games(count, seed, winnable=False):
    """Random starts; `winnable`: the player moves first where the first player wins, else second."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        stones = draw.randint(4, 12)
        first = ("player" if stones % 4 else "rival") if winnable else draw.choice(["player", "rival"])
        rows.append({"prompt": "Take the last stone.", "stones": stones, "first": first, "start": f"{first} {stones}"})
    return rows


def taught_model(seed, steps=800, base=None, device="cpu"):
    """Train a tiny model, or a pretrained one, to imitate players who move at random three times in four."""
    if base is None:
        tokenizer = tiny_tokenizer(WORDS)
        model = tiny_model(len(tokenizer), seed=seed, initializer_range=0.06)
    else:
        tokenizer = AutoTokenizer.from_pretrained(base)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.to(device)
    set_seed(seed)
    print("Teaching the model the rules ...", flush=True)

    def scripted_move(episode, agent, seen, draw):
        stones = episode.environment.stones
        return a_move(stones, draw) if draw.random() < SLIPS else str(stones % 4 or 1)

    row = lambda draw: games(1, draw.random())[0]  # noqa: E731
    rows = scripted_turns(tokenizer, WORKFLOW, players("self"), row, scripted_move, seed)
    warm_up(model, tokenizer, steps=steps, learning_rate=1.5e-3 if base is None else 1e-4, rows=rows)
    return model, tokenizer


def make_trainer(model, tokenizer, output_dir, opponent="self", seed=0, max_steps=60, **settings):
    args = MARFTConfig(
        str(output_dir),
        **{
            "advantage": "rae",  # compares a game with earlier games from the same start
            "rae_column": "start",
            "num_generations": 1,
            "per_device_train_batch_size": 128,
            "max_steps": max_steps,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "entropy_coef": 0.01,  # otherwise a move that loses in self-play may never be sampled again
            "gradient_checkpointing": False,
            "logging_steps": 2,
            "save_strategy": "no",
            "seed": seed,
            **settings,
        },
    )
    trainer = MARFTTrainer(
        model=model,
        processing_class=tokenizer,
        agents=players(opponent),
        workflow=WORKFLOW,
        args=args,
        train_dataset=Dataset.from_list(games(4000, seed)),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    if opponent == "copies":
        PastSelves(trainer, "player", "rival")
    return trainer


def share_not_lost(folder, model, tokenizer, seed=1, count=200, greedy=True):
    """Play winnable games against a perfect player with a saved team."""
    settings = {"workflow": WORKFLOW, "view": dict.fromkeys(OTHER, last_alone), "replies": {"rival": perfect}}
    team = Team.from_pretrained(folder, model, processing_class=tokenizer, **settings)
    episodes = team.run(games(count, seed, winnable=True), greedy=greedy, seed=seed)
    return sum(sum(episode.own["player"]) >= 0 for episode in episodes) / count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--opponent", choices=["self", "copies", "perfect"], default="self")
    parser.add_argument("--model", help="folder, or name on the Hub (default: a tiny model)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output_dir", type=Path, default=Path("self-play-output"))
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--teaching_steps", type=int, help="supervised steps (default: 800, or 50 with `--model`)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few steps of everything")
    options = parser.parse_args()
    if options.quick:
        options.teaching_steps, options.max_steps = 30, 2
    count = 40 if options.quick else 200
    logging.set_verbosity_error()
    steps = (50 if options.model else 800) if options.teaching_steps is None else options.teaching_steps
    model, tokenizer = taught_model(options.seed, steps, options.model, options.device)
    base = options.output_dir / "base"
    model.save_pretrained(base)
    run = (options.output_dir, options.opponent, options.seed, options.max_steps)
    trainer = make_trainer(model, tokenizer, *run, use_cpu=options.device == "cpu")
    before = options.output_dir / "before"
    trainer.save_model(str(before))
    trainer.train()
    trainer.save_model()
    save_learning_curve(trainer.state.log_history, options.output_dir, ["agents/player/return"])
    folders = (before, options.output_dir)
    shares = [share_not_lost(folder, str(base), tokenizer, count=count, greedy=False) for folder in folders]
    print(f"winnable games of {count} not lost to a perfect player: {shares[0]:.1%} before, {shares[1]:.1%} after")
    print(f"saved team: {options.output_dir} (base: {base})")


if __name__ == "__main__":
    main()
