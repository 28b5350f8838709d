"""
Train a team in which only the looker sees the picture and only the solver computes, offline and in minutes on a CPU.

    python examples/look_and_solve.py                      # a tiny vision-language model, built and taught first
    python examples/look_and_solve.py --quick              # a few steps of everything, which do not teach much
    python examples/look_and_solve.py --model HuggingFaceTB/SmolVLM-256M-Instruct   # or another one from the Hub

"Mia has 3 more of them. How many are there?" comes with a picture of colored squares. The looker writes "4 red", and
the solver, which reads this but does not see the picture, answers "7 red". The tiny model learns both roles from
demonstrations with mistakes. The reward is 1 for a right answer of the team and 0 otherwise.
"""

import argparse
import dataclasses
import hashlib
import random
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
import transformers
from datasets import Dataset
from peft import LoraConfig
from PIL import Image, ImageDraw
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import logging


COLORS = ("red", "green", "blue", "yellow")
CELL = 12  # pixels of a side of a cell, of which a picture has three times three
DIE = {1: (4,), 2: (0, 8), 3: (0, 4, 8), 4: (0, 2, 6, 8), 5: (0, 2, 4, 6, 8), 6: (0, 2, 3, 5, 6, 8)}
SLIPS = 0.3  # share of demonstrations with a mistake
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
    """A picture with `count` squares, arranged as on a die that is turned at random."""
    image = Image.new("RGB", (3 * CELL, 3 * CELL), "white")
    for cell in DIE[count]:
        left, top = cell % 3 * CELL + draw.randint(1, 3), cell // 3 * CELL + draw.randint(1, 3)
        ImageDraw.Draw(image).rectangle((left, top, left + CELL - 5, top + CELL - 5), fill=color)
    return image.rotate(draw.choice((0, 90, 180, 270)))


def make_rows(count, seed):
    """Rows with pictures. A hash of the numbers keeps held-out questions (odd seeds) apart from training ones."""
    draw, rows = random.Random(seed), []
    while len(rows) < count:
        more, shown, color = draw.randint(1, 5), draw.randint(1, 6), draw.choice(COLORS)
        digest = hashlib.sha256(f"{more},{shown},{color}".encode()).digest()
        if (digest[0] < 51) == bool(seed % 2):
            prompt = f"{draw.choice(NAMES)} has {more} more of them. How many are there?"
            solution = f"{more + shown} {color}"
            rows.append({"prompt": prompt, "image": draw_picture(shown, color, draw), "solution": solution})
    return rows


def script(row, draw):
    """What the looker should write about a row, and the texts of both agents in a demonstration."""
    total, color = row["solution"].split()
    seen = f"{int(total) - int(row['prompt'].split()[2])} {color}"
    looks = f"1 {color}" if draw.random() < SLIPS else seen  # misses the others
    return seen, [looks, seen if draw.random() < SLIPS else row["solution"]]  # the solver forgets to add


def tiny_vlm():
    """A LLaVA with random weights, and its processor."""
    tokenizer = tiny_tokenizer(WORDS)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]}, replace_extra_special_tokens=False)
    tokenizer.padding_side = "left"
    side = 3 * CELL
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side}),
        tokenizer,
        patch_size=CELL,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(image_size=side, patch_size=CELL, **vision),
        text_config=tiny_model(len(tokenizer)).config,
        image_token_index=processor.image_token_id,
        image_seq_length=9,  # a cell becomes a token
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    return transformers.LlavaForConditionalGeneration(config), processor


def demonstrations(processor, draw):
    """Endless observations of both agents, as in the team that is trained, each with the tokens that follow."""
    tokenizer = processor.tokenizer
    template = ChatTemplate(tokenizer, processor.chat_template, images=ImageProcessor(processor))
    builder = PromptBuilder(template, make_tokenize(template), AGENTS)
    while True:
        requests, texts = [], []
        for index, row in enumerate(make_rows(64, seed=2 * draw.randrange(10**9))):
            seen, written = script(row, draw)
            episode, turn = Episode(read_prompt(row), row, index), Turn("looker", seen, index=0)
            requests += [Request(episode, "looker"), Request(episode, "solver", (turn,))]
            texts += written
        for observation, text in zip(builder.build(requests), texts, strict=True):
            yield observation, [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


def taught_model(folder, steps, seed):
    """Build the tiny model, teach it with its vision tower, and save it in a folder, unless it is there."""
    if (folder / "config.json").exists():
        return str(folder)
    print("Building and teaching a tiny vision-language model (once, about two minutes) ...", flush=True)
    torch.manual_seed(seed)
    model, processor = tiny_vlm()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    rows, images = demonstrations(processor, random.Random(seed)), ImageProcessor(processor)
    model.train()
    for step in range(1, steps + 1):
        batch = [next(rows) for _ in range(32)]
        ids = pad([shown.ids + written for shown, written in batch], processor.tokenizer.pad_token_id)
        labels = pad([[-100] * len(shown.ids) + written for shown, written in batch], -100)
        ends = [len(shown.ids) for shown, _ in batch]
        pixels = images.for_model([shown.images for shown, _ in batch], ids, ends)
        loss = model(input_ids=ids, labels=labels, **pixels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % max(steps // 10, 1) == 0:
            print(f"  step {step:3} of {steps}: loss {loss.item():.3f}", flush=True)
    processor.save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


def pad(rows, value):
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def silenced(agent, prompt, seen):
    """View in which the messages of teammates are empty."""
    return team_view(agent, prompt, [dataclasses.replace(turn, raw_text="") for turn in seen])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a vision-language model with a chat template (default: a tiny one)")
    parser.add_argument("--max_steps", type=int, default=80)
    parser.add_argument("--teaching_steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("look-and-solve-output"))
    parser.add_argument("--quick", action="store_true", help="a few steps of everything")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.quick:
        options.teaching_steps, options.max_steps = 20, 2
    count = 40 if options.quick else 400
    base = options.output_dir / f"base-{options.teaching_steps}-{options.seed}"
    model = options.model or taught_model(base, options.teaching_steps, options.seed)
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
            max_steps=options.max_steps,
            learning_rate=1e-4 if options.model else 1.5e-3,
            logging_steps=4,
            save_strategy="no",
            seed=options.seed,
        ),
        train_dataset=Dataset.from_list(make_rows(8 * options.max_steps, seed=0)),
        eval_dataset=Dataset.from_list(make_rows(count, seed=1)),
        eval_metrics=team_exact_match(),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    print(trainer.plan().partition("\n\nWorkflow")[0], flush=True)
    before = trainer.evaluate()["eval_exact_match"]
    trainer.train()
    after = trainer.evaluate()["eval_exact_match"]
    trainer.view = silenced
    without_looker = trainer.evaluate(metric_key_prefix="eval_silenced")["eval_silenced_exact_match"]
    trainer.view = team_view
    trainer.save_model()
    print(f"\nright answers of the team on {count} held-out questions")
    print(f"  before training        {before:6.1%}\n  after training         {after:6.1%}")
    print(f"  with a silenced looker {without_looker:6.1%}, and 1 of 24 by chance\n")

    team = Team.from_pretrained(options.output_dir, model=model)
    picture, question = draw_picture(3, "blue", random.Random()), "Eve has 2 more of them. How many are there?"
    print(f"a new picture of 3 blue squares. {question}")
    print(f"the saved team answers: {team(question, images=[picture], greedy=True)}")
    print(f"saved team: {options.output_dir} (base: {model})")


if __name__ == "__main__":
    main()
