"""
A coding harness on the client of Anthropic: a main agent, a sub-agent that searches files, and two tools.

    ANTHROPIC_BASE_URL=... ANTHROPIC_API_KEY=... ANTHROPIC_MODEL=... python coding_harness.py "Ann buys 3 pens." folder

The main agent may start a search and run Python programs in a sandbox. A search is a sub-agent with its own
conversation, which reads files. All agents share one model name and have their own system prompts.
"""

import asyncio
import os
import sys
from pathlib import Path

from marft_trl.extras.sandbox import run_python

from anthropic import AsyncAnthropic


CODER, SEARCHER = "You code.", "You search."  # how the system prompts begin
MOST_TURNS = 4  # of a conversation
MOST_CHARACTERS = 200  # of a result
MOST_TOKENS = 64  # of an answer


def tool(name, description, argument):
    """A tool with one text as its argument."""
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"name": name, "description": description, "input_schema": schema}


SEARCH = tool("search", "Ask another agent to look something up in the files.", "query")
RUN = tool("run", "Run a Python program and get what it prints.", "code")
READ = tool("read", "Read a file.", "path")


class Harness:
    """
    Solves tasks about files.

    Args:
        client: client of Anthropic's API.
        files: contents by path.
        model: name of the model, the same for all agents.
    """

    def __init__(self, client, files, model="claude"):
        self.client, self.files, self.model = client, files, model

    async def solve(self, task):
        """Answer a task, as the main agent."""
        return await self.converse(CODER, task, [SEARCH, RUN])

    async def converse(self, system, text, tools):
        """Ask the model, and call tools, until an answer calls none. Returns its text."""
        messages = [{"role": "user", "content": text}]
        for _ in range(MOST_TURNS):
            reply = await self.client.messages.create(
                model=self.model, max_tokens=MOST_TOKENS, system=system, messages=messages, tools=tools
            )
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls or reply.stop_reason == "max_tokens":
                return "".join(block.text for block in reply.content)
            messages.append({"role": "assistant", "content": [block.to_dict() for block in reply.content]})
            results = [await self.call(block, tools) for block in calls]
            messages.append({"role": "user", "content": results})
        return ""

    async def call(self, block, tools):
        """The result of a tool call. A wrong call gets an error message, so that the model can correct it."""
        schema = next((tool["input_schema"] for tool in tools if tool["name"] == block.name), None)
        if schema is None:
            text = f"There is no tool {block.name}."
        elif set(block.input) != set(schema["required"]):
            text = f"Needed: {schema['required']}."
        else:
            (argument,) = map(str, block.input.values())
            text = await getattr(self, block.name)(argument)
        return {"type": "tool_result", "tool_use_id": block.id, "content": text[:MOST_CHARACTERS]}

    async def search(self, query):
        return await self.converse(SEARCHER, query, [READ])

    async def run(self, code):
        outcome = await asyncio.to_thread(run_python, code)
        return outcome.stdout.strip() or outcome.status

    async def read(self, path):
        return self.files.get(path, "no file")


async def main(task, folder):
    files = {path.name: path.read_text() for path in Path(folder).iterdir() if path.is_file()}
    async with AsyncAnthropic() as client:
        print(await Harness(client, files, os.environ.get("ANTHROPIC_MODEL", "claude")).solve(task))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
