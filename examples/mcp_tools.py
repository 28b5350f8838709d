"""
Give an agent the tools of a server of the Model Context Protocol (MCP). Each tool becomes a function.

    python examples/mcp_tools.py                    # a tiny model and a server with one tool, offline: minutes
    python examples/mcp_tools.py --quick            # a few steps of everything
    python examples/mcp_tools.py --model Qwen/Qwen2.5-1.5B-Instruct --server "python my_server.py"
    python examples/mcp_tools.py --model Qwen/Qwen2.5-1.5B-Instruct --server http://127.0.0.1:8000/mcp

Copy `Connection` into your script: `AgentSpec("solver", tools=Connection(server).functions)`. The tiny model first
imitates an agent that multiplies with the tool and copies the result with mistakes. The reward is 1 for the product.
Needs `pip install "mcp>=2"`.
"""

import argparse
import asyncio
import inspect
import random
import re
import shlex
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer, Team
from marft_trl.tiny import tiny_model, tiny_tokenizer, warm_up

from datasets import Dataset
from mcp import Client, StdioServerParameters
from mcp.server.mcpserver import MCPServer
from peft import LoraConfig
from transformers.utils import get_json_schema, logging
from trl.chat_template_utils import qwen3_template


TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict}
SYSTEM = "Multiply with the tool. Answer with the number."
# This template shows only the names of tools. Templates of pretrained models show their schemas
TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name }}
{{- '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{%- if loop.first and tools %}{% for tool in tools %}{{ ' ' + tool.function.name }}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


class Connection:
    """
    A connection to a server, in a thread with its own event loop: the trainer calls tools in another one.

    Args:
        server (`str`): address of a server, or a command that starts one.
    """

    def __init__(self, server):
        command, *args = shlex.split(server)
        self._server = server if "://" in server else StdioServerParameters(command=command, args=args)
        self._loop, listed = asyncio.new_event_loop(), Future()
        threading.Thread(target=self._loop.run_until_complete, args=(self._hold(listed),), daemon=True).start()
        self.functions = [self._as_function(tool) for tool in listed.result()]

    async def _hold(self, listed):
        try:
            async with Client(self._server) as self._client:
                listed.set_result((await self._client.list_tools()).tools)
                await asyncio.Event().wait()  # until the script ends
        except BaseException as error:
            if listed.done():
                raise
            listed.set_exception(error)

    def _as_function(self, tool):
        """An asynchronous function with the signature and the docstring that `get_json_schema` reads."""

        async def call(**arguments):
            calling = self._client.call_tool(tool.name, arguments)
            result = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(calling, self._loop))
            text = "\n".join(part.text for part in result.content if part.type == "text")
            if result.is_error:
                raise RuntimeError(text)  # which the model is told
            return text

        properties, required = (tool.input_schema.get(key, ()) for key in ("properties", "required"))
        parameters, lines = [], [" ".join((tool.description or tool.name).split()), "", "Args:"]
        for name, schema in dict(properties).items():
            default = inspect.Parameter.empty if name in required else schema.get("default")
            types = [part.get("type") for part in schema.get("anyOf", [schema])]  # of optional arguments: with "null"
            kind = TYPES.get(next((name for name in types if name != "null"), None), str)
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            )
            lines.append(f"    {name}: {' '.join((schema.get('description') or name).split())}")
        call.__name__, call.__doc__ = tool.name, "\n".join(lines if parameters else lines[:1])
        call.__signature__ = inspect.Signature(parameters)
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call


