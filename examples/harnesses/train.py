"""
Train an unmodified coding agent: opencode, Codex or Qwen Code. The agent fixes a function, and a test is the reward.

    npm install -g opencode-ai  # or @openai/codex, or @qwen-code/qwen-code
    python examples/harnesses/train.py --harness opencode

Each episode runs the harness in its own copy of a folder with one broken file. The harness runs commands that the
model writes, with your rights: use a container or a virtual machine. Its prompts have 10,000 to 30,000 tokens.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
from marft_trl.extras.apps import ExternalApp, Program
from marft_trl.extras.sandbox import run_python

from datasets import Dataset
from peft import LoraConfig
from start import HARNESSES


TASKS = {  # name of the function: its line, and a test
    "double": ("    return x + 1", "assert double(3) == 6 and double(0) == 0"),
    "is_even": ("    return x % 2 == 1", "assert is_even(4) and not is_even(7)"),
    "square": ("    return 2 * x", "assert square(5) == 25 and square(-1) == 1"),
    "negate": ("    return x", "assert negate(2) == -2"),
}


def rows():
    return Dataset.from_list(
        [
            {"prompt": f"The function `{name}` in calc.py is wrong. Fix it.", "function": name, "test": test}
            for name, (_, test) in TASKS.items()
        ]
    )


def folder_of_tasks():
    """The folder that each episode gets a copy of."""
    folder = Path(tempfile.mkdtemp(prefix="tasks_"))
    code = "\n\n\n".join(f"def {name}(x):\n{line}" for name, (line, _) in TASKS.items())
    (folder / "calc.py").write_text(code + "\n")
    return folder


def passes(environments, test, **kwargs):
    """1 if the test of the row passes on the file as the harness left it, in a sandbox."""
    codes = [Path(result.cwd, "calc.py").read_text() for result in environments]
    return [float(run_python(f"{code}\n{check}").status == "ok") for code, check in zip(codes, test, strict=True)]


def make_trainer(options, **arguments):
    start = str(Path(__file__).with_name("start.py"))
    workflow = ExternalApp(
        Program(
            [sys.executable, start, options.harness, "Task: {prompt}"],
            cwd=folder_of_tasks(),
            env={"HOME": "{cwd}"},  # each episode has its own settings and memory of the harness
        ),
        tools=True,
        agent_of=lambda request: "coder",  # also of its titles and sub-agents
    )
    args = MARFTConfig(
        "harness-output",
        num_generations=options.num_generations,
        per_device_train_batch_size=options.num_generations,
        max_steps=options.steps,
        max_completion_length=options.max_completion_length,
        on_episode_error="skip",
        report_to=[],
        logging_steps=1,
    )
    return MARFTTrainer(
        model=options.model,
        agents=[AgentSpec("coder")],
        workflow=workflow,
        reward_funcs=passes,
        args=args,
        train_dataset=rows(),
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
        **arguments,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harness", choices=HARNESSES, default="opencode")
    parser.add_argument("--model", default="Qwen/Qwen2.5-Coder-7B-Instruct", help="with a window of 32k tokens")
    parser.add_argument("--num_generations", type=int, default=8)
    parser.add_argument("--max_completion_length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=50)
    trainer = make_trainer(parser.parse_args())
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
