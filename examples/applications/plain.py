"""
An application on the OpenAI client: one model writes the steps, another writes the answer.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python plain.py "Ann has 3 books and buys 4. How many are left?"
"""

import asyncio
import sys

from openai import AsyncOpenAI


async def answer(question: str, client: AsyncOpenAI) -> str:
    """Answer the question of a user. The application knows only the names of the models."""
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
