"""
An application on the client of OpenAI: a model that writes steps, and one that writes the answer.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python plain.py "Ann has 3 books and buys 4. How many are left?"
"""

import asyncio
import sys

from openai import AsyncOpenAI


async def answer(question: str, client: AsyncOpenAI) -> str:
    """What the application does for a user. It knows models by name, and nothing of how they came about."""
    steps = await client.chat.completions.create(
        model="reasoner",
        messages=[{"role": "system", "content": "Write the steps."}, {"role": "user", "content": question}],
    )
    result = await client.chat.completions.create(
        model="actor",
        messages=[
            {"role": "system", "content": "Write the answer."},
            {"role": "user", "content": f"{question}\n\n[reasoner]\n{steps.choices[0].message.content}"},
        ],
    )
    return result.choices[0].message.content


if __name__ == "__main__":
    print(asyncio.run(answer(sys.argv[-1], AsyncOpenAI())))
