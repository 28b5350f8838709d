"""
Kuhn poker between two language models, and how far they are from an equilibrium, computed exactly.

    python examples/kuhn.py                               # a LoRA for each seat: about five minutes on a CPU
    python examples/kuhn.py --quick                       # a few steps of everything
    python examples/kuhn.py --players one                 # one LoRA plays both seats
    python examples/kuhn.py --players copies --device cuda
    make kuhn                                             # all of them, three seeds

Two players each hold one of three cards and have put one chip into the pot. The first may check or bet a second chip,
and the other checks, bets, calls or folds; after "check" and "bet", the first calls or folds. The higher card wins the
pot unless its player folds. A player sees its card and the moves, so it has six information sets, and a strategy is
the probability of each move in them, which is read from the model's token probabilities. The exploitability is what
switching to the best response gains, in chips, on average over both seats: 11/24 if both players toss coins, 0 in a
Nash equilibrium.

The pretrained model first imitates players that toss coins. Then the players learn from their own games. The script
prints the exploitability of their strategies every five steps, and that of the average of all strategies printed so
far, because strategies that chase each other may cycle.
"""

import argparse
import hashlib
import itertools
import json
import random
from itertools import permutations
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
from marft_trl.extras.tasks import Chance, Decision, End, average_policy, exploitability, smollm2
from marft_trl.prompts import team_view
from marft_trl.tiny import scripted_turns, warm_up
from marft_trl.workflows import EnvironmentLoop

import torch
from datasets import Dataset
from peft import LoraConfig
from self_play import PastSelves
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging


MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Prompts have only the observation, 12 to 14 tokens. The trainer warns that agents could imitate its mark,
# `[environment]`, but here no agent reads the turns of another
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
CARDS = ("jack", "queen", "king")
SEATS = ("first", "second")
# What follows the moves so far: the two moves of the next player. Each is one token
MOVES = {
    "": ("check", "bet"),
    "check": ("check", "bet"),
    "bet": ("fold", "call"),
    "check bet": ("fold", "call"),
}


def gain_of_first(cards, moves):
    """Gain of the first player at the end of a game."""
    if moves.endswith("fold"):
        return 1 if moves == "bet fold" else -1
    return (2 if moves.endswith("call") else 1) * (1 if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -1)


def shown(card, moves):
    """Observation of a player."""
    return f"{moves.replace(' ', ', ') or 'start'}; {' or '.join(MOVES[moves])}? {card}"


def tree(cards, moves=""):
    """The rest of a game."""
    if moves not in MOVES:
        gain = gain_of_first(cards, moves)
        return End((gain, -gain))
    player = len(moves.split()) % 2
    following = {move: tree(cards, f"{moves} {move}".strip()) for move in MOVES[moves]}
    return Decision(player, shown(cards[player], moves), following)


DEALS = list(permutations(CARDS, 2))
KUHN = Chance([(1 / 6, tree(cards)) for cards in DEALS])


class Kuhn:
    """Environment with the columns `deal` ("king queen"), `moves` (so far) and `seats` (names of the agents)."""

    def reset(self, deal, moves, seats, **row):
        self.cards, self.moves, self.seats = deal.split(), moves, seats.split()
        return self.observe()

    def whose_turn(self):
        return self.seats[len(self.moves.split()) % 2]

    def observe(self):
        """Observation for the next player, with only its own card."""
        return {self.whose_turn(): shown(self.cards[len(self.moves.split()) % 2], self.moves)}

    def step(self, turns):
        (turn,) = turns
        other = next(name for name in self.seats if name != turn.agent)
        move = turn.text.strip()
        if move not in MOVES[self.moves]:
            return None, {turn.agent: -2.0, other: 0.0}, True  # costs as much as the largest loss
        self.moves = f"{self.moves} {move}".strip()
        if self.moves in MOVES:
            return self.observe(), 0.0, False
        gain = gain_of_first(self.cards, self.moves)
        return None, {self.seats[0]: float(gain), self.seats[1]: float(-gain)}, True


def last_alone(agent, prompt, seen):
    """The card and the moves are all that matters."""
    return team_view(agent, [], seen[-1:])


WORKFLOW = EnvironmentLoop(Kuhn, turns="one", horizon=3)


