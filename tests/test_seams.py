"""What we override, call or rely on in TRL and transformers. A new version that breaks one of them fails one test."""

import ast
import contextlib
import functools
import inspect
import itertools
import json
import logging
import math
import os
import re
import warnings
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import marft_trl
from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer, seams
from marft_trl.algorithms.rows import Row
from marft_trl.config.team_setup import Sampling
from marft_trl.learning.batching import collate
from marft_trl.seams import libraries, models, runs
from marft_trl.seams import trl as of_trl
from marft_trl.seams.generation import TrlEngine, forward_in_precision, generating_by, get_pad_token
from marft_trl.seams.libraries import TESTED, installed_version, release
from marft_trl.seams.swapping import swapped, swapped_in_module
from marft_trl.shared_prefix.forward import hidden_states

import pytest
import torch
from accelerate import PartialState
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.utils import gather
from datasets import Dataset, IterableDataset
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, Trainer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer
from trl.trainer.utils import RepeatSampler, add_fused_lm_head

from .helpers import config, lora, team_trainer


# Names of the parameters after `self`
PARAMETERS = {
    (GRPOTrainer, "_prepare_inputs"): "generation_batch",
    (GRPOTrainer, "_generate_and_score_completions"): "inputs",
    (GRPOTrainer, "_generate_single_turn"): "prompt_ids images multimodal_fields num_generations has_tool_images",
    (GRPOTrainer, "_tokenize_prompts"): "prompts",
    (GRPOTrainer, "_calculate_rewards"): "inputs prompts completions completion_ids_list",
    (GRPOTrainer, "_compute_loss"): "model inputs",
    (GRPOTrainer, "compute_loss"): "model inputs return_outputs num_items_in_batch",
    (GRPOTrainer, "training_step"): "model inputs num_items_in_batch",
    (GRPOTrainer, "prediction_step"): "model inputs prediction_loss_only ignore_keys",
    (GRPOTrainer, "log"): "logs start_time",
    (GRPOTrainer, "_get_train_sampler"): "dataset",
    (GRPOTrainer, "_load_optimizer_and_scheduler"): "checkpoint",
    (GRPOTrainer, "create_model_card"): "model_name dataset_name tags",
    (Trainer, "create_optimizer"): "model",
    (Trainer, "_clip_grad_norm"): "model",
    (Trainer, "_get_grad_norm"): "model grad_norm",
    (Trainer, "_save"): "output_dir state_dict",
    (Trainer, "_save_rng_state"): "output_dir",
    (Trainer, "_save_checkpoint"): "model trial",
    (Trainer, "_get_dataloader"): "dataset description batch_size sampler_fn is_training dataloader_key",
    (Trainer, "_maybe_log_save_evaluate"): (
        "tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time learning_rate"
    ),
    (Trainer, "_finalize_training"): "trial num_train_samples start_time",
    (Trainer, "_run_epoch"): (
        "model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial ignore_keys_for_eval "
        "start_time resume_from_checkpoint epochs_trained steps_trained_in_current_epoch"
    ),
    (Trainer, "_load_from_checkpoint"): "resume_from_checkpoint model",
    (Trainer, "_load_best_model"): "",
    (Trainer, "_push_from_checkpoint"): "checkpoint_folder",
    (Trainer, "_finish_current_push"): "",
}


@pytest.mark.parametrize(("owner", "name"), PARAMETERS, ids=lambda value: getattr(value, "__name__", value))
def test_the_method_has_the_parameters_we_know(owner, name):
    assert list(inspect.signature(getattr(owner, name)).parameters) == ["self", *PARAMETERS[owner, name].split()]


# ---- Versions ----


def test_versions_are_those_that_were_read():
    """`release`, `newer_than_tested`: what is installed here is at least the lowest that works."""
    for name, (lowest, newest) in TESTED.items():
        assert release(lowest) <= release(version(name)) and release(lowest) <= release(newest), name
    assert not libraries.newer_than_tested() or os.environ.get("MARFT_NEWEST"), "raise `TESTED` if the tests pass"
    assert installed_version("marft-trl") == marft_trl.__version__ and installed_version("trl") == version("trl")
    assert installed_version("no-such-package") is None


