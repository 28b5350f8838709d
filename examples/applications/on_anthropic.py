"""
The same application on the Anthropic client.

    ANTHROPIC_BASE_URL=... ANTHROPIC_API_KEY=... python on_anthropic.py "Ann has 3 books and buys 4. How many?"
"""

import asyncio
import sys

from anthropic import AsyncAnthropic


async def answer(question: str, client: AsyncAnthropic) -> str:
    """Answer the question of a user."""

    async def ask(model, task, text):
        messages = [{"role": "user", "content": text}]
        reply = await client.messages.create(model=model, max_tokens=32, system=task, messages=messages)
        return "".join(block.text for block in reply.content)

    steps = await ask("reasoner", "Write the steps.", question)
    return await ask("actor", "Write the answer.", f"{question}\n\n[reasoner]\n{steps}")


if __name__ == "__main__":
    print(asyncio.run(answer(sys.argv[-1], AsyncAnthropic())))