def agents(players):
    """`own`: each seat has a LoRA. `one`: both seats share one. `copies`: one LoRA plays against past copies."""
    common = {"max_completion_length": 1, "view": last_alone}
    if players == "copies":
        return [AgentSpec("first", **common), AgentSpec("second", trainable=False, **common)]
    return [AgentSpec("first", **common), AgentSpec("second", adapter="first" if players == "one" else None, **common)]


def row(deal, seats=SEATS, moves=""):
    seats = " ".join(seats)
    return {
        "prompt": "Kuhn poker.",
        "deal": " ".join(deal),
        "moves": moves,
        "seats": seats,
        "start": f"{seats} {' '.join(deal)}",
    }


def games(count, players, seed):
    """Random deals. Against past copies, the agent that learns alternates between both seats."""
    draw = random.Random(seed)
    orders = [SEATS, SEATS[::-1]] if players == "copies" else [SEATS]
    return [row(draw.choice(DEALS), draw.choice(orders)) for _ in range(count)]


# ---- Reading the strategy from the model ----


def tokens_of_moves(tokenizer):
    """The token of each move."""
    tokens = {}
    for move in itertools.chain(*MOVES.values()):
        ids = tokenizer(move, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise SystemExit(f"The tokenizer of {tokenizer.name_or_path} has {len(ids)} tokens for {move!r}, not one.")
        tokens[move] = ids[0]
    return tokens


class PolicyReader:
    """Reads the probability of each move in each information set from the model's token probabilities."""

    def __init__(self, trainer, players):
        self.team, self.tokens = trainer.team, tokens_of_moves(trainer.processing_class)
        self.agents, rows = [], []
        for moves in MOVES:
            for card in CARDS:
                seat = len(moves.split()) % 2
                # In `copies`, only `first` learns, so both seats are read from it
                seats = SEATS[::-1] if players == "copies" and seat == 1 else SEATS
                deal = [card, card]  # the other card is not shown
                rows.append(row(deal, seats, moves))
                self.agents.append(seats[seat])
        episodes = self.team.run(rows, seed=0)
        self.prompts = [episode.turns[0].prompt_ids for episode in episodes]
        self.sets = [(shown(row["deal"].split()[0], row["moves"]), MOVES[row["moves"]]) for row in rows]

    @torch.no_grad()
    def read(self):
        """The policy of legal moves, and the least probability that a move is legal."""
        policy, legal = {}, 1.0
        models = {agent: self.team[agent] for agent in set(self.agents)}
        for agent, prompt, (name, moves) in zip(self.agents, self.prompts, self.sets, strict=True):
            model = models[agent]
            logits = model(torch.tensor([prompt], device=model.device)).logits[0, -1].double()
            probabilities = logits.softmax(-1)[[self.tokens[move] for move in moves]].tolist()
            legal = min(legal, sum(probabilities))
            policy[name] = {move: value / sum(probabilities) for move, value in zip(moves, probabilities, strict=True)}
        return policy, legal


def last_third(model):
    """Positions of the layers that learn: the backward pass ends there."""
    layers = AutoConfig.from_pretrained(model).num_hidden_layers
    return list(range(layers * 2 // 3, layers))


def taught_model(base, output_dir, steps=30, seed=0, device="cpu"):
    """The pretrained model after it has imitated players that toss coins, saved in a folder, once."""
    digest = hashlib.sha256(f"{base} {device}".encode()).hexdigest()[:8]
    folder = Path(output_dir) / f"taught-{Path(base).name}-{steps}-{digest}"
    if (folder / "config.json").exists():
        return str(folder)
    print("Teaching the model to toss coins (once) ...", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATE
    tokens_of_moves(tokenizer)  # raises before the model is trained
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).to(device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(f"layers.{layer}." in name for layer in last_third(base)))
    toss = lambda episode, agent, seen, draw: draw.choice(MOVES[episode.environment.moves])  # noqa: E731
    turns = scripted_turns(tokenizer, WORKFLOW, agents("own"), lambda draw: row(draw.choice(DEALS)), toss, seed)
    # Each of the two moves in each of the twelve information sets
    pairs = sorted({(tuple(prompt), tuple(move)) for prompt, move in itertools.islice(turns, 1000)})
    rows = ((list(prompt), list(move)) for prompt, move in itertools.cycle(pairs))
    warm_up(model, tokenizer, steps=steps, batch_size=24, learning_rate=2e-4, rows=rows)
    unfinished = Path(f"{folder}.unfinished")
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)
    return str(folder)


def make_trainer(model, folder, players="own", baseline="rae", seed=0, max_steps=30, device="cpu", **settings):
    args = MARFTConfig(
        str(folder),
        **{
            # "rae" compares a game with earlier ones of its deal, "group" with the other games of its row
            "advantage": baseline,
            "scale_rewards": "none",  # both in chips
            "rae_column": "start" if baseline == "rae" else None,
            "num_generations": 1 if baseline == "rae" else 8,
            "per_device_train_batch_size": 128,
            "max_steps": max_steps,
            "learning_rate": 5e-4,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": 10,
            # Both pull towards players that toss coins, so that every move keeps being sampled. The price: strategies
            # stay away from an equilibrium
            "beta": 0.3,
            "entropy_coef": 0.05,
            "gradient_checkpointing": False,
            "logging_steps": 5,
            "save_strategy": "no",
            "report_to": [],
            "seed": seed,
            "use_cpu": device == "cpu",
            "bf16": False,
            "model_init_kwargs": {"dtype": "float32"},  # bfloat16 rounds probabilities to 0.4 %
            **settings,
        },
    )
    trainer = MARFTTrainer(
        model=model,
        agents=agents(players),
        workflow=WORKFLOW,
        args=args,
        train_dataset=Dataset.from_list(games(4000, players, seed)),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=MATRICES, layers_to_transform=last_third(model)),
    )
    if players == "copies":
        PastSelves(trainer, "first", "second", size=8)
    return trainer


class Measure(TrainerCallback):
    """Records the exploitability every few steps: `(step, probability of legal moves, last strategy, average)`."""

    def __init__(self, reader, every=5):
        self.reader, self.every, self.policies, self.found = reader, every, [], []
        self.note(0)

    def note(self, step):
        policy, legal = self.reader.read()
        self.policies.append(policy)
        last, average = exploitability(KUHN, policy), exploitability(KUHN, average_policy(KUHN, self.policies))
        self.found.append((step, legal, last, average))
        print(f"step {step:3}: exploitability {last:.3f}, of the average {average:.3f}; legal {legal:.3f}", flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0:
            self.note(state.global_step)


def run(model, folder, players="own", baseline="rae", seed=0, max_steps=30, device="cpu", **settings):
    """Train a team, and return measurements and strategies."""
    trainer = make_trainer(model, folder, players, baseline, seed, max_steps, device, **settings)
    measure = Measure(PolicyReader(trainer, players))
    trainer.add_callback(measure)
    trainer.train()
    trainer.save_model()
    return {"measured": measure.found, "policies": measure.policies}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--players", choices=["own", "one", "copies"], default="own")
    parser.add_argument("--baseline", choices=["rae", "group"], default="rae")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max_steps", type=int, default=30)
    parser.add_argument("--teaching_steps", type=int, default=30, help="supervised steps on players that toss coins")
    parser.add_argument("--model", help="folder, or name on the Hub (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output_dir", type=Path, default=Path("kuhn-output"))
    parser.add_argument("--quick", action="store_true", help="a few steps of everything")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.quick:
        options.teaching_steps, options.max_steps = 2, 1
    settings = {"per_device_train_batch_size": 16} if options.quick else {}
    base, steps = options.model or smollm2(), options.teaching_steps
    taught = taught_model(base, options.output_dir, steps, device=options.device)
    name = f"{options.players}-{options.baseline}-{options.seed}"
    chosen = (options.players, options.baseline, options.seed, options.max_steps, options.device)
    result = run(taught, options.output_dir / name, *chosen, **settings)
    (options.output_dir / f"{name}.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    for shown_to_player, moves in result["policies"][-1].items():
        print(f"{shown_to_player:65}", ", ".join(f"{move} {value:.2f}" for move, value in moves.items()))
    print(f"saved team: {options.output_dir / name} (base: {taught})")


if __name__ == "__main__":
    main()
