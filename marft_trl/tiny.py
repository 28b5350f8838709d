# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
A team that learns within minutes on a CPU: a tiny model, its tokenizer and a task for two agents, built offline.

The task: "Ann has 7 apples, buys 3 and loses 2. How many are left?" The reasoner writes the steps, "7+3=10;10-2=8",
and the actor reads the answer from them. A short supervised warm-up teaches the model both roles. Some of its
demonstrations contain a mistake, as real ones do. Reinforcement learning starts from this model. The quickstart and
the tests use it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from .agents import AgentSpec
from .episodes.collector import collect
from .episodes.records import Episode, Request, Seen, TeamContext, Turn
from .episodes.state import EpisodeState
from .prompts.builder import PromptBuilder
from .prompts.chat_template import ChatTemplate
from .workflows import Workflow


LARGEST = 7  # largest number in a question
SLIPS = 0.25  # share of demonstrations whose last number is wrong
NAMES = ("Ann", "Ben", "Cat", "Dan", "Eve", "Finn")
THINGS = ("apples", "books", "coins", "pens", "cards", "shells")
# If two words could merge the same letters, the earlier word wins.
WORDS = (
    *("system", "assistant", "user", "many", "reasoner", "actor", "Write", "the", "steps", "answer"),
    *("has", "buys", "finds", "and", "loses", "sells", "How", "are", "left"),
    *NAMES,
    *THINGS,
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Make a BPE tokenizer over characters with ChatML. Each word of the task, and each of `words`, is one token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *letters])}
    merges: list[tuple[str, str]] = []
    for word in (*WORDS, *words):
        for head, tail in [*((word[:end], word[end]) for end in range(1, len(word))), ("Ġ", word)]:
            if head + tail not in vocab:
                vocab[head + tail] = len(vocab)
                merges.append((head, tail))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",  # noqa: S106
        pad_token="<|endoftext|>",  # noqa: S106
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(vocab_size: int, seed: int = 0, **overrides) -> Qwen3ForCausalLM:
    """Make a randomly initialized Qwen 3 model with about 0.4 million parameters."""
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(Qwen3Config(**{**settings, **overrides}))


def tiny_agents() -> list[AgentSpec]:
    """The two agents of the task. The reasoner writes the steps, and the actor writes the answer."""
    return [
        AgentSpec("reasoner", system_prompt="Write the steps.", max_completion_length=24),
        AgentSpec("actor", system_prompt="Write the answer.", max_completion_length=6),
    ]


def questions(count: int, seed: int) -> list[dict[str, str]]:
    """
    Draw questions, each with its `solution` (a number) and the reasoner's `steps`.

    Even seeds give training questions, odd seeds held-out questions. A hash of the numbers assigns every combination
    of numbers to one of the two sets, so held-out questions have combinations that training never uses.
    """
    draw = random.Random(seed)
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        start, gain = draw.randint(1, LARGEST), draw.randint(1, LARGEST)
        loss = draw.randint(1, min(LARGEST, start + gain))
        digest = hashlib.sha256(f"{start},{gain},{loss}".encode()).digest()
        if (digest[0] < 51) != bool(seed % 2):
            continue
        name, thing = draw.choice(NAMES), draw.choice(THINGS)
        get, lose = draw.choice(("buys", "finds")), draw.choice(("sells", "loses"))
        total, left = start + gain, start + gain - loss
        rows.append(
            {
                "prompt": f"{name} has {start} {thing}, {get} {gain} and {lose} {loss}. How many are left?",
                "solution": str(left),
                "steps": f"{start}+{gain}={total};{total}-{loss}={left}",
            }
        )
    return rows


def tiny_dataset(count: int, seed: int = 0) -> Dataset:
    """Questions as a dataset with `prompt` and `solution`. Even seeds give training, odd ones held-out questions."""
    return Dataset.from_list(questions(count, seed)).remove_columns("steps")


def exact_answer(completions, solution, **kwargs) -> list[float]:
    """Reward of 1 if the team's answer equals the solution, else 0."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [float(text.strip() == target) for text, target in zip(texts, solution, strict=True)]


def _demonstrations(tokenizer, seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Endless demonstrations of the reasoner and the actor on training questions: `(prompt_ids, completion_ids)`."""
    builder = _prompt_builder(tokenizer, tiny_agents())
    draw = random.Random(seed)
    while True:
        rows = questions(256, seed=2 * draw.randrange(10**9))
        episodes = [Episode(row["prompt"], row, index) for index, row in enumerate(rows)]
        steps = [Turn("reasoner", row["steps"], index=0) for row in rows]
        plans = builder.build([Request(episode, "reasoner") for episode in episodes])
        answers = builder.build(
            [Request(episode, "actor", (turn,)) for episode, turn in zip(episodes, steps, strict=True)]
        )
        for row, plan, answer in zip(rows, plans, answers, strict=True):
            yield plan.ids, [*tokenizer(_with_slip(row["steps"], draw))["input_ids"], tokenizer.eos_token_id]
            yield answer.ids, [*tokenizer(_with_slip(row["solution"], draw))["input_ids"], tokenizer.eos_token_id]