def test_newer_versions_warn_once_and_are_not_refused(monkeypatch, model_folder, tmp_path, caplog):
    monkeypatch.setitem(TESTED, "trl", ("1.0", "1.1"))
    monkeypatch.setitem(TESTED, "no-such-package", ("1.0", "1.1"))
    libraries.warn_of_newer_versions.cache_clear()
    for folder in ("one", "two"):
        team_trainer(model_folder, tmp_path / folder)
    assert caplog.text.count(f"has not been tested with trl {version('trl')} (tested up to 1.1). It is likely") == 1
    assert release("2.13.0+cpu") == (2, 13) and release("1.17rc1") == (1, 17) and release("1.10.dev0") == (1, 10)


def test_checkpointing_has_either_name():
    """Of `checkpointing_fields` and `is_checkpointing`."""
    old, new = SimpleNamespace(is_gradient_checkpointing=True), SimpleNamespace(is_activation_checkpointing=False)
    assert models.is_checkpointing(old) and not models.is_checkpointing(new)
    assert "gradient_checkpointing" in libraries.checkpointing_fields(MARFTConfig("x"))
    assert libraries.checkpointing_fields(SimpleNamespace(gradient_checkpointing=None)) == ["gradient_checkpointing"]


def test_shared_arguments_have_the_names_and_the_order_of_grpo_trainer():
    trl_arguments = list(inspect.signature(GRPOTrainer.__init__).parameters)
    arguments = list(inspect.signature(MARFTTrainer.__init__).parameters)
    assert arguments[: len(trl_arguments)] == trl_arguments
    team_arguments = ["agents", "workflow", "critic_peft_config", "view", "eval_metrics", "eval_vote", "anonymous"]
    assert arguments[len(trl_arguments) :] == team_arguments


def test_the_loss_gathers_only_through_local_calls():
    """No collective may run inside a micro-batch. TRL's loss may only use accelerator attributes that are replaced."""
    source = inspect.getsource(GRPOTrainer._compute_loss) + inspect.getsource(GRPOTrainer.get_high_entropy_mask)
    called = {*re.findall(r"self\.accelerator\.(\w+)", source)}
    local = {"gather", "gather_for_metrics", "reduce", "pad_across_processes", "num_processes", "sync_gradients"}
    assert "gather" in called and called <= local


def test_the_metrics_of_the_loss_are_those_we_join():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    names = {part.split('"')[0] for part in source.split('self._metrics[mode]["')[1:]}
    assert names == {
        *("policy_loss", "entropy_coef", "aux_loss", "kl", "entropy", "cispo_clip_ratio", "vespo/phi_seq_mean"),
        *(f"clip_ratio/{figure}" for figure in ("low_mean", "high_mean", "region_mean", "low_min", "high_max")),
    }


# ---- Each entry of `seams` ----


def test_LossType_table_has_the_names_and_metrics_of_the_parent():
    """Read from TRL's source. That micro-batches add up to TRL's loss of all rows is tested in `test_batching.py`."""
    source = inspect.getsource(GRPOTrainer._compute_loss)
    branches = re.split(r"if self\.loss_type (?:==|in) ", source)[1:]
    named = [(re.findall(r'"(\w+)"', branch.split(":")[0]), branch) for branch in branches]
    assert {name for names, _ in named for name in names} == set(of_trl.LOSSES)
    logged: dict[str, list[str]] = {name: [] for name in of_trl.LOSSES}
    for names, branch in named:
        for name in names:
            logged[name] += re.findall(r'_metrics\[mode\]\["((?:clip_ratio|cispo|vespo)[^"]*)"\]', branch)
    assert logged == {name: list(loss.metrics) for name, loss in of_trl.LOSSES.items()}
    divided = {name: branch for names, branch in named for name in names if "policy_loss = loss" in branch}
    by_tokens = {name for name, code in divided.items() if "num_items_in_batch" in code or "/ mask.sum()" in code}
    assert {name for name, loss in of_trl.LOSSES.items() if not loss.is_row_mean} == by_tokens < set(divided)


