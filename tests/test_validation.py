"""Bad input raises before the first generation: what is wrong, the value, what is accepted, and the fix."""

import dataclasses
import functools
import math
import re
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer, Sequential, Team, Workflow
from marft_trl.config.dataset_checks import check_prompts
from marft_trl.config.marft_config import EngineSettings, EvaluationSettings, LimitSettings
from marft_trl.config.options import UNUSED, table
from marft_trl.rewards import (
    get_coder_reward,
    get_outcome_reward,
    get_planner_reward,
    get_solver_reward,
    get_verifier_reward,
)
from marft_trl.rollout.generator import SampledTurn
from marft_trl.rollout.reward_scorer import check_scores
from marft_trl.tiny import exact_answer, tiny_dataset
from marft_trl.trainer.setup import as_marft_config
from marft_trl.workflows import rehearse, together

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, IterableDataset, Value
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, HfArgumentParser, TrainerCallback
from trl import GRPOConfig

from .helpers import (
    by_hand,
    calling,
    config,
    logged_steps,
    lora,
    moved,
    moved_by_training,
    only_slice,
    team_trainer,
    varied_reward,
    weights,
)


@pytest.fixture
def no_generation(monkeypatch):
    def generate(*args, **kwargs):
        pytest.fail("generated before the error")

    monkeypatch.setattr(MARFTTrainer, "_generate_single_turn", generate)


def rows(prompts, **columns):
    return Dataset.from_dict({"prompt": prompts, **columns})


GOOD = ["How many?"] * 8
CHAT = [{"role": "user", "content": "How many?"}]
SILENT = {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        ([{"prompt": "x"}], TypeError, "`train_dataset` must be a `Dataset`.*list"),
        (rows([]), ValueError, "`train_dataset` is empty.*0 rows"),
        (rows(["one"]), ValueError, "has 1 prompts, but one generation batch needs 2"),
        (rows([*GOOD, None]), ValueError, "row 8 of `train_dataset` is None"),
        (rows(["a", " ", "b"]), ValueError, "row 1 of `train_dataset` is empty. Remove"),
        (rows([CHAT, []]), ValueError, "row 1 .*not a list of messages"),
        (rows([CHAT, [{"role": "user", "content": None}]]), ValueError, "row 1 .*'user' message without content"),
        (rows([1, 2, 3]), TypeError, "row 0 .*is a int"),
        (rows([CHAT, [*CHAT, SILENT, *CHAT]]), ValueError, "'assistant' message without"),
        (rows([CHAT, [{"role": None, "content": "x"}]]), ValueError, "row 1 .*the role None"),
        (rows([CHAT, [*CHAT, {"role": "assistant", "content": "2"}]]), ValueError, "row 1 .*ends with an assistant"),
        (rows(GOOD, image=GOOD), ValueError, "the column 'image'.*vision-language"),
        (rows(GOOD, turns=GOOD), ValueError, r"columns named \['turns'\]"),
    ],
)
def test_bad_datasets(model_folder, tmp_path, no_generation, dataset, error, message):
    with pytest.raises(error, match=message):
        team_trainer(model_folder, tmp_path, train_dataset=dataset)


def test_bad_eval_datasets(model_folder, tmp_path, no_generation):
    with pytest.raises(ValueError, match=r"row 0 of `eval_dataset\['hard'\]` is empty"):
        team_trainer(model_folder, tmp_path, eval_dataset={"easy": tiny_dataset(4), "hard": rows([""])})
    with pytest.raises(TypeError, match="`eval_dataset` must be"):
        team_trainer(model_folder, tmp_path, eval_dataset="test")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "yielded no full batch of prompts"),
        ([{"prompt": "x"}], "yielded no full batch of prompts"),
        ([{"q": "x"}] * 8, "There is no `prompt` in a row"),
        ([{"prompt": ""}] * 8, "The prompt in a row .*is empty"),
        ([{"prompt": "x"}, {"prompt": None}] * 4, "The prompt in a row .*is None"),
    ],
)
def test_faults_of_a_stream_are_found_when_training_reads_it(model_folder, tmp_path, rows, message):
    dataset = IterableDataset.from_generator(lambda: iter(rows))
    trainer = team_trainer(model_folder, tmp_path, train_dataset=dataset, settings={"shuffle_dataset": False})
    with pytest.raises(ValueError, match=message):
        trainer.train()


@pytest.mark.parametrize("settings", [{}, {"save_strategy": "steps", "save_steps": 1}], ids=["plain", "saves"])
def test_stream_rows_are_read_once_and_only_in_training(model_folder, tmp_path, settings):
    """A source may be slow, or give each row once."""
    read, source = [], iter(range(1000))

    def rows():
        for number in source:  # the same for each pass
            read.append(number)
            yield {"prompt": f"What is {number}+1?", "solution": "x"}

    scored = []

    def reward(prompts, completions, solution, **kwargs):
        scored.extend(prompts)
        return varied_reward(completions)

    dataset = IterableDataset.from_generator(rows)
    arguments = {"train_dataset": dataset, "reward_funcs": reward, "workflow": Own()}
    settings = {"max_steps": 3, "shuffle_dataset": False, **settings}
    trainer = team_trainer(model_folder, tmp_path, settings=settings, **arguments)
    assert read == []
    trainer.train()
    assert list(dict.fromkeys(scored)) == [f"What is {number}+1?" for number in range(len(set(scored)))]
    assert len(read) <= len(set(scored)) + 4 and len(set(scored)) == 6  # two prompts a step; the loader reads ahead


