"""Planted secrets and local paths are in no file, no log, no tracker and no push."""

import contextlib
import copy
import http.server
import io
import json
import logging
import os
import pickle
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig, Sequential, Team, Workflow, endpoint_reply
from marft_trl.extras.apps import ExternalApp
from marft_trl.extras.report.experiment import Experiment, collect_settings
from marft_trl.system.redaction import for_log, published, without_paths, without_secrets
from marft_trl.tiny import exact_answer, tiny_agents, tiny_dataset

import pytest
from transformers import TrainerCallback

from .helpers import config, grows_linearly, team_trainer
from .test_live import team_folder  # noqa: F401  # a fixture
from .test_persistence import RESUME, ROOT, hub, run_on_hub  # noqa: F401  # a fixture
from .test_serve import TYPE, send, serving


SECRET = "CANARY"
# Settings that can hold a secret, and variables of the environment
PLANTED = {
    "hub_token": f"hf_{SECRET}0",
    "model_init_kwargs": {"token": f"hf_{SECRET}1", "dtype": "float32"},
    "vllm_server_base_url": f"http://me:{SECRET}3@localhost:8000",
    "chat_template_kwargs": {
        "openai_api_key": f"{SECRET}5",
        "nested": [{"db_password": f"{SECRET}6"}, OrderedDict(github_token=f"{SECRET}7")],
        "headers": [("Authorization", f"Bearer {SECRET}8")],
        "url": f"https://host/x?api_key={SECRET}9",
    },
    "run_name": f"sk-{SECRET}0123456789abcdef",
}
ENVIRONMENT = {
    name: f"{SECRET}_{name}"
    for name in ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "COMET_API_KEY", "PASSWORD")
}


class Tracker(TrainerCallback):
    """Records everything that a tracker would receive."""

    def __init__(self):
        self.seen = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.seen += [repr(args.to_dict()), args.to_json_string(), repr(args.to_sanitized_dict()), repr(model.config)]

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(repr(logs))


def files_with(folder, text):
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    assert len(files) > 10
    return sorted(str(path.relative_to(folder)) for path in files if text.encode() in path.read_bytes())


@pytest.fixture
def planted(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "arguments", [{}, pytest.param({"peft_config": None}, marks=pytest.mark.slow)], ids=["adapters", "full"]
)
def test_no_planted_secret_is_saved_logged_or_shown(planted, model_folder, tmp_path, caplog, arguments):
    """Nor does any file, which may all be pushed, have a path of this machine."""
    settings = {**RESUME, **PLANTED, "max_steps": 2, "save_steps": 1, "log_completions": True}
    tracker, printed, output = Tracker(), io.StringIO(), tmp_path / "LOCALPATH" / "out"
    with caplog.at_level(logging.DEBUG), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        trainer = team_trainer(model_folder, output, settings=settings, **arguments)
        trainer.add_callback(tracker)
        trainer.train()
        trainer.save_model()
        trainer.create_model_card()
        trainer = team_trainer(model_folder, output, settings={**settings, "learning_rate": 1e-3}, **arguments)
        trainer.train(resume_from_checkpoint=True)
        print(trainer.args, repr(trainer.args), trainer.plan(), trainer.memory_plan(), trainer.manifest())
    assert trainer.args.hub_token == PLANTED["hub_token"]  # it is used, not lost
    for text in (SECRET, "LOCALPATH", model_folder, str(ROOT), os.path.expanduser("~") + os.sep):
        assert files_with(output, text) == [], text
    assert trainer.args.output_dir == str(output)
    if not arguments:
        Team.from_pretrained(output, model=model_folder)
    assert len(tracker.seen) > 5 and SECRET not in "".join(tracker.seen)
    assert "marft" in caplog.text + printed.getvalue() and SECRET not in caplog.text + printed.getvalue()


PUSH = """
import sys
sys.path.insert(0, {root!r})
from tests.helpers import team_trainer
from tests.test_secrets import PLANTED
trainer = team_trainer({model!r}, {output!r}, settings=dict(PLANTED, max_steps=2, save_strategy="steps", save_steps=1,
    push_to_hub=True, hub_model_id="user/team", hub_strategy="all_checkpoints", hub_always_push=True))
trainer.train()
trainer.push_to_hub()
"""