def test_every_entry_has_a_test_that_names_it():
    trees = [ast.parse(path.read_text()) for path in Path(seams.__file__).parent.glob("*.py")]
    names = {n.name for tree in trees for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    words = {word for path in Path(__file__).parent.glob("test_*.py") for word in re.findall(r"\w+", path.read_text())}
    for name in names:
        assert name.startswith("_") or name in words or any(word.startswith(f"test_{name}") for word in words), name


@pytest.fixture  # per test: arguments of a newer trainer take the state of accelerate from an older trainer
def trainer(model_folder, tmp_path_factory):
    return team_trainer(model_folder, tmp_path_factory.mktemp("seams"))


def tensors_of(trainer, advantage=1.0):
    """Two rows of the agent `actor`, as tensors of the loss."""
    row = Row("actor", "actor", torch.tensor([5, 6, 7]), torch.tensor([8, 9, 10]), advantage=advantage)
    tensors = collate([row, row], trainer.processing_class.pad_token_id, None, trainer.accelerator.device)
    return {**tensors, "num_items_in_batch": torch.tensor(6.0)}


def test_TrlLoss_reads_old_log_probabilities_after_computing_new_ones(trainer):
    """Action level relies on this: `inputs["old_per_token_logps"]` may be set while TRL computes log-probabilities."""
    trainer.model.eval()
    trainer.policies.activate("actor")
    losses = []
    for shift in (None, 1.0, -1.0):
        inputs = tensors_of(trainer)

        def transform(logps, entropies, inputs=inputs, shift=shift):
            if shift is not None:
                inputs["old_per_token_logps"] = logps.detach() - shift
            return logps, entropies

        with trainer.parts.log_probs.transformed(transform), torch.no_grad():
            loss, metrics = of_trl.TrlLoss(trainer)(trainer.model, inputs, entropy_coef=0.0, max_completion_length=16)
        losses.append(loss.item())
        assert "entropy" in metrics and not trainer.parts.state.metrics["eval"]
    # A ratio of 1, of e (clipped at 1.2) and of 1/e
    assert losses == pytest.approx([-1.0, -1.2, -math.exp(-1.0)], rel=1e-4)


def test_swapped_attributes_are_restored_after_errors(trainer, model_folder):
    """Class attributes are class attributes again, also when TRL raises."""
    before, model_before = dict(trainer.__dict__), dict(trainer.model.__dict__)
    with pytest.raises(KeyError):
        of_trl.TrlLoss(trainer)(trainer.model, {}, entropy_coef=0.0, max_completion_length=16)
    with pytest.raises(ZeroDivisionError), of_trl.TrlRewards(trainer).locally([len]):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), of_trl.logging_completions(trainer, True):
        assert trainer.num_completions_to_print == 0
        raise ZeroDivisionError
    engine = TrlEngine(trainer, Sampling.from_agent(AgentSpec("solo"), trainer.args).as_generation_kwargs())
    with pytest.raises(Exception, match="."):
        engine.generate([[10**9]], engine.settings(Sampling.from_agent(AgentSpec("solo"), trainer.args)), {})
    with pytest.raises(ZeroDivisionError), swapped(trainer, {"get_high_entropy_mask": None, "beta": 7.0}):
        assert trainer.beta == 7.0 and trainer.get_high_entropy_mask is None
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), swapped_in_module(grpo_trainer, {"gather": None}):
        assert grpo_trainer.gather is None
        raise ZeroDivisionError
    assert trainer.__dict__.keys() == before.keys() and "get_high_entropy_mask" not in trainer.__dict__
    assert all(trainer.__dict__[name] is value for name, value in before.items())
    assert trainer.model.__dict__.keys() == model_before.keys() and grpo_trainer.gather is gather


def test_TrlSettings_are_read_when_they_are_used(trainer):
    settings = of_trl.TrlSettings(trainer)
    changed = {"beta": 0.5, "loss_type": "bnpo", "scale_rewards": "none", "top_entropy_quantile": 0.3}
    changed |= {"mask_truncated_completions": True, "log_completions": True, "num_completions_to_print": 2}
    for name, value in {**changed, "multi_objective_aggregation": "normalize_then_sum"}.items():
        setattr(trainer, name, value)
        assert getattr(settings, name) == value
    trainer.num_generations, trainer.num_generations_eval = 8, 3
    assert not settings.aux_loss_enabled
    assert (settings.group_size(True), settings.group_size(False)) == (8, 3)


def test_configure_grpo_trainer_sets_attributes_that_the_constructor_derives(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path, settings={"beta": 0.1, "level": "action"})
    assert trainer.beta == trainer.args.beta == 0.1
    assert trainer.accelerator.ddp_handler.broadcast_buffers is False  # not only in `args`, which are read before
    assert trainer.importance_sampling_level == "sequence"
    of_trl.configure_grpo_trainer(trainer, 0.2, None)
    assert trainer.beta == 0.2 and trainer.importance_sampling_level == "sequence"