class Own(Workflow):
    async def run(self, episode):
        for agent in episode.agents[::-1]:
            await episode.turn(agent)


@pytest.mark.parametrize(
    ("agents", "error", "message"),
    [
        ([], ValueError, "`agents` is empty.*at least one agent"),
        (None, TypeError, "must be a list of `AgentSpec`, got NoneType"),
        ([AgentSpec("solver"), AgentSpec("solver")], ValueError, "the name 'solver'.*names must be unique"),
        ([AgentSpec("solver", trainable=False)], ValueError, "All agents have `trainable=False`.*Make at least one"),
        (
            [AgentSpec("one", adapter="both"), AgentSpec("two", adapter="both", trainable=False)],
            ValueError,
            "'one' and 'two' share the adapter 'both' but differ in `trainable`",
        ),
        ([AgentSpec("model")], ValueError, "'model'.*part of the parameter names"),
    ],
)
def test_bad_teams(model_folder, tmp_path, no_generation, agents, error, message):
    with pytest.raises(error, match=message):
        team_trainer(model_folder, tmp_path, agents=agents)


@pytest.mark.parametrize(
    "name", ["", "A", "1st", "a/b", "/tmp/x", "../x", "a.b", "x" * 49, "a b", "é", "default", "ref"]
)
def test_unsafe_names_are_refused(name):
    with pytest.raises(ValueError, match="cannot be the name of an agent"):
        AgentSpec(name)
    with pytest.raises(ValueError, match="cannot be the name of the adapter of agent 'solver'"):
        AgentSpec("solver", adapter=name)


@given(st.text(max_size=60))
def test_accepted_names_are_plain_folder_names(name):
    try:
        AgentSpec(name)
    except ValueError:
        return
    assert re.fullmatch(r"[a-z][a-z0-9_-]{0,47}", name)
    assert name not in {"default", "ref"} and not name.startswith("checkpoint-")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"temperature": 0}, ValueError, "`temperature` of agent 'solver' must be a number above 0, got 0"),
        ({"temperature": math.nan}, ValueError, "`temperature`"),
        ({"temperature": 10**400}, ValueError, "`temperature`"),
        ({"top_p": 1.5}, ValueError, r"`top_p`.*\(0, 1\]"),
        ({"min_p": -0.1}, ValueError, "`min_p`"),
        ({"max_completion_length": 0}, ValueError, "`max_completion_length`"),
        ({"learning_rate": -1.0}, ValueError, "`learning_rate`"),
        ({"learning_rate": math.inf}, ValueError, "`learning_rate`"),
        ({"system_prompt": 3}, TypeError, "`system_prompt` of agent 'solver'"),
        ({"trainable": 1}, TypeError, "`trainable` of agent 'solver'"),
        ({"stop": [""]}, TypeError, "`stop` of agent 'solver'"),
        ({"stop": [1]}, TypeError, "`stop` of agent 'solver'"),
        ({"top_k": 1.5}, TypeError, "`top_k` of agent 'solver'"),
        ({"temperature": "hot"}, TypeError, "`temperature` of agent 'solver'"),
    ],
)
def test_bad_fields_of_an_agent(settings, error, message):
    with pytest.raises(error, match=message):
        AgentSpec("solver", **settings)


