"""
Train a team in which only the looker sees the picture and only the solver computes, offline and in minutes on a CPU.

    python examples/look_and_solve.py                      # a tiny vision-language model, made and taught first
    python examples/look_and_solve.py --seed 1 --quick     # every step in a minute, without good answers
    python examples/look_and_solve.py --model Qwen/Qwen2.5-VL-3B-Instruct

"Mia has 4 points and wins the red squares. How many points?" comes with a picture of squares in two colors. The looker
says what it sees, "3 red, 2 blue", and the solver, which does not see the picture, answers "7". The tiny model learns
both roles from demonstrations with mistakes. Then reinforcement learning rewards right answers of the team.
"""

import argparse
import dataclasses
import hashlib
import random
import time
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer, Team
from marft_trl.episodes.images import read_prompt
from marft_trl.episodes.records import Episode, Request, Turn
from marft_trl.prompts import team_view
from marft_trl.prompts.builder import PromptBuilder
from marft_trl.prompts.chat_template import ChatTemplate
from marft_trl.reporting import team_exact_match
from marft_trl.rollout.speaker import make_tokenize
from marft_trl.seams.vision import ImageProcessor
from marft_trl.tiny import NAMES, exact_answer, tiny_model, tiny_tokenizer

import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image, ImageDraw
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    TrainerCallback,
)
from transformers.utils import logging


COLORS = ("red", "green", "blue", "yellow")
GRID, CELL = 4, 12  # cells in a row, and pixels of a cell
MOST = 6  # squares in a picture
SLIPS = 0.25  # share of demonstrations with a wrong number
WORDS = ("looker", "solver", "more", "of", "them", "there", "Say", "what", "you", "see", *COLORS)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AGENTS = [
    AgentSpec("looker", system_prompt="Say what you see.", max_completion_length=12),
    AgentSpec("solver", system_prompt="Write the answer.", max_completion_length=6, sees_images=False),
]


def draw_picture(count, color, draw):
    """A picture with `count` squares in random cells."""
    image = Image.new("RGB", (GRID * CELL, GRID * CELL), "white")
    for cell in draw.sample(range(GRID * GRID), count):
        left, top = cell % GRID * CELL + 1, cell // GRID * CELL + 1
        ImageDraw.Draw(image).rectangle((left, top, left + CELL - 3, top + CELL - 3), fill=color)
    return image


def make_rows(count, seed):
    """Questions with pictures. A hash assigns the numbers to training (even seeds) or held-out questions (odd ones)."""
    draw, rows = random.Random(seed), []
    while len(rows) < count:
        more, shown, color = draw.randint(1, MOST), draw.randint(1, MOST), draw.choice(COLORS)
        digest = hashlib.sha256(f"{more},{shown},{color}".encode()).digest()
        if (digest[0] < 51) != bool(seed % 2):
            continue
        prompt = f"{draw.choice(NAMES)} has {more} more of them. How many are there?"
        picture = draw_picture(shown, color, draw)
        rows.append(
            {"prompt": prompt, "image": picture, "solution": f"{more + shown} {color}", "seen": f"{shown} {color}"}
        )
    return rows


def make_dataset(count, seed):
    return Dataset.from_list(
        [{name: row[name] for name in ("prompt", "image", "solution")} for row in make_rows(count, seed)]
    )


def with_slip(text, draw):
    """The text, or in a share `SLIPS` of the calls the text with a wrong number."""
    number, color = text.split()
    return text if draw.random() >= SLIPS else f"{max(0, int(number) + draw.choice((-2, -1, 1, 2)))} {color}"


def tiny_vlm():
    """A LLaVA with random weights, and its processor."""
    tokenizer = tiny_tokenizer(WORDS)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]}, replace_extra_special_tokens=False)
    tokenizer.padding_side = "left"
    side = GRID * CELL
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side}),
        tokenizer,
        patch_size=CELL,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4}
    vision = CLIPVisionConfig(hidden_size=64, intermediate_size=128, image_size=side, patch_size=CELL, **layers)
    config = LlavaConfig(
        vision_config=vision,
        text_config=tiny_model(len(tokenizer)).config,
        image_token_index=processor.image_token_id,
        image_seq_length=GRID * GRID,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config), processor


def demonstrations(processor, draw):
    """Endless `(images, prompt_ids, completion_ids)` of both agents, whose prompts are those of the trained team."""
    tokenizer = processor.tokenizer
    template = ChatTemplate(tokenizer, processor.chat_template, images=ImageProcessor(processor))
    builder = PromptBuilder(template, make_tokenize(template), AGENTS)
    while True:
        requests, texts = [], []
        for index, row in enumerate(make_rows(64, seed=2 * draw.randrange(10**9))):
            episode = Episode(read_prompt(row), row, index)
            requests += [
                Request(episode, "looker"),
                Request(episode, "solver", (Turn("looker", row["seen"], index=0),)),
            ]
            texts += [with_slip(row["seen"], draw), with_slip(row["solution"], draw)]
        for observation, text in zip(builder.build(requests), texts, strict=True):
            written = tokenizer(text, add_special_tokens=False)["input_ids"]
            yield observation.images, observation.ids, [*written, tokenizer.eos_token_id]


