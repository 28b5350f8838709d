"""
Effect of DeepSpeed on adapters that processes use at different positions: why `MARFTTrainer` rejects it.

    pip install deepspeed
    DS_ACCELERATOR=cpu torchrun --nproc_per_node 2 benchmarks/devices/zero.py

DeepSpeed compiles its communication on the CPU when it first starts, which takes minutes. Two processes train a small
frozen network with two adapters, one step with SGD. Both use the same adapter, or each uses a different one, like
the agents of a team. The weights of the adapters are compared with those of one process that has all the rows.
"""

import os

import torch
from torch import nn


class Layer(nn.Module):
    """A frozen matrix with two adapters, one of which is used."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(16, 16, bias=False).requires_grad_(False)
        self.adapters = nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in ("planner", "solver")})

    def forward(self, x, name):
        return torch.tanh(self.base(x) + self.adapters[name](x))


class Network(nn.Module):
    """Three such layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x, name):
        for layer in self.layers:
            x = layer(x, name)
        return x


def build():
    """The same network on every process, and an optimizer of its adapters."""
    torch.manual_seed(0)
    network = Network()
    return network, torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.1)


def loss_of(model, process, names):
    """Loss of the row of a process under its adapter."""
    return model(torch.ones(1, 16) * (1 + process) / 4, names[process]).pow(2).sum()


def expected(names):
    """Adapters after a step of one process with the rows of both."""
    network, optimizer = build()
    (sum(loss_of(network, process, names) for process in range(2)) / 2).backward()
    optimizer.step()
    return {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}


def wrong(stage, names):
    """Number of adapter matrices that DeepSpeed trains differently, and of all."""
    import deepspeed

    process, (network, optimizer) = int(os.environ["RANK"]), build()
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
    settings |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=settings)
    engine.backward(loss_of(engine, process, names))
    engine.step()
    right = expected(names)
    with deepspeed.zero.GatheredParameters(list(network.parameters())):
        trained = {name: p.detach() for name, p in network.named_parameters() if name in right}
        errors = [name for name, value in right.items() if not torch.allclose(trained[name], value, atol=1e-6)]
    return len(errors), len(right)


def main():
    import deepspeed

    deepspeed.init_distributed("gloo")
    for stage in (1, 2, 3):
        for names in (("planner", "planner"), ("planner", "solver")):
            try:
                outcome = "{} of {} matrices wrong, without an error".format(*wrong(stage, names))
            except RuntimeError as error:
                outcome = f"RuntimeError: {str(error).splitlines()[0][:90]}"
            if os.environ["RANK"] == "1":
                print(f"deepspeed {deepspeed.__version__}, ZeRO {stage}, {' and '.join(names)}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
