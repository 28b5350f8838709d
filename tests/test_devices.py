"""Runs on a device that is not the CPU, pretended (`tests/pretend_device.py`), and what depends on devices."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from marft_trl import AgentSpec, MARFTConfig
from marft_trl.config import marft_config
from marft_trl.extras.engines import vllm_generator
from marft_trl.extras.engines.vllm_generator import VLLMGenerator
from marft_trl.learning import batching
from marft_trl.learning.memory import ActivationCost, measure_activations, memory_of_server
from marft_trl.rollout.transformers_generator import ModelEngine
from marft_trl.seams.generation import generating_in_precision
from marft_trl.seams.runs import step_without_gradients
from marft_trl.seams.trl import constructing_grpo_trainer
from marft_trl.shared_prefix import forward
from marft_trl.shared_prefix.forward import find_obstacle
from marft_trl.system.event_loop import run_coroutine
from marft_trl.system.processes import device_map_kwargs, is_model_parallel, other_devices
from marft_trl.system.randomness import RandomStates, UserRandomness
from marft_trl.trainer import setup
from marft_trl.trainer.setup import check_launcher, choose_dtype, computing_in, stays_frozen

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import GRPOConfig
from trl.trainer.utils import create_model_from_path

from . import pretend_device
from .families import family_base, family_model
from .helpers import config, lora, moved_by_training, team_trainer


ROOT = Path(__file__).parents[1]
CANNOT_PRETEND = pretend_device.find_obstacle()
pretended = pytest.mark.skipif(CANNOT_PRETEND is not None, reason=str(CANNOT_PRETEND))


def run(*arguments):
    command = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def train(*arguments):
    return json.loads(run("tests/scripts/train_pretended.py", *arguments).splitlines()[-1])


@pretended
@pytest.mark.slow
@pytest.mark.parametrize(("team", "agents"), [("critic", 2), ("parallel", 4)])
def test_a_base_that_is_spread_over_devices_trains_as_on_one(team, agents):
    layouts = train(team, "--layouts", "whole", "spread")
    whole, spread = layouts["whole"], layouts["spread"]
    assert whole["devices"] == ["pretend:0"] and spread["devices"] == ["pretend:0", "pretend:1"]
    assert whole["moved"] == spread["moved"] == [f"a{index}" for index in range(agents)]
    assert (whole["losses"], whole["weights"]) == (spread["losses"], spread["weights"])
    # Nothing is copied for every token, or for every layer of a pass
    assert whole["waits"]["generate"]["to the device"] <= 60


@pretended
@pytest.mark.slow
@pytest.mark.parametrize("team", ["critic", "parallel"])
def test_a_second_base_on_another_device_trains_as_on_one(team):
    layouts = train(team, "--layouts", "near", "apart")
    near, apart = layouts["near"], layouts["apart"]
    assert near["devices"] == ["pretend:0"] and apart["devices"] == ["pretend:0", "pretend:1"]
    assert near["moved"] == apart["moved"] and len(near["moved"]) == {"critic": 2, "parallel": 4}[team]
    assert (near["losses"], near["weights"]) == (apart["losses"], apart["weights"])


TEACH = """
import pretend_device
device = pretend_device.install()
from marft_trl.tiny import tiny_model, tiny_tokenizer, warm_up
with pretend_device.Pretend():
    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer)).to(device)
    before = model.lm_head.weight.detach().clone()
    warm_up(model, tokenizer, steps=2, batch_size=4)
    print(model.lm_head.weight.device, (model.lm_head.weight != before).any().item())