def test_the_lora_configs_that_cannot_live_together(model_folder, tmp_path, no_generation):
    agents = [AgentSpec("one"), AgentSpec("two")]
    partly_configured = {"agents": [AgentSpec("one", peft_config=lora()), agents[1]], "peft_config": None}
    with_rate = {"agents": [AgentSpec("one", learning_rate=1e-4)], "peft_config": None}
    for arguments, error, message in (
        (partly_configured, ValueError, "Agent 'two' has no `peft_config`"),
        (with_rate, ValueError, "'one' sets `learning_rate`.*share one fully trained policy"),
        ({"peft_config": lora(init_lora_weights="pissa")}, ValueError, "'pissa'.*changes the weights of the base"),
        ({"peft_config": lora(modules_to_save=["norm"])}, ValueError, "modules_to_save"),
        ({"peft_config": PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2)}, ValueError, "prompt learning"),
        ({"peft_config": LoraConfig(r=2, target_modules=["lm_head"])}, ValueError, "lm_head"),
        ({"peft_config": lora(bias="all")}, ValueError, "'one' trains biases of the base"),
        ({"peft_config": {"r": 8}}, TypeError, "`peft_config` must be"),
    ):
        with pytest.raises(error, match=message):
            team_trainer(model_folder, tmp_path, **{"agents": agents, **arguments})
    loaded = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), lora(), adapter_name="other")
    with pytest.raises(ValueError, match=r"Agent 'one' uses the adapter 'one', but the model has only \['other'\]"):
        team_trainer(loaded, tmp_path, agents=agents, peft_config=None)
    with pytest.raises(ValueError, match="passed with a `PeftModel`, but no agent is new"):
        team_trainer(loaded, tmp_path, agents=[AgentSpec("other")])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"reward_funcs": None}, ValueError, "No reward source provided. Pass `reward_funcs`"),
        ({"reward_funcs": [3]}, TypeError, "must be a callable"),
        ({"workflow": Sequential}, TypeError, r"Pass an object: `workflow=MyWorkflow\(\)`"),
        ({"workflow": Sequential(["solver"])}, ValueError, "the agent 'solver', but the team's agents are 'reasoner'"),
        ({"args": {"output_dir": "x"}}, TypeError, "`args` must be a `MARFTConfig`"),
        ({"model": 3}, TypeError, "`model` must be the name or folder of a model"),
        ({"processing_class": "gpt2"}, TypeError, "`processing_class` must be a tokenizer"),
        ({"tools": [print]}, ValueError, "`print` of agent 'reasoner' cannot be described"),
        ({"rollout_func": print}, ValueError, "`rollout_func` is not supported.*workflow"),
        ({"environment_factory": print}, TypeError, "`NoneType` of `EnvironmentLoop` has no `reset`"),
        ({"eval_metrics": ["accuracy"]}, TypeError, "`eval_metrics` takes"),
        (
            {"settings": {"advantage": "rae", "num_generations": 1, "rae_column": "solutions"}},
            ValueError,
            r"`rae_column='solutions'` is not a column of `train_dataset`. Did you mean",
        ),
        (
            {"settings": {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}}},
            ValueError,
            "`accelerator_config` has `num_steps=2`.*Set only `gradient_acc",
        ),
    ],
)
def test_bad_arguments(model_folder, tmp_path, no_generation, arguments, error, message):
    with pytest.raises(error, match=message):
        team_trainer(**{"model": model_folder, "output_dir": tmp_path, **arguments})


def test_a_reward_that_needs_a_missing_column(model_folder, tmp_path, no_generation):
    def judge(completions, rubric, style="plain", **kwargs):
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match=r"`judge` needs \['rubric'\].*`train_dataset`.*\['prompt', 'solution'\]"):
        team_trainer(model_folder, tmp_path, reward_funcs=judge)
    with pytest.raises(ValueError, match=r"needs \['solution'\], but `eval_dataset` has the columns \['prompt'\]"):
        team_trainer(model_folder, tmp_path, reward_funcs=exact_answer, eval_dataset=rows(GOOD))
    settings, makers = {"credit": "per_step"}, (get_outcome_reward, get_planner_reward, get_solver_reward)
    for make in (*makers, get_coder_reward, get_verifier_reward):  # they call it for the outcome
        agents = [AgentSpec(name, reward_funcs=make(judge)) for name in ("reasoner", "actor")]
        with pytest.raises(ValueError, match=r"needs \['rubric'\], but `train_dataset`"):
            team_trainer(model_folder, tmp_path, agents=agents, settings=settings)

    @functools.wraps(agents[0].reward_funcs[0])
    def with_rubric(completions, **columns):
        return judge(completions, rubric=None)

    agents = [AgentSpec(name, reward_funcs=with_rubric) for name in ("reasoner", "actor")]
    team_trainer(model_folder, tmp_path, agents=agents, settings=settings)
    agents = [AgentSpec(name, reward_funcs=get_outcome_reward(exact_answer)) for name in ("reasoner", "actor")]
    message = r"`remove_unused_columns=True` keeps only the column `prompt`.*needs \['solution'\]"
    with pytest.raises(ValueError, match=message):
        team_trainer(model_folder, tmp_path, agents=agents, settings={**settings, "remove_unused_columns": True})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_generations": 1}, r"`num_generations=1` needs a critic"),
        ({"advantage": "agents"}, "Did you mean 'agent'"),
        ({"use_vllm": True, "vllm_structured_outputs_regex": "a*"}, "vllm_structured_outputs_regex` is not supported"),
        (
            {"use_vllm": True, "level": "action", "vllm_importance_sampling_mode": "token_mask"},
            "a turn is one action. Set it to 'sequence_mask'",
        ),
        ({"use_vllm": True, "loss_type": "vespo"}, "`loss_type='vespo'` needs `vllm_importance_sampling_mode="),
        ({"sync_ref_model": True}, "`sync_ref_model=True` has no effect with `beta=0.0`"),
        ({"top_entropy_quantile": 0.5, "level": "action"}, "trains only some tokens of a turn"),
        ({"level": "action", "beta": 0.1, "use_bias_correction_kl": True}, "by the ratio of the whole"),
        ({"use_policy_ratio": False, "target_kl": 0.1, "num_iterations": 2}, "`use_policy_ratio=False` disables"),
        ({"sequential_clip": 0.2}, "`sequential_clip=0.2` has no effect with `update_order='joint'`"),
        ({"sequential_clip": 0}, "`sequential_clip` must be a finite number above 0, or None for no clipping"),
        ({"advantage": "turn_itself", "candidate_samples": 2}, "`advantage='turn_itself'` scores candidates without"),
        ({"per_device_train_batch_size": 6}, "divisible by"),
        ({"on_episode_error": "skip", "credit": "counterfactual"}, "does not support candidates.*or re-runs"),
        # These would train on something else
        ({"generation_kwargs": {"num_return_sequences": 2}}, "num_return_sequences=2"),
        ({"generation_kwargs": {"stop_strings": ["x"]}}, r"AgentSpec\(stop=...\)"),
        ({"generation_kwargs": {"num_beam": 2}}, "`generation_kwargs` has 'num_beam', .* Did you mean 'num_beams'"),
        ({"advantage": "rae", "num_generations": 1, "rae_decay": 1.0}, "at 0 forever"),
        ({"advantage": "rae", "rae_column": "game", "remove_unused_columns": True}, "keeps only the column `prompt`"),
    ],
)
def test_bad_configs(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **settings)