def test_checkpointing_with_caches_gives_the_gradients_of_a_plain_pass(model_folder):
    prompts, completions = [[7, 8, 9], [7, 8, 10], [7, 8, 9]], [[11, 12], [13], [14, 15, 16]]
    gradients = []
    for checkpointing in (False, True):
        model = AutoModelForCausalLM.from_pretrained(model_folder).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        hidden_states(model.base_model, prompts, completions).sum().backward()
        assert not any("_can_checkpoint_with_cache" in module.__dict__ for module in model.modules())
        gradients.append(model.get_input_embeddings().weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_LocalAccelerator_gathers_nothing(trainer):
    local, scalar = of_trl.LocalAccelerator(trainer.accelerator), torch.tensor(3.0)
    assert local.gather(scalar).shape == (1,) and local.reduce(scalar, reduction="sum") is scalar
    assert local.gather_for_metrics(scalar).shape == (1,) and local.pad_across_processes(scalar, dim=0) is scalar
    assert local.num_processes == trainer.accelerator.num_processes


def test_TrlRewards_are_local_and_put_back(trainer):
    rewards, rows = of_trl.TrlRewards(trainer), [{"prompt": "q"}] * 3

    def twos(completions, log_metric, **kwargs):
        log_metric("noise", 1.0)
        return [2.0] * len(completions)

    before = rewards.functions, rewards.names
    with rewards.locally([twos]):
        assert rewards.names == ["twos"]
        assert rewards(rows, ["q"] * 3, ["a"] * 3, [[5]] * 3).tolist() == [[2.0]] * 3
    assert (rewards.functions, rewards.names) == before and rewards.weights.tolist() == [1.0]
    assert trainer.parts.state.take_user_metrics() == {}
    assert grpo_trainer.gather is gather


def test_TrlPrompts_and_TrlEngine_put_the_trainers_attributes_back(trainer):
    tools, config, kwargs = trainer.tools, trainer.generation_config, trainer.generation_kwargs
    (ids,) = of_trl.TrlPrompts(trainer).tokenize([[{"role": "user", "content": "1"}]], [])
    assert ids and trainer.tools is tools
    engine = TrlEngine(trainer, Sampling.from_agent(AgentSpec("solo"), trainer.args).as_generation_kwargs())
    sampling = Sampling.from_agent(AgentSpec("solo", max_completion_length=3, temperature=0.5), trainer.args)
    settings = engine.settings(sampling)
    assert settings["max_new_tokens"] == 3 and settings["temperature"] == 0.5
    trainer.policies.activate("actor")
    sampled = engine.generate([ids, ids[:-1]], settings, {})
    assert all(1 <= len(completion_ids) <= 3 for completion_ids in sampled)
    assert trainer.generation_config is config and trainer.generation_kwargs is kwargs
    assert "generate" not in trainer.model.__dict__


def test_accepting_one_generation_lets_no_other_error_pass(tmp_path):
    assert MARFTConfig(str(tmp_path), advantage="none", num_generations=1).num_generations == 1
    with pytest.raises(ValueError, match="at least 2 generations"):
        GRPOConfig(str(tmp_path), num_generations=1, per_device_train_batch_size=8, use_cpu=True, bf16=False)
    with pytest.raises(ValueError):
        MARFTConfig(str(tmp_path), num_generations=3, per_device_train_batch_size=8)


def test_constructing_grpo_trainer_hides_settings_from_the_constructor_alone(model_folder, tmp_path, caplog):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), lora())
    args = MARFTConfig(str(tmp_path), beta=0.1, sync_ref_model=True)
    args.use_vllm = True
    parents = logging.getLogger("trl.trainer.grpo_trainer")
    with of_trl.constructing_grpo_trainer(args, model, is_model_name=True):
        assert not args.use_vllm and args.beta == 0.0 and not args.sync_ref_model
        parents.warning("You passed `model_init_kwargs` to the `GRPOConfig`, ...")
        parents.warning("something else")
    assert args.use_vllm and args.beta == 0.1 and args.sync_ref_model
    assert not parents.filters and "something else" in caplog.text and "model_init_kwargs" not in caplog.text


