"""
Checks that need a GPU, and figures that only a GPU can give.

    make gpu                                              # random weights in the shape of Qwen2.5-1.5B
    python benchmarks/devices/gpu.py --model Qwen/Qwen2.5-1.5B-Instruct --page gpu.md
    python benchmarks/devices/gpu.py --model smollm2      # a real model without a hub
    python benchmarks/devices/gpu.py --device pretend     # test this script without a GPU

Every check prints the expected and the measured result. A check that the device does not support prints why it was
left out: a pretended device has no memory, no kernels and no speed. The comparison with TRL's step comes first. Every
row is printed and written to the page as soon as it is measured. Figures of rollouts on vLLM servers are those of
`gpu_servers.py`.
"""

import argparse
import collections
import contextlib
import datetime
import functools
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch


TESTS = Path(__file__).resolve().parents[2] / "tests"
LEFT_OUT = "left out"


class Checks:
    """Rows of the page: what is checked, what is expected, what was found, and whether that is right."""

    def __init__(self, write=lambda checks: None):
        self.rows, self.write = [], write

    def add(self, what, expected, found, right):
        verdict = right if isinstance(right, str) else "as expected" if right else "**NOT**"
        self.rows.append((what, expected, found, verdict))
        self.write(self)
        print(f"{verdict:12} {what}: expected {expected}; found {found}", flush=True)

    @contextlib.contextmanager
    def row(self, what, expected):
        """A check that may fail in any way, without ending the others."""
        try:
            yield functools.partial(self.add, what, expected)
        except Exception as error:
            self.add(what, expected, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}", False)


class Device:
    """The device that is checked."""

    def __init__(self, name):
        self.is_pretended = name == "pretend"
        if self.is_pretended:
            sys.path.append(str(TESTS))
            import pretend_device

            self._pretended = pretend_device
            self.device = pretend_device.install()
            from marft_trl.learning import batching as micro_batcher
            from marft_trl.learning.memory import ActivationCost

            micro_batcher.measure_activations = lambda *args, **kwargs: ActivationCost(1e4, 1e3, 1e3)
        else:
            self.device = torch.device("cuda", 0)

    def mode(self):
        return self._pretended.Pretend() if self.is_pretended else contextlib.nullcontext()

    def apart(self):
        return self._pretended.apart() if self.is_pretended else contextlib.nullcontext()

    def synchronize(self):
        if not self.is_pretended:
            torch.cuda.synchronize()

    @contextlib.contextmanager
    def waits(self):
        """Count synchronizations with the device: a list with one entry each."""
        events = []
        if self.is_pretended:
            listener = lambda kind: kind != "to the device" and events.append(kind)  # noqa: E731
            self._pretended.LISTENERS.append(listener)
            try:
                yield events
            finally:
                self._pretended.LISTENERS.remove(listener)
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield events
            finally:
                torch.cuda.set_sync_debug_mode("default")
                events.extend(str(warning.message) for warning in caught if "synchroniz" in str(warning.message))

    def name(self):
        if self.is_pretended:
            return f"a pretended device on {platform.machine()}"
        return f"{torch.cuda.get_device_name()}, {torch.cuda.mem_get_info()[1] / 2**30:.0f} GiB"