OUT_OF_RANGE = {
    "max_completion_length": (0, ""), "max_tokens_per_micro_batch": (0, ""), "vllm_request_timeout": (0, ""),
    "fidelity_tolerance": (-1.0, ""), "temperature": (0.0, "above 0"), "max_episode_turns": (0, "above 0"),
    "top_p": (2.0, "of at most 1"), "min_p": (1.5, "of at most 1"),
    "reward_timeout": (0, "above 0, or None for no limit"), "max_skipped_share": (2.0, r"in \[0, 1\]"),
    "epsilon": (-1.0, "of at least 0"), "max_staleness": (1.5, "an integer"), "loss_type": ("grp0", "mean 'grpo'"),
    "scale_rewards": ("grop", "mean 'group'"), "context_overflow": ("cut", "one of"),
    "vllm_mode": ("sever", "mean 'server'"), "on_episode_error": ("skipp", "mean 'skip'"),
    "max_steps": ("2", "a number, got '2'"), "gradient_accumulation_steps": ("2", "a number, got '2'"),
    "learning_rate": ("2", "a number, got '2'"), "num_generations": ("2", "a number, got '2'"),
}  # fmt: skip


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_values_out_of_range_are_refused(tmp_path, name):
    value, words = OUT_OF_RANGE[name]
    with pytest.raises(ValueError, match=f"`{name}` must be .*{words}"):
        config(tmp_path, use_vllm=name == "vllm_mode", **{name: value})


@given(value=st.floats(), name=st.sampled_from(["learning_rate", "beta", "epsilon", "temperature", "max_grad_norm"]))
def test_configs_reject_numbers_out_of_range(value, name):
    is_valid = math.isfinite(value) and (value > 0 if name == "temperature" else value >= 0)
    if is_valid:
        assert getattr(config("x", **{name: value}), name) == value
    else:
        with pytest.raises(ValueError, match=name):
            config("x", **{name: value})


def test_conversion_keeps_the_values_of_a_grpo_config():
    source = GRPOConfig("x", learning_rate=3e-4, num_generations=4, per_device_train_batch_size=4, bf16=False)
    converted = as_marft_config(source, "m")
    assert isinstance(converted, MARFTConfig) and converted.learning_rate == 3e-4 and converted.advantage == "group"
    assert converted.generation_batch_size == source.generation_batch_size
    source.use_vllm, source.vllm_tensor_parallel_size = True, 2
    with pytest.raises(ValueError, match="vllm_mode='colocate'"):  # TRL's default
        as_marft_config(source, "m")
    source.vllm_tensor_parallel_size = 1
    assert (as_marft_config(source, "m").vllm_mode, as_marft_config(source, "m").use_vllm) == ("colocate", True)


@pytest.mark.parametrize("settings", [{}, {"loss_type": "cispo"}, {"importance_sampling_level": "sequence"}], ids=str)
def test_a_grpo_config_is_completed_and_checked_as_a_marft_config(settings):
    """Settings that are left out get the same values from both classes."""
    common = {"learning_rate": 3e-4, "num_generations": 4, "per_device_train_batch_size": 4, "bf16": False, **settings}
    marft_settings = {"loss_type": "dapo", **common}
    direct, converted = MARFTConfig("x", **marft_settings), as_marft_config(GRPOConfig("x", **common), "m")
    differing = {name for name in vars(direct) if getattr(direct, name) != getattr(converted, name, "missing")}
    checkpointing = {"gradient_checkpointing", "activation_checkpointing"}
    assert differing <= {"given", "vllm_mode", "distributed_state", *checkpointing}
    assert converted.skip_rows_without_signal is True
    for invalid in ({"rae_decay": 1.5}, {"eval_k": [0]}, {"turn_candidates": 0}):
        grpo_config = GRPOConfig("x", **common)
        vars(grpo_config).update(invalid)
        with pytest.raises((ValueError, TypeError), match=next(iter(invalid))):
            as_marft_config(grpo_config, "m")