def test_constructing_grpo_trainer_keeps_adapters_of_a_quantized_base_also_after_an_error(model_folder, tmp_path):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), lora())
    model.is_quantized, before = True, {name: p.data for name, p in model.named_parameters() if p.requires_grad}
    with pytest.raises(ZeroDivisionError), of_trl.constructing_grpo_trainer(config(tmp_path), model, True):
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        raise ZeroDivisionError
    after = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert before and all(p.dtype == torch.float32 and torch.equal(p, before[name]) for name, p in after.items())


REPEATED = {"mini_repeat_count": 2, "batch_size": 2, "repeat_count": 1, "seed": 3}


def test_EpochSampler_has_the_order_of_an_epoch():
    trl_sampler, sampler = (kind(range(8), **REPEATED) for kind in (RepeatSampler, runs.EpochSampler))
    trl_orders = [list(trl_sampler) for _ in range(3)]
    for epoch, expected in enumerate(trl_orders):
        sampler.set_epoch(epoch)
        assert list(sampler) == expected
    late_sampler = runs.EpochSampler.from_sampler(RepeatSampler(range(8), **REPEATED), 1)
    late_sampler.set_epoch(2)
    assert list(late_sampler) == trl_orders[2]


@pytest.mark.parametrize("index", [0, 1])
def test_begin_pass_reaches_the_order_of_several_processes_that_resume(index):
    """The upstream loader does not, if batches are skipped."""

    def order(skipped, epoch, begins):
        sampler = runs.EpochSampler(range(8), **REPEATED)
        loader = torch.utils.data.DataLoader(range(8), sampler=sampler, batch_size=2)
        loader = prepare_data_loader(loader, num_processes=2, process_index=index, put_on_device=False)
        loader = skip_first_batches(loader, skipped)
        loader.set_epoch(epoch)
        if begins:
            runs.begin_pass(sampler, epoch)
        return torch.cat([*loader]).tolist()

    whole = order(0, 1, begins=True)
    assert order(2, 1, begins=True) == whole[4:]
    assert order(2, 1, begins=False) == order(0, 0, begins=True)[4:] != whole[4:]  # else fixed upstream
    runs.begin_pass(None, 1)  # of a stream


FUSED = {"cast_lm_head_to_fp32": False, "outputs": ("log_probs", "entropy")}


def test_ScoringTemperature_and_fused_head_score_as_a_plain_pass(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    add_fused_lm_head(model, temperature=1.0, **FUSED)
    switch = models.ScoringTemperature([model], [1.0, 0.5], default=1.0, head=FUSED)
    ids = torch.tensor([[7, 8, 9, 10]])
    with torch.no_grad():
        output = model(input_ids=ids, output_hidden_states=True)
        logits, hidden = output.logits[0, :-1], model.base_model(input_ids=ids).last_hidden_state[0, :-1]
        for temperature in (0.5, 1.0):
            switch.switch_to(temperature)
            expected = torch.log_softmax(logits / temperature, -1).gather(-1, ids[0, 1:, None]).squeeze(-1)
            log_probs = models.fused_head(model, hidden, ids[0, 1:]).log_probs[0]
            torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)
    assert "forward" not in model.base_model.__dict__


def test_a_generation_config_acts_unless_it_is_set_aside(model_folder):
    """transformers#42762: a setting that equals transformers' default, `None`, is taken from the model's config."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    model.generation_config.top_k, model.generation_config.do_sample = 1, True
    settings = {"do_sample": True, "top_k": None, "temperature": 1.0, "max_new_tokens": 12, "pad_token_id": 0}
    ids = torch.tensor([[7, 8, 9]] * 16)

    def draw():
        torch.manual_seed(0)
        rows = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=GenerationConfig(**settings))
        return len({tuple(row) for row in rows.tolist()})

    assert draw() == 1  # the model's `top_k`
    with generating_by(model, settings):
        assert draw() > 1
    assert model.generation_config.top_k == 1


@pytest.mark.parametrize(
    ("family", "setting", "value"),
    [("granite", "logits_scaling", 8.0), ("cohere", "logit_scale", 0.25), ("gemma2", "final_logit_softcapping", 3.0)],
)
def test_check_fused_head_knows_heads_that_scale_or_cap(tokenizer, tmp_path, family, setting, value):
    """So does `next_token`, the probe of servers: scaling and capping after the head are part of the distribution."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": len(tokenizer), "bos_token_id": None}
    sizes |= {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id")}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **{setting: value})).float()
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=1.0)
    trainer = team_trainer(model, tmp_path, processing_class=tokenizer, peft_config=lora())
    ids = [7, 8, 9, 10]
    log_probs = trainer.parts.log_probs.next_token("actor", ids)
    with torch.no_grad():
        expected = model.eval()(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=0)