@pytest.mark.slow
def test_no_planted_secret_is_pushed(planted, hub, model_folder, tmp_path):  # noqa: F811
    output = tmp_path / "LOCALPATH" / "out"
    done = run_on_hub(hub, tmp_path, PUSH.format(root=str(ROOT), model=model_folder, output=str(output)))
    assert done.returncode == 0, done.stderr[-3000:]
    files = hub.files["user/team"]
    assert {"training_args.bin", "marft_team.json", "checkpoint-2/training_args.bin"} <= set(files)
    for text in (SECRET, "LOCALPATH", model_folder):
        assert [path for path, data in files.items() if text.encode() in data] == [], text
        assert not any(text in message for _, message in hub.commits)
    assert SECRET not in done.stdout + done.stderr


def test_detection_of_secrets_and_paths():
    harmless = {"pad_token": "<pad>", "eos_token_id": 2, "max_new_tokens": 3, "tokenizer": "x", "video_token": "<v>"}
    harmless |= {"url": "http://host:1/p@th", "token": True, "monkey": "x", "link": "https://host/path@main"}
    assert without_secrets(harmless) == harmless
    dropped = dict.fromkeys(["Api-Key", "API_KEY", "secret", "hub_token", "x-api-key", "session_token", "token"], "x")
    assert without_secrets({"deep": [{"deeper": (dropped, "x")}]}) == {"deep": [{"deeper": ({}, "x")}]}
    assert without_secrets("https://me:pass@host/path?x=1") == "https://host/path?x=1"
    assert without_secrets("redis://pass@host") == "redis://host"
    assert grows_linearly(lambda size: for_log("://a:" * (size // 5)), 100_000)  # as a remote may answer
    assert without_secrets("http://me:p@ss@h") == "http://h" and without_secrets("pg://u:a/ss@h/db") == "pg://h/db"
    paths = {"a": ["/home/me/out/", "out/model", "me/team", "/think", Path("/home/me/cache"), "file:///home/me/x"]}
    assert without_paths(paths) == {"a": ["out", "out/model", "me/team", "/think", Path("cache"), "x"]}


def test_arguments_keep_paths_where_they_are_not_published(tmp_path):
    model_kwargs = {"token": SECRET, "dtype": "float32"}
    args = config(tmp_path / "out", hub_token=SECRET, model_init_kwargs=dict(model_kwargs))
    for same in (copy.copy(args), copy.deepcopy(args)):
        assert same.hub_token == SECRET and same.model_init_kwargs == model_kwargs
    assert args.to_dict()["model_init_kwargs"] == {"dtype": "float32"}  # what trackers receive

    def pickled():
        return pickle.loads(pickle.dumps(args))  # noqa: S301 - our own

    assert pickled().output_dir == str(tmp_path / "out")
    with published():
        assert pickled().output_dir == "out"
    assert isinstance(args, MARFTConfig) and args.output_dir == str(tmp_path / "out") and args.hub_token == SECRET


@pytest.mark.parametrize(
    "text",
    [
        "gho_0123456789abcdef0123", "github_pat_11ABCDEFG0123456789_x", "glpat-0123456789abcdefghij",
        "xoxb-123456789012-abcdefghijkl", "AIzaSyA0123456789abcdefghijklmnopqrstuv", "sk_live_0123456789abcdefghij",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdef012345", "npm_0123456789abcdefghijklmnopqrstuvwxyz",
        "pypi-AgEIcHlwaS5vcmcCJDAxMjM0NTY3ODkwMTIzNDU2Nzg5", "Basic dXNlcjpwYXNzd29yZA==",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\n-----END RSA PRIVATE KEY-----",
        "x-api-key: 0123456789abcdef", "'api_key': '0123456789abcdef'", "api-key=0123456789abcdef",
        "https://x.blob.net/a?sv=1&sig=0123456789abcdef",
    ],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_secrets_are_recognized_by_their_format(text):
    redacted = without_secrets({"note": f"before {text} after"})["note"]
    assert redacted.startswith("before ") and redacted.endswith(" after") and text[-12:] not in redacted


def test_texts_that_only_look_like_secrets_stay():
    for text in (
        *("sk-learn is a library", "Basic algebra", "npm_config", "eyJ is how a token begins", "pypi-server"),
        *("You teach Basic arithmetic to children.", "Basic instructions: answer", "Bearer of bad news"),
        *("api_key=endpoint.api_key", "the api_key: none was passed", "signature = hashlib.sha256(x)"),
    ):
        assert without_secrets(text) == text


def test_settings_of_a_report_have_no_secrets(model_folder, tmp_path):
    class Keeps(Sequential):
        def __init__(self):
            super().__init__(["reasoner", "actor"])
            self.api_key, self.url = SECRET, f"https://me:{SECRET}@host/x"

    args = config(tmp_path, model_init_kwargs={"token": SECRET}, chat_template_kwargs={"openai_api_key": SECRET})
    experiment = Experiment(
        model_folder, tiny_agents(), args=args, reward_funcs=exact_answer, train_dataset=tiny_dataset(8),
        eval_dataset=tiny_dataset(8, seed=1), workflow=Keeps(), options={"db": {"password": SECRET}, "n": 3},
    )  # fmt: skip
    settings = collect_settings(experiment)
    assert SECRET not in json.dumps(settings) and settings["options.n"] == 3
    assert "args.output_dir" not in settings and "args.learning_rate" in settings and "args.eval_sampling" in settings


class AsksElsewhere(Workflow):
    """A workflow that calls another model at an address with secrets."""

    def __init__(self, url="", key=None):
        self.ask = endpoint_reply(url, "m", api_key=key, tries=1) if url else None

    async def run(self, episode):
        await episode.turn("reasoner")
        await self.ask([{"role": "user", "content": "x"}])


@pytest.fixture
def repeating():
    """The address of a server that echoes the request, in red."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(400)
            self.end_headers()
            self.wfile.write(f"\x1b[31mwrong key: {self.headers['Authorization']} of {self.path}".encode())

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


SHOUTS = "import os, sys; print('\x1b[31mno', os.environ['OPENAI_API_KEY'], os.environ['PASSWORD']); sys.exit(3)"


@pytest.mark.parametrize("fails", ["key", "password", "program"])
def test_clients_of_a_served_team_get_no_secrets(fails, team_folder, model_folder, repeating, monkeypatch, caplog):  # noqa: F811
    """A server error gets an id; the log has the message under that id, without secrets and escape codes."""
    monkeypatch.setenv("PASSWORD", ENVIRONMENT["PASSWORD"])
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    workflow = {
        "key": AsksElsewhere(f"http://{repeating}/v1?key={SECRET}", f"{SECRET}-key"),
        "password": AsksElsewhere(f"http://me:{SECRET}@{repeating}/v1?token={SECRET}"),
        "program": ExternalApp([sys.executable, "-c", SHOUTS]),
    }[fails]
    team = Team.from_pretrained(team_folder, model=model_folder, workflow=workflow)
    ask = {"model": "team", "messages": [{"role": "user", "content": "?"}]}
    with serving(team) as url, caplog.at_level(logging.INFO):
        responses = [send(url, ask), send(url, {"model": "team", "input": "?"}, "/v1/responses")]
        responses.append(send(url, {**ask, "temperature": 9}))
        streamed = json.dumps({**ask, "stream": True}).encode()
        stream = urllib.request.Request(f"{url}/v1/chat/completions", streamed, TYPE)
        try:
            text = urllib.request.urlopen(stream, timeout=60).read().decode()
        except urllib.error.HTTPError as error:
            text = error.read().decode()
    assert [status for status, *_ in responses] == [500, 500, 400] and "from 0 to 2" in str(responses[2])
    messages = [text, *(json.dumps(body) for *_, body in responses[:2])]
    for message in messages:
        assert re.search(r"See error (\w+)", message)[1] in caplog.text
        assert "127.0.0.1" not in message and "no" not in message.split()
    assert ("exited with status 3" if fails == "program" else "wrong key") in caplog.text
    for message in (*messages, caplog.text):
        assert SECRET not in message and "\x1b" not in message


def test_a_secret_in_a_system_prompt_is_named(model_folder, tmp_path, caplog):
    """The prompt is not changed: the team is trained with it."""
    token = "ghp_0123456789abcdefghij"
    agents = [AgentSpec("reasoner", system_prompt="Plan."), AgentSpec("actor", system_prompt=f"Call with {token}.")]
    trainer = team_trainer(model_folder, tmp_path, agents=agents)
    assert "system prompt of agent 'actor' has what looks like a secret" in caplog.text
    assert "agent 'reasoner' has" not in caplog.text and token not in caplog.text
    assert trainer.agents[1].system_prompt == agents[1].system_prompt


def test_the_length_that_is_searched_for_a_secret_is_bounded():
    """The time grows linearly with the text, which may be the output of a program."""
    seconds = []
    for count in (2_000, 20_000):
        start = time.process_time()
        without_secrets("api_key=" * count)
        seconds.append(time.process_time() - start)
    assert seconds[1] < 60 * max(seconds[0], 0.05)  # quadratic time would be a hundred times as long
