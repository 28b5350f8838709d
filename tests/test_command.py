"""The command `marft`: flags override files for every option, errors name the fix, each command runs as a process."""

import argparse
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from marft_trl import MARFTConfig, MARFTTrainer, Team, TeamManifest
from marft_trl.extras.apps import Program
from marft_trl.extras.commands import COMMANDS, UsageError, as_tokens, main, read_config, scripts
from marft_trl.extras.commands.scripts import Launcher, Recipe, reward_named
from marft_trl.extras.commands.teams import KINDS
from marft_trl.extras.sandbox import code_reward
from marft_trl.rewards import math_reward
from marft_trl.seams.libraries import get_options

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from peft import LoraConfig
from trl import ModelConfig, ScriptArguments, TrlParser

from .helpers import team_trainer


ROOT = Path(__file__).parents[1]
SCRIPT = """
from marft_trl import MARFTTrainer
from marft_trl.tiny import tiny_agents, tiny_dataset, exact_answer
from peft import LoraConfig
SETTINGS = {"output_dir": "out", "max_steps": 1, "num_generations": 2, "per_device_train_batch_size": 8,
            "report_to": "none", "learning_rate": 0.125, "save_strategy": "no", "disable_tqdm": True,
            "log_completions": True, "num_completions_to_print": 0, "logging_steps": 1}
def make(args, model="MODEL", rank=4, quick=False):
    return MARFTTrainer(model, agents=tiny_agents(), reward_funcs=exact_answer, args=args,
                        train_dataset=tiny_dataset(64), eval_dataset=tiny_dataset(8, seed=1),
                        peft_config=LoraConfig(r=rank, target_modules="all-linear"))
"""


