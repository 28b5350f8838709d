"""Common mistakes of first-time users, each with the error message that names the fix."""

import itertools
import json
import re
import time
from types import SimpleNamespace

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer, Team, Workflow, load_adapters
from marft_trl.episodes import collector
from marft_trl.extras.engines import server
from marft_trl.extras.engines.server import parse_addresses
from marft_trl.extras.report import Experiment
from marft_trl.extras.report.comparison import ArmResult, make_verdicts
from marft_trl.extras.report.runner import Arm
from marft_trl.reporting import Interval
from marft_trl.reporting.evaluation import scores
from marft_trl.rollout.reward_scorer import unique_names
from marft_trl.runs.run_folder import DamagedCheckpoint
from marft_trl.tiny import tiny_agents, tiny_dataset, tiny_model
from marft_trl.workflows import EnvironmentLoop, rehearse, together

import pytest
from datasets import Dataset
from pandas import DataFrame
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from .helpers import lora, team_trainer


class Mistaken:
    async def no_await(self, episode):
        draft = episode.turn("reasoner")
        episode.answer = draft.text

    async def no_await_sees(self, episode):
        draft = episode.turn("reasoner")
        await episode.turn("actor", sees=[draft])

    async def reads_messages(self, episode):
        await episode.turn("reasoner", sees=[episode.prompt[-1]["content"]])

    def no_async(self, episode):
        episode.turn("reasoner")

    async def returns(self, episode):
        draft = await episode.turn("reasoner")
        await episode.turn("actor", sees=[draft])
        return draft

    async def sees_one(self, episode):
        draft = await episode.turn("reasoner")
        await episode.turn("actor", sees=draft)

    async def reads_content(self, episode):
        draft = await episode.turn("reasoner")
        await episode.turn("actor", sees=[draft] if draft.content else [])

    async def awaits_twice(self, episode):
        await together([await episode.turn("reasoner"), await episode.turn("actor")])

    async def reads_no_column(self, episode):
        await episode.turn("reasoner")
        episode.row["solutoin"]

    async def reads_no_key(self, episode):
        await episode.turn("reasoner")
        {}[episode.row["solution"]]

    async def fails_in_a_library(self, episode):
        await episode.turn("reasoner")
        json.loads("{")

    async def no_await_of_a_call(self, episode):
        episode.call(len, "x")
        await episode.turn("reasoner")

    async def awaits_feedback(self, episode):
        await episode.observe("x", after=[await episode.turn("reasoner")])


def wrong(name):
    return type(name, (Workflow,), {"run": getattr(Mistaken, name)})()


class OtherName(Workflow):
    async def run(self, episode):
        await episode.turn("resoner")


class World:
    def reset(self, **row):
        return "Go."


class Misspelt(World):
    def stp(self, turns):
        return "x", 0.0, True


class Paid(World):
    def get_reward(self):
        return 1.0


def scoring(name, score):
    def reward(completions, **kwargs):
        return score(completions)

    reward.__name__ = name
    return reward


expects_messages = scoring("expects_messages", lambda texts: [float(len(text[0]["content"])) for text in texts])
environment_reward = scoring("environment_reward", lambda completions: [1.0] * len(completions))
too_few = scoring("too_few", lambda completions: [1.0])
texts = scoring("texts", lambda completions: ["1"] * len(completions))
not_a_number = scoring("not_a_number", lambda completions: [float("nan")] * len(completions))


def rows(**columns):
    return Dataset.from_dict(columns)


