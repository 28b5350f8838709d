"""
An application that uses OpenAI's client, trained without changes: each request is a turn of an agent.

    marft rehearse team.py                    # the application once, with placeholder answers (`pip install openai`)
    marft train team.py                       # on a CPU, offline, in minutes
    marft serve app --model tiny              # then: OPENAI_BASE_URL=http://127.0.0.1:8080/v1
"""

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
from marft_trl.extras.apps import ExternalApp
from marft_trl.tiny import exact_answer, tiny_dataset, tiny_team_model

from peft import LoraConfig


# Settings of MARFTConfig; options of the command line and of a YAML file (--config) take precedence
SETTINGS = {
    "output_dir": "app",
    "learning_rate": 1.5e-3,
    "max_steps": 60,
    "num_generations": 8,
    "per_device_train_batch_size": 64,  # episodes: 8 questions, each 8 times
    "logging_steps": 5,
}
# The model names that the application requests
AGENTS = [AgentSpec("reasoner", max_completion_length=24), AgentSpec("actor", max_completion_length=6)]


async def answer(question, client):
    """Your application. It requests models by name, and needs no change for training."""

    async def ask(model, task, text):
        messages = [{"role": "system", "content": task}, {"role": "user", "content": text}]
        return (await client.chat.completions.create(model=model, messages=messages)).choices[0].message.content

    steps = await ask("reasoner", "Write the steps.", question)
    return await ask("actor", "Write the answer.", f"{question}\n\n[reasoner]\n{steps}")


async def app(row, endpoint):
    from openai import AsyncOpenAI

    question = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]  # served: messages
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        return await answer(question, client)


TEAM = {"workflow": ExternalApp(app)}  # or a program: ExternalApp("python my_app.py --question={prompt}")


def make(args, model="tiny"):
    """Create the trainer. Further parameters, such as `model`, are command-line options as well."""
    data, lora = tiny_dataset(4000, seed=0), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    base, team = tiny_team_model() if model == "tiny" else model, {"agents": AGENTS, **TEAM}
    return MARFTTrainer(base, reward_funcs=exact_answer, args=args, train_dataset=data, peft_config=lora, **team)


if __name__ == "__main__":
    make(MARFTConfig(**SETTINGS)).train()
