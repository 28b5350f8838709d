"""Trains a team with real generation, on a sharded base if `SHARD_ON_CPU` is set, and saves its weights."""

import faulthandler
import json
import os
import sys
from pathlib import Path

from marft_trl import AgentSpec, Workflow
from marft_trl.learning import memory
from marft_trl.seams.sharding import local, shard_sizes
from marft_trl.tiny import tiny_dataset
from tests import shard_on_cpu  # before anything asks accelerate for its state
from tests.helpers import lora, team_trainer, varied_reward

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.debug import CommDebugMode
from transformers import BitsAndBytesConfig, training_args


class Lopsided(Workflow):
    """On the second process, an agent that is not trained takes all the turns."""

    async def run(self, episode):
        for name in ["critic"] * 3 if os.environ.get("RANK") == "1" else ["reasoner", "actor"]:
            await episode.turn(name)


def share(parameters) -> float:
    """Share of their elements that this process holds."""
    return sum(local(p).numel() for p in parameters) / sum(p.numel() for p in parameters)


def beside_4bit(model) -> int:
    """Bytes of the constants of 4-bit layers."""
    states = [module.quant_state for module in model.modules() if getattr(module, "quant_state", None) is not None]
    return sum(4 * (state.absmax.numel() + state.code.numel()) for state in states)


def failing(completions, **columns):
    if os.environ.get("RANK") == "1":
        raise KeyError("a reward that is lost")
    return varied_reward(completions)


def run_out_of_memory(module, args):
    if torch.is_grad_enabled():
        raise torch.OutOfMemoryError("in the middle of a pass")


def main(model: str, folder: str, options: str) -> None:
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", 1))
    overrides = json.loads(options)
    resume, evaluates = overrides.pop("resume", None), overrides.pop("evaluates", False)
    arguments = {"workflow": Lopsided()} if overrides.pop("lopsided", False) else {}
    arguments |= {"reward_funcs": failing} if overrides.pop("fails", False) else {}
    if overrides.get("bf16"):  # which transformers allows on GPUs only
        training_args.is_torch_bf16_gpu_available = lambda: True
    asks, out_of_memory = overrides.pop("asks", False), overrides.pop("out_of_memory", False)
    dropout, dtype = overrides.pop("dropout", 0.0), overrides.pop("dtype", "float32")
    storage = overrides.pop("four_bit", None)
    dtype = storage if storage not in (None, "uint8") else dtype
    apart = overrides.pop("apart", False) and os.environ.get("RANK") == "1"
    output = folder + "-of-another-node" if apart else folder
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=storage) if storage else None
    one_layer = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], layers_to_transform=[1])
    agents = [
        AgentSpec("reasoner", system_prompt="Write the steps.", peft_config=one_layer),
        AgentSpec("actor", system_prompt="Answer."),
        AgentSpec("critic", system_prompt="Check.", trainable=False),
        AgentSpec("second", system_prompt="Answer again.", adapter="actor"),
    ]
    if url := overrides.pop("server", None):  # a server without a model, whose turns depend on seeds and texts alone
        overrides |= {"use_vllm": True, "vllm_server_base_url": url, "fidelity_tolerance": 1e9}
        overrides |= {"vllm_importance_sampling_mode": "token_truncate"}
    settings = {"use_cpu": not shard_on_cpu.IS_ON, "per_device_train_batch_size": 8 // world}
    settings |= {"max_completion_length": 16, "max_steps": 5, "beta": 0.05, "learning_rate": 1e-2, **overrides}
    arguments |= {"eval_dataset": tiny_dataset(5, seed=1)} if evaluates else {}
    if dtype != "float32":
        settings["model_init_kwargs"] = {"dtype": dtype}
    arguments |= {"peft_config": lora(lora_dropout=dropout), "quantization_config": four_bit}
    trainer = team_trainer(model, output, agents=agents, settings=settings, **arguments)
    if out_of_memory and os.environ.get("RANK") == "1":
        trainer.model.get_base_model().model.layers[1].mlp.register_forward_pre_hook(run_out_of_memory)
    if evaluates:  # before anything is prepared for training
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=resume)
    if asks:  # other questions on each process, so other numbers of passes
        count = 1 + 2 * trainer.accelerator.process_index
        assert len(trainer.team.run(["Two and two?"] * count, batch_size=1)) == count
        trainer.accelerator.wait_for_everyone()
    adapters = trainer.policies.all_parameters()
    for module in trainer.model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(True, recurse=False)  # embeddings of a head stay gathered after a pass
            module.reshard()
    adapter_ids = {id(p) for p in adapters}
    base = {name: p for name, p in trainer.model.named_parameters() if id(p) not in adapter_ids}
    matrices = [p for name, p in base.items() if ".layers." in name and p.dim() > 1]
    memory._FIXED = float(os.environ.get("RANK", "0"))  # plans of the first process measure with two passes
    with CommDebugMode() as collectives:
        sizes = shard_sizes(trainer.model, adapters, world)
    measured = {
        "bytes": sum(local(p).numel() * p.element_size() for p in base.values()) + beside_4bit(trainer.model),
        "expected": sizes.held,
        "collectives": collectives.get_total_counts(),
        "layers": share(matrices),
        "adapters": share(adapters),
        "plan": trainer.plan(),
    }
    Path(folder, f"held-{trainer.accelerator.process_index}.json").write_text(json.dumps(measured), encoding="utf-8")
    trainer.save_model(os.path.join(folder, "final"))
    if trainer.is_world_process_zero():
        tensors = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" in name}
        if trainer.critic is not None:
            tensors |= {f"heads.{name}": p.detach() for name, p in trainer.critic.heads.named_parameters()}
        save_file(tensors, os.path.join(folder, "weights.safetensors"))
        Path(folder, "log.json").write_text(json.dumps(trainer.state.log_history), encoding="utf-8")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(240, exit=True)  # shortly before the limit of tests
    main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)