WITHOUT_CONTENT = [[{"role": "user", "text": "a"}]] * 8
MISTAKES = {
    # Errors when the trainer is created
    "argument": (TypeError, {"reward_function": texts}, "no argument `reward_function`. Did you mean 'reward_funcs'?"),
    "dataset": (TypeError, {"dataset": []}, "Did you mean 'train_dataset'?"),
    "names": (TypeError, {"agents": ["planner"]}, r"Write `AgentSpec\('planner'\)`"),
    "mappings": (TypeError, {"agents": [{"name": "planner"}]}, r"Write `AgentSpec\(name, ...\)`"),
    "one agent": (TypeError, {"agents": AgentSpec("solo")}, r"Example: `agents=\[AgentSpec"),
    "no data": (ValueError, {"train_dataset": None}, "Pass a dataset with a `prompt` column"),
    "no prompt": (ValueError, {"train_dataset": rows(question=["a"] * 8)}, r"rename_column\('question', 'prompt'\)"),
    "kwargs": (ValueError, {"reward_funcs": lambda completions: [1.0]}, r"Add `\*\*kwargs` to its arguments"),
    "other name": (ValueError, {"workflow": OtherName()}, "Did you mean 'reasoner'?"),
    "split": (TypeError, {"train_dataset": {"train": []}}, r"Pass one of the splits: `dataset\['train'\]`"),
    "name of data": (TypeError, {"train_dataset": "me/data"}, r"`load_dataset\('me/data', split='train'\)`"),
    "frame": (TypeError, {"train_dataset": DataFrame({"prompt": ["a"]})}, r"`Dataset.from_pandas\(frame\)`"),
    "eval sets": (TypeError, {"eval_dataset": [rows(prompt=["a"])]}, "Pass several sets by name"),
    "lora by name": (TypeError, {"peft_config": {"reasoner": 1}}, r"set `AgentSpec\(peft_config=...\)`"),
    "replies": (ValueError, {"agents": [AgentSpec("a", reply=len)]}, "a function writes their turns"),
    "environment": (TypeError, {"workflow": World}, r"pass `workflow=EnvironmentLoop\(Environment\)`"),
    "gguf": (ValueError, {"model": "models/x.gguf"}, "a GGUF file, which cannot be trained"),
    "config": (TypeError, {"config": 1}, "Did you mean 'args'?"),
    "tokenizer": (TypeError, {"tokenizer": 1}, "Did you mean 'processing_class'?"),
    "4 bits": (TypeError, {"quantization_config": True}, r"BitsAndBytesConfig\(load_in_4bit=True\)"),
    "task": (ValueError, {"peft_config": LoraConfig(task_type="SEQ_CLS")}, "Set `task_type='CAUSAL_LM'`"),
    "no content": (ValueError, {"train_dataset": rows(prompt=WITHOUT_CONTENT)}, "without `content`"),
    "no folder": (FileNotFoundError, {"model": "./no/such"}, "`model='./no/such'` is neither .*nor a valid Hub id"),
    "no model": (OSError, {"model": "models/none"}, "`model='models/none'` is not a folder .*loaded from the Hub"),
    "reward model": (FileNotFoundError, {"reward_funcs": "./no/such"}, "`reward_funcs='./no/such'` is neither"),
    "output_dir": (ValueError, {"output_dir": f"{__file__}/run"}, "`output_dir='.*/run'` cannot be created: Not a "),
    "function": (TypeError, {"workflow": lambda episode: None}, r"class .*, and pass `workflow=MyWorkflow\(\)`"),
    "our name": (
        ValueError,
        {"workflow": EnvironmentLoop(Paid), "reward_funcs": environment_reward},
        "named 'environment_reward', like the function that the trainer adds",
    ),
    "per step": (ValueError, {"settings": {"credit": "per_step"}}, r"`get_outcome_reward\(your_reward\)`"),
    "resume number": (TypeError, {"resume": 1.5}, "must be True or the path of a checkpoint, got 1.5"),
    "resume nowhere": (FileNotFoundError, {"resume": "nowhere"}, "Pass `True` for the newest checkpoint"),
    # Errors in the first episode
    "one value": (ValueError, {"reward_funcs": too_few}, "'too_few' returned 1 rewards, but 8 were expected"),
    "messages": (TypeError, {"reward_funcs": expects_messages}, "`expects_messages`. Completions are strings be"),
    "values": (TypeError, {"reward_funcs": texts}, "`texts` returned '1' of type str for completion 0"),
    "nan": (ValueError, {"reward_funcs": not_a_number}, "`not_a_number` returned nan"),
}
IN_AN_EPISODE = {
    "no_await": r"An `await` is missing: write `turn = await episode.turn",
    "no_await_sees": "An `await` is missing: write",
    "reads_messages": "prompt is a string because the dataset's prompts are strings",
    "no_async": r"Write `async def run\(self, episode\):`",
    "returns": "Set `episode.answer = turn` instead",
    "sees_one": r"takes a list of turns, got a single turn. Pass `\[turn\]`",
    "reads_content": "`Turn` has no attribute `content`. Did you mean 'text'",
    "awaits_twice": "`together` takes turns that are not awaited yet",
    "reads_no_column": r"test_first_day.py, line \d+, in `reads_no.*row has 'prompt', 'solution'. Did you mean 'solu",
    "reads_no_key": r"KeyError: '[^']*'$",
    "fails_in_a_library": r"\(test_first_day.py, line \d+, in `fails_in_a_library`\): JSONDecodeError",
    "no_await_of_a_call": r"Write .* `await episode.call\(...\)`",
    "awaits_feedback": "Only `episode.turn`, `episode.call` and `together` are awaited",
}
MISTAKES |= {name: (RuntimeError, {"workflow": wrong(name)}, message) for name, message in IN_AN_EPISODE.items()}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_with_a_fix(model_folder, tmp_path, name):
    error, arguments, message = MISTAKES[name]
    trainer_arguments = {"model": model_folder, "output_dir": tmp_path, "settings": {"max_steps": 1}, **arguments}
    resume = trainer_arguments.pop("resume", None)
    with pytest.raises(error, match=message):
        team_trainer(**trainer_arguments).train(resume_from_checkpoint=resume)