def test_expert_parameters_are_targeted_instead_of_modules():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 11, "head_dim": 8}
    mixture = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", num_experts=2, **sizes))
    dense = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes))
    assert "down_proj" in models.expert_parameters(mixture) and not models.expert_parameters(dense)


HEADS = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
HEADS |= {"intermediate_size": 64, "max_position_embeddings": 64}
EXPERTS = {"num_local_experts": 2, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size_mlp": 64}
OTHER_HEAD = "GRPOTrainer's scoring does not match the LM head"


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("roberta", {"is_decoder": True}, OTHER_HEAD), ("bert", {"is_decoder": True}, OTHER_HEAD),
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}, None),  # calls a part of its backbone; has dropout
        ("mamba", {}, None), ("mixtral", {"num_local_experts": 2, "output_router_logits": True}, None),
        ("llama4_text", EXPERTS, "`Llama4ForCausalLM` is not supported, as in GRPOTrainer"),  # has no backbone
    ],
)  # fmt: skip
def test_check_fused_head_tells_heads_of_families_apart(family, settings, message):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **HEADS, **settings)).float().train()
    add_fused_lm_head(model, temperature=0.7, **FUSED)
    modes = [module.training for module in model.modules()]
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        models.check_fused_head(model, 0.7)
    assert modes == [module.training for module in model.modules()]


def test_check_fused_head_refuses_heads_that_score_differently(model_folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    forward = model.lm_head.forward
    model.lm_head.forward = lambda hidden: forward(torch.tanh(hidden))
    with pytest.raises(ValueError, match=OTHER_HEAD):
        team_trainer(model, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(model_folder)
    add_fused_lm_head(plain, temperature=0.7, **FUSED)
    models.check_fused_head(plain, 0.7)
    low = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    low.lm_head.weight.data *= 30  # logits of 100 and more, which bfloat16 rounds to halves
    add_fused_lm_head(low, temperature=0.2, **FUSED)
    modes = [module.training for module in low.modules()]
    models.check_fused_head(low, 0.2)
    assert modes == [module.training for module in low.modules()]
    with pytest.raises(ValueError, match="differ by"):
        models.check_fused_head(plain, 1.0)


def test_saving_adapters_alone_is_still_needed(model_folder, tmp_path):
    """PEFT adds the base's embeddings to an adapter with a LoRA on them."""
    trainer = team_trainer(model_folder, tmp_path, peft_config=LoraConfig(r=4, target_modules=["embed_tokens"]))
    trainer.model.save_pretrained(tmp_path / "plain")
    with runs.saving_adapters_alone(trainer, trainer.policies.saved_adapters):
        trainer.model.save_pretrained(tmp_path / "alone")
    plain, alone = (load_file(tmp_path / name / "actor" / "adapter_model.safetensors") for name in ("plain", "alone"))
    assert len(plain) > len(alone) == 2 and all("lora_" in name for name in alone)


def test_forward_in_precision_casts_as_accelerate_does(model_folder):
    model, ids = AutoModelForCausalLM.from_pretrained(model_folder), torch.tensor([[7, 8, 9]])
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with forward_in_precision(model, torch.bfloat16):
            cast = model(input_ids=ids).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = model(input_ids=ids).logits.float()
    assert cast.dtype == torch.float32 and torch.equal(cast, expected) and not torch.equal(cast, plain)
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("whole", [None, ["lm_head"]], ids=["plain", "with_whole_modules"])
def test_AdapterLayers_switches_as_peft_does(model_folder, whole):
    switched, peft_model = (
        get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), lora(), adapter_name="one") for _ in "ab"
    )
    layers = models.AdapterLayers(switched)

    def flags(model):
        kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
        adapter_modules = [module for module in model.modules() if isinstance(module, kinds)]
        active = [(module.active_adapters, module._disable_adapters) for module in adapter_modules]
        return active, model.active_adapter, [parameter.requires_grad for parameter in model.parameters()]

    layers.activate("one")
    for model in (switched, peft_model):  # a new adapter adds layers that no adapter had before
        model.add_adapter("two", LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], modules_to_save=whole))
    for name, trained in (("two", ["one"]), ("one", ["one", "two"]), ("two", [])):
        others = [adapter for adapter in ("one", "two") if adapter not in trained]
        layers.activate(name)
        peft_model.set_adapter(name, inference_mode=True)
        for model in (layers, peft_model):
            model.set_requires_grad(trained, True)
            model.set_requires_grad(others, False)
        assert flags(switched) == flags(peft_model) and any(flags(peft_model)[2]) == bool(trained)
    ids = torch.tensor([[7, 8, 9]])
    for model in (switched, peft_model):
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.ones_(parameter)
    with torch.no_grad():
        before = switched(input_ids=ids).logits
        with layers.disabled(), peft_model.disable_adapter():
            assert torch.equal(switched(input_ids=ids).logits, peft_model(input_ids=ids).logits)
            assert not torch.equal(switched(input_ids=ids).logits, before)
        assert torch.equal(switched(input_ids=ids).logits, before)
    with pytest.raises(ValueError, match="no adapter 'three'. It has one, two"):
        layers.activate("three")