"""


@pretended
@pytest.mark.slow
def test_a_model_is_taught_on_its_device():
    assert run("-c", f"import sys; sys.path.insert(0, 'tests')\n{TEACH}").split() == ["pretend:0", "True"]


@pretended
@pytest.mark.slow
def test_a_frozen_base_is_in_half_precision_on_one_device_by_default():
    named = train("half", "--layouts", "named", "--settings", '{"max_completion_length": 3, "max_steps": 1}')["named"]
    assert named["devices"] == ["pretend:0"] and named["moved"] == ["a0", "a1"]
    assert named["dtypes"] == {"base": ["torch.bfloat16"], "adapters": ["torch.float32"]}
    for phase in ("generate", "train"):
        assert named["products"][phase].keys() == {"torch.bfloat16"}, phase
    # Synchronizations with the device: one per token, and a few per micro-batch
    looks = {phase: waits.copy() for phase, waits in named["waits"].items()}
    copies = {phase: waits.pop("to the device", 0) for phase, waits in looks.items()}
    tokens = 2 * 3
    assert sum(looks["generate"].values()) <= 1.6 * tokens + 20 and copies["generate"] <= 20
    assert sum(looks["train"].values()) <= 40


def test_a_model_goes_to_the_device_of_its_process():
    assert device_map_kwargs(torch.device("cuda", 1)) == {"device_map": {"": torch.device("cuda", 1)}}
    assert device_map_kwargs(torch.device("cpu")) == device_map_kwargs(torch.device("mps")) == {}


def test_a_user_s_device_map_is_kept(model_folder, tmp_path, monkeypatch):
    loads = []

    def load(name, **options):
        loads.append(options)
        return create_model_from_path(name, **{**options, "device_map": None})

    monkeypatch.setattr(setup, "create_model_from_path", load)
    monkeypatch.setattr(setup, "device_map_kwargs", lambda device: {"device_map": {"": "the device"}})
    for kwargs in (None, {"device_map": "auto"}):
        team_trainer(model_folder, tmp_path, settings={"model_init_kwargs": kwargs})
    assert [load_options["device_map"] for load_options in loads] == [{"": "the device"}, "auto"]


@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_reference_goes_to_the_device_of_its_process(model_folder, has_adapters):
    """`constructing_grpo_trainer`: TRL loads the reference of a fully trained policy itself."""
    args = SimpleNamespace(
        **{"beta": 0.1, "world_size": 1, "device": torch.device("cuda", 0), "model_init_kwargs": {"dtype": "float32"}},
        **{"importance_sampling_level": "token", "use_vllm": False, "sync_ref_model": False},
    )
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with constructing_grpo_trainer(args, get_peft_model(model, lora()) if has_adapters else model, True):
        placed = {} if has_adapters else {"device_map": {"": torch.device("cuda", 0)}}
        assert args.model_init_kwargs == {"dtype": "float32", **placed}
    assert args.model_init_kwargs == {"dtype": "float32"}


def test_a_process_that_sees_several_devices_uses_its_own(model_folder, tmp_path, caplog):
    """`use_one_device`. TRL refuses to start with more."""
    args = config(tmp_path)
    args._n_gpu = 2
    with caplog.at_level("WARNING"):
        trainer = team_trainer(model_folder, tmp_path, args=args)
    assert trainer.args.n_gpu == 1 and "This machine has 2 devices" in caplog.text


def test_random_states_of_all_devices_of_a_spread_base_are_kept(monkeypatch):
    states = {0: torch.tensor([1], dtype=torch.uint8), 1: torch.tensor([2], dtype=torch.uint8)}
    monkeypatch.setattr(torch.xpu, "get_rng_state", lambda device: states[device.index].clone())
    monkeypatch.setattr(torch.xpu, "set_rng_state", lambda state, device: states.update({device.index: state}))
    model = SimpleNamespace(hf_device_map={"a": 0, "b": "xpu:1", "c": "cpu", "d": "disk", "e": "xpu"})
    assert is_model_parallel(model) and not is_model_parallel(torch.nn.Linear(1, 1))
    first = torch.device("xpu", 0)
    others = other_devices(model, first)
    assert others == [torch.device("xpu", 1)]
    random_states = RandomStates(first, others=others)
    before = random_states.capture()
    randomness = UserRandomness(0, first, others)
    with randomness.user_states():  # as `torch.manual_seed` of a reward function does
        states.update({0: torch.tensor([7], dtype=torch.uint8), 1: torch.tensor([8], dtype=torch.uint8)})
    assert [states[index].item() for index in (0, 1)] == [1, 2]
    saved = json.loads(json.dumps(randomness.state_dict()))
    again = UserRandomness(0, first, others)
    again.load_state_dict(saved)
    with again.user_states():
        assert [states[index].item() for index in (0, 1)] == [7, 8]
    states[1] = torch.tensor([9], dtype=torch.uint8)
    random_states.restore(before)
    assert states[1].item() == 2


def test_the_dtype_of_a_loaded_base(caplog):
    PartialState(cpu=True)  # for a line in the log

    def args(**settings):
        return SimpleNamespace(**{"bf16": True, "device": torch.device("cuda"), "model_init_kwargs": None} | settings)

    assert choose_dtype(args(), True, {}) == torch.bfloat16
    assert choose_dtype(args(), False, {}) is None  # weights are trained
    for settings in ({"bf16": False}, {"device": torch.device("cpu")}, {"model_init_kwargs": {"dtype": "float32"}}):
        assert choose_dtype(args(**settings), True, settings.get("model_init_kwargs", {})) is None
    plain, whole = lora(), LoraConfig(modules_to_save=["lm_head"])
    assert stays_frozen([AgentSpec("a")], plain) and stays_frozen([AgentSpec("a", peft_config=plain)], None)
    assert not stays_frozen([AgentSpec("a")], None) and not stays_frozen([AgentSpec("a")], whole)


@pytest.mark.parametrize("is_native", [True, False])
def test_a_gpu_that_emulates_bfloat16_trains_without_it(monkeypatch, is_native):
    monkeypatch.setattr(marft_config, "is_torch_bf16_gpu_available", lambda: True)  # transformers counts emulation
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or is_native
    )
    monkeypatch.setattr(GRPOConfig, "__post_init__", lambda self: None)  # would take the GPU
    monkeypatch.setattr(MARFTConfig, "check", lambda self: None)
    assert MARFTConfig("unused").bf16 is is_native and not MARFTConfig("unused", fp16=True).bf16


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_a_loaded_team_computes_in_the_precision_of_training(model_folder, tokenizer, dtype):
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    computed = set()
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *call: computed.add(call[-1].dtype))
    settings = {"max_new_tokens": 2, "do_sample": False}
    engine = ModelEngine(model, tokenizer, settings, dtype)
    engine.generate([[1, 2]], settings, {})
    assert computed == {dtype or torch.float32}


def test_generating_in_precision_casts_where_the_base_has_it(model_folder):
    for dtype, expected in ((torch.float32, False), (torch.bfloat16, True)):
        model = family_model("qwen3").to(dtype)
        with generating_in_precision(model, torch.bfloat16):
            assert torch.is_autocast_enabled("cpu") == expected
    base = family_base("qwen3").to(torch.bfloat16)  # accelerate casts the passes of a base that is trained itself
    with generating_in_precision(base, torch.bfloat16), generating_in_precision(model, None):
        assert not torch.is_autocast_enabled("cpu")


def test_copies_that_mixed_precision_makes_of_weights_are_counted(model_folder, tmp_path, monkeypatch):
    model = family_model("qwen3")
    base = model.get_base_model()
    layers = [(name, layer) for name, layer in base.model.named_modules() if isinstance(layer, torch.nn.Linear)]
    linear = sum(layer.weight.numel() for name, layer in layers if "lora" not in name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        once, twice = (measure_activations(base, share).fixed for share in (False, True))
    assert once == pytest.approx(2 * linear, rel=0.2) and twice == pytest.approx(4 * linear, rel=0.2)
    assert measure_activations(base, True).fixed < 0.2 * linear
    cost = measure_activations(base)
    assert ActivationCost(1.0, 0.0, 1.0, fixed=5.0).size(3, 0, False) == 8
    trainer = team_trainer(model_folder, tmp_path)
    monkeypatch.setattr(batching, "free_memory", lambda device: 10**9)
    free = trainer.parts.batcher.free_for_activations
    assert free(8, cost.fixed + 1000) == pytest.approx(free(8, cost.fixed) - 1000)


def test_the_trial_of_shared_prefixes_runs_in_the_precision_of_training(model_folder, tmp_path, monkeypatch):
    """Some attention kernels run only in half precision."""
    autocast_states = []
    trial = forward.find_obstacle

    def noting(model):
        autocast_states.append(torch.is_autocast_enabled("cpu"))
        return trial(model)

    monkeypatch.setattr(forward, "find_obstacle", noting)
    for half in (False, True):
        team_trainer(model_folder, tmp_path, settings={"bf16": half, "use_cpu": True})
    assert autocast_states == [False, True]


def test_the_trial_sees_another_prefix_where_few_dimensions_dominate(monkeypatch):
    model = family_base("qwen3")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.15)  # so that tokens matter to one another
        model.model.embed_tokens.weight[:, 0] = 4.0  # the same for all tokens
        model.model.norm.weight[0] = 30.0  # and larger than all else
    model = model.to(torch.bfloat16)
    assert find_obstacle(model) is None
    prefill = forward.prefill

    def of_other_tokens(backbone, prefixes, *cache):
        return prefill(backbone, [[token + 20 for token in prefix] for prefix in prefixes], *cache)

    with monkeypatch.context() as patch:
        patch.setattr(forward, "_typical_error", lambda *_: 0.0)
        patch.setattr(forward, "prefill", of_other_tokens)
        assert find_obstacle(model) is None  # nothing shows in the norm
    monkeypatch.setattr(forward, "prefill", of_other_tokens)
    assert "when rows share a prefix" in find_obstacle(model)


def test_compiled_passes_are_refused_where_they_would_not_be_taken(model_folder, tmp_path):
    with pytest.raises(ValueError, match=r"`torch_compile=True`.*`share_prefixes=False`"):
        team_trainer(model_folder, tmp_path, settings={"torch_compile": True, "torch_compile_backend": "eager"})


@pytest.mark.slow
def test_compiled_passes_train(model_folder, tmp_path):
    settings = {"torch_compile": True, "torch_compile_backend": "eager", "share_prefixes": False, "max_steps": 1}
    trainer = team_trainer(model_folder, tmp_path, settings=settings)
    torch._dynamo.utils.counters.clear()
    assert moved_by_training(trainer) and torch._dynamo.utils.counters["frames"]["ok"]


def test_step_without_gradients_changes_nothing_and_goes_on(tmp_path):
    AcceleratorState(cpu=True)
    parameter = torch.nn.Parameter(torch.ones(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    step_without_gradients(scaler)
    optimizer = AcceleratedOptimizer(torch.optim.SGD([parameter], lr=1.0), scaler=scaler)
    for gradient, expected in ((None, 1.0), (1.0, 0.0), (None, 0.0), (torch.inf, 0.0), (1.0, -1.0)):
        parameter.grad = None
        if gradient is not None:
            scaler.scale((parameter * gradient).sum()).backward()
            scaler.unscale_(optimizer.optimizer)
        optimizer.step()
        assert parameter.tolist() == [expected] * 2 and optimizer.step_was_skipped == (gradient == torch.inf)


def test_a_step_in_which_all_adapters_are_stopped_goes_on_in_fp16(model_folder, tmp_path, monkeypatch):
    begin = Accelerator.__init__

    def with_scaler(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    monkeypatch.setattr(Accelerator, "__init__", with_scaler)
    settings = {"target_kl": 1e-12, "num_iterations": 2, "max_steps": 4}
    trainer = team_trainer(model_folder, tmp_path, settings=settings)
    trainer.train()
    logs = trainer.state.log_history
    assert any("stopped_updates" in name and value == 1.0 for entry in logs for name, value in entry.items())
    assert trainer.state.global_step == 4


def test_memory_is_given_back_before_a_sleeping_server_wakes(monkeypatch):
    calls = []

    class Library:
        async def wake(self):
            calls.append("wake")

    waking = VLLMGenerator.__new__(VLLMGenerator)
    waking.library, waking._asleep = Library(), True
    monkeypatch.setattr(vllm_generator, "clear_device_cache", lambda **options: calls.append(options))
    run_coroutine(waking._wake)
    run_coroutine(waking._wake)
    assert calls == [{"garbage_collection": True}, "wake"]


def test_the_memory_of_a_sleeping_server_is_not_counted_as_free(model_folder, tmp_path, monkeypatch):
    vllm = {"mode": "colocate", "enable_sleep_mode": True, "gpu_memory_utilization": 0.4}
    args = SimpleNamespace(use_vllm=True, **{f"vllm_{name}": value for name, value in vllm.items()})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50, 1000))
    assert memory_of_server(args, torch.device("cuda")) == 400
    assert memory_of_server(MARFTConfig(str(tmp_path)), torch.device("cuda")) == 0
    trainer = team_trainer(model_folder, tmp_path)
    monkeypatch.setattr(batching, "free_memory", lambda device: 10**9)
    free = trainer.parts.batcher.free_for_activations(8)
    monkeypatch.setattr(batching, "memory_of_server", lambda args, device: 10**8)
    assert trainer.parts.batcher.free_for_activations(8) == pytest.approx(free - 0.7 * 10**8)


def test_a_4_bit_base_computes_in_the_type_that_the_base_is_loaded_in(caplog):
    PartialState(cpu=True)  # for a line in the log
    args = SimpleNamespace(bf16=True, device=torch.device("cuda"), model_init_kwargs=None)
    quantization_config = BitsAndBytesConfig(load_in_4bit=True)
    resolved = computing_in(quantization_config, choose_dtype(args, True, {}))
    assert resolved.bnb_4bit_compute_dtype == torch.bfloat16 and resolved.load_in_4bit
    assert quantization_config.bnb_4bit_compute_dtype == torch.float32  # the user's config is unchanged
    assert computing_in(quantization_config, None) is quantization_config
    chosen = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16)
    assert computing_in(chosen, torch.bfloat16) is chosen and computing_in(None, torch.bfloat16) is None
    plain, set_by_user = {"load_in_4bit": True}, {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}
    assert computing_in(plain, torch.bfloat16) == {**plain, "bnb_4bit_compute_dtype": torch.bfloat16}
    assert computing_in(set_by_user, torch.bfloat16) == set_by_user


@pytest.mark.parametrize(
    ("variables", "variable"),
    [
        ({}, None),
        ({"WORLD_SIZE": "1", "MASTER_PORT": "29500"}, None),  # torchrun with one process
        ({"MASTER_PORT": "29500"}, "MASTER_PORT"),  # accelerate with MULTI_CPU
        ({"SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS=4"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2"),
        ({"SLURM_STEP_NUM_TASKS": "4(x2)"}, None),
    ],
    ids=str,
)
def test_a_lone_process_among_others_logs_a_warning(tmp_path, monkeypatch, caplog, variables, variable):
    args = config(tmp_path)
    for name in ("WORLD_SIZE", "MASTER_PORT", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level("WARNING"):
        check_launcher(args)
    warnings = [warning for warning in caplog.messages if "so the other processes may be separate runs" in warning]
    assert (len(warnings) == 1 and variable in warnings[0]) if variable else not warnings


@pytest.mark.slow
@pretended
def test_the_checks_of_a_gpu_run_from_start_to_end():
    output = run("benchmarks/devices/gpu.py", "--device", "pretend")
    assert "**NOT**" not in output and output.count("as expected") >= 7, output


def test_sampling_and_scoring_in_two_precisions_logs_a_warning(model_folder, tmp_path, caplog):
    has_warned = []
    for kwargs in (None, {"dtype": "bfloat16"}):
        caplog.clear()
        settings = {"bf16": True, "use_cpu": True, "model_init_kwargs": kwargs}
        team_trainer(model_folder, tmp_path, settings=settings)
        has_warned.append("turns are sampled in float32 and scored in half precision" in caplog.text)
    assert has_warned == [True, False]


def test_adapters_without_an_agent_are_not_trained(model_folder, tmp_path):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), lora(), adapter_name="actor")
    model.add_adapter("spare", lora())
    model.set_requires_grad(["spare"], True)
    trainer = team_trainer(model, tmp_path)
    trainer.policies.activate("actor")
    assert not any(
        parameter.requires_grad for name, parameter in trainer.model.named_parameters() if ".spare." in name
    )