def test_cispo_bounds_ratios_above_one(tmp_path, caplog):
    """TRL's default, `epsilon`, would be the weight of every token: a fifth of the gradient."""
    assert config(tmp_path, loss_type="cispo").epsilon_high == 5.0
    assert "`epsilon_high`, the maximum ratio, to 5.0" in caplog.text
    assert config(tmp_path, loss_type="cispo", epsilon_high=3.0).epsilon_high == 3.0
    assert config(tmp_path, loss_type="dapo").epsilon_high is None
    with pytest.raises(ValueError, match="`epsilon_high=0.2` is the maximum ratio"):
        config(tmp_path, loss_type="cispo", epsilon_high=0.2)


def test_beams_are_warned_of_once(model_folder, tmp_path, caplog):
    settings = {"generation_kwargs": {"num_beams": 2}}
    trainer = team_trainer(model_folder, tmp_path, settings=settings)
    assert trainer.parts.runner.generator.settings("actor")["num_beams"] == 2
    warnings = [r.message for r in caplog.records if "num_beams" in r.message]
    assert [text.count("beam search returns the most likely turn") for text in warnings] == [1]
    config(tmp_path, generation_kwargs={"num_beams": 1})
    assert caplog.text.count("beam search returns") == 1


def test_dictionaries_on_a_command_line():
    arguments = ["--output_dir", "x", "--eval_sampling", '{"temperature": 0.5}']
    arguments += ["--resume_changes", '{"accept": ["seed"]}', "--generation_kwargs", '{"max_time": 9}']
    (parsed,) = HfArgumentParser((MARFTConfig,)).parse_args_into_dataclasses(arguments)
    assert parsed.eval_sampling == {"temperature": 0.5} and parsed.resume_changes == {"accept": ["seed"]}
    assert parsed.generation_kwargs == {"max_time": 9}


def test_a_subclass_with_other_defaults_keeps_the_rules(tmp_path):
    @dataclasses.dataclass
    class Ours(MARFTConfig):
        advantage: str = "gae"
        critic: str | None = "shared"
        learning_rate: float = 1e-4

    assert Ours(str(tmp_path), gae_lambda=0.9, use_cpu=True).gae_lambda == 0.9
    with pytest.raises(ValueError, match="`learning_rate` must be a finite number of at least 0"):
        Ours(str(tmp_path), learning_rate=-1.0, use_cpu=True)
    with pytest.raises(ValueError, match="`advantage` must be one of"):
        Ours(str(tmp_path), advantage="gea", use_cpu=True)


def test_new_fields_are_documented_with_their_defaults():
    documented = MARFTConfig.__doc__ + EngineSettings.__doc__ + LimitSettings.__doc__ + EvaluationSettings.__doc__
    grpo_fields = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    for field in dataclasses.fields(MARFTConfig):
        if field.name in grpo_fields and field.default == grpo_fields[field.name].default:
            continue
        match = re.search(rf"^        {field.name} \((.+?)\):$", documented, re.MULTILINE)
        assert match, f"{field.name} is missing in the docstring"
        default = f'"{field.default}"' if isinstance(field.default, str) else str(field.default)
        assert f"defaults to `{default}`" in re.sub(r"e-(\d)\b", r"e-0\1", match[1]), field.name
        assert field.metadata["help"] and "%" not in field.metadata["help"].replace("%%", "")


# ---- Scores ----


@pytest.mark.parametrize(
    ("scores", "error", "message"),
    [
        (None, TypeError, "`judge` returned a NoneType"),
        ("ab", TypeError, "returned a str"),
        ([1.0, [2.0]], TypeError, "for completion 1"),
        ([1.0, math.nan], ValueError, "returned nan for completion 1"),
        ([1.0, 10**400], ValueError, "returned inf for completion 1"),
        ([1.0, np.int64(-(2**63))], ValueError, "for completion 1"),
        ([math.inf, 1.0], ValueError, "returned inf for completion 0"),
        ([2e15, 1.0], ValueError, r"returned 2000000000000000.0 for completion 0.*at most 1e[+]15"),
        (torch.zeros(2, 1), TypeError, r"Tensor of shape \(2, 1\)"),
        (torch.tensor([0.0, math.nan]), ValueError, "returned nan for completion 1"),
    ],
)
def test_bad_scores(scores, error, message):
    with pytest.raises(error, match=message):
        check_scores(scores, "judge", 2)