def test_AdapterLayers_sets_only_flags_that_change(model_folder, monkeypatch):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), lora(), adapter_name="one")
    model.add_adapter("two", lora())
    layers = models.AdapterLayers(model)
    layers.activate("one")
    layers.set_requires_grad(["one", "two"], True)
    touched = []
    monkeypatch.setattr(torch.Tensor, "requires_grad_", lambda self, value: touched.append(self))
    monkeypatch.setattr(BaseTunerLayer, "__setattr__", lambda self, name, value: touched.append(name), raising=False)
    layers.activate("one")
    layers.set_requires_grad(["one", "two"], True)
    assert not touched
    layers.set_requires_grad(["two"], False)
    assert len(touched) == sum("two" in name for name, _ in model.named_parameters())


def test_without_adapter_name_warning(model_folder):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), lora(), adapter_name="first")
    with pytest.warns(UserWarning, match="should not be contained in the prefix"):
        model.add_adapter("a", lora())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with models.without_adapter_name_warning():
            model.add_adapter("lo", lora())


def test_trl_log_probs_is_the_pass_of_the_parent(trainer):
    ids = torch.tensor([[7, 8, 9, 10]])
    trainer.parts.log_probs.activate("actor")
    with torch.no_grad():
        logps, entropies, _ = of_trl.trl_log_probs(trainer)(trainer.model, ids, torch.ones_like(ids), 2)
        logits = trainer.model.get_base_model()(input_ids=ids).logits[0, 1:-1].float()
    expected = torch.log_softmax(logits, -1).gather(-1, ids[0, 2:, None]).squeeze(-1)
    torch.testing.assert_close(logps[0], expected, atol=1e-5, rtol=0)
    assert entropies is None


