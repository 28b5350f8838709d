"""
Two players of Nim: each takes one to three stones in turn, and whoever takes the last one wins.

    marft plan team.py
    marft train team.py --model path/to/a/model
"""

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
from marft_trl.workflows import EnvironmentLoop

from datasets import Dataset
from peft import LoraConfig


# Settings of MARFTConfig; options of the command line and of a YAML file (--config) take precedence
SETTINGS = {"output_dir": "nim", "num_generations": 8, "per_device_train_batch_size": 16, "max_completion_length": 4}
RULES = "You play Nim: take 1, 2 or 3 stones; whoever takes the last one wins. Answer with the number alone."
OTHER = {"player": "rival", "rival": "player"}


class Nim:
    """A game. The dataset has the columns `stones` and `first`, the name of the agent that begins."""

    def reset(self, stones, first, **row):
        self.stones, self.next = stones, first
        return f"There are {stones} stones."

    def whose_turn(self):
        return self.next

    def step(self, turns):
        move, me = turns[-1].text.strip(), turns[-1].agent
        self.next = OTHER[me]
        if move not in ("1", "2", "3") or int(move) > self.stones:
            return "That is no move.", {me: -1.0, self.next: 0.0}, True
        self.stones -= int(move)
        result = {me: 1.0, self.next: -1.0} if self.stones == 0 else 0.0
        return f"There are {self.stones} stones.", result, self.stones == 0


TEAM = {"environment_factory": Nim}  # what `marft serve nim --code team.py` needs


def make(args, model="Qwen/Qwen2.5-0.5B-Instruct"):  # further parameters are options as well: --model
    play = [{"role": "user", "content": "Play."}]
    rows = [{"prompt": play, "stones": count, "first": name} for count in range(4, 13) for name in OTHER]
    agents = [AgentSpec(name, adapter="player", system_prompt=RULES) for name in OTHER]  # self-play: one adapter
    loop, lora = EnvironmentLoop(Nim, turns="one", horizon=12), LoraConfig(r=16, target_modules="all-linear")
    return MARFTTrainer(
        model, agents=agents, args=args, train_dataset=Dataset.from_list(rows), workflow=loop, peft_config=lora
    )


if __name__ == "__main__":
    make(MARFTConfig(**SETTINGS)).train()
