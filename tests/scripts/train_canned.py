"""Trains a team on episodes that depend on the prompts alone, and saves its weights: one process or several."""

import asyncio
import dataclasses
import hashlib
import json
import os
import random
import sys
from collections import Counter

from marft_trl import AgentSpec, Sequential, Workflow
from marft_trl.extras.apps import ExternalApp
from marft_trl.rollout.generator import SampledTurn
from marft_trl.tiny import tiny_agents, tiny_dataset, tiny_tokenizer
from marft_trl.workflows import Orchestrated
from tests import shard_on_cpu  # before anything asks accelerate for its state
from tests.helpers import add, logged_steps, lora, team_trainer, varied_reward
from tests.vision_families import FAMILIES, picture

import aiohttp
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl.chat_template_utils import qwen3_chat_template


class ByPrompt(Workflow):
    """Each prompt has its own team: the processes' rows fall on different agents and differ in number."""

    async def run(self, episode):
        if int(hashlib.sha256(episode.prompt.encode()).hexdigest(), 16) % 2:
            await episode.turn("reasoner")
        else:
            await episode.turn("actor")
            await episode.turn("actor")


def call_of(tokenizer, draw):
    """A call of the tool, now and then with an argument that it does not take."""
    arguments = {"a": draw.randrange(9), draw.choice("bbbc"): draw.randrange(9)}
    return tokenizer(f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': arguments})}\n</tool_call>")["input_ids"]


def canned(trainer, kind):
    """Replies drawn from the observation and its repetition, not from the model."""
    counts = Counter()

    async def generate(observed, **options):
        replies = []
        for observation in observed:
            agent, ids = observation.agent, observation.ids
            key = (trainer.state.global_step, agent, tuple(ids))
            counts[key] += 1
            draw = random.Random(repr((key, counts[key])))
            reply = [draw.randrange(3, 200) for _ in range(draw.randint(1, 9))]
            if kind == "tools" and trainer.processing_class.decode(ids).count("<tool_response>") < 2:
                reply = call_of(trainer.processing_class, draw) if draw.random() < 0.7 else reply
            elif isinstance(trainer.workflow, Orchestrated) and agent == "reasoner":
                tag = draw.choice(["<call>actor</call>", "<call>nobody</call>", "<done/>"])
                reply = trainer.processing_class(tag)["input_ids"]
            replies.append(SampledTurn([*reply, 2]))
        return replies

    return generate


async def application(row, endpoint):
    """Three requests to two agents, two of them at the same time, some of a third."""
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}

    async def ask(agent, text):
        body = {"model": agent, "messages": [{"role": "user", "content": text}]}
        async with session.post(f"{endpoint.base_url}/chat/completions", json=body) as answer:
            return (await answer.json())["choices"][0]["message"]["content"]

    async with aiohttp.ClientSession(headers=headers) as session:
        reply = await ask("reasoner", row["prompt"])
        replies = await asyncio.gather(ask("actor", reply), ask("reasoner", f"again {reply}"))
        if len(replies[0]) % 2:
            await ask("actor", "".join(replies))


FOUR_BITS = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
PPO = {"advantage": "gae", "num_generations": 1, "num_iterations": 2, "critic_learning_rate": 1e-2}
LEARNING = {
    "ppo": {**PPO, "critic": "per_agent", "target_kl": 1.0, "use_adaptive_entropy": True, "max_steps": 2},
    "sequential": {**PPO, "critic": "frozen", "level": "action", "update_order": "sequential", "max_steps": 6},
    "counterfactual": {"advantage": "leave_one_out", "credit": "counterfactual", "scale_rewards": "none"},
    "candidates": {"advantage": "turn", "turn_candidates": 2},
    "orchestrated": {},
    "bases": {**PPO, "critic": "shared", "target_kl": 1.0, "use_adaptive_entropy": True, "max_steps": 2},
    "opponents": {"max_steps": 4},
    "dynamic": {"dynamic_sampling": True, "entropy_coef": 0.0, "beta": 0.0},
    "four_bits": {"model_init_kwargs": {"quantization_config": FOUR_BITS}},
}


WORKFLOWS = {
    **dict.fromkeys(("chain", "full", "tools", "dynamic", "images")),
    "opponents": Sequential(["reasoner", "rival", "judge", "actor"]),
    "application": ExternalApp(application, together=0.6),
    "orchestrated": Orchestrated("reasoner", ["actor"], max_turns=5, fallback="actor", penalty=-0.5),
}