def test_small_entries_read_values_of_transformers(trainer, model_folder):
    """`get_pad_token`, `get_commit`, `checkpoint_folder` and `keep_4bit_weights` (also in test_team_training.py)."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    pad_tokens = []

    def note(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        pad_tokens.append(get_pad_token(generation_config))
        return input_ids

    ids = torch.tensor([[7, 8, 9]])
    model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=3, custom_generate=note)
    assert pad_tokens[0].item() == 3 and models.get_commit(model.config) is None
    assert runs.checkpoint_folder(trainer, None) == Path(trainer.args.output_dir) / "checkpoint-0"
    models.keep_4bit_weights(model)  # nothing to do


# ---- The course of a run ----


def test_EndlessStream_restarts_in_the_order_of_each_pass():
    rows = Dataset.from_dict({"prompt": list("abcdef")})
    stream = rows.to_iterable_dataset(num_shards=3).shuffle(seed=3, buffer_size=2)
    passes = []
    for epoch in range(3):
        stream.set_epoch(epoch)
        passes += [row["prompt"] for row in stream]
    rows = [row["prompt"] for row in itertools.islice(runs.EndlessStream(stream), 18)]
    assert rows == passes and passes[:6] != passes[6:12]
    with pytest.raises(ValueError, match="epoch 1"):
        next(iter(runs.EndlessStream(IterableDataset.from_generator(lambda: iter([])))))


def test_saving_only_and_keeping_checkpoints_put_the_settings_back(model_folder, tmp_path):
    """`save_checkpoint_now` names the folder and saves the step as the parent does."""
    trainer = team_trainer(model_folder, tmp_path, settings={"save_total_limit": 1, "save_strategy": "steps"})
    args = trainer.args
    with runs.saving_only(trainer):
        assert (args.push_to_hub, args.save_total_limit) == (False, None)
    with runs.keeping_checkpoints(trainer):
        assert args.save_total_limit is None
    assert args.save_total_limit == 1
    source = inspect.getsource(Trainer._save_checkpoint)
    assert source.index("save_model(") < source.index("_save_rng_state(") < source.index("push_to_hub")
    assert "rotate_checkpoints(" in source and "rotate" not in inspect.getsource(Trainer._save_rng_state)
    trainer.train()
    trainer.state.global_step = 7
    runs.save_checkpoint_now(trainer)
    assert (tmp_path / "checkpoint-7" / "trainer_state.json").exists()


def scheduler_of(rates, factor=lambda step: 1 / (1 + step)):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(groups), [factor] * len(rates))


@pytest.mark.parametrize("saved_groups", [1, 2, 3])
def test_schedule_of_any_length_loads_the_state_of_another_number_of_groups(saved_groups):
    def scheduler_with_groups(count):  # as `get_scheduler` makes them
        return scheduler_of([0.1] * count, functools.partial(lambda step, last: 1 - step / last, last=10))

    before, fresh = scheduler_with_groups(saved_groups), scheduler_with_groups(2)
    before.optimizer.step()
    before.step()
    if saved_groups > 2:
        with pytest.raises(IndexError):
            scheduler_with_groups(2).load_state_dict(before.state_dict())
    with runs.schedule_of_any_length(fresh):
        fresh.load_state_dict(before.state_dict())
    assert fresh.last_epoch == 1 and "load_state_dict" not in vars(fresh)


def test_restart_schedule_sets_the_rates_of_the_present_step():
    scheduler = scheduler_of([0.1, 0.1])
    scheduler.optimizer.step()
    scheduler.step()
    assert runs.restart_schedule(scheduler, [0.4, 0.8])
    assert [group["lr"] for group in scheduler.optimizer.param_groups] == [0.2, 0.4] == scheduler.get_last_lr()
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.4 / 3, 0.8 / 3])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(scheduler.optimizer)
    assert not runs.restart_schedule(plateau, [0.4, 0.8])


def test_store_of_processes_is_that_of_the_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        store = runs.store_of_processes()
        store.set("marft/test", "1")
        assert store.check(["marft/test"]) and store.get("marft/test") == b"1"
    finally:
        torch.distributed.destroy_process_group()


def test_TrlState_window_is_the_state_that_a_log_consumes(model_folder, tmp_path):
    """The Trainer's sums of losses, and TRL's lists of metrics, as they are in the middle of a window."""
    trainer = team_trainer(model_folder, tmp_path, settings={"max_steps": 2, "logging_steps": 5})
    windows, state = [], of_trl.TrlState(trainer)
    assert (state.micro_step, state.optimizer_step, state.slices) == (0, 0, None)

    class Look(TrainerCallback):
        def on_step_end(self, args, state_, control, **kwargs):
            windows.append(json.loads(json.dumps(state.capture_log_window())))

    trainer.add_callback(Look())
    trainer.train()
    first, second = windows
    assert first["loss"] != 0 and len(second["metrics"]["train"]["reward"]) == 2
    state.restore_log_window(first)
    assert json.loads(json.dumps(state.capture_log_window())) == first
    assert len(state.metrics["train"]["reward"]) == 1 and state.metrics["train"]["not yet"] == []


def test_get_logger_names_processes_where_there_are_several(caplog, monkeypatch):
    PartialState()
    logger = libraries.get_logger("marft_trl.test")
    logger.warning("alone")
    monkeypatch.setattr(libraries, "_is_alone", lambda: False)
    logger.warning("[RANK 0] of several")
    assert [record.getMessage() for record in caplog.records] == ["alone", "[RANK 0] [RANK 0] of several"]


def test_hush_leaves_out_known_messages_alone(caplog, monkeypatch):
    bitsandbytes = logging.getLogger("bitsandbytes.backends.cpu.ops")
    for log_filter in list(bitsandbytes.filters):
        bitsandbytes.removeFilter(log_filter)
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        libraries.hush()
        warnings.warn("`is_gradient_checkpointing` is deprecated and will be removed", FutureWarning, stacklevel=1)
        warnings.warn("`something_else` is deprecated", FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught_warnings] == ["`something_else` is deprecated"]
    bitsandbytes.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s", "why")
    bitsandbytes.warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]
