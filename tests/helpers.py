"""What several tests share."""

import statistics

from peft import LoraConfig
from transformers import TrainerCallback

from marft_trl import MARFTConfig, MARFTTrainer
from marft_trl.tiny import tiny_agents, tiny_dataset


SETTINGS = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_steps": 3,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "max_completion_length": 16,
    "save_strategy": "no",
    "disable_tqdm": True,
    "report_to": [],
}


def lora(r: int = 4, **settings) -> LoraConfig:
    return LoraConfig(r=r, lora_alpha=2 * r, target_modules="all-linear", **settings)


def varied_reward(completions, **kwargs):
    """A reward that differs between the completions of an untrained model, so that there is something to learn."""
    return [float(sum(map(ord, str(completion))) % 7) for completion in completions]


def config(output_dir, **settings) -> MARFTConfig:
    return MARFTConfig(str(output_dir), **{**SETTINGS, **settings})


def team_trainer(model, output_dir, *, settings=None, **arguments) -> MARFTTrainer:
    defaults = {
        "agents": tiny_agents(),
        "reward_funcs": varied_reward,
        "args": config(output_dir, **(settings or {})),
        "train_dataset": tiny_dataset(64),
        "peft_config": lora(),
    }
    return MARFTTrainer(model=model, **{**defaults, **arguments})


def pooled(gains) -> tuple[float, float]:
    """
    Mean gain of several seeds and its distance from 0 in standard errors: one seed is another draw on every machine,
    whose arithmetic rounds in its own way.
    """
    mean = statistics.mean(gains)
    return mean, mean / (statistics.stdev(gains) / len(gains) ** 0.5 + 1e-9)


class StopAt(TrainerCallback):
    """Ends training after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def weights(trainer) -> dict:
    """A copy of all weights by name."""
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def moved(before: dict, after: dict) -> set[str]:
    """Names of weights that are not bitwise the same."""
    return {name for name in before if not before[name].equal(after[name])}


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def echo(waves=None):
    """Answers requests with who was seen; notes which agents were asked together."""

    def answer(requests):
        if waves is not None:
            waves.append([request.agent for request in requests])
        return [one.answered(f"{one.agent}({','.join(item.text for item in one.seen)})") for one in requests]

    return answer
