"""
The same application as a LangGraph graph.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python on_langgraph.py "Ann has 3 books and buys 4. How many are left?"
"""

import asyncio
import sys
from typing import TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph


class State(TypedDict, total=False):
    """State that the nodes pass on."""

    question: str
    steps: str
    answer: str


def graph(**connection):
    """The compiled graph. `connection`: arguments of `ChatOpenAI`; by default, those of the environment."""
    reasoner, actor = (ChatOpenAI(model=name, **connection) for name in ("reasoner", "actor"))

    async def reason(state: State) -> State:
        reply = await reasoner.ainvoke([("system", "Write the steps."), ("user", state["question"])])
        return {"steps": reply.content}

    async def act(state: State) -> State:
        shown = f"{state['question']}\n\n[reasoner]\n{state['steps']}"
        reply = await actor.ainvoke([("system", "Write the answer."), ("user", shown)])
        return {"answer": reply.content}

    builder = StateGraph(State)
    builder.add_node("reason", reason)
    builder.add_node("act", act)
    builder.add_edge(START, "reason")
    builder.add_edge("reason", "act")
    builder.add_edge("act", END)
    return builder.compile()


async def answer(question: str, **connection) -> str:
    """Answer the question of a user."""
    return (await graph(**connection).ainvoke({"question": question}))["answer"]


if __name__ == "__main__":
    print(asyncio.run(answer(sys.argv[-1])))