def teach(model, processor, steps, seed, batch_size=32, learning_rate=2e-3):
    """Train the whole model, the vision tower as well, on demonstrations."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    rows, images = demonstrations(processor, random.Random(seed)), ImageProcessor(processor)
    model.train()
    for step in range(1, steps + 1):
        batch = [next(rows) for _ in range(batch_size)]
        width = max(len(prompt) + len(completion) for _, prompt, completion in batch)
        ids = torch.full((batch_size, width), processor.tokenizer.pad_token_id)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for index, (_, prompt, completion) in enumerate(batch):
            end = len(prompt) + len(completion)
            ids[index, :end], mask[index, :end] = torch.tensor(prompt + completion), 1
            labels[index, len(prompt) : end] = torch.tensor(completion)
        pixels = images.for_model([row[0] for row in batch], ids, [len(row[1]) for row in batch])
        loss = model(input_ids=ids, attention_mask=mask, labels=labels, **pixels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % max(steps // 10, 1) == 0:
            print(f"  teaching: step {step} of {steps}, loss {loss.item():.3f}", flush=True)
    model.eval()


def taught_model(folder, steps):
    """The folder of the tiny model, which is made and taught once."""
    if not (folder / "config.json").exists():
        print("Making and teaching a tiny vision-language model (once, about two minutes) ...", flush=True)
        torch.manual_seed(0)
        model, processor = tiny_vlm()
        teach(model, processor, steps, seed=0)
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
    return str(folder)


def silenced(agent, prompt, seen):
    """View in which the messages of teammates are empty."""
    return team_view(agent, prompt, [dataclasses.replace(turn, raw_text="") for turn in seen])


class Progress(TrainerCallback):
    """Prints the share of right answers in training."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs:
            print(f"  training: step {state.global_step} of {state.max_steps}, right {logs['reward']:.0%}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a vision-language model with a chat template (default: a tiny one)")
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--teaching_steps", type=int, default=700)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("look-and-solve-output"))
    parser.add_argument("--quick", action="store_true", help="a few steps of everything")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    teaching_steps, max_steps, held_out = (
        (10, 2, 16) if options.quick else (options.teaching_steps, options.max_steps, 400)
    )
    start = time.process_time()
    model = options.model or taught_model(options.output_dir / f"base-{teaching_steps}", teaching_steps)
    print(f"teaching: {time.process_time() - start:.0f} s")
    trainer = MARFTTrainer(
        model=model,
        agents=AGENTS,
        reward_funcs=exact_answer,
        args=MARFTConfig(
            str(options.output_dir),
            per_device_train_batch_size=64,  # 8 questions with 8 episodes each
            num_generations=8,
            num_generations_eval=1,
            per_device_eval_batch_size=200,
            max_steps=max_steps,
            learning_rate=1e-4 if options.model else 1.5e-3,
            logging_steps=min(5, max_steps),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=options.seed,
        ),
        train_dataset=make_dataset(8 * max_steps, seed=0),
        eval_dataset=make_dataset(held_out, seed=1),
        eval_metrics=team_exact_match(),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        callbacks=[Progress()],
    )
    print(trainer.plan().partition("\n\nWorkflow")[0], flush=True)
    before = trainer.evaluate()["eval_exact_match"]
    print(f"right answers before training: {before:.1%}", flush=True)
    start = time.process_time()
    trainer.train()
    print(f"training: {time.process_time() - start:.0f} s")
    after = trainer.evaluate()["eval_exact_match"]
    trainer.view = silenced
    without_looker = trainer.evaluate(metric_key_prefix="eval_silenced")["eval_silenced_exact_match"]
    trainer.view = team_view
    trainer.save_model()
    print(f"\n{held_out} held-out questions, right answers of the team")
    print(f"  before training        {before:6.1%}\n  after training         {after:6.1%}")
    print(f"  with a silenced looker {without_looker:6.1%}\n")

    team = Team.from_pretrained(options.output_dir, model=model)
    picture, question = (
        draw_picture(3, "blue", random.Random(options.seed)),
        "Eve has 2 more of them. How many are there?",
    )
    print(f"A new picture with 3 blue squares. {question}")
    print(f"the saved team answers: {team(question, images=[picture], greedy=True)}")


if __name__ == "__main__":
    main()