def _with_slip(text: str, draw: random.Random) -> str:
    """Return the text, with a wrong last number in a share `SLIPS` of the calls."""
    if draw.random() >= SLIPS:
        return text
    head, equals, number = text.rpartition("=")
    return f"{head}{equals}{max(0, int(number) + draw.choice((-3, -2, -1, 1, 2, 3)))}"


def scripted_turns(
    tokenizer,
    workflow: Workflow,
    agents: Sequence[AgentSpec],
    rows: Callable[[random.Random], dict[str, Any]],
    reply: Callable[[EpisodeState, str, Sequence[Seen], random.Random], str],
    seed: int = 0,
) -> Iterator[tuple[list[int], list[int]]]:
    """
    Endless turns of scripted agents in a workflow, as demonstrations `(prompt_ids, completion_ids)` for [`warm_up`].
    `rows(draw)` returns a dataset row, and `reply(episode, agent, seen, draw)` the text of the agent's turn.
    """
    builder, draw = _prompt_builder(tokenizer, agents), random.Random(seed)
    while True:
        demonstrations: list[tuple[list[int], list[int]]] = []

        def answer(requests: Sequence[Request], demonstrations: list = demonstrations) -> list[Turn]:
            texts = [reply(request.episode, request.agent, request.seen, draw) for request in requests]
            for observation, text in zip(builder.build(requests), texts, strict=True):
                written = tokenizer(text, add_special_tokens=False)["input_ids"]
                demonstrations.append((observation.ids, [*written, tokenizer.eos_token_id]))
            return [request.make_turn(text) for request, text in zip(requests, texts, strict=True)]

        collect(workflow, [rows(draw) for _ in range(64)], TeamContext(tuple(builder.agents)), answer)
        draw.shuffle(demonstrations)
        yield from demonstrations


def _prompt_builder(tokenizer, agents: Sequence[AgentSpec]) -> PromptBuilder:
    def tokenize(prompts):
        return tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)["input_ids"]

    return PromptBuilder(ChatTemplate(tokenizer), tokenize, agents)


def warm_up(
    model,
    tokenizer,
    steps: int,
    batch_size: int = 32,
    learning_rate: float = 3e-3,
    seed: int = 0,
    rows: Iterator[tuple[list[int], list[int]]] | None = None,
) -> None:
    """
    Train a model in place on demonstrations `(prompt_ids, completion_ids)`, `batch_size` per optimizer step. Only
    completion tokens count in the loss, which is printed five times. By default, half of the demonstrations are the
    reasoner's, half the actor's.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=learning_rate, total_steps=steps, pct_start=0.1)
    rows = _demonstrations(tokenizer, seed) if rows is None else rows
    model.train()
    # Not what is masked: many tokenizers pad with a token that ends messages
    filler = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    for step in range(1, steps + 1):
        batch = [next(rows) for _ in range(batch_size)]
        width = max(len(prompt) + len(completion) for prompt, completion in batch)
        ids = torch.full((batch_size, width), filler)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for index, (prompt, completion) in enumerate(batch):
            end = len(prompt) + len(completion)
            ids[index, :end] = torch.tensor(prompt + completion)
            mask[index, :end] = 1
            labels[index, len(prompt) : end] = torch.tensor(completion)
        ids, mask, labels = (tensor.to(model.device) for tensor in (ids, mask, labels))
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % max(steps // 5, 1) == 0:
            print(f"  warm-up step {step} of {steps}: loss {loss.item():.3f}", flush=True)
    model.eval()


WARM_UP_STEPS = 800


def tiny_team_model(folder: str | os.PathLike | None = None, steps: int = WARM_UP_STEPS) -> str:
    """
    Build the model once, with `steps` of supervised warm-up, and return its folder, which is by default under
    `$XDG_CACHE_HOME/marft_trl` (`~/.cache/marft_trl`).
    """
    # All that decides about the last digits of the weights: another machine may share the folder
    made_with = [steps, torch.__version__, transformers.__version__, torch.get_num_threads()]
    made_with += [torch.backends.cpu.get_cpu_capability(), platform.machine()]
    recipe = hashlib.sha256(Path(__file__).read_bytes() + repr(made_with).encode()).hexdigest()[:12]
    if folder is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(cache) / "marft_trl" / f"tiny-{recipe}"
    folder = Path(folder)
    if (folder / "config.json").exists():
        return str(folder)
    print("Building the tiny model (once, at most two minutes) ...", flush=True)
    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        warm_up(model, tokenizer, steps)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.rename(folder)  # atomic, also if two processes build the model at the same time
    except OSError:
        if not (folder / "config.json").exists():
            raise
    return str(folder)
