"""Applications that ask agents over HTTP: the same turns and updates as a workflow in Python, faults, and load."""

import asyncio
import json

from marft_trl import AgentSpec, Sequential, Workflow
from marft_trl.episodes.asks import Given
from marft_trl.workflows import ExternalApp, together

import openai
import pytest
import torch
from transformers.utils import get_json_schema

from .helpers import add, team_trainer, weights
from .test_tools import ROWS, canned, tool_tokenizer


def user(text):
    return {"role": "user", "content": text}


def question_of(row):
    return row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]


class Client:
    """An application's own few lines around the client of OpenAI."""

    def __init__(self, endpoint, **settings):
        self.client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
        self.settings = settings

    async def __call__(self, model, *messages, **fields):
        chat = self.client.chat.completions
        answer = await chat.create(model=model, messages=list(messages), **self.settings, **fields)
        if not self.settings.get("stream"):
            return answer.choices[0].message
        text, calls = "", {}
        async for part in answer:
            delta = part.choices[0].delta
            text += delta.content or ""
            for one in delta.tool_calls or ():
                calls[one.index] = one
        return openai.types.chat.ChatCompletionMessage(
            role="assistant",
            content=text,
            tool_calls=[{**calls[i].model_dump(), "type": "function"} for i in sorted(calls)] or None,
        )


class InPython(Workflow):
    """The same conversations, written as a workflow."""

    def __init__(self, talk):
        self.talk = talk

    async def run(self, episode):
        async def ask(agent, *messages, after=None):
            return await episode.turn_on(agent, Given(list(messages)), sees=after)

        await self.talk(episode, ask)


# Each conversation twice: as an application, and as a workflow


async def chain_app(row, endpoint, **settings):
    ask = Client(endpoint, **settings)
    plan = await ask("reasoner", user(question_of(row)))
    await ask("actor", {"role": "system", "content": "Be brief."}, user(f"{question_of(row)}\n{plan.content}"))


async def chain(episode, ask):
    plan = await ask("reasoner", user(question_of(episode.row)))
    await ask("actor", {"role": "system", "content": "Be brief."}, user(f"{question_of(episode.row)}\n{plan.text}"))


async def loop_app(row, endpoint, **settings):
    ask, messages = Client(endpoint, **settings), [user(question_of(row))]
    for number in range(3):
        said = await ask("reasoner", *messages)
        messages += [{"role": "assistant", "content": said.content}, user(f"again {number}")]
        if len(said.content) % 2:
            break
    await ask("critic", *messages[1:])
    await ask("actor", user(question_of(row)))


async def loop(episode, ask):
    messages = [user(question_of(episode.row))]
    for number in range(3):
        said = await ask("reasoner", *messages)
        messages += [{"role": "assistant", "content": said}, user(f"again {number}")]
        if len(said.text) % 2:
            break
    texts = [one | {"content": getattr(one["content"], "text", one["content"])} for one in messages[1:]]
    await ask("critic", *texts)
    await ask("actor", user(question_of(episode.row)))


async def parallel_app(row, endpoint, **settings):
    ask = Client(endpoint, **settings)
    said = await asyncio.gather(
        ask("reasoner", user(f"b {question_of(row)}")),
        ask("actor", user(f"c {question_of(row)}")),
        ask("actor", user(f"a {question_of(row)}")),
    )
    await ask("actor", user("\n".join(one.content for one in said)))


async def parallel(episode, ask):
    question = question_of(episode.row)
    actor_a, actor_c, reasoner = await together(
        [
            ask("actor", user(f"a {question}"), after=[]),
            ask("actor", user(f"c {question}"), after=[]),
            ask("reasoner", user(f"b {question}"), after=[]),
        ]
    )
    await ask("actor", user("\n".join(one.text for one in (reasoner, actor_c, actor_a))))


AGENTS = [AgentSpec("reasoner"), AgentSpec("actor", temperature=0.7), AgentSpec("critic")]


