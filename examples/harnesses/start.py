"""
Start a coding agent on the endpoint of an episode: `python start.py opencode|codex|qwen "Fix calc.py."`

It writes the settings that the harness reads from its home folder, which `train.py` puts into the folder of the
episode, and becomes the harness. Nothing here is about training.
"""

import json
import os
import sys
from pathlib import Path


def opencode(home, task):
    """`npm install -g opencode-ai`"""
    options = {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"}
    models = {"coder": {"name": "coder", "tool_call": True}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "marft", "options": options, "models": models}
    settings = {"provider": {"marft": provider}, "model": "marft/coder", "autoupdate": False}
    write(home / ".config" / "opencode" / "opencode.json", json.dumps(settings))
    return ["opencode", "run", "--auto", "--", task]


def codex(home, task):
    """`npm install -g @openai/codex`"""
    provider = f'name = "marft"\nbase_url = "{os.environ["OPENAI_BASE_URL"]}"\nenv_key = "OPENAI_API_KEY"\n'
    settings = 'model = "coder"\nmodel_provider = "marft"\n[model_providers.marft]\n' + provider
    write(home / ".codex" / "config.toml", settings + 'wire_api = "responses"\n')
    return ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--", task]


def qwen(home, task):
    """`npm install -g @qwen-code/qwen-code`"""
    os.environ["OPENAI_MODEL"] = "coder"
    return ["qwen", "--yolo", "--auth-type", "openai", "-m", "coder", f"--prompt={task}"]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


HARNESSES = {"opencode": opencode, "codex": codex, "qwen": qwen}


if __name__ == "__main__":
    command = HARNESSES[sys.argv[1]](Path(os.environ["HOME"]), sys.argv[2])
    os.execvp(command[0], command)  # noqa: S606