def test_good_scores():
    numbers = [np.float32(1), torch.tensor(2.0)]
    for scores in ([1, True], (1.0, None), np.array([1.0, 2.0]), torch.tensor([1, 2]), numbers):
        assert len(check_scores(scores, "judge", 2)) == 2


@pytest.mark.parametrize(("bad", "asynchronous"), [(math.nan, False), ("1", True)])
def test_a_bad_score_ends_training_with_the_weights_as_they_were(model_folder, tmp_path, bad, asynchronous):
    def now(completions, **kwargs):
        return [*varied_reward(completions)[:-1], bad]

    async def later(completions, **kwargs):
        return now(completions)

    trainer = team_trainer(model_folder, tmp_path, reward_funcs=later if asynchronous else now)
    before = weights(trainer)
    with pytest.raises((ValueError, TypeError), match="for completion 7"):
        trainer.train()
    assert not moved(before, weights(trainer))


def test_none_throughout_trains_nothing_and_none_for_some_is_counted(model_folder, tmp_path, caplog):
    def nothing(completions, **kwargs):
        return [None] * len(completions)

    def some(completions, **kwargs):
        return [None, *varied_reward(completions)[1:]]

    settings = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    arguments = {"reward_funcs": nothing, "eval_dataset": tiny_dataset(2, seed=1), "settings": settings}
    throughout = team_trainer(model_folder, tmp_path, **arguments)
    before = weights(throughout)
    throughout.train()
    assert not moved(before, weights(throughout))
    assert [step["frac_unscored"] for step in logged_steps(throughout)] == [1.0, 1.0]
    assert "following kwargs:\n" not in caplog.text  # TRL's message continues with the row
    assert "All reward functions returned None for 8 of 8 episodes" in caplog.text
    trainer = team_trainer(model_folder, tmp_path, reward_funcs=[some, nothing], settings={"max_steps": 1})
    trainer.train()
    assert {step["frac_unscored"] for step in logged_steps(trainer)} == {1 / 8}


def test_rewards_cannot_reach_into_the_trainers_lists(model_folder, tmp_path):
    def vandal(prompts, completions, completion_ids, solution, turns, **kwargs):
        scores = varied_reward(completions)
        for inner in (*completion_ids, *turns):
            inner.pop()
        for values in (prompts, completions, completion_ids, solution, turns):
            values.clear()
        return scores

    trainer = team_trainer(model_folder, tmp_path, reward_funcs=[vandal, varied_reward])
    sampled, trained = [], []
    generate, roll = calling(trainer.parts.runner.generator.generate), trainer.parts.batch_maker.for_training

    def spy_generate(agents, prompt_ids):
        completions = generate(agents, prompt_ids)
        sampled.extend(tuple(completion.ids) for completion in completions)
        return completions

    def spy_roll(inputs):
        slices = roll(inputs)
        trained.extend(tuple(row.completion_ids.tolist()) for slice_ in slices for row in slice_.rows)
        return slices

    trainer.parts.runner.generator.generate, trainer.parts.batch_maker.for_training = by_hand(spy_generate), spy_roll
    trainer.train()
    assert sorted(sampled) == sorted(trained) and len(sampled) == 2 * 16
    assert all(step["rewards/vandal/mean"] == step["rewards/varied_reward/mean"] for step in logged_steps(trainer))


def test_a_reward_model_scores_the_team(model_folder, tmp_path, tokenizer):
    torch.manual_seed(0)
    judge = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1)
    trainer = team_trainer(model_folder, tmp_path, reward_funcs=judge, reward_processing_classes=tokenizer)
    assert moved_by_training(trainer)
    torch.nn.init.constant_(judge.score.weight, math.inf)
    with pytest.raises(ValueError, match="reward model .* NaN or infinite"):
        team_trainer(model_folder, tmp_path, reward_funcs=judge, reward_processing_classes=tokenizer).train()


# ---- During training ----


def test_an_observation_longer_than_the_window(model_folder, tmp_path):
    agents = [AgentSpec("reasoner", max_completion_length=24), AgentSpec("actor", max_completion_length=6)]

    def trainer(window=70, **settings):
        settings |= {"max_steps": 1, "model_init_kwargs": {"max_position_embeddings": window}}
        workflow = Sequential(rounds=3)
        return team_trainer(model_folder, tmp_path, agents=agents, workflow=workflow, settings=settings)

    with pytest.raises(ValueError, match=r"window is 70 tokens \(. turns.*fewer turns.*'drop_oldest_turn'`, set"):
        trainer().train()
    with pytest.raises(ValueError, match=r"\(0 turns shown\)\. Lower `max_completion_length`, set .*'end_episode'"):
        trainer(20).train()
    cutting = trainer(context_overflow="drop_oldest_turn")
    cutting.train()
    assert logged_steps(cutting)[0]["context/dropped_turns"] > 0