class Types(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts operations, and products with weights by their type."""

    def __init__(self):
        super().__init__()
        self.products, self.operations = collections.Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        if str(func) in ("aten.mm.default", "aten.addmm.default"):
            self.products[str(args[-1].dtype).removeprefix("torch.")] += 1
        return func(*args, **(kwargs or {}))


def reward(completions, **kwargs):
    return [float(sum(map(ord, str(completion))) % 7) / 7 for completion in completions]


def trainer_of(options, folder, agents=2, **settings):
    from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
    from marft_trl.tiny import tiny_dataset

    from peft import LoraConfig

    defaults = {
        "per_device_train_batch_size": options.episodes,
        "num_generations": 4,
        "max_completion_length": options.tokens,
        "max_steps": 2,
        "learning_rate": 1e-4,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "optim": "adamw_torch",
        "dataloader_pin_memory": not options.is_pretended,
        "gradient_checkpointing": False if options.is_pretended else None,
        "generation_kwargs": {"min_new_tokens": options.tokens},
    }
    return MARFTTrainer(
        model=options.base,
        agents=[AgentSpec(f"a{index}", system_prompt=f"Work {index}.") for index in range(agents)],
        reward_funcs=reward,
        args=MARFTConfig(f"{folder}/run", **defaults | settings),
        train_dataset=tiny_dataset(64),
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def trl_trainer(options, folder, **settings):
    """TRL's trainer with one agent."""
    from marft_trl.tiny import tiny_dataset

    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    return GRPOTrainer(
        model=options.base,
        reward_funcs=reward,
        args=GRPOConfig(
            f"{folder}/trl",
            **{
                "per_device_train_batch_size": options.episodes,
                "num_generations": 4,
                "max_completion_length": options.tokens,
                "max_steps": 1,
                "report_to": "none",
                "save_strategy": "no",
                "optim": "adamw_torch",
                "bf16": True,
                "dataloader_pin_memory": not options.is_pretended,
                "gradient_checkpointing": False,
                "model_init_kwargs": {"device_map": None},
                **settings,
            },
        ),
        train_dataset=tiny_dataset(64),
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


@contextlib.contextmanager
def around(owner, name, make):
    """Run each call of a function in its own context, and return the list of contexts."""
    function, results = getattr(owner, name), []

    def counted(*args, **kwargs):
        with make() as record:
            result = function(*args, **kwargs)
        results.append(record)
        return result

    setattr(owner, name, counted)
    try:
        yield results
    finally:
        setattr(owner, name, function)


# ---- Checks ----


def step(checks, device, options, folder):
    """Seconds of a step with default settings: two agents, one and `GRPOTrainer`, whole, split and in 4 bits."""
    small = options.is_pretended
    splits = [(options.episodes, 1), (options.episodes // 4, 4)]
    for bits in ("bfloat16",) if small else ("bfloat16", "4 bits"):
        for rows, accumulation in splits if bits == "bfloat16" else splits[1:]:
            seconds = {}
            for contender in ("GRPOTrainer", "one agent", "two agents"):
                expected = {"one agent": "at most 0.5 of GRPOTrainer", "two agents": "at most 0.5 of two GRPOTrainers"}
                title = f"step of {contender}, {rows} x {accumulation} rows, {options.tokens} new tokens, {bits}"
                with checks.row(title, expected.get(contender, "a figure")) as say:
                    seconds[contender], start, most = _seconds_of_a_step(
                        device, options, folder, contender, rows, accumulation, bits
                    )
                    share = seconds[contender] / seconds["GRPOTrainer"] / (2 if contender == "two agents" else 1)
                    measured = f"{seconds[contender]:.2f} s ({share:.2f}); the first {start:.1f} s; {most:.1f} GiB"
                    say(measured, "a figure" if small or contender == "GRPOTrainer" else share <= 0.5)


def _seconds_of_a_step(device, options, folder, contender, rows, accumulation, bits):
    """Median seconds of the steps after the first, those of the first, and peak memory in GiB."""
    from transformers import BitsAndBytesConfig, TrainerCallback

    times = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            device.synchronize()
            times.append(-time.perf_counter())

        def on_step_end(self, *args, **kwargs):
            device.synchronize()
            times[-1] += time.perf_counter()

    kwargs = {"device_map": None, "dtype": "bfloat16"}
    if bits == "4 bits":
        four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
        kwargs |= {"device_map": {"": 0}, "quantization_config": BitsAndBytesConfig(**four)}
    settings = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}
    settings |= {"max_steps": 2 if device.is_pretended else 4, "model_init_kwargs": kwargs, "num_generations": 4}
    settings |= {"gradient_checkpointing": False, "generation_kwargs": {"min_new_tokens": options.tokens}}
    if not device.is_pretended:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if contender == "GRPOTrainer":
        trainer = trl_trainer(options, folder, **settings)
    else:
        trainer = trainer_of(options, folder, agents=1 if contender == "one agent" else 2, **settings)
    trainer.add_callback(Clock())
    trainer.train()
    most = 0.0 if device.is_pretended else torch.cuda.max_memory_allocated() / 2**30
    return statistics.median(times[1:]), times[0], most


def types(checks, device, options, folder):
    with checks.row("types", "base in bfloat16, adapters in float32, products alike in both phases") as say:
        trainer = trainer_of(options, folder)
        model = trainer.accelerator.unwrap_model(trainer.model)
        with around(model, "generate", Types) as generated, around(trainer, "training_step", Types) as trained:
            trainer.train()
        kinds = [sum((call.products for call in calls), collections.Counter()) for calls in (generated, trained)]
        weights = {
            str(parameter.dtype)
            for name in trainer.policies.names
            for parameter in trainer.policies.parameters(name).values()
        }
        measured = f"{model.get_base_model().dtype}, {sorted(weights)}, {dict(kinds[0])}, {dict(kinds[1])}"
        right = model.get_base_model().dtype == torch.bfloat16 and weights == {"torch.float32"}
        # The head of training computes in float32
        say(measured, right and set(kinds[0]) == {"bfloat16"} and kinds[1]["bfloat16"] >= kinds[1]["float32"])
    with checks.row("types of GRPOTrainer", "a figure: products with weights in generation") as say:
        baseline = trl_trainer(options, folder)
        with around(baseline.accelerator.unwrap_model(baseline.model), "generate", Types) as calls:
            baseline.train()
        say(str(dict(sum((call.products for call in calls), collections.Counter()))), "a figure")
    with checks.row("host operations of a layer and token", "a figure: what is launched, with one LoRA") as say:
        layer, ids = model.get_base_model().model.layers[0], torch.tensor([[5, 6, 7]], device=device.device)
        half = torch.autocast(device.device.type, dtype=torch.bfloat16)
        with around(layer, "forward", Types) as layers, torch.no_grad(), half:
            model.generate(input_ids=ids, max_new_tokens=4)
        say(f"{layers[-1].operations}", "a figure")


def waits(checks, device, options, folder):
    counts = []
    for tokens in (options.tokens, 2 * options.tokens):
        settings = {"max_completion_length": tokens, "generation_kwargs": {"min_new_tokens": tokens}}
        trainer = trainer_of(options, folder, max_steps=1, **settings)
        model = trainer.accelerator.unwrap_model(trainer.model)
        with around(model, "generate", device.waits) as calls, around(trainer, "compute_loss", device.waits) as steps:
            trainer.train()
        counts.append((sum(map(len, calls)) / len(calls), sum(map(len, steps))))
    with checks.row("waits a token", "at most 1.6 (GRPOTrainer: 1.1)") as say:
        slope = (counts[1][0] - counts[0][0]) / options.tokens
        say(f"{slope:.2f}", slope <= 1.6)
    with checks.row("waits of the loss of a step, two agents", "at most 40") as say:
        say(f"{counts[0][1]}", counts[0][1] <= 40)


def switching(checks, device, options, folder):
    with checks.row("activating an adapter", "under 1 ms if it is active, under 8 ms if another one is") as say:
        policies = trainer_of(options, folder, agents=4).policies
        times = {}
        for case, names in {"active": ["a0"] * 20, "another": ["a0", "a1"] * 10}.items():
            policies.activate("a0")
            begin = time.perf_counter()
            for name in names:
                policies.activate(name)
            times[case] = 1e3 * (time.perf_counter() - begin) / len(names)
        measured = ", ".join(f"{case} {spent:.2f} ms" for case, spent in times.items())
        say(measured, times["active"] < 1 and times["another"] < 8)


def memory(checks, device, options, folder):
    for dtype in ("bfloat16", "float32"):
        with checks.row(f"memory of a step, base in {dtype}", "at most what is planned") as say:
            if device.is_pretended:
                say("a pretended device has none", LEFT_OUT)
                continue
            trainer = trainer_of(options, folder, model_init_kwargs={"dtype": dtype})
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            planned = trainer.memory_plan().total
            trainer.train()
            most = torch.cuda.max_memory_allocated()
            say(f"{most / 2**30:.2f} of {planned / 2**30:.2f} GiB", most <= planned)
            del trainer


def out_of_memory(checks, device, options, folder):
    with checks.row("a step that does not fit", "taken again in smaller micro-batches, the run goes on") as say:
        trainer = trainer_of(options, folder, max_tokens_per_micro_batch=10**6)
        backward, left = trainer.accelerator.backward, [1]

        def failing(loss, **kwargs):
            if left and loss.grad_fn is not None:
                left.clear()
                if device.is_pretended:
                    raise torch.OutOfMemoryError("out of memory.")
                torch.empty(2**50, dtype=torch.uint8, device="cuda")  # more than there is
            backward(loss, **kwargs)

        trainer.accelerator.backward = failing
        trainer.train()
        limit = trainer.parts.batcher.max_tokens
        say(
            f"{trainer.state.global_step} steps, at most {limit:,} tokens",
            trainer.state.global_step == 2 and limit < 10**6,
        )


def decoding(checks, device, options, folder):
    """The loop of transformers, and ours with growing and fixed shapes: greedy tokens and speed."""
    from marft_trl.seams.generation import find_capture_obstacle
    from marft_trl.shared_prefix import decoding as steps
    from marft_trl.shared_prefix.decoding import decode

    trainer = trainer_of(options, folder)
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    trainer.policies.activate("a0")
    captured = []
    make = steps.captured
    steps.captured = lambda *arguments: captured.append(1) or make(*arguments)
    loops = {
        "transformers": {},
        "growing": {"custom_generate": decode},
        "fixed": {"custom_generate": functools.partial(decode, is_fixed=True)},
    }
    if not device.is_pretended:
        loops["captured"] = loops.pop("fixed")
    for rows in options.rows:
        ids = torch.arange(5, 5 + 24).repeat(rows, 1)
        ids[:, 20:] += torch.arange(rows).unsqueeze(1) % 50
        mask = torch.ones_like(ids)
        mask[::3, :5] = 0
        ids, mask = ids.to(device.device), mask.to(device.device)
        speeds, tokens = {}, {}
        with checks.row(f"decoding {rows} rows", "the same greedy tokens from each loop, captured the fastest") as say:
            for name, arguments in loops.items():
                times = []
                for _ in range(options.rounds):
                    device.synchronize()
                    begin = time.perf_counter()
                    with torch.no_grad(), torch.autocast(device.device.type, dtype=torch.bfloat16):
                        generated = model.generate(
                            input_ids=ids,
                            attention_mask=mask,
                            max_new_tokens=options.tokens,
                            min_new_tokens=options.tokens,
                            do_sample=False,
                            disable_compile=True,
                            pad_token_id=0,
                            **arguments,
                        )
                    device.synchronize()
                    times.append(time.perf_counter() - begin)
                speeds[name] = rows * options.tokens / statistics.median(times)
                tokens[name] = generated[:, ids.size(1) :].tolist()
            same = {
                name: sum(a == b for a, b in zip(outputs, tokens["growing"], strict=True))
                for name, outputs in tokens.items()
            }
            fast = ", ".join(
                f"{name} {speed:,.0f} tokens/s ({same[name]}/{rows} alike)" for name, speed in speeds.items()
            )
            # In half precision, another order of summation may change a greedy choice
            right = all(count >= (1.0 if device.is_pretended else 0.8) * rows for count in same.values())
            say(fast, right and (device.is_pretended or max(speeds, key=speeds.get) == "captured"))
    steps.captured = make
    with checks.row("steps of decoding", "captured as graphs") as say:
        obstacle = find_capture_obstacle(model)
        say(obstacle or f"{len(captured)} graphs", LEFT_OUT if obstacle else bool(captured))


def drawing(checks, device, options, folder):
    """A token of each row: few long rows take the scan over the vocabulary longest."""
    from marft_trl.shared_prefix.decoding import draw

    for rows in (8, 128):
        with checks.row(f"drawing a token for {rows} rows of 152,000", "a figure") as say:
            probabilities = torch.rand(rows, 152_000, device=device.device)
            draw(probabilities)
            device.synchronize()
            begin = time.perf_counter()
            for _ in range(5):
                draw(probabilities)
            device.synchronize()
            say(f"{200 * (time.perf_counter() - begin):.2f} ms", "a figure")


def spread(checks, device, options, folder):
    with checks.row("several devices are visible to one process", "the base is on its own") as say:
        count = 2 if device.is_pretended else torch.cuda.device_count()
        trainer = trainer_of(options, folder)
        devices = {str(parameter.device) for parameter in trainer.model.parameters()}
        say(
            f"{count} visible, weights on {sorted(devices)}",
            LEFT_OUT if count < 2 else devices == {str(device.device)},
        )


def nccl(checks, device, options, folder):
    with checks.row("a process fails over NCCL", "the others end with its words in half a minute") as say:
        if device.is_pretended or torch.cuda.device_count() < 2:
            say("it takes two GPUs", LEFT_OUT)
            return
        train = str(Path(__file__).with_name("machines") / "train.py")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", train, str(options.base)]
        begin = time.monotonic()
        done = subprocess.run(
            [*command, folder, "--fail", "1:1:raise", "--settings", '{"use_cpu": false, "bf16": true}'],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        is_reported = "Process 1 of the run failed" in done.stderr + done.stdout
        say(f"{is_reported} after {time.monotonic() - begin:.0f} s", is_reported)


CHECKS = [step, decoding, memory, types, waits, switching, out_of_memory, drawing, spread, nccl]


def random_base(folder):
    """Random weights in the shape of Qwen2.5-1.5B, with a small vocabulary: speed and memory do not depend on them."""
    from marft_trl.tiny import tiny_tokenizer

    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = tiny_tokenizer()
    config = Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=49152,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype="bfloat16",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def page(checks, device, options):
    lines = [
        f"# On {device.name()}",
        "",
        f"- {datetime.date.today().isoformat()}, PyTorch {torch.__version__}, base `{options.model}`",
        f"- `python benchmarks/devices/gpu.py {' '.join(sys.argv[1:])}`",
        "",
        "| what | expected | found | |",
        "|---|---|---|---|",
        *("| " + " | ".join(row) + " |" for row in checks.rows),
    ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "pretend"), default="cuda")
    parser.add_argument("--model", default="1.5b", help="name or folder of the base, `1.5b`, `tiny` or `smollm2`")
    parser.add_argument("--only", nargs="*", choices=[check.__name__ for check in CHECKS])
    parser.add_argument("--tokens", type=int, help="of a turn")
    parser.add_argument("--rows", type=int, nargs="*", help="that are decoded together")
    parser.add_argument("--page", type=Path, help="file for the table")
    options = parser.parse_args()
    options.is_pretended = options.device == "pretend"
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("PyTorch finds no GPU. Use `--device pretend` to test the script.")
    options.tokens = options.tokens or (12 if options.is_pretended else 128)
    options.rows = options.rows or ([8] if options.is_pretended else [8, 32, 128])
    options.rounds = 1 if options.is_pretended else 3
    options.episodes = 8 if options.is_pretended else 32
    device = Device(options.device)
    options.model = "tiny" if options.is_pretended and options.model == "1.5b" else options.model

    def write(checks):
        if options.page:
            options.page.parent.mkdir(parents=True, exist_ok=True)
            options.page.write_text(page(checks, device, options), encoding="utf-8")

    checks = Checks(write)
    with tempfile.TemporaryDirectory() as folder:
        options.base = options.model
        if options.model == "tiny":
            sys.path.append(str(Path(__file__).parents[1] / "servers"))
            from vllm_server import tiny_base

            options.base = tiny_base(f"{folder}/base")
        elif options.model == "1.5b":
            options.base = random_base(f"{folder}/base")
        elif options.model == "smollm2":
            from marft_trl.extras.tasks.smollm2 import smollm2

            options.base = smollm2()
        with device.mode():
            for check in CHECKS:
                if not options.only or check.__name__ in options.only:
                    check(checks, device, options, f"{folder}/{check.__name__}")
    raise SystemExit(any(row[-1] == "**NOT**" for row in checks.rows))


if __name__ == "__main__":
    main()
