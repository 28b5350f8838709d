"""
Model families that teams support: the tables of `docs/reference/models.md`.

    python benchmarks/models_table.py

Templates are those that TRL 1.16 ships, on small tokenizers that have the control tokens of each family. Architectures
have their real code and random weights of a few thousand numbers: a trainer with default settings and LoRAs on all
linear layers generates and takes a step, the team is saved, loaded and run, and training continues from its adapters.
Nothing is downloaded.
"""

import argparse
import contextlib
import functools
import importlib.util
import logging
import re
import sys
import tempfile
import warnings
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer, Team, load_adapters
from marft_trl.episodes.records import Episode, Request, Turn
from marft_trl.prompts.builder import PromptBuilder
from marft_trl.prompts.chat_template import ChatTemplate, EarlierReasoning
from marft_trl.prompts.tool_calls import prepare_tools
from marft_trl.tiny import tiny_agents, tiny_dataset, tiny_tokenizer
from marft_trl.workflows import Sequential

from datasets import Dataset
from peft import LoraConfig


sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.families import FAMILIES as ARCHITECTURES
from tests.families import MIXTURES, OTHERS, family_base
from tests.helpers import varied_reward
from tests.tokenizers_and_templates import FAMILIES, PLAIN_MARKS, tokenizer_of
from tests.vision_families import FAMILIES as FAMILIES_WITH_IMAGES
from tests.vision_families import NEEDS_TORCHVISION, picture


TEMPLATES = {
    "qwen2_5": "Qwen 2.5",
    "qwen3": "Qwen 3",
    "llama3": "Llama 3",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4",
    "phi3": "Phi 3",
    "deepseekv3": "DeepSeek V3",
    "glm4moe": "GLM 4.5",
    "gptoss": "GPT-OSS",
    "lfm2": "LFM 2",
    "llama2": "Llama 2",
    "zephyr": "Zephyr",
    "vicuna": "Vicuna",
}
TEAM = [AgentSpec("planner", system_prompt="Plan."), AgentSpec("solver", system_prompt="Solve.")]


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: A number.
        b: Another.
    """
    return a + b


def is_right(tokenizer):
    """Whether the prompt of an agent equals the template applied to the same messages, written by hand."""

    def tokenize(prompts):
        return tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)["input_ids"]

    question = [{"role": "user", "content": "1 + 1?"}]
    turns = [Turn("planner", "Add them.", 0), Turn("solver", "2", 1), Turn("planner", "Sure?", 2)]
    (shown,) = PromptBuilder(ChatTemplate(tokenizer), tokenize, TEAM).build(
        [Request(Episode(question, {}, 0), TEAM[1].name, turns)]
    )
    return tokenizer.decode(shown.ids) == tokenizer.apply_chat_template(
        shown.content, tokenize=False, add_generation_prompt=True
    )


def has_tools(tokenizer):
    with contextlib.suppress(ValueError):
        prepare_tools(tokenizer, [AgentSpec("solver", tools=[add])], Sequential())
        return True
    return False


def trainer_of(model, tokenizer, folder, **arguments):
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 1}  # else the defaults
    args = MARFTConfig(folder, **sizes, save_strategy="no", report_to=[], disable_tqdm=True)
    defaults = {"args": args, "train_dataset": tiny_dataset(64), "reward_funcs": varied_reward}
    return MARFTTrainer(model, agents=tiny_agents(), processing_class=tokenizer, **{**defaults, **arguments})


def make_text_family(family):
    tokenizer = tiny_tokenizer()
    return family_base(family, len(tokenizer)), tokenizer


def try_family(make, folder, **arguments):
    """Train a team of a family: does it learn, can it be saved and reused, and do its rows share prefixes?"""
    cells, handler = {"learns": "", "used": "", "shares": "yes"}, logging.StreamHandler()
    handler.emit = lambda record: cells.update(shares=_reason(record.getMessage()) or cells["shares"])
    logging.getLogger("marft_trl.learning.log_probs").addHandler(handler)
    stage = "learns"
    try:
        trainer = trainer_of(*make(), folder, peft_config=LoraConfig(target_modules="all-linear"), **arguments)
        trainer.train()
        ends = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
        assert any(p.any() for p in ends) and all(p.isfinite().all() for p in ends), "gradients are not finite"
        cells["learns"], stage = "yes", "used"
        trainer.save_model(folder)
        row = arguments["train_dataset"][0] if arguments else "How many?"
        model, processing_class = make()
        Team.from_pretrained(folder, model=make()[0]).run([row])
        trainer_of(load_adapters(model, folder), processing_class, folder, **arguments).train()
        cells["used"] = "yes"
    except Exception as error:
        cells[stage] = f"no: {type(error).__name__}: {str(error).splitlines()[0]}"
    return cells.values() if cells["learns"] == "yes" else (cells["learns"], "", "")


def _reason(message):
    match = re.search(r"`share_prefixes` is off.* for every row: (.*)\.$", message)
    return f"no: {match[1]}" if match else None


def yes(value):
    return "yes" if value else "no"


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    warnings.simplefilter("ignore")
    print("| template | marked by control tokens | tools | cuts reasoning off |")
    print("|---|---|---|---|")
    for family, name in TEMPLATES.items():
        assert family in {*FAMILIES, *PLAIN_MARKS}, "a family of which no test tries the prompts"
        with contextlib.redirect_stdout(sys.stderr):
            tokenizer = tokenizer_of("byte_level", family)
            template = ChatTemplate(tokenizer)
            assert is_right(tokenizer) and template.renders_system, name
            cells = [not template.plain_marks(), has_tools(tokenizer), EarlierReasoning(template).removes_reasoning]
        print(f"| {name} | {' | '.join(map(yes, cells))} |", flush=True)
    print("\n| `model_type` | learns | saved, loaded, asked, trained on | shared prefixes |")
    print("|---|---|---|---|")
    for family in {**ARCHITECTURES, **MIXTURES, **OTHERS}:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            cells = try_family(functools.partial(make_text_family, family), folder)
        print(f"| `{family}` | {' | '.join(cells)} |", flush=True)
    print("\n| vision-language `model_type` | learns | saved, loaded, asked, trained on | shared prefixes |")
    print("|---|---|---|---|")
    prompt = [{"role": "user", "content": "What color is it?"}]
    rows = Dataset.from_list([{"prompt": prompt, "image": picture(seed)} for seed in range(8)])
    others = NEEDS_TORCHVISION if importlib.util.find_spec("torchvision") else {}
    for family, make in {**FAMILIES_WITH_IMAGES, **others}.items():
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            cells = try_family(make, folder, train_dataset=rows)
        print(f"| `{family}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