def serve():
    """Run a server with one tool, on standard input and output."""
    server = MCPServer("calculator")

    @server.tool()
    def multiply(a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b

    server.run()


def products(count, seed):
    draw = random.Random(seed)
    pairs = [(draw.randint(2, 30), draw.randint(2, 30)) for _ in range(count)]
    return [{"prompt": [{"role": "user", "content": f"{a} * {b} = ?"}], "answer": str(a * b)} for a, b in pairs]


def demonstrations(tokenizer, tools):
    """Endless turns of an agent that calls the tool, and copies its result wrongly two times in five."""
    schemas, draw = [get_json_schema(function) for function in tools], random.Random(0)
    while True:
        (row,) = products(1, draw.random())
        a, b = map(int, re.findall(r"\d+", row["prompt"][0]["content"]))
        call = {"name": "multiply", "arguments": {"a": a, "b": b}}
        messages = [{"role": "system", "content": SYSTEM}, *row["prompt"]]
        answer = row["answer"] if draw.random() < 0.6 else str(draw.randint(4, 900))
        text = f'<tool_call>\n{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'
        for written in (text, answer):
            prompt = tokenizer.apply_chat_template(messages, tools=schemas, add_generation_prompt=True)["input_ids"]
            yield prompt, [*tokenizer(written)["input_ids"], tokenizer.eos_token_id]
            messages.append(
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
            )
            messages.append({"role": "tool", "content": row["answer"], "name": "multiply"})


def taught_model(folder, tools, steps):
    """Build and teach a tiny model, once."""
    if not (folder / "config.json").exists():
        print("Teaching a tiny model to call the tool (once) ...", flush=True)
        tokenizer = tiny_tokenizer(
            ("tool_call", "name", "arguments", "multiply", "Multiply", "with", "tool", "number")
        )
        tokenizer.chat_template, tokenizer.response_template = TEMPLATE, qwen3_template
        model = tiny_model(len(tokenizer))
        warm_up(model, tokenizer, steps, rows=demonstrations(tokenizer, tools))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return str(folder)


def right(completions, answer, **kwargs):
    """1 if the answer is the product."""
    return [float(text[0]["content"].strip() == target) for text, target in zip(completions, answer, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", help="address, or command (default: this file with `--serve`)")
    parser.add_argument("--model", help="model whose template supports tools (default: a tiny one)")
    parser.add_argument("--max_steps", type=int, default=40)
    parser.add_argument("--teaching_steps", type=int, default=600)
    parser.add_argument("--output_dir", type=Path, default=Path("mcp-output"))
    parser.add_argument("--quick", action="store_true", help="a few steps of everything")
    parser.add_argument("--serve", action="store_true", help="be the server")
    options = parser.parse_args()
    if options.serve:
        return serve()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if options.quick:
        options.teaching_steps, options.max_steps = 100, 2
    tools = Connection(options.server or shlex.join([sys.executable, __file__, "--serve"])).functions
    print("tools:", ", ".join(f"{tool.__name__}{inspect.signature(tool)}" for tool in tools), flush=True)
    base = options.output_dir / f"base-{options.teaching_steps}"
    model = options.model or taught_model(base, tools, options.teaching_steps)
    trainer = MARFTTrainer(
        model=model,
        agents=[AgentSpec("solver", system_prompt=SYSTEM, tools=tools)],
        reward_funcs=right,
        args=MARFTConfig(
            str(options.output_dir),
            per_device_train_batch_size=64,  # 8 questions with 8 episodes each
            num_generations=8,
            num_generations_eval=1,
            max_completion_length=64,
            max_steps=options.max_steps,
            learning_rate=1e-5 if options.model else 1.5e-3,
            logging_steps=2,
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list(products(2000, seed=1)),
        eval_dataset=Dataset.from_list(products(16 if options.quick else 200, seed=2)),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    before = trainer.evaluate()["eval_reward"]
    trainer.train()
    after = trainer.evaluate()["eval_reward"]
    trainer.save_model()
    print(f"\nright answers: {before:.1%} before, {after:.1%} after training")
    team = Team.from_pretrained(options.output_dir, model=model, tools=tools)
    print(f"the saved team on 12 * 13: {team('12 * 13 = ?', greedy=True)}")
    print(f"saved team: {options.output_dir} (base: {model})")


if __name__ == "__main__":
    main()