def sometimes(prompts, completions, **kwargs):
    """Half of the prompts earn nothing, whatever is answered."""
    pairs = zip(prompts, varied_reward(completions), strict=True)
    return [score * (int(hashlib.sha256(str(prompt).encode()).hexdigest(), 16) % 2) for prompt, score in pairs]


async def judge(messages):
    return hashlib.sha256(repr(messages).encode()).hexdigest()[:6]


def with_picture(row, index):
    return {**row, "image": picture(index, (56, 56 + 28 * (index % 2)))}


def count(answers, prompt, **columns):
    assert len(set(prompt)) == len(prompt)
    return {"count": len(answers)}


def main(model_folder: str, output: str, kind: str, loss_type: str) -> None:
    torch.set_num_threads(1)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    agents = [*tiny_agents(), AgentSpec("idle", system_prompt="x")]
    tokenizer = tiny_tokenizer()
    if kind == "opponents":
        agents += [AgentSpec("rival", trainable=False), AgentSpec("judge", reply=judge)]
    if kind == "bases":
        agents[1] = dataclasses.replace(
            agents[1], model=AutoModelForCausalLM.from_pretrained(model_folder), processing_class=tokenizer
        )
    if kind == "tools":
        agents[0] = AgentSpec("reasoner", system_prompt="Write the steps.", max_completion_length=128, tools=[add])
        tokenizer.chat_template = qwen3_chat_template
    model, evaluated, data = model_folder, tiny_dataset(9, seed=1), {}
    if kind == "images":
        model, tokenizer = FAMILIES["qwen2_5_vl"]()
        agents = [agents[0], dataclasses.replace(agents[1], sees_images=False)]
        evaluated = evaluated.map(with_picture, with_indices=True)
        data = {"train_dataset": tiny_dataset(64).map(with_picture, with_indices=True)}
    trainer = team_trainer(
        model,
        output + "-run",
        agents=agents,
        workflow=WORKFLOWS.get(kind, ByPrompt()),
        **data,
        processing_class=tokenizer,
        reward_funcs=sometimes if kind == "dynamic" else varied_reward,
        eval_dataset=evaluated,
        eval_metrics=count,
        peft_config=None if kind == "full" else lora(),
        settings={
            **{"per_device_train_batch_size": 16 // world_size, "per_device_eval_batch_size": 4 // world_size},
            **{"loss_type": loss_type, "entropy_coef": 0.01, "beta": 0.05, "num_generations_eval": 1},
            **{"weight_decay": 0.1, "learning_rate": 1e-2, "optim": "sgd", "max_tokens_per_micro_batch": 400},
            **{"use_cpu": not shard_on_cpu.IS_ON, "gradient_checkpointing": kind != "full", **LEARNING.get(kind, {})},
        },
    )
    assert kind != "four_bits" or trainer.model.get_base_model().is_loaded_in_4bit
    trainer.parts.runner.generator.generate = canned(trainer, kind)
    models = (trainer.model, *trainer.policies.further)
    trained = {n: p for model in models for n, p in model.named_parameters() if p.requires_grad}
    start = {"start/" + n: p.detach().clone() for n, p in trained.items()}
    trainer.train()
    figures = trainer.evaluate()
    if trainer.accelerator.is_main_process:
        tensors = {n: p.detach().clone() for n, p in trained.items()}
        log, steps = trainer.state.log_history, logged_steps(trainer)
        numbers = {
            "losses": [step["loss"] for step in steps],
            # none in a step in which the agent whose turn it was to learn never spoke
            "entropies": [entry["entropy"] for entry in log if "entropy" in entry],
            "evaluated": [figures["eval_count"], figures["eval_reward"]],
        }
        if kind == "dynamic":
            numbers["drawn"] = [entry.get("dynamic_sampling/prompts", 0.0) for entry in log]
        for name in ("calls", "failures") if kind == "tools" else ():
            numbers[name] = [step[f"workflow/tools/{name}"] for step in steps]
        if trainer.critic is not None:
            tensors |= {f"head.{n}": p.detach().clone() for n, p in trainer.critic.heads.named_parameters()}
        save_file({**start, **tensors, **{name: torch.tensor(series) for name, series in numbers.items()}}, output)
    trainer.accelerator.end_training()  # leave the process group before the interpreter goes


if __name__ == "__main__":
    main(*sys.argv[1:])
    # On a busy machine a thread of gloo now and then aborts the interpreter on its way out ("terminate called without
    # an active exception"). By now everything is saved, so there is nothing left to tear down.
    sys.stderr.flush()
    os._exit(0)
