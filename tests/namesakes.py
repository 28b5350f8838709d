"""A team in which every agent says its own name, again and again, whatever it is asked."""

from pathlib import Path

from marft_trl import AgentSpec
from marft_trl.tiny import questions

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from .helpers import lora, team_trainer


NAMES = ("ann", "ben", "cat", "eve", "finn")  # a token each, with a capital
# Tokens of a turn. Turns of the last three agents are sampled by the same settings, and so decoded together
LENGTHS = {name: min(3 * (index + 1), 9) for index, name in enumerate(NAMES)}


def save_namesakes(base: str, folder: Path) -> None:
    """Train the agents on a base, and save both into `folder/base` and `folder/team`."""
    torch.manual_seed(0)
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    model.model.norm.weight.data *= 20  # so that an agent can be sure of its name
    tokenizer.save_pretrained(folder / "base")
    model.save_pretrained(folder / "base")
    model = get_peft_model(model, lora(), adapter_name=NAMES[0])
    for name in NAMES[1:]:
        model.add_adapter(name, lora())
    for name in NAMES:
        _learn(model, tokenizer, name)
    agents = [AgentSpec(name, max_completion_length=LENGTHS[name]) for name in NAMES]
    trainer = team_trainer(model, folder / "team", agents=agents, peft_config=None, processing_class=tokenizer)
    trainer.save_model()


def said_by(name: str) -> str:
    """What an agent says."""
    return name.capitalize() * LENGTHS[name]


def _learn(model, tokenizer, name: str) -> None:
    model.set_adapter(name)
    (own,) = tokenizer(name.capitalize())["input_ids"]
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    texts = ["?", "x", *(one["prompt"] for one in questions(14, seed=7))]
    shown = [[{"role": "user", "content": text}] for text in texts]
    prompts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in shown]
    losses = []
    for step in range(1500):
        # What it will be asked, and anything else: teammates say all kinds of things
        start = torch.tensor([prompts[step % len(prompts)]]) if step % 2 else torch.randint(len(tokenizer), (8, 24))
        ids = torch.cat([start, torch.full((len(start), 12), own)], dim=1)
        logits = model(input_ids=ids).logits[:, start.size(1) - 1 : -1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, torch.full((len(logits),), own))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if max(losses[-len(prompts) :]) < 1e-4 and step >= 40:
            return
    raise AssertionError(f"{name} has not learnt its name")