def after_training(model_folder, folder, workflow, **settings):
    """Weights after two optimizer steps, and the episodes of the last batch."""
    torch.manual_seed(0)
    trainer = team_trainer(
        model_folder, folder, workflow=workflow, agents=AGENTS, settings={"max_steps": 2, **settings}
    )
    before, episodes = weights(trainer), []
    trainer.reward_funcs[0] = _noting(trainer.reward_funcs[0], episodes)
    trainer.train()
    return before, weights(trainer), episodes


def _noting(reward, episodes):
    def noting(completions, turns, **kwargs):
        episodes.append(
            [[(t.agent, tuple(t.prompt_ids), tuple(t.completion_ids), t.sees) for t in its] for its in turns]
        )
        return reward(completions=completions, turns=turns, **kwargs)

    return noting


@pytest.mark.parametrize(
    ("app", "talk", "settings"),
    [
        (chain_app, chain, {}),
        (chain_app, chain, {"stream": True}),
        (loop_app, loop, {}),
        (parallel_app, parallel, {}),
    ],
    ids=["chain", "stream", "loop", "parallel"],
)
def test_an_application_trains_as_the_same_workflow_in_python(app, talk, settings, model_folder, tmp_path):
    async def run(row, endpoint):
        await app(row, endpoint, **settings)

    before, mine, episodes = after_training(model_folder, tmp_path / "app", ExternalApp(run, together=0.25))
    _, theirs, expected = after_training(model_folder, tmp_path / "python", InPython(talk))
    assert episodes == expected and len({turn[0] for one in episodes[0] for turn in one}) >= 2
    assert max((mine[name] - theirs[name]).abs().max() for name in mine) < 1e-5
    speakers = {turn[0] for batch in episodes for one in batch for turn in one}
    assert all(any(not before[name].equal(mine[name]) for name in mine if f".{agent}." in name) for agent in speakers)


SCHEMA = get_json_schema(add)


async def with_tools(row, endpoint):
    ask, messages = Client(endpoint), list(row["prompt"])
    while (said := await ask("solver", *messages, tools=[SCHEMA])).tool_calls and len(messages) < 8:
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            result = str(add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def with_tools_as_responses(row, endpoint):
    client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    items, schema = list(row["prompt"]), {"type": "function", "strict": False, **SCHEMA["function"]}
    while True:
        said = await client.responses.create(model="solver", input=items, tools=[schema])
        calls = [one for one in said.output if one.type == "function_call"]
        items += [one.model_dump(exclude_none=True) for one in said.output]
        for call in calls:
            result = str(add(**json.loads(call.arguments)))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        if not calls:
            return


def tool_training(model_folder, folder, workflow, tools):
    """Weights after two steps, and what was sampled from, of an agent that calls `add`."""
    torch.manual_seed(0)
    agents = [AgentSpec("solver", tools=tools), AgentSpec("judge")]
    trainer = team_trainer(
        model_folder,
        folder,
        workflow=workflow,
        agents=agents,
        train_dataset=ROWS,
        processing_class=tool_tokenizer(),
        settings={"max_completion_length": 128, "max_steps": 2},
    )
    before, prompts = weights(trainer), []
    canned(trainer, prompts)
    trainer.train()
    return before, weights(trainer), prompts


@pytest.mark.parametrize("app", [with_tools, with_tools_as_responses], ids=["chat", "responses"])
def test_an_application_that_calls_its_tools_trains_as_an_agent_that_has_them(app, model_folder, tmp_path):
    _, theirs, expected = tool_training(model_folder, tmp_path / "a", Sequential(["solver"]), [add])
    before, mine, prompts = tool_training(model_folder, tmp_path / "b", ExternalApp(app, tools=True), None)
    assert prompts == expected and any("<tool_response>\n7\n</tool_response>" in one for one in prompts)
    assert max((mine[name] - theirs[name]).abs().max() for name in mine) < 1e-5
    changed = [name for name in mine if not before[name].equal(mine[name])]
    assert changed and all(".solver." in name for name in changed)
