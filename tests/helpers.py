"""What several tests share."""

import statistics

from peft import LoraConfig
from transformers import TrainerCallback

from marft_trl import MARFTConfig, MARFTTrainer
from marft_trl.episodes import collector
from marft_trl.episodes.live import Setting
from marft_trl.tiny import tiny_agents, tiny_dataset
from marft_trl.tools import ToolLimits


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
    trainer = MARFTTrainer(model=model, **{**defaults, **arguments})
    trainer.add_callback(Beginning())
    return trainer


class Beginning(TrainerCallback):
    """Notes the optimizer step that training began at."""

    step: int | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.step = state.global_step


def began_at(trainer) -> int | None:
    """The optimizer step that the last training of a trainer began at."""
    return next(one.step for one in trainer.callback_handler.callbacks if isinstance(one, Beginning))


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


def collect(workflow, rows, agents, answer, reruns=None, tools=None, limits=None, aliases=None, patience=None):
    """Runs a workflow on rows with agents of these names."""
    setting = Setting(tuple(agents), tools or {}, limits or ToolLimits(), aliases or {})
    return collector.collect(workflow, rows, setting, answer, reruns, patience)


def earned(episode):
    """What the turns of an episode earned, where it is not 0."""
    return {index: reward for index, reward in enumerate(episode.earned) if reward}


def echo(waves=None):
    """Answers requests with who was seen; notes which agents were asked together."""

    def answer(requests):
        if waves is not None:
            waves.append([request.agent for request in requests])
        return [one.completed(f"{one.agent}({','.join(item.text for item in one.seen)})") for one in requests]

    return answer