@pytest.fixture
def script(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("team.py").write_text(SCRIPT.replace("MODEL", model_folder))
    return tmp_path


def marft(*arguments, where=None, **environment):
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-W", "ignore", "-m", "marft_trl", *arguments]
    done = subprocess.run(command, env=variables | environment, cwd=where, capture_output=True, text=True, timeout=250)
    return done.returncode, done.stdout, done.stderr


def two_values(action):
    """Two different values of an option, as in a YAML file."""
    if action.nargs == 0:
        return True, True
    if action.choices:
        first, second = [*action.choices, *action.choices][:2]
        values = (str(getattr(first, "value", first)), str(getattr(second, "value", second)))
    elif getattr(action.type, "__name__", "") in ("string_to_bool", "str_to_bool"):
        values = (True, False)
    else:
        for values in ((3, 5), (0.25, 0.5), ({"a": 1}, {"b": 2}), ("true,false", "false,true"), ("x", "y")):
            try:
                for value in values:
                    text = json.dumps(value) if isinstance(value, dict) else str(value)
                    _ = action.type(text) if action.type is not None else text
                break
            except (ValueError, TypeError, argparse.ArgumentTypeError):
                continue
        else:
            return None
    return ([values[0]], [values[1], values[0]]) if action.nargs in ("*", "+") else values


def written(name, option_value, action):
    if action.nargs == 0:
        return [f"--{name}"]
    values = option_value if isinstance(option_value, list) else [option_value]
    return [f"--{name}", *(json.dumps(value) if isinstance(value, dict) else str(value) for value in values)]


PARSERS = [(MARFTConfig, ModelConfig, ScriptArguments), None]


@pytest.mark.parametrize("kinds", PARSERS, ids=["settings", "launcher"])
def test_flags_win_over_files_and_files_over_defaults_for_every_option(kinds):
    """TRL issue 7031: a YAML file that wins over a flag."""
    launcher = Launcher([])

    def make():
        return TrlParser(kinds, allow_abbrev=False) if kinds else launch_command_parser()

    counted, parser = 0, make()
    for name, action in get_options(parser).items():
        if name in ("help", "module", "no_python") or name != action.dest:  # aliases have separate entries
            continue
        if (values := two_values(action)) is None:  # can only be set in a file
            only, before = {"a": 1}, parser.get_default(name)
            assert not as_tokens({name: only}, parser) and parser.get_default(name) == only
            parser.set_defaults(**{name: before})
            continue
        in_file, on_line = values

        def read(file_settings, flags, name=name):
            if kinds is None:
                launcher_flags, rest = launcher.split_config(file_settings, flags)
                assert not rest
                flags, left = launcher.split_command_line(flags)
                assert not left
                tokens = [*launcher_flags, *flags, "script.py"]
            else:
                required = [] if name == "output_dir" else ["--output_dir", "x"]
                tokens = [*as_tokens(file_settings, parser, flags), *flags, *required]
            return getattr(parser.parse_known_args(tokens)[0], name)

        alone, line = read({name: in_file}, []), written(name, on_line, action)
        assert alone == read({}, written(name, in_file, action)), name
        assert read({name: in_file}, line) == read({}, line), name
        assert on_line == in_file or action.type is bool or alone != read({name: on_line}, []), name
        counted += 1
    assert counted > (250 if kinds else 80)


def test_settings_of_the_script_a_file_and_flags_in_this_order(script, monkeypatch):
    in_file = {"learning_rate": "1e-4", "model_init_kwargs": {"dtype": "float32"}, "rank": 2, "env": {"MARFT_X": 7}}
    Path("run.yaml").write_text(yaml.safe_dump(in_file))
    monkeypatch.delenv("MARFT_X", raising=False)
    recipe = Recipe.read("team.py")
    file_settings, rest = read_config(["--seed", "3", "--config", "run.yaml", "--max_steps=9"])
    args, more = recipe.parse([*as_tokens(file_settings, recipe.parser), *rest])
    assert (args.learning_rate, args.max_steps, args.seed, more.rank) == (1e-4, 9, 3, 2)
    assert args.num_generations == 2 and args.model_init_kwargs == {"dtype": "float32"} and not more.quick
    assert os.environ.pop("MARFT_X") == "7"
    args, more = recipe.parse(["--quick", "--learning_rate", "0.5", "--rank", "8"])
    assert (args.learning_rate, more.rank, more.quick) == (0.5, 8, True)


def test_options_of_the_launcher_are_separated_from_those_of_the_run():
    launcher = Launcher(["gradient_accumulation_steps", "debug"])
    launcher_flags, rest = launcher.split_command_line(
        ["--num_processes", "2", "--seed", "1", "--multi_gpu", "--mixed_precision=bf16", "--debug", "x", "--cpu"]
    )
    assert launcher_flags == ["--num_processes", "2", "--multi_gpu", "--mixed_precision=bf16", "--cpu"]
    assert rest == ["--seed", "1", "--debug", "x"]
    in_file = {"num_processes": 2, "seed": 1, "multi_gpu": False}
    assert launcher.split_config(in_file) == (["--num_processes=2"], {"seed": 1})


EXPERIMENT = """
from marft_trl import MARFTConfig
from marft_trl.extras.report import Experiment
from marft_trl.tiny import exact_answer, tiny_agents, tiny_dataset

def make():
    args = MARFTConfig("runs", per_device_train_batch_size=8, use_cpu=True)
    return Experiment("nowhere", tiny_agents(), exact_answer, tiny_dataset(8), tiny_dataset(4, seed=1), args)
"""
REPORT = ["report", "--experiment", "experiment.py:make"]
GOOD = {"agents": ["a", {"name": "b"}], "reward_funcs": ["accuracy_reward"], "output_dir": "x"}
CHANGES = {
    "no-model": {},
    "no-agents": {"agents": []},
    "no-data": {"model_name_or_path": "tiny", "dataset_name": "rows.jsonl"},
    "bad-data": {"model_name_or_path": "x", "dataset_name": "bad.jsonl", "reward_funcs": "math_reward"},
    "bad-agent": {"agents": ["a", {"name": "b", "sytem_prompt": "x"}]},
    "bad-name": {"agents": ["a b"]},
    "bad-workflow": {"workflow": {"class": "Sequentail"}},
    "bad-reward": {"reward_funcs": "acuracy_reward"},
}
FILES = {f"{name}.yaml": yaml.safe_dump({**GOOD, **change}) for name, change in CHANGES.items()} | {
    "wrong.yaml": "learnin_rate: 1\n",
    "list.yaml": "[1]\n",
    "bad.jsonl": '{"prompt": "x"}\n{"prompt": \n',
    "empty.py": "x = 1\n",
    "clash.py": "def make(args, seed=1): ...\n",
    "needs.py": "def make(args, data): ...\n",
    "settings.py": "SETTINGS = {'learnin_rate': 1}\ndef make(args): ...\n",
    "returns.py": "def make(args): ...\n",
    "experiment.py": EXPERIMENT,
}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian'. Did you mean 'train'"),
        (["train", "--learnin_rate", "1"], "Did you mean `--learning_rate`"),
        (["train", "--num_process", "2"], "Did you mean `--num_processes`"),
        (["train", "--config", "wrong.yaml"], "'learnin_rate' in the YAML file. Did you mean 'learning_rate'"),
        (["train", "--config", "list.yaml"], "must be a mapping"),
        (["train", "--config", "none.yaml"], "cannot be read"),
        (["train", "--max_steps", "many"], "argument --max_steps/--max-steps: invalid int value: 'many'"),
        (["train", "nothing.py"], "no file 'nothing.py'. `marft init duo`"),
        (["train", "empty.py"], "has no function `make`"),
        (["train", "clash.py"], "`seed` of `make` in clash.py is a setting of `MARFTConfig`"),
        (["train", "needs.py"], "`data` of `make` in needs.py is a command-line option, so its default must be"),
        (["plan", "returns.py"], "must return a `MARFTTrainer`, got NoneType"),
        (["plan", "--num_processes", "2"], "'--num_processes' is an option of `accelerate launch`"),
        (["eval"], "There is no trained team in out. Run `marft train team.py`"),
        (["chat"], "the following arguments are required: team"),
        (["chat", "empty-folder"], "empty-folder has no marft_team.json"),
        (["serve", "empty-folder", "--prot", "1"], "Did you mean `--port`"),
        (["serve", "empty-folder", "--host", "10.0.0.1"], "MARFT_API_KEY"),
        (["init", "--file", "team.py/x.py"], "File exists: 'team.py'.*MARFT_TRACEBACK=1"),
        ([*REPORT, "--arms", "sollo"], "Unknown arm 'sollo'. Did you mean 'solo'\\? Available arms: "),
        ([*REPORT, "--margin", "2"], "must be at least 0 and below 1, got 2"),
        (["plan", "no-data.yaml"], "marft plan: `dataset_name` is 'rows.jsonl', but there is no such file.$"),
        (["transcripts", "empty-folder"], "Train with `log_completions=True`"),
        (["init", "trio"], "invalid choice: 'trio'"),
        (["init"], "team.py already exists"),
        (["train", "--max_steps", "1", "team.py"], "The file must be the first argument: `marft train team.py"),
        (["train", "--config"], "`--config` needs the name"),
        (["plan", "settings.py"], "Unknown option 'learnin_rate' in `SETTINGS`"),
        (["plan", "--model", "nowhere"], "(?s)`model='nowhere'` is not a folder.*MARFT_TRACEBACK=1"),
        (["train", "no-agents.yaml"], "must set `agents`"),
        (["train", "no-model.yaml"], "`model_name_or_path` is not set"),
        (["train", "bad-agent.yaml"], "Agent 1 of the YAML file: .*sytem_prompt"),
        (["train", "bad-name.yaml"], "Agent 0 of the YAML file: 'a b' cannot be the name of an agent"),
        (["train", "bad-workflow.yaml"], "the unknown class 'Sequentail'. Did you mean 'Sequential'"),
        (["train", "bad-reward.yaml"], "Unknown reward function 'acuracy_reward'. Did you mean 'accuracy_reward'"),
        (["train", "bad-data.yaml"], "`dataset_name='bad.jsonl'` cannot be read: JSON parse error"),
        (["train", "--num_generations", "7"], "must be divisible by num_generations"),
        (["train", "--output_dir="], "`output_dir` is empty"),
    ],
)
def test_user_errors_exit_with_a_message(script, arguments, message, capsys):
    Path("empty-folder").mkdir()
    for name, text in FILES.items():
        Path(name).write_text(text)
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert re.search(message, errors) and "Traceback" not in errors


