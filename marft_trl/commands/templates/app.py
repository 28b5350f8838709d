"""
An application whose own code decides who is asked: a writer drafts, a critic reviews, and the writer redrafts.

    marft rehearse team.py                    # the code once, without a model
    marft train team.py --model path/to/a/model
    marft serve app --code team.py
"""

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer, Workflow

from datasets import Dataset
from peft import LoraConfig


# Settings of MARFTConfig; options of the command line and of a YAML file (--config) take precedence
SETTINGS = {
    "output_dir": "app",
    "max_steps": 100,
    "num_generations": 8,
    "per_device_train_batch_size": 16,
    "max_completion_length": 96,
}


class App(Workflow):
    """Plain Python. `await episode.call(function, ...)` calls your services; `episode.row` has the columns."""

    async def run(self, episode):
        draft = await episode.turn("writer")
        review = await episode.turn("critic", sees=[draft])
        if "OK" not in review.text:
            draft = await episode.turn("writer", sees=[draft, review])
        episode.answer = draft


# A trained team is loaded with its own code: `marft serve app --code team.py`
TEAM = {"workflow": App()}
AGENTS = [
    AgentSpec("writer", system_prompt="Write one sentence about the subject, with at most ten words."),
    AgentSpec("critic", system_prompt="Say OK if the sentence is good; otherwise say in a few words what to change."),
]


def brief(completions, subject, **kwargs):
    """1 if the answer has at most ten words and names the subject."""
    texts = [one[-1]["content"] for one in completions]
    return [float(len(t.split()) <= 10 and s in t.lower()) for t, s in zip(texts, subject, strict=True)]


def make(args, model="Qwen/Qwen2.5-0.5B-Instruct"):
    """The trainer. Further parameters, such as `model`, are options of the command line, too."""
    subjects = ("sea", "moon", "bread", "rain")
    rows = [{"prompt": [{"role": "user", "content": f"The {one}."}], "subject": one} for one in subjects]
    team = {"agents": AGENTS, "workflow": App(), "reward_funcs": brief, "peft_config": LoraConfig(r=16)}
    return MARFTTrainer(model, args=args, train_dataset=Dataset.from_list(rows), **team)


if __name__ == "__main__":
    make(MARFTConfig(**SETTINGS)).train()