def test_a_misspelt_step_of_an_environment_is_named():
    with pytest.raises(ValueError, match=r"no `step`, but `stp`. Rename it to `step`, or pass `tools=\['stp'\]`"):
        EnvironmentLoop(Misspelt)
    assert EnvironmentLoop(Misspelt, tools=[]).tools == []


def test_a_model_without_a_tokenizer_is_named(tokenizer, tmp_path):
    tiny_model(len(tokenizer)).save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"bare'` has no tokenizer.*Pass `processing_class=AutoTokenizer"):
        team_trainer(str(tmp_path / "bare"), tmp_path)


class Sleeps(Workflow):
    async def run(self, episode):
        time.sleep(0.1)
        await episode.turn("reasoner")


def test_a_workflow_that_blocks_the_other_episodes_is_named_once(small_model, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(collector, "BLOCKING_SECONDS", 0.2)
    team_trainer(small_model, tmp_path, workflow=Sleeps(), settings={"max_steps": 1}).train()
    assert caplog.text.count("block the other episodes for more than a second") == 1


VIEWS = {
    "text": (lambda agent, prompt, seen: "hi", r"must return a list of messages .*, got 'hi'"),
    "none": (lambda agent, prompt, seen: None, "must return a list of messages"),
    "turns": (lambda agent, prompt, seen: [*prompt, *seen], r"is a Turn. Write .*turn.text"),
    "no role": (lambda agent, prompt, seen: [{"content": "x"}], r"message 0 without a `role`; it has \['content'\]"),
    "nested": (lambda agent, prompt, seen: [{"role": "user", "content": prompt}], r"unpack it with `\*prompt`"),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_must_return_messages(model_folder, tmp_path, name):
    view, message = VIEWS[name]
    with pytest.raises(TypeError, match=f"The view .* of agent '(reasoner|actor)'.*{message}"):
        team_trainer(model_folder, tmp_path, view=view).train()


def test_errors_in_a_view_name_the_agent(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path, view=lambda agent, prompt, seen: seen[-1])
    with pytest.raises(IndexError, match="Raised by the view of agent 'reasoner'.*`seen` is empty"):
        trainer.plan()
    with pytest.raises(TypeError, match=r"a single agent, use `AgentSpec\(view=...\)`"):
        trainer.view = {"reasoner": len}


def test_a_folder_of_a_model_with_a_near_name_is_proposed(tmp_path):
    for name in ("base", "bose"):
        (tmp_path / name).mkdir()
    (tmp_path / "base" / "config.json").touch()
    with pytest.raises(FileNotFoundError, match="Did you mean 'base'"):
        team_trainer(str(tmp_path / "bsae"), tmp_path)


def test_reward_functions_of_the_same_name_are_numbered(small_model, tmp_path, caplog):
    functions = [lambda completions, score=score, **kwargs: [score] * len(completions) for score in (1.0, 2.0)]
    trainer = team_trainer(small_model, tmp_path, reward_funcs=functions, settings={"max_steps": 1})
    assert unique_names(["r", "r", "r_2"]) == ["r", "r_3", "r_2"]
    assert "Their metrics are `rewards/<lambda>`, `rewards/<lambda>_2`, in the order of `reward_funcs`" in caplog.text
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["rewards/<lambda>/mean"] == 1.0 and log["rewards/<lambda>_2/mean"] == 2.0


EVALUATIONS = [
    ({}, r"`num_generations_eval` \(3\) must divide .* \(8\)"),
    ({"num_samples": 5}, r"`num_samples` \(5\) must divide"),
    ({"k": [16], "num_samples": 4}, "`k` .16. needs at least 16 episodes"),
    ({"sampling": {"temprature": 1.0}, "num_samples": 4}, "has no setting 'temprature'; .* mean 'temperature'"),
    ({"eval_dataset": "hard"}, "Unknown evaluation set 'hard': the sets of the trainer have no names"),
]


def test_evaluations_hold_whole_questions(model_folder, tmp_path):
    settings = {"num_generations_eval": 3, "per_device_eval_batch_size": 8}
    trainer = team_trainer(model_folder, tmp_path, eval_dataset=tiny_dataset(4, seed=1), settings=settings)
    for settings, message in EVALUATIONS:
        with pytest.raises(ValueError, match=message):
            trainer.evaluate(**settings)
    evaluations = trainer.parts.evaluations
    with pytest.raises(ValueError, match="Did you mean 'reasoner'"), evaluations.silence_agents("resoner"):
        pass


def test_folders_that_are_no_checkpoints(model_folder, folder, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    team_trainer(model_folder, tmp_path, settings=settings).train()
    other = team_trainer(model_folder, tmp_path / "other")
    for path, message in ((tmp_path, "newest checkpoint, or the path of .*checkpoint-1"), (folder, "is a saved team")):
        with pytest.raises(ValueError, match=message):
            other.train(resume_from_checkpoint=str(path))
    (tmp_path / "checkpoint-1" / "trainer_state.json").unlink()
    with pytest.raises(DamagedCheckpoint, match="trainer_state.json is missing"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


class StepsByText(World):
    def step(self, turns):
        return turns.strip(), 0.0, True


class NoColumns(StepsByText):
    def reset(self):
        return "Go."


@pytest.mark.parametrize(
    ("world", "message"),
    [
        (NoColumns, r"`NoColumns.reset` failed when called with the row's columns as keywords: .* Add `\*\*row`"),
        (StepsByText, r"`StepsByText.step` failed when called with the round's list .* text is `turns\[-1\].text`"),
    ],
)
def test_methods_of_environments_with_other_arguments_are_named(model_folder, tmp_path, world, message):
    loop = EnvironmentLoop(world, agents=["reasoner", "actor"])
    with pytest.raises(RuntimeError, match=message):
        team_trainer(model_folder, tmp_path, workflow=loop, settings={"max_steps": 1}).train()


def test_metrics_that_fail_are_named(model_folder, tmp_path):
    data = tiny_dataset(8, seed=1)
    trainer = team_trainer(model_folder, tmp_path, eval_dataset=data, eval_metrics=[lambda answers: 1.0])
    with pytest.raises(TypeError, match=r"Raised by the metric `<lambda>`, called as `<lambda>\(answers, prompt, sol"):
        trainer.evaluate()


def test_arguments_of_an_experiment_are_checked(model_folder, tmp_path):
    valid = {"model": model_folder, "agents": tiny_agents(), "reward_funcs": texts, "train_dataset": tiny_dataset(8)}
    valid |= {"eval_dataset": tiny_dataset(8, seed=1), "args": MARFTConfig(str(tmp_path))}
    for wrong, message in (
        ({"args": {}}, "`args` of an `Experiment` must be a `MARFTConfig`, got dict"),
        ({"agents": ["a"]}, r"Write `AgentSpec\('a'\)`"),
        ({"model": 1}, "which each run loads, got int"),
        ({"eval_set": 1}, "`Experiment` has no argument `eval_set`"),
    ):
        with pytest.raises(TypeError, match=message):
            Experiment(**{**valid, **wrong})


def test_helpers_name_the_arguments_they_accept(tmp_path):
    for call, error, message in (
        (lambda: MARFTTrainer("x", reward_funcs=texts), TypeError, r"needs `agents`. Write `agents=\[AgentSpec"),
        (lambda: rehearse(OtherName, ["reasoner"], str), TypeError, r"takes a workflow object. Write `OtherName\(\)`"),
        (lambda: rehearse(OtherName(), "reasoner", str), TypeError, "takes a list of names and a function"),
        (lambda: rehearse(OtherName(), ["resoner"], lambda *_: None), TypeError, "the text of a turn, got None"),
        (lambda: scores("out"), TypeError, r"takes a list of runs, got a single run. Write `\['out'\]`"),
        (lambda: scores([tmp_path]), FileNotFoundError, "which evaluations write if `eval_k` is set"),
    ):
        with pytest.raises(error, match=message):
            call()


SETTINGS = {
    "num_generation": (4, "has no setting `num_generation`. Did you mean 'num_generations'?"),
    "preset": ("grop", "Did you mean 'grpo'?"),
    "learning_rate": ("fast", "`learning_rate` must be a number, got 'fast'"),
    "critic": ("shared", "Set `advantage='gae'`"),
    "max_staleness": (1, "Set `use_vllm=True`"),
    "dynamic_sampling": ("no", "`dynamic_sampling` must be True or False; got 'no'"),
    "mixed_passes": (True, "no longer has the setting `mixed_passes`: rows of several agents share passes in gener"),
    "max_prompt_length": (512, "prompts are not truncated"),
    "reward_weights": ({"f": 1.0}, "must be a list of numbers, one for each reward function"),
    "clip_agents": (1, "has no setting `clip_agents`"),
    "deepspeed": ("zero2.json", "does not support DeepSpeed, which reduces gradients"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_wrong_settings_are_named_with_a_fix(tmp_path, name):
    value, message = SETTINGS[name]
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        MARFTConfig(str(tmp_path), per_device_train_batch_size=8, **{name: value})


def test_a_conflict_with_a_preset_names_it(tmp_path):
    with pytest.raises(ValueError, match=r"`preset='marft-t'` sets `critic='frozen'`."):
        MARFTConfig(str(tmp_path), preset="marft-t", advantage="group", num_generations=8)


def test_wrong_agent_fields_are_named_with_a_fix():
    for field, message in {
        "lr": "`AgentSpec` has no argument `lr`. Did you mean 'learning_rate'?",
        "systemprompt": "Did you mean 'system_prompt'?",
        "frobnicate": "Its arguments are name, ",
    }.items():
        with pytest.raises(TypeError, match=message):
            AgentSpec("solver", **{field: 1})


@pytest.fixture(scope="module")
def folder(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "team"
    team_trainer(model_folder, folder).save_model()
    return folder


def test_questions_that_cannot_be_answered(model_folder, folder, tmp_path):
    team = Team.from_pretrained(folder, model=model_folder)
    assert isinstance(team([{"role": "user", "content": "1+1="}], greedy=True), str)
    assert team("1+1=", seed=3) == team({"prompt": "1+1="}, seed=3)
    assert len({team("1+1=", seed=seed) for seed in range(8)}) > 1
    assert len({team("1+1=", seed=seed, greedy=True) for seed in range(8)}) == 1
    assert len({team("1+1=", seed=seed, sampling={"top_k": 1}) for seed in range(8)}) == 1
    load = Team.from_pretrained
    for call, error, message in (
        (lambda: team(["1+1=", "2+2="]), TypeError, r"For several questions, use `team.run\(questions\)`"),
        (lambda: team([]), TypeError, "answers one question"),
        (lambda: team("  "), ValueError, "Prompt 0 of 1 is empty"),
        (lambda: team("1", max_new_tokens=1), TypeError, "no argument `max_new_tokens`. .* `max_completion_length`"),
        (lambda: team("1", temperature=1), TypeError, "Write `sampling={'temperature': ...}`"),
        (lambda: team.to("cuda"), AttributeError, r"`to`. .* 'Team.from_pretrained\(..., device=...\)'"),
        (lambda: team("1", greed=1), TypeError, r"`team\(question\)` has no argument .* Did you mean 'greedy'?"),
        (lambda: team.run("1+1="), TypeError, r"or call `team\(prompt\)`"),
        (lambda: team.run(["1+1=", ""], num_samples=2), ValueError, "Prompt 1 of 2 is empty"),
        (lambda: team("1", greedy=True, sampling={"top_k": 1}), ValueError, "`greedy=True` and `sampling` were both"),
        (lambda: load(folder, model=model_folder, replies=[len]), TypeError, "`replies` must map .*, got list"),
        (lambda: load_adapters(model_folder, folder), TypeError, "a loaded base model without adapters, .*, got str"),
        (lambda: load(folder), ValueError, "Pass its folder or the loaded model as `model=`"),
        (lambda: load("teem"), FileNotFoundError, "'teem' is not a local folder, and the team could not be loaded"),
        (lambda: team_trainer(str(folder), tmp_path), ValueError, "is the folder of a saved team. .*load_adapters"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_no_adapter_is_lost_in_silence(model_folder, folder, tmp_path, tokenizer, caplog):
    def make(agents, subfolder, peft_config=None):
        loaded = load_adapters(AutoModelForCausalLM.from_pretrained(model_folder), folder)
        arguments = {"agents": agents, "processing_class": tokenizer, "peft_config": peft_config}
        return team_trainer(loaded, tmp_path / subfolder, **arguments)

    reasoner, actor = tiny_agents()
    renamed = AgentSpec("planner", system_prompt=reasoner.system_prompt)
    trainer = make([renamed, actor], "renamed", peft_config=lora())
    assert "No agent uses the model's adapters 'reasoner', so they are neither trained nor saved." in caplog.text
    assert "`AgentSpec('planner', adapter='reasoner')`" in caplog.text
    assert re.search("planner: adapter planner, .* weights, fresh;", trainer.plan())
    assert re.search("actor: adapter actor, .* weights, loaded;", trainer.plan())
    trainer.save_model()
    saved = {path.parent.name for path in (tmp_path / "renamed").glob("*/adapter_config.json")}
    assert saved == {"planner", "actor"}

    caplog.clear()
    reused = make([AgentSpec("planner", system_prompt=reasoner.system_prompt, adapter="reasoner"), actor], "kept")
    assert "No agent uses" not in caplog.text
    assert re.search("planner: adapter reasoner, .* weights, loaded;", reused.plan())

    # A folder in which an earlier team was saved
    team_trainer(model_folder, tmp_path / "both").save_model()
    caplog.clear()
    make([actor], "both").save_model()
    assert "also has the adapters 'reasoner' of an earlier team" in caplog.text


def test_a_base_with_too_few_tokens_is_refused(model_folder, folder, tokenizer):
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    base.resize_token_embeddings(len(tokenizer) - 4)
    with pytest.raises(ValueError, match=r"Pass the base of training .* with the tokens that were added"):
        Team.from_pretrained(folder, model=base)


def test_a_base_model_is_the_first_warning(model_folder, tmp_path, tokenizer, caplog):
    tokenizer = type(tokenizer).from_pretrained(model_folder)
    tokenizer.chat_template = None
    team_trainer(model_folder, tmp_path, processing_class=tokenizer)
    first, second = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"][:2]
    assert "has no chat template, so the model is probably a base model" in first and "`-Instruct`" in first
    assert "its teammates may mistake for a message from another speaker" in second


def test_a_missing_server_is_reported_after_the_timeout(model_folder, tmp_path, caplog, monkeypatch):
    assert parse_addresses(None, "0.0.0.0", 8000) == ("http://127.0.0.1:8000",)  # noqa: S104
    ticks = itertools.count()  # the clock advances a second at each reading, however busy the machine is
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    monkeypatch.setattr(server, "_POLL_SECONDS", 0.0)
    settings = {"use_vllm": True, "vllm_server_timeout": 9.0, "vllm_server_port": 9}
    with pytest.raises(RuntimeError, match="127.0.0.1:9 within 9 seconds .*vllm_mode='colocate'"):
        team_trainer(model_folder, tmp_path, settings=settings)
    (message,) = [log.message for log in caplog.records if "Waiting for a vLLM server at http://127" in log.message]
    assert next(ticks) > 9 and "vllm_command" in message and "for up to 9 seconds" in message


def test_an_arm_without_any_reward_is_flagged_in_the_verdict():
    def solo_result(rewards, differ=False):
        difference = Interval(0.5, 0.4, 0.6, 3, 100)
        curves = [[[step, reward] for step, reward in enumerate(rewards)]]
        arm = Arm("solo", "one agent, trained")
        return {"solo": ArmResult(arm, difference, difference, 1.0, 1.0, curves, rewards_differ=differ)}

    (verdict,) = make_verdicts(solo_result([0.0, 0.0]), [], 0.02)
    assert "is better than one agent" in verdict and "one agent got a reward of 0 in every episode" in verdict
    for rewards, differ in (([0.0, 0.5], False), ([0.125], True)):
        (verdict,) = make_verdicts(solo_result(rewards, differ), [], 0.02)
        assert "in every episode" not in verdict


def test_the_card_says_how_the_team_was_trained(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path, settings={"max_steps": 1, "beta": 0.1})
    trainer.train()
    trainer.save_model()
    card = (tmp_path / "README.md").read_text()
    facts = ["| base model |", "| data | 64 rows |", "| reward functions | varied", "| optimizer steps | 1 |"]
    facts += ["| learning rate | 0.001 |", "advantage='group'", "--chat-template team/chat_template.jinja"]
    for fact in facts:
        assert fact in card.replace("\\", ""), fact
    assert "agents/reasoner/reward" not in card and "agents/reasoner/kl" in card  # the reward is the whole team's
