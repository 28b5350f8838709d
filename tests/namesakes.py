"""A team in which every agent repeats its own name, whatever the prompt."""

from pathlib import Path

from marft_trl import AgentSpec

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from .helpers import lora, team_trainer


NAMES = ("ann", "ben", "cat", "eve", "finn")  # a token each, with a capital
# Tokens of a turn. Turns of the last three agents are sampled by the same settings, and so decoded together
LENGTHS = {name: min(3 * (index + 1), 9) for index, name in enumerate(NAMES)}


def save_namesakes(base: str, folder: Path) -> None:
    """Make the agents on a base of one layer, and save both into `folder/base` and `folder/team`."""
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 100  # the same for all tokens, and above all else
        model.model.layers[0].input_layernorm.weight[0] = 1
        model.model.norm.weight *= 1000  # so that an agent can be sure of its name
    tokenizer.save_pretrained(folder / "base")
    model.save_pretrained(folder / "base")
    model = get_peft_model(model, lora(), adapter_name=NAMES[0])
    for name in NAMES[1:]:
        model.add_adapter(name, lora())
    for name in NAMES:
        _teach(model, tokenizer, name)
    agents = [AgentSpec(name, max_completion_length=LENGTHS[name]) for name in NAMES]
    trainer = team_trainer(model, folder / "team", agents=agents, peft_config=None, processing_class=tokenizer)
    trainer.save_model()


def said_by(name: str) -> str:
    return name.capitalize() * LENGTHS[name]


@torch.no_grad()
def _teach(model, tokenizer, name: str) -> None:
    """
    Write an adapter that says a name, by construction and not by training, so that no processor and no seed changes
    what it says: attention carries what all tokens share, and makes the direction of the name out of it.
    """
    (token_id,) = tokenizer(name.capitalize())["input_ids"]
    outputs = model.get_output_embeddings().weight * model.base_model.model.model.norm.weight
    outputs = outputs - outputs.mean(0)
    direction = torch.zeros(outputs.size(1))  # not what all tokens share
    direction[1:] = torch.linalg.lstsq(outputs[:, 1:], torch.eye(len(outputs))[:, token_id]).solution
    direction /= direction.norm()
    logits = outputs @ direction * len(direction) ** 0.5
    logits -= logits[token_id].clone()
    logits[token_id] = -torch.inf
    assert logits.logsumexp(0) < -50, f"{name} would not be sure of its name"
    attention = model.base_model.model.model.layers[0].self_attn
    for layer, row in ((attention.v_proj, torch.tensor([1000.0])), (attention.o_proj, 1000 * direction)):
        inner, outer = layer.lora_A[name].weight.zero_(), layer.lora_B[name].weight.zero_()
        inner[0, 0] = 1
        outer[: len(row), 0] = row
