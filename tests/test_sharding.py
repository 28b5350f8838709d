"""Two gloo processes with a sharded base (FSDP2) train bitwise the same weights as two with the whole base."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from marft_trl.extras.engines.fsdp2 import check_team, keep_adapters_whole
from marft_trl.seams.sharding import (
    ShardSizes,
    WholeAdapters,
    as_if_not_sharded,
    constants,
    in_the_precision_of_the_head,
    shard_sizes,
    storage_of_4bit,
)
from marft_trl.trainer.setup import check_launcher

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config, Qwen3ForCausalLM

from .helpers import config, team_trainer
from .test_distributed import ROOT, launch
from .vllm_server import as_text, fake_servers, turn


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]
SCRIPT = "tests/scripts/train_sharded.py"


def train(model, folder, *, sharded, processes=2, environment=(), **options):
    Path(folder).mkdir(exist_ok=True)
    variables = {"PYTHONHASHSEED": "0", **dict(environment)}
    variables |= {"SHARD_ON_CPU": "1", "ACCELERATE_USE_CPU": "false"} if sharded else {}
    launch(processes, SCRIPT, model, str(folder), json.dumps(options), environment=variables)
    return load_file(folder / "weights.safetensors")


@pytest.fixture(scope="module")
def untied_folder(deep_folder, tmp_path_factory):
    """The tiny model with an untied head, as most models from 7B on have."""
    folder = tmp_path_factory.mktemp("untied")
    shutil.copytree(deep_folder, folder, dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(deep_folder)
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def assert_same(weights, expected, is_exact=True):
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        # By norms, because Adam turns the rounding of a gradient near 0 into a part of the learning rate (1e-2)
        is_near = (weights[name] - weight).norm() <= 1e-5 * weight.norm()
        assert torch.equal(weights[name], weight) if is_exact else is_near, name


PPO = {"advantage": "gae", "num_generations": 1, "critic_learning_rate": 1e-2}
BATCHES = {"num_iterations": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 4}
SETTINGS = {
    "lopsided": {"lopsided": True, "max_steps": 2},
    "lopsided, one matrix for embeddings and head": {"lopsided": True, "max_steps": 2},
    "batches": {**BATCHES, "per_device_train_batch_size": 2, "max_steps": 4, "gradient_checkpointing": True},
    "no prefixes": {"lopsided": True, "max_steps": 2, "share_prefixes": False, "gradient_checkpointing": True},
    "shared": {**PPO, "critic": "shared", "num_iterations": 2, "max_steps": 3},
    "per_agent": {**PPO, "critic": "per_agent", "level": "action", "max_steps": 3},
    "frozen": {**PPO, "critic": "frozen", "max_steps": 3, "evaluates": True},
    "sequential": {"update_order": "sequential", "num_iterations": 2, "max_steps": 4, "sync_ref_model": True},
    "dropout": {"dropout": 0.2, "max_steps": 3, "lopsided": True, "gradient_checkpointing": True},
    "best model": {
        **{"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1},
        **{"evaluates": True, "load_best_model_at_end": True, "asks": True},
    },
    "4-bit": {"four_bit": "bfloat16", "max_steps": 2},
    "4-bit, whole": {"four_bit": "uint8", "max_steps": 2},
    "five steps": {
        **{"max_steps": 5, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2},
        "evaluates": True,
    },
    # transformers leaves the weights of all processes but the first uninitialized
    "loaded by one": {"max_steps": 2},
}
ENVIRONMENTS = {"loaded by one": {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}}
MARKS = {"lopsided": pytest.mark.slow, "shared": pytest.mark.slow, "batches": pytest.mark.slow}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=MARKS.get(kind, pytest.mark.exhaustive)) for kind in SETTINGS]
)
def test_a_sharded_base_trains_like_a_whole_base(deep_folder, untied_folder, tmp_path, kind):
    """
    Generation, references, critics and evaluations included; `is_sharded`, `gather_in_one_order` and `with_all_layers`
    are tested here. "lopsided": the rows of one process train nothing, and an adapter has one layer of two.
    """
    folder = untied_folder if kind in ("lopsided", "no prefixes") else deep_folder
    expected = train(folder, tmp_path / "whole", sharded=False, **SETTINGS[kind])
    environment = ENVIRONMENTS.get(kind, ())
    weights = train(folder, tmp_path / "sharded", sharded=True, environment=environment, **SETTINGS[kind])
    # A critic keeps passes for its update, in other micro-batches. On a sharded base it keeps none
    assert_same(weights, expected, is_exact=kind != "per_agent")
    memory, other_memory = (json.loads((tmp_path / "sharded" / f"held-{index}.json").read_text()) for index in (0, 1))
    assert max(memory["bytes"], other_memory["bytes"]) == memory["expected"]  # the last shards may be smaller
    assert "The base is sharded over 2 processes (FSDP2)" in memory["plan"] and memory["collectives"] == 0
    is_whole = kind == "4-bit, whole"  # accelerate cannot shard bytes: it warns and leaves them
    assert (memory["layers"] < 0.51) != is_whole and memory["adapters"] == 1.0


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "loss_type"),
    [
        *((kind, "dapo") for kind in ("ppo", "uneven", "orchestrated", "counterfactual", "tools")),
        *((kind, "grpo") for kind in ("sequential", "candidates")),
    ],
)
def test_two_processes_with_shards_equal_a_single_process(deep_folder, tmp_path, kind, loss_type):
    """On the same episodes, whose rows fall on different agents and differ in number."""
    script = "tests/scripts/train_canned.py"
    launch(1, script, deep_folder, str(tmp_path / "one"), kind, loss_type)
    sharded = {"SHARD_ON_CPU": "1", "ACCELERATE_USE_CPU": "false"}
    launch(2, script, deep_folder, str(tmp_path / "two"), kind, loss_type, environment=sharded)
    expected, weights = load_file(tmp_path / "one"), load_file(tmp_path / "two")
    assert expected.keys() == weights.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.exhaustive
def test_folders_are_the_same_and_runs_resume(deep_folder, tmp_path):
    """Sharded and whole runs write the same checkpoints, and each resumes the other bitwise."""
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    expected = train(deep_folder, tmp_path / "whole", sharded=False, **settings)
    weights = train(deep_folder, tmp_path / "sharded", sharded=True, **settings)
    assert_same(weights, expected)
    for path in sorted((tmp_path / "whole").rglob("*")):
        is_skipped = path.name in ("training_args.bin", "trainer_state.json", "marft_commit.json", "log.json")
        if path.is_file() and not is_skipped and path.parent != tmp_path / "whole":
            twin = tmp_path / "sharded" / path.relative_to(tmp_path / "whole")
            assert twin.read_bytes() == path.read_bytes(), path.name
    for written_by, sharded in (("sharded", True), ("sharded", False), ("whole", True)):
        folder = tmp_path / f"{written_by}-{sharded}"
        shutil.copytree(tmp_path / written_by, folder)
        shutil.rmtree(folder / "checkpoint-4")
        again = train(deep_folder, folder, sharded=sharded, **settings, resume=True)
        log = json.loads((folder / "log.json").read_text())
        assert [entry["step"] for entry in log if "loss" in entry] == [1, 2, 3, 4]
        assert_same(again, expected)


@pytest.mark.exhaustive
def test_runs_resume_on_another_number_of_processes(deep_folder, tmp_path):
    """Two processes with shards, one without, two again: the adapters train on, with other random numbers."""
    settings = {"save_strategy": "steps", "save_steps": 1}
    other = {"resume": True, "resume_changes": {"accept": ["processes", "batch"]}}
    folder = tmp_path / "run"
    first = train(deep_folder, folder, sharded=True, max_steps=2, **settings)
    second = train(deep_folder, folder, sharded=False, processes=1, max_steps=4, **settings, **other)
    third = train(deep_folder, folder, sharded=True, max_steps=6, **settings, **other)
    log = json.loads((folder / "log.json").read_text())
    assert [entry["step"] for entry in log if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    for before, after in ((first, second), (second, third)):  # as far as two steps of Adam lead
        moved = [(after[name] - before[name]).abs().max().item() for name in before]
        assert 0 < max(moved) <= 2 * 1e-2 * 1.5


@pytest.mark.exhaustive
@pytest.mark.parametrize("staleness", [0, 1])
def test_turns_of_servers(deep_folder, tmp_path, tokenizer, staleness):
    """
    The first process compares the adapters on the server with its own weights, which the other processes help to
    gather. It alone reads the weights of the adapters (`keep_what_is_gathered`).
    """
    settings = {"max_steps": 3, "max_staleness": staleness}
    with fake_servers() as (server,):
        flat = -math.log(len(tokenizer))  # as an untrained model
        server.logps = lambda adapter, ids, temperature: {5: flat if temperature > 1 else flat + 0.5}
        server.fault = lambda body: as_text(turn({**body, "model": ""}))
        expected = train(deep_folder, tmp_path / "whole", sharded=False, server=server.url, **settings)
        weights = train(deep_folder, tmp_path / "sharded", sharded=True, server=server.url, **settings)
    assert_same(weights, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "says", "error"),
    [
        ("fails", "a reward that is lost", "Process 1 of the run failed"),
        # The other process waits in the middle of the pass, where no message reaches it
        ("out_of_memory", "in the middle of a pass", "Process 1 of the run failed: OutOfMemoryError"),
    ],
)
def test_a_process_that_fails_ends_all_with_the_same_error(deep_folder, tmp_path, fault, says, error):
    start = time.monotonic()
    with pytest.raises(AssertionError, match=says) as raised:
        train(deep_folder, tmp_path / "sharded", sharded=True, **{fault: True})
    assert error in str(raised.value)
    assert time.monotonic() - start < 100  # and not the time limit of a collective


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_tied", [True, False])
def test_mixed_precision(deep_folder, untied_folder, tmp_path, is_tied):
    """Layers compute in bfloat16, also where the base is in float32: it trains, close to a whole base."""
    folder = deep_folder if is_tied else untied_folder
    settings = {"bf16": True, "max_steps": 2, "learning_rate": 1e-3}
    expected = train(folder, tmp_path / "whole", sharded=False, **settings)
    environment = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    weights = train(folder, tmp_path / "sharded", sharded=True, environment=environment, **settings)
    for name, weight in expected.items():  # two steps of Adam; episodes may differ by the precision of generation
        assert (weights[name] - weight).abs().max() <= 4.5e-3, name
    assert any(weight.any() for name, weight in weights.items() if "lora_B" in name)


@pytest.mark.exhaustive
def test_nodes_without_a_shared_output_folder_raise(deep_folder, tmp_path):
    """Also without shards. Every process writes its part of a checkpoint."""
    with pytest.raises(AssertionError, match="is not the one that the first process of the run writes to") as error:
        train(deep_folder, tmp_path / "node", sharded=False, apart=True, save_strategy="steps", save_steps=1)
    assert "set `output_dir` to a file system that all nodes share" in str(error.value)


@pytest.mark.exhaustive
def test_an_example_under_accelerate_with_a_config_file(deep_folder, tmp_path):
    """What a user types, with two processes instead of eight."""
    (tmp_path / "sitecustomize.py").write_text("from tests import shard_on_cpu\n")
    environment = {**os.environ, "SHARD_ON_CPU": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    environment.pop("ACCELERATE_USE_CPU", None)
    flags = f"""-W ignore -m accelerate.commands.launch --config_file examples/fsdp2.yaml --num_processes 2
        --mixed_precision no --main_process_port 0 examples/math_duo.py --model_name_or_path {deep_folder}
        --output_dir {tmp_path / "out"} --dataset_file tests/data/gsm8k_sample.jsonl --eval_size 4 --bf16 false
        --use_peft --lora_target_modules q_proj v_proj --max_steps 2 --per_device_train_batch_size 4
        --num_generations 4 --max_completion_length 8 --report_to none"""
    command = [sys.executable, *flags.split()]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert process.returncode == 0, process.stderr[-3000:]
    assert "step 2/2" in process.stdout and "eval_reward" in process.stdout
    assert (tmp_path / "out" / "actor" / "adapter_model.safetensors").exists()


# ---- The parts ----


def test_WholeAdapters_ignores_adapters_and_norms_and_keeps_the_optimizer(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path)
    optimizer = trainer.create_optimizer()
    before = [list(group["params"]) for group in optimizer.param_groups]
    sizes = []

    def prepare(*args):
        sizes.append([len(group["params"]) for group in optimizer.param_groups])
        return args

    plugin = SimpleNamespace(ignored_modules=None, cpu_ram_efficient_loading=False)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), device=torch.device("cpu"), prepare=None)
    accelerator._prepare_fsdp2 = prepare
    WholeAdapters(accelerator, trainer.model, trainer.policies.all_parameters())
    left_out = {id(p) for module in plugin.ignored_modules for p in module.parameters()}
    for name, parameter in trainer.model.named_parameters():
        is_whole = "lora_" in name or name.endswith("model.norm.weight")
        assert (id(parameter) in left_out) == is_whole, name
    accelerator._prepare_fsdp2(trainer.model, optimizer)
    assert sizes == [[0, 0]] and [group["params"] for group in optimizer.param_groups] == before
    assert accelerator.prepare(trainer.model) is trainer.model  # an evaluation has no optimizer


def small_model(vocab_size=5, is_tied=False):
    config = Qwen3Config(
        hidden_size=4, intermediate_size=3, num_hidden_layers=3, num_attention_heads=1, num_key_value_heads=1,
        head_dim=4, vocab_size=vocab_size, tie_word_embeddings=is_tied,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def test_shard_sizes_of_a_small_model():
    """By hand: three rows over two processes are two and one; two layers are gathered at once."""
    model = small_model()
    square, gate, down, norms = 16, 12, 12, (4 + 4) + (4 + 4)  # of a layer; norms of queries and keys have 4 each
    layer = 4 * square + 2 * gate + down + norms
    half = 4 * 8 + 2 * (2 * 4) + 2 * 3 + 4 * 2  # two of the three rows of gate and up
    whole = 4 + 5 * 4  # the last norm and the head
    assert shard_sizes(model, [], 2) == ShardSizes(4 * (3 * half + 3 * 4 + whole), 4 * 2 * layer)
    # Tied embeddings are gathered with the layers, others before the layers
    tied = ShardSizes(4 * (3 * half + 3 * 4 + 4), 4 * (2 * layer + 5 * 4))
    assert shard_sizes(small_model(is_tied=True), [], 2) == tied
    assert shard_sizes(small_model(vocab_size=200), [], 2).gathered == 4 * (200 * 4 + layer)
    assert shard_sizes(model, [], 1).held == 4 * sum(p.numel() for p in model.parameters())
    assert shard_sizes(model, [], 2, width=2).gathered == 2 * 2 * layer
    without_mlp = 4 * (3 * half + 3 * 4 + whole - (2 * 8 + 6))
    assert shard_sizes(model, model.model.layers[0].mlp.parameters(), 2).held == without_mlp


def test_as_if_not_sharded_is_for_a_while():
    trainer = SimpleNamespace(is_fsdp_enabled=True)
    with as_if_not_sharded(trainer):
        assert not trainer.is_fsdp_enabled
    assert trainer.is_fsdp_enabled


# ---- What does not go with it ----


FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
REENTRANT = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}


def launched(tmp_path, monkeypatch, environment=(), kind=DistributedType.MULTI_GPU, stage=None, **settings):
    args = config(tmp_path, **settings)
    if stage is not None:
        args.deepspeed_plugin = SimpleNamespace(zero_stage=stage)
    for name, value in {**FSDP2, **dict(environment)}.items():
        monkeypatch.setenv(name, value)
    args.distributed_state = SimpleNamespace(distributed_type=kind, num_processes=2)
    return args


@pytest.mark.parametrize(
    ("environment", "settings", "message"),
    [
        ({}, REENTRANT, "Remove `use_reentrant`"),
        ({}, {"kind": DistributedType.MULTI_CPU}, "accelerate has no device to shard a model on"),
        ({"FSDP_VERSION": "1"}, {}, "does not support FSDP1.*`fsdp_version: 2`"),
        ({"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, {}, "needs `fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP`"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {}, "to false, and set `MARFTConfig.gradient_checkpointing=True."),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, {}, "`fsdp_offload_params` is not supported"),
        ({"FSDP_IGNORED_MODULES": "x"}, {}, "MARFTTrainer sets `fsdp_ignored_modules` to the adapters itself"),
        ({"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, {}, "remove `parallelism_config`"),
        (DEEPSPEED, {}, "not support DeepSpeed, .*--multi_gpu.*--use_fsdp --fsdp_version 2"),
        (DEEPSPEED, {"stage": 1}, "DeepSpeed ZeRO 1, .*do not shard a frozen base. Use plain data parallelism"),
        (DEEPSPEED, {"stage": 3}, "DeepSpeed ZeRO 3, .*To shard the base, use FSDP2"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, {}, "does not support Megatron, "),
    ],
)
def test_unsupported_launches_are_refused_before_loading(tmp_path, monkeypatch, environment, settings, message):
    args = launched(tmp_path, monkeypatch, environment, **settings)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        check_launcher(args)


def prepared(model, computes=torch.bfloat16, layers=None):
    """What a trainer has before accelerate prepares it."""
    policy = SimpleNamespace(param_dtype=computes)
    plugin = SimpleNamespace(mixed_precision_policy=policy, transformer_cls_names_to_wrap=layers)
    accelerator = SimpleNamespace(is_fsdp2=True, state=SimpleNamespace(fsdp_plugin=plugin))
    return SimpleNamespace(accelerator=accelerator, model=model)


def test_4bit_weights_that_mixed_precision_would_cast_are_refused(model_folder):
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.float16)
    model = AutoModelForCausalLM.from_pretrained(model_folder, quantization_config=settings)
    assert storage_of_4bit(model) is torch.float16
    with pytest.raises(ValueError, match=r"stored as torch.float16.*bnb_4bit_quant_storage=torch.bfloat16"):
        keep_adapters_whole(prepared(model), None)
    states = [p.quant_state for p in model.parameters() if hasattr(p, "quant_state")]
    assert states and constants(model) == sum(4 * (state.absmax.numel() + state.code.numel()) for state in states)
    assert constants(small_model()) == 0


def test_other_layers_than_those_of_the_base_are_refused():
    """By `names_of_layers`."""
    with pytest.raises(ValueError, match="names Qwen3MLP, but the layers of this base are Qwen3DecoderLayer"):
        keep_adapters_whole(prepared(small_model(), layers=["Qwen3MLP"]), None)


def test_an_untied_head_takes_any_precision():
    """`in_the_precision_of_the_head`: the head of a base in float32 below layers in bfloat16."""
    model = small_model()
    states = torch.ones(1, 1, 4, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"):
        model.lm_head(states)
    in_the_precision_of_the_head(model)
    assert model.lm_head(states).dtype == torch.float32


def test_fsdp2_on_gpus_is_accepted_for_teams_with_adapters(tmp_path, monkeypatch):
    check_launcher(launched(tmp_path, monkeypatch))
    check_team(has_adapters=True)
    with pytest.raises(ValueError, match="this team has no adapters. Pass `peft_config="):
        check_team(has_adapters=False)
