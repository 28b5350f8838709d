"""
The same application on the OpenAI Agents SDK, which uses the Responses API.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python on_agents_sdk.py "Ann has 3 books and buys 4. How many are left?"
"""

import asyncio
import sys

from agents import Agent, OpenAIResponsesModel, RunConfig, Runner
from openai import AsyncOpenAI


async def answer(question: str, client: AsyncOpenAI) -> str:
    """Answer the question of a user."""
    reasoner, actor = (
        Agent(name=name, instructions=task, model=OpenAIResponsesModel(model=name, openai_client=client))
        for name, task in (("reasoner", "Write the steps."), ("actor", "Write the answer."))
    )
    config = RunConfig(tracing_disabled=True)
    steps = await Runner.run(reasoner, question, run_config=config)
    shown = f"{question}\n\n[reasoner]\n{steps.final_output}"
    return (await Runner.run(actor, shown, run_config=config)).final_output


if __name__ == "__main__":
    print(asyncio.run(answer(sys.argv[-1], AsyncOpenAI())))
