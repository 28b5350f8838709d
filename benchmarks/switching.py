"""
Time of switching adapters, next to PEFT's own functions. The model has 28 layers with LoRA on all linear layers, and
is so narrow that other costs do not matter.

    python benchmarks/switching.py
"""

import statistics
import time

from marft_trl import AgentSpec
from marft_trl.adapters.lora import add_adapters
from marft_trl.adapters.policies import Policies

import torch
from peft import LoraConfig
from transformers import Qwen2Config, Qwen2ForCausalLM


def milliseconds(switch, names):
    times = []
    for name in names:
        begin = time.process_time()
        switch(name)
        times.append(1e3 * (time.process_time() - begin))
    return statistics.median(times)


def main():
    torch.set_num_threads(1)
    print("| agents | | PEFT | marft_trl | ratio |\n|---|---|---|---|---|")
    for count in (2, 4, 8):
        config = Qwen2Config(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=28,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
        agents = [AgentSpec(f"a{index}", system_prompt="Work.") for index in range(count)]
        lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
        model = add_adapters(Qwen2ForCausalLM(config), agents, lora)
        policies = Policies(model, agents)
        trained = [agent.adapter for agent in agents]

        def by_peft(name, model=model, trained=trained):
            model.set_adapter(name, inference_mode=True)
            model.set_requires_grad(trained, True)

        def base_by_peft(_, model=model, trained=trained):
            with model.disable_adapter():
                pass
            model.set_requires_grad(trained, True)

        def base(_, policies=policies):
            with policies.base():
                pass

        rows = {
            "the adapter is active already": (by_peft, policies.activate_adapter, ["a0"] * 9),
            "another one is active": (by_peft, policies.activate_adapter, ["a0", "a1"] * 5),
            "the base alone, for a reference": (base_by_peft, base, [""] * 9),
        }
        for case, (peft_switch, own_switch, names) in rows.items():
            own_switch(names[0] or None)
            spent = [milliseconds(switch, names) for switch in (peft_switch, own_switch)]
            print(f"| {count} | {case} | {spent[0]:.1f} ms | {spent[1]:.2f} ms | {spent[1] / spent[0]:.3f} |")


if __name__ == "__main__":
    main()