def test_a_model_of_another_trainer_is_no_bare_base(model_folder, tmp_path, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    team_trainer(model, tmp_path, processing_class=tokenizer)
    with pytest.raises(ValueError, match="already has adapter layers"):
        team_trainer(model, tmp_path, processing_class=tokenizer)


def test_an_adapter_that_a_user_has_activated_changes_nothing_of_training(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path)
    trainer.model.set_adapter(trainer.policies.trained[-1])  # which leaves only this adapter with `requires_grad`
    groups = trainer.create_optimizer().param_groups
    trained = [weight for name in trainer.policies.trained for weight in trainer.policies.parameters(name).values()]
    assert {id(weight) for group in groups for weight in group["params"]} == set(map(id, trained))


def test_dropout_between_scoring_and_training_is_named(model_folder, tmp_path, caplog):
    agents = [AgentSpec("left", peft_config=lora(lora_dropout=0.1)), AgentSpec("right", peft_config=lora())]
    for harmless in ({}, {"num_iterations": 2, "disable_dropout": True}):
        team_trainer(model_folder, tmp_path, agents=agents, settings=harmless)
    assert "dropout" not in caplog.text
    team_trainer(model_folder, tmp_path, agents=agents, settings={"num_iterations": 2})
    (message,) = [record.message for record in caplog.records if "dropout" in record.message]
    assert message.startswith("`lora_dropout=0.1` of agent 'left', with `num_iterations=2, steps_per_generation=1`: ")


def test_an_empty_completion_is_a_valid_turn(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path, settings={"loss_type": "grpo", "beta": 0.1})
    generate = calling(trainer.parts.runner.generator.generate)

    def sometimes_nothing(agents, prompt_ids):
        return [SampledTurn([]) if i % 3 == 0 else turn for i, turn in enumerate(generate(agents, prompt_ids))]

    trainer.parts.runner.generator.generate = by_hand(sometimes_nothing)
    assert moved_by_training(trainer)
    assert all(math.isfinite(step["loss"]) for step in logged_steps(trainer))

    trainer = team_trainer(model_folder, tmp_path)
    trainer.parts.runner.generator.generate = by_hand(lambda agents, prompt_ids: [SampledTurn([]) for _ in agents])
    assert not moved_by_training(trainer)


def test_stop_texts_end_a_turn_and_stay_in_it(model_folder, tmp_path):
    agents = [AgentSpec("reasoner", stop="=", max_completion_length=24, system_prompt="Write the steps.")]
    settings = {"mask_truncated_completions": True, "per_device_train_batch_size": 16}
    trainer = team_trainer(model_folder, tmp_path, agents=agents, settings=settings)
    rows = only_slice(trainer, [row for row in tiny_dataset(4).to_list() for _ in range(4)]).rows
    texts = [trainer.processing_class.decode(row.completion_ids) for row in rows]
    assert all(text.count("=") <= 1 and (text.endswith("=") or "=" not in text) for text in texts)
    stopped = [row for row, text in zip(rows, texts, strict=True) if text.endswith("=")]
    assert stopped and all(row.counts for row in stopped)  # ended by itself, not truncated
    assert trainer.processing_class.pad_token_id not in {i for row in stopped for i in row.completion_ids.tolist()}


def test_prompts_of_two_kinds_are_not_mixed():
    check_prompts([{"prompt": "x"}, {"prompt": "y"}], "d", 0)
    with pytest.raises(ValueError, match="row 1 of `d` is a list of messages, but the first prompt is text"):
        check_prompts([{"prompt": "x"}, {"prompt": CHAT}], "d", 0)


def test_remote_code_is_not_trusted_by_default(tmp_path, monkeypatch):
    """Only if the user asks for it in the arguments, as in TRL."""
    load_calls = []

    def load(name, **kwargs):
        load_calls.append(kwargs)
        raise KeyError

    monkeypatch.setattr("marft_trl.trainer.setup.create_model_from_path", load)
    with pytest.raises(KeyError):
        team_trainer("somebody/some-model", tmp_path)
    assert config(tmp_path).trust_remote_code is False and not load_calls[0].get("trust_remote_code")


def test_luspo_by_turns_does_not_warn(model_folder, tmp_path, caplog):
    team_trainer(model_folder, tmp_path, settings={"level": "action", "loss_type": "luspo"})
    assert "importance_sampling_level" not in caplog.text


def test_settings_without_effect_warn_and_are_documented(model_folder, tmp_path, caplog):
    team_trainer(model_folder, tmp_path)
    assert "has no effect" not in caplog.text
    settings = {"data_seed": 3, "pad_to_multiple_of": 16, "log_multimodal": False}
    team_trainer(model_folder, tmp_path, settings=settings)
    assert set(re.findall(r"`(\w+)=[^`]*` has no effect", caplog.text)) == settings.keys()
    caplog.clear()
    team_trainer(model_folder, tmp_path, settings={"pad_to_multiple_of": 16, "share_prefixes": False})
    settings = {"eval_strategy": "steps", "per_device_eval_batch_size": 8}  # which sets `do_eval`
    team_trainer(model_folder, tmp_path, settings=settings, eval_dataset=tiny_dataset(8))
    # Defaults of TRL, and settings that only scripts read
    args = GRPOConfig(str(tmp_path), max_steps=1, report_to=[], use_cpu=True, bf16=False, do_train=True, do_eval=True)
    team_trainer(model_folder, tmp_path, args=args)
    assert "has no effect" not in caplog.text
    assert table() in (Path(__file__).parent.parent / "docs" / "reference" / "settings.md").read_text()
    assert UNUSED.keys() <= {field.name for field in dataclasses.fields(MARFTConfig)}


def test_removed_settings_name_their_replacement(tmp_path):
    message = "no longer has the setting `collapse_window`: `eval_reward` is compared with the best evaluation so far."
    with pytest.raises(TypeError, match=message):
        MARFTConfig(str(tmp_path), collapse_window=1)


def test_settings_for_other_launchers_are_ignored_with_a_warning(tmp_path, caplog):
    args = config(tmp_path, enable_jit_checkpoint=True, ddp_backend="gloo")
    assert not args.enable_jit_checkpoint and args.ddp_backend is None
    assert "`enable_jit_checkpoint=True` has no effect" in caplog.text
    assert "`ddp_backend='gloo'` has no effect with a single process" in caplog.text


@pytest.mark.parametrize("name", ["steps_per_generation", "num_generations"])
def test_callbacks_that_change_the_batch_are_refused(model_folder, tmp_path, name):
    class Changes(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 1:
                setattr(args, name, 8)

    trainer = team_trainer(model_folder, tmp_path, callbacks=[Changes()])
    with pytest.raises(RuntimeError, match=f"`{name}` changed from [124] to 8"):
        trainer.train()


@pytest.mark.parametrize("role", ["usr", "User", "human", "", 3, None])
def test_roles_that_no_template_has_are_refused(role):
    row = {"prompt": [{"role": role, "content": "x"}]}
    hint = {"usr": " Did you mean 'user'", "human": " Roles are 'user', 'assistant', 'system', 'tool'"}.get(role, "")
    with pytest.raises(ValueError, match=f"role {role!r}, which is not a known role.{hint}|not a list of messages"):
        check_prompts([row], "train_dataset", start=0)
    for accepted_role in ("user", "developer", "tool", "ipython"):
        check_prompts([{"prompt": [{"role": accepted_role, "content": "x"}]}], "train_dataset", start=0)


def test_names_of_reward_functions_are_not_taken_for_models(model_folder, tmp_path):
    for name in ("accuracy_reward", "math_reward"):  # of TRL and ours
        with pytest.raises(ValueError, match=f"'{name}'` is the name of a reward function.*Import the function"):
            team_trainer(model_folder, tmp_path, reward_funcs=name)
    for name, message in (("./acuracy_reward", "`reward_funcs='./"), ("a/b/acuracy_reward", "mean 'accuracy_reward'")):
        with pytest.raises(FileNotFoundError, match=message):
            team_trainer(model_folder, tmp_path, reward_funcs=name)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.turn("a", temperature=0.2), r"`temperature`. Set it on the agent: `AgentSpec\(name, temperature"),
        (lambda e: e.turn(AgentSpec("a")), "names the agent 'AgentSpec', .* Pass the name of the agent: 'a'"),
        (lambda e: together(e.turn("a"), e.turn("a")), "`together` takes one list of turns"),
    ],
)
def test_workflow_mistakes_raise_errors_with_a_fix(call, message):
    class Own(Workflow):
        async def run(self, episode):
            await call(episode)

    with pytest.raises(Exception, match=message) as raised:
        rehearse(Own(), ["a"], lambda agent, seen: "x")
    assert "Traceback" not in str(raised.value)


def test_loading_a_run_folder_names_the_latest_checkpoint(model_folder, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    team_trainer(model_folder, tmp_path / "run", settings=settings).train()
    message = "has no marft_team.json, which `trainer.save_model..` writes. Its latest saved team is .*checkpoint-2"
    with pytest.raises(FileNotFoundError, match=message):
        Team.from_pretrained(tmp_path / "run")
    with pytest.raises(TypeError, match="no argument `device`. Load the base with it"):
        Team.from_pretrained(tmp_path / "run", device="cuda")


class Reads(Workflow):
    async def run(self, episode):
        for agent in episode.row["order"]:
            await episode.turn(agent)


@pytest.mark.parametrize("columns", [Features({"prompt": Value("string"), "order": [Value("string")]}), None])
def test_neither_checks_nor_links_read_a_stream(model_folder, tmp_path, columns):
    read = []

    def rows():
        read.append(1)
        yield {"prompt": "What is 1+1?", "order": ["actor", "reasoner"]}

    dataset = IterableDataset.from_generator(rows, features=columns)
    trainer = team_trainer(model_folder, tmp_path, train_dataset=dataset, reward_funcs=varied_reward, workflow=Reads())
    assert trainer.parts.planner.links() == [] and read == []