def test_every_command_has_help_and_a_class(capsys):
    for name in COMMANDS:
        try:
            assert main([name, "--help"]) == 0
        except SystemExit as end:
            assert end.code == 0
        assert f"marft {name}" in capsys.readouterr().out
    assert main([]) == 2 and main(["--help"]) == 0 and main(["--version"]) == 0
    assert "vllm-command" in capsys.readouterr().out


def test_a_team_is_trained_evaluated_rehearsed_and_queried(script, model_folder, capsys, monkeypatch):
    assert main(["plan"]) == 0 and "Workflow: Sequential" in capsys.readouterr().out
    assert main(["rehearse", "team.py"]) == 0 and "what actor says" in capsys.readouterr().out
    assert main(["train", "--learning_rate", "1e-3", "--rank", "2"]) == 0
    output = capsys.readouterr().out
    assert f"marft chat out --model {model_folder}" in output
    manifest = TeamManifest.load("out")
    assert set(manifest.adapters) == {"reasoner", "actor"}
    assert LoraConfig.from_pretrained("out/actor").r == 2
    assert main(["eval", "--rank", "2"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^evaluation  batch 1/\d+$", printed, re.MULTILINE)
    names = re.findall(r"^(eval_\S+)  ", printed, re.MULTILINE)
    assert names[:3] == ["eval_reward", "eval_reward_std", "eval_rewards/exact_answer/mean"]
    assert names[-2:] == ["eval_samples_per_second", "eval_steps_per_second"] and "eval_loss" in names[-6:]
    # With an interval over the questions, of which there are eight
    for name in ("eval_reward", "eval_rewards/exact_answer/mean"):
        mean, low, high = map(float, re.search(rf"^{name}  +(\S+)  \[(\S+), (\S+)\]$", printed, re.MULTILINE).groups())
        assert 0 <= low <= mean <= high <= 1 and high - low > 0.1
    shutil.copytree("out", "other")
    shutil.rmtree("other/actor")
    assert main(["eval", "--rank", "2", "--output_dir", "other"]) == 2
    assert "has no adapter 'actor'" in capsys.readouterr().err
    assert main(["transcripts", "out"]) == 0 and "-- reasoner" in capsys.readouterr().out
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert main(["transcripts", "out", "--step", "1", "--open"]) == 0 and opened[0].endswith("transcripts_00001.html")
    assert main(["transcripts", "out", "--step", "7"]) == 2 and "Available steps: 0, 1" in capsys.readouterr().err
    question = "Ann has 7 apples, finds 7 and loses 1. How many are left?"
    assert main(["chat", "out", "--question", question]) == 2  # whose base is a folder
    assert "Pass its folder, or `tiny` for the embedded model, as `--model`" in capsys.readouterr().err
    Path("chat.yaml").write_text(yaml.safe_dump({"question": "another one", "greedy": True, "model": model_folder}))
    assert main(["chat", "out", "--config", "chat.yaml", "--question", question]) == 0
    (episode,) = Team.from_pretrained("out", model=model_folder).run([question], greedy=True)
    assert capsys.readouterr().out == "".join(f"{turn.agent}: {turn.text}\n" for turn in episode.turns)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/greedy\n{question}\n\n/help\n/quit\nnever read\n"))
    assert main(["chat", "out", "--model", model_folder]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:-1] == [f"{turn.agent}: {turn.text}" for turn in episode.turns] and "/quit: exit" in lines[-1]
    assert main(["vllm-command", "out", "--model", model_folder, "--device", "cpu"]) == 0
    assert "--max-lora-rank 8" in (command := capsys.readouterr().out) and model_folder in command
    assert main(["env"]) == 0 and "transformers" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_script_templates_are_short_and_run_unchanged(kind, tmp_path, monkeypatch, model_folder, capsys):
    monkeypatch.chdir(tmp_path)
    for place in ("tiny", "extras.commands.scripts"):
        monkeypatch.setattr(f"marft_trl.{place}.tiny_team_model", lambda: model_folder)
    assert main(["init", kind]) == 0 and "marft train" in capsys.readouterr().out
    assert Path("team.py").read_text().count("\n") < 60
    assert main(["plan"]) == 0 and main(["rehearse"]) == 0
    small = ["--num_generations", "2", "--per_device_train_batch_size", "4", "--report_to", "none"]
    assert main(["train", *small, "--max_steps", "1"]) == 0
    (chat,) = re.findall(r"^  marft (chat .*)$", capsys.readouterr().out, re.MULTILINE)
    for command in (chat, chat.replace(model_folder, "tiny")):
        assert main([*command.split(), "--question", "The sea.", "--seed", "1"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len([line for line in lines if re.match(r"[a-z]+: |The team answers: ", line)]) >= 1


def test_a_team_in_a_yaml_file(script, model_folder, capsys):
    Path("mine.py").write_text("def short(completions, **kwargs):\n    return [-len(text) for text in completions]\n")
    rows = [{"prompt": f"{number} + 1 = ?"} for number in range(16)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    team = {
        "model_name_or_path": model_folder, "dataset_name": "rows.jsonl", "use_peft": True, "lora_r": 2,
        "lora_target_modules": ["q_proj", "v_proj"], "output_dir": "yaml-out", "max_steps": 2, "num_generations": 2,
        "per_device_train_batch_size": 4, "max_completion_length": 8, "report_to": "none", "learning_rate": 1.0e-4,
        "agents": ["first", {"name": "second", "system_prompt": "Answer.", "temperature": 0.5}],
        "workflow": {"class": "Sequential", "rounds": 2}, "reward_funcs": ["mine.py:short"],
    }  # fmt: skip
    Path("team.yaml").write_text(yaml.safe_dump(team))
    assert main(["train", "team.yaml", "--max_steps", "1", "--lora_r", "4"]) == 0
    assert main(["train", "team.yaml", "--max_steps", "1", "--lora_r", "4"]) == 0
    assert "Resuming after step 1/1: nothing to train" in capsys.readouterr().out
    manifest = TeamManifest.load("yaml-out")
    assert manifest.workflow["rounds"] == 2 and [agent.name for agent in manifest.agents] == ["first", "second"]
    assert LoraConfig.from_pretrained("yaml-out/first").r == 4


@pytest.mark.slow
def test_each_command_as_a_process(script, model_folder):
    """In the order of a new user. Training also runs in two processes."""
    where = script
    for arguments in (["train"], ["train", "--multi_gpu", "--num_processes", "2", "--output_dir", "two",
                                  "--per_device_train_batch_size", "4"]):  # fmt: skip
        status, output, errors = marft(*arguments, where=where)
        assert status == 0, errors[-3000:]
        assert "Try it:\n  marft chat" in output
    assert "2 processes" in output + errors or "on 2" in output + errors
    for arguments, expected in (
        (["--help"], "vllm-command"),
        (["init", "app", "--file", "new/app.py"], "marft plan new/app.py"),
        (["plan"], "Workflow"),
        (["rehearse"], "what actor says"),
        (["eval"], "eval_reward"),
        (["transcripts", "out"], "-- actor"),
        (["chat", "out", "--model", model_folder, "--question", "1 + 1 = ?"], "actor:"),
        (["vllm-command", "out", "--model", model_folder], "--enable-lora"),
        (["env"], "torch"),
        (["report", "--help"], "experiment"),
    ):
        status, output, errors = marft(*arguments, where=where)
        assert status == 0 and expected in output, (arguments, output, errors[-2000:])
    assert "secret" not in marft("env", where=where, MARFT_API_KEY="secret", HF_TOKEN="secret")[1]


@pytest.mark.slow
def test_a_server_process_ends_on_sigterm(script, model_folder):
    trainer = team_trainer(model_folder, script / "team")
    trainer.save_model()
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "MARFT_API_KEY": "k"}
    command = [sys.executable, "-m", "marft_trl", "serve", ".", "--model", model_folder, "--port", "0"]
    process = subprocess.Popen(command, env=variables, cwd=script / "team", stderr=subprocess.PIPE, text=True)
    try:
        lines = iter(process.stderr.readline, "")
        log = next(line for line in lines if "Serving Team(reasoner, actor" in line)  # with its port
        url = re.search(r"http://127\.0\.0\.1:\d+", log)[0]
        body = json.dumps({"model": "team", "messages": [{"role": "user", "content": "1 + 1 = ?"}]}).encode()
        headers = {"Content-Type": "application/json", "Authorization": "Bearer k"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.loads(answer.read())["choices"][0]["finish_reason"]
        process.send_signal(signal.SIGTERM)
        log = process.communicate(timeout=60)[1]
        assert process.returncode == 0 and "Traceback" not in log
    finally:
        process.kill()


def test_rewards_and_workflows_of_the_extras_have_names_in_yaml_files():
    assert reward_named("code_reward") is code_reward and reward_named("math_reward") is math_reward
    workflow = scripts._workflow(
        {"class": "ExternalApp", "app": {"command": "true", "env": {"A": "1"}}, "tools": True}
    )
    assert workflow.app == Program("true", env={"A": "1"}) and workflow.uses_tools
    with pytest.raises(UsageError, match="`ExternalApp` has no argument `cwd`"):
        scripts._workflow({"class": "ExternalApp", "app": "true", "cwd": "."})


def test_errors_of_a_run_have_a_traceback_only_where_own_code_raised_them(script, capsys):
    assert main(["train", "--resume_from_checkpoint", "nowhere"]) == 2 and "nowhere" in capsys.readouterr().err
    code = Path("team.py").read_text().replace("reward_funcs=exact_answer", "reward_funcs=wrong")
    Path("team.py").write_text(code + "def wrong(completions, **kwargs):\n    raise ValueError('mine')\n")
    with pytest.raises(Exception, match="mine") as raised:
        main(["train"])
    assert type(raised.value).__name__ != "UsageError"


@pytest.mark.parametrize(("text", "parsed"), [("false", False), ("No", False), ("true", True), ("a/b", "a/b")])
def test_resume_from_checkpoint_is_parsed_from_the_command_line(script, monkeypatch, text, parsed):
    resumes = []
    monkeypatch.setattr(
        MARFTTrainer, "train", lambda self, resume_from_checkpoint: resumes.append(resume_from_checkpoint)
    )
    assert main(["train", "--resume_from_checkpoint", text]) == 0 and resumes == [parsed]
