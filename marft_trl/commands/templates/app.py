"""
An application that talks to models by OpenAI's client, trained as it is: each request is a turn of an agent.

    marft rehearse team.py                    # the application once, without a model (`pip install openai`)
    marft train team.py --model path/to/a/model
    marft serve app --code team.py            # then: OPENAI_BASE_URL=http://127.0.0.1:8080/v1
"""

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
from marft_trl.workflows import ExternalApp

from datasets import Dataset
from peft import LoraConfig


# Settings of MARFTConfig; options of the command line and of a YAML file (--config) take precedence
SETTINGS = {
    "output_dir": "app",
    "max_steps": 100,
    "per_device_train_batch_size": 16,
    "max_completion_length": 96,
}


async def answer(subject, client):
    """Your application. It asks for models by name, `writer` and `critic`, and needs no change to be trained."""

    async def ask(model, task, text):
        messages = [{"role": "system", "content": task}, {"role": "user", "content": text}]
        return (await client.chat.completions.create(model=model, messages=messages)).choices[0].message.content

    draft = await ask("writer", "Write one sentence about the subject, with at most ten words.", subject)
    review = await ask("critic", "Say OK if the sentence is good; otherwise say what to change.", draft)
    return draft if "OK" in review else await ask("writer", "Improve the sentence as told.", f"{draft}\n{review}")


async def app(row, endpoint):
    from openai import AsyncOpenAI

    subject = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]  # served: messages
    await answer(subject, AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key))


TEAM = {"workflow": ExternalApp(app, answer="writer")}  # or a program: "python my_app.py --question {prompt}"


def make(args, model="Qwen/Qwen2.5-0.5B-Instruct"):
    """The trainer. Further parameters, such as `model`, are options of the command line, too."""

    def brief(completions, **kwargs):  # 1 if the writer's last sentence has at most ten words
        return [float(len(text.split()) <= 10) for text in completions]

    rows = Dataset.from_dict({"prompt": [f"The {one}." for one in ("sea", "moon", "bread", "rain")]})
    team = {"agents": [AgentSpec("writer"), AgentSpec("critic")], "reward_funcs": brief, **TEAM}
    return MARFTTrainer(model, args=args, train_dataset=rows, peft_config=LoraConfig(r=16), **team)


if __name__ == "__main__":
    make(MARFTConfig(**SETTINGS)).train()
