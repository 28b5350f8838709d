"""Compare the prompts of each step between an uninterrupted run and runs resumed at each step of two passes."""

import sys

from tests.helpers import team_trainer, varied_reward

from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset


BASE = {"per_device_train_batch_size": 2, "num_generations": 2, "use_cpu": True, "max_completion_length": 4}
KINDS = {
    "map": {},
    "stream": {},
    "one batch a pass": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "stored": {"steps_per_generation": 2},
    "iterations": {"num_iterations": 2},
    "dynamic": {"dynamic_sampling": True},
    "own returns": {"returns": "agent"},
}


def wrong_steps(model: str, folder: str, kind: str, processes: int) -> tuple[int, list[int]]:
    """The number of generation batches of a run, and the steps after which a resumed run has different prompts."""
    seen: list[tuple[int, list[str]]] = []

    def reward(prompts, completions, **kwargs):
        seen.append((trainer.state.global_step, list(prompts)))
        return varied_reward(completions)

    in_pass = {"one batch a pass": 1, "stored": 8}.get(kind, 4)  # optimizer steps
    steps = in_pass * {"iterations": 4, "one batch a pass": 4}.get(kind, 2)
    count = processes * min(in_pass, 4) * (2 if kind == "accumulated" else 1)
    rows = Dataset.from_dict({"prompt": [f"Question {row}" for row in range(count)]})

    def make(output_dir, **settings):
        dataset = rows.to_iterable_dataset().shuffle(seed=5, buffer_size=4) if kind == "stream" else rows
        settings = {**BASE, **KINDS[kind], "max_steps": steps, **settings}
        return team_trainer(model, output_dir, reward_funcs=reward, settings=settings, train_dataset=dataset)

    trainer = make(f"{folder}/whole", save_strategy="steps", save_steps=1)
    trainer.train()
    whole, wrong = list(seen), []
    for step in range(1, steps):
        seen.clear()
        trainer = make(f"{folder}/from-{step}", save_strategy="no")
        trainer.train(resume_from_checkpoint=f"{folder}/whole/checkpoint-{step}")
        if seen != [entry for entry in whole if entry[0] >= step]:
            wrong.append(step)
    return len(whole), wrong


def main(model: str, folder: str, *kinds: str) -> None:
    shared = PartialState()
    for kind in kinds or KINDS:
        own_result = wrong_steps(model, f"{folder}/{kind}", kind, shared.num_processes)
        for rank, result in enumerate(gather_object([own_result])):
            print("ORDER", kind, rank, *result, sep="|") if shared.is_main_process else None


if __name__ == "__main__":
    main(*sys.argv[1:])
