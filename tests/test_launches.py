"""The number of GPU launches: passes of a step, kernels of a token, and graphs that are replayed."""

import sys
from pathlib import Path

from marft_trl import AgentSpec
from marft_trl.config.team_setup import Sampling
from marft_trl.learning.batching import MicroBatcher
from marft_trl.seams.generation import TrlEngine
from marft_trl.seams.lora_layers import DecodingLayers
from marft_trl.shared_prefix import decoding as steps
from marft_trl.shared_prefix.decoding import FixedLayer

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BitsAndBytesConfig

from .families import FAMILIES, family_model
from .helpers import calling, logged_steps, shake, team_trainer, weights


sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "speed"))
import launches


def test_passes_do_not_depend_on_how_a_batch_is_split():
    whole, split = (launches.passes_of_a_step(launches.make("duo", *parts)) for parts in ((16, 1), (4, 4)))
    assert split == whole
    assert whole["backward"] == 2  # one for each agent


GAE = {"advantage": "gae", "critic": "shared", "level": "token"}
CASES = [
    {"steps_per_generation": 1, "entropy_coef": 0.01, "agent_weight": "equal"},  # a step has rows of several batches
]
SLOW_CASES = [
    {"loss_type": "bnpo", "beta": 0.1, "num_iterations": 2},
    {**GAE, "critic": "per_agent", "beta": 0.1},
    {"loss_type": "grpo", "num_iterations": 2, "target_kl": 0.02},
    {"loss_type": "dr_grpo", "steps_per_generation": 1, "num_iterations": 2},  # a step has the same rows twice
    {"update_order": "sequential", "steps_per_generation": 2, "loss_type": "dapo"},
    {"top_entropy_quantile": 0.5},
    {**GAE, "steps_per_generation": 1, "num_iterations": 2},
]


@pytest.mark.parametrize(
    "settings", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)], ids=str
)
def test_slices_that_go_through_together_teach_the_same(settings, model_folder, tmp_path, monkeypatch):
    runs = []
    for joins in (False, True):
        if not joins:
            monkeypatch.setattr(MicroBatcher, "joins_slices", False)
        common = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "optim": "sgd"}
        common |= {"max_grad_norm": 0.0, "learning_rate": 0.5, "lr_scheduler_type": "constant"}
        rate = {"critic_learning_rate": 0.05} if "critic" in settings else {}
        trainer = team_trainer(model_folder, tmp_path, settings={**common, **rate, **settings})
        before = weights(trainer)
        trainer.train()
        change = {name: weight - before[name] for name, weight in weights(trainer).items()}
        runs.append((change, logged_steps(trainer)))
        monkeypatch.undo()
    (apart, apart_logs), (together, together_logs) = runs
    assert max(delta.abs().max() for delta in apart.values()) > 1e-3
    torch.testing.assert_close(together, apart, atol=2e-5, rtol=1e-3)
    assert len(apart_logs) == len(together_logs) == 2
    for apart_log, together_log in zip(apart_logs, together_logs, strict=True):
        assert apart_log.keys() == together_log.keys()
        for name in (name for name in apart_log if "time" not in name and "second" not in name):
            assert together_log[name] == pytest.approx(apart_log[name], rel=2e-3, abs=1e-5, nan_ok=True), name


def test_a_layer_launches_few_kernels_for_a_token():
    assert len(launches.kernels_of_a_layer()) <= 45


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_for_decoding_compute_the_same_as_the_layers(family):
    model = family_model(family)
    ids = torch.arange(3, 39).view(4, 9)
    layers = DecodingLayers(lambda: model)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with layers.on() as key:
            logits = model(input_ids=ids).logits
            with torch.enable_grad():  # as another thread that trains
                trained = model(input_ids=ids).logits
        assert torch.equal(model(input_ids=ids).logits, expected)  # nothing is left behind
        assert torch.equal(trained, expected) and trained.requires_grad
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert key is not None


def bfloat16_model(tokens=300):
    """A model with three adapters that change it and with logits as large as those of a trained model."""
    torch.manual_seed(0)
    base = launches.tiny_model(tokens, num_hidden_layers=3).to(torch.bfloat16)
    base.model.norm.weight.data *= 4
    # As PEFT does it, adapters stay in float32
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=12, target_modules="all-linear"), adapter_name="one")
    for name in ("two", "dora"):
        kind = {"use_dora": True} if name == "dora" else {}
        model.add_adapter(name, LoraConfig(r=4, lora_alpha=20, target_modules=["q_proj", "v_proj", "up_proj"], **kind))
    shake(model, 0.02)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("adapter", ["one", "two"])
def test_log_probabilities_of_a_half_precision_base_have_no_bias(adapter, autocast):
    """Compared with a scoring pass, the layers for decoding are no less precise than the ordinary layers."""
    model = bfloat16_model()
    model.set_adapter(adapter)
    ids = torch.randint(300, (32, 40), generator=torch.Generator().manual_seed(0))
    layers, layer_logps = DecodingLayers(lambda: model), {}

    def logps(model):
        logits = model(input_ids=ids[:, :-1]).logits.float()
        return logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)

    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            layer_logps["ordinary"] = logps(model)
            with layers.on():
                layer_logps["decoding"] = logps(model)
                norms = [module for name, module in model.named_modules() if name.endswith("input_layernorm")]
                dtypes = {norm(torch.ones(1, 128, dtype=torch.bfloat16)).dtype for norm in norms}
        assert dtypes == {torch.bfloat16}
        exact = logps(model.float())
    assert exact.std() > 0.1
    gaps = {name: values - exact for name, values in layer_logps.items()}
    assert gaps["decoding"].std() < 1.2 * gaps["ordinary"].std() < 0.02
    assert (layer_logps["decoding"] - layer_logps["ordinary"]).std() < 0.015
    for gap in gaps.values():
        assert gap.mean().abs() < 4 * gap.std() / gap.numel() ** 0.5


def test_layers_that_cannot_be_computed_otherwise_stay():
    model = bfloat16_model()
    ids, layers = torch.arange(20).view(2, 10), DecodingLayers(lambda: model)
    model.set_adapter("dora")
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with layers.on() as key:
            assert key is None
            torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=0.05, rtol=0.05)
        with model.disable_adapter(), layers.on() as without:
            assert without is not None and without[0] == ""
            model.get_base_model().model.layers[0].mlp.up_proj.weight.data = torch.ones(384, 128).bfloat16()
        with model.disable_adapter(), layers.on() as other:
            assert other != without  # a graph is not replayed after weights have moved
        model.add_adapter("three", LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"]))
        model.set_adapter("three")
        with layers.on() as key:  # an adapter of embeddings has no graph that another could replay
            assert key is None


def test_a_batch_that_does_not_fit_leaves_room_for_a_smaller_batch(model_folder, tmp_path, monkeypatch):
    answers, begin = greedy(static_team(model_folder, tmp_path)), FixedLayer._begin

    def full(layer, keys, values):
        if layer._most > 4:
            raise torch.OutOfMemoryError("out of memory.")
        begin(layer, keys, values)

    monkeypatch.setattr(FixedLayer, "_begin", full)
    with pytest.raises(torch.OutOfMemoryError):
        answers(["ann"] * 8, [[5, 6, 7]] * 8)
    assert len(answers(["ann"] * 4, [[5, 6, 7]] * 4)) == 4


@pytest.mark.parametrize("settings", [{}, {"advantage": "gae", "critic": "shared"}], ids=str)
def test_a_step_that_was_left_is_forgotten(settings, model_folder, tmp_path):
    """Otherwise the next step would train on the remaining slices."""
    calls, slices = [], []

    def reward(completions, **kwargs):
        calls.append(1)
        if len(calls) == 2:  # in the second half of the step
            raise KeyboardInterrupt
        return [float(index % 3) for index in range(len(completions))]

    common = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 1}
    trainer = team_trainer(model_folder, tmp_path, settings=common | settings, reward_funcs=reward)
    guard = trainer.parts.loss.out_of_memory.guard

    def noting(work, rows, *args):
        slices.append(len(rows))
        return guard(work, rows, *args)

    trainer.parts.loss.out_of_memory.guard = noting
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    # Two slices of eight episodes with a row of each agent; without a critic, those with a signal
    assert len(slices) == 1 and slices[0] <= 32 and (not settings or slices == [32])


class Tape(TorchDispatchMode):
    """Stands in for a CUDA graph: records the operations of a function with the memory that they use."""

    def __init__(self):
        super().__init__()
        self.taken = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "_local_scalar_dense" in str(function):
            raise RuntimeError("operation not permitted when stream is capturing")
        result = function(*args, **(kwargs or {}))
        self.taken.append((function, args, kwargs or {}, result))
        return result


def on_tape(run, pool=None):
    with Tape() as tape:
        result = run()

    def replay():
        for function, args, kwargs, then in tape.taken:
            if function.is_view:
                continue
            for old, new in zip(tree_leaves(then), tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)
        return result

    return replay


@pytest.fixture
def tapes(monkeypatch):
    replays = []
    monkeypatch.setattr(steps, "find_capture_obstacle", lambda model: None)
    monkeypatch.setattr(
        steps, "captured", lambda *args, **kwargs: replays.append(on_tape(*args, **kwargs)) or replays[-1]
    )
    return replays


def static_team(model, folder):
    settings = {"cache_implementation": "static", "max_completion_length": 20, "num_iterations": 2}
    return team_trainer(model, folder, agents=[AgentSpec("ann"), AgentSpec("ben")], settings=settings)


def greedy(trainer):
    generate = trainer.parts.runner.generator.generate
    return calling(lambda *args, **kwargs: generate(*args, greedy=True, **kwargs))


@pytest.mark.slow
def test_graphs_are_used_again_after_the_adapters_have_changed(model_folder, tmp_path, tapes, monkeypatch):
    """Tokens are those without graphs: with the current weights, with the reference, and with fewer rows."""
    trainer = static_team(model_folder, tmp_path)
    generator, answers = trainer.parts.runner.generator, greedy(trainer)
    prompts, counts, seen = [[5, 6, 7 + row % 3, 8][row % 2 :] for row in range(20)], [], set()
    for turn in range(3):
        shake(trainer.model, 0.2, "lora_")
        for agent in ("ann", "ben"):
            for options in ({}, {"by_reference": True}):
                with monkeypatch.context() as patch:
                    patch.setattr(generator, "keeps_shapes", lambda *args: False)
                    expected = answers([agent] * 20, prompts, **options)
                replayed = answers([agent] * 20, prompts, **options)
                assert [replayed_turn.ids for replayed_turn in replayed] == [
                    replayed_turn.ids for replayed_turn in expected
                ], (turn, agent, options)
                for replayed_turn, expected_turn in zip(replayed, expected, strict=True):
                    if replayed_turn.logps is not None:
                        assert replayed_turn.logps == pytest.approx(expected_turn.logps, abs=1e-3)
                seen.add(str([replayed_turn.ids for replayed_turn in replayed]))
        counts.append(len(tapes))
    # The two agents and the base, with all rows and with two smaller numbers of rows
    assert len(seen) > 6 and counts[0] >= 3 and counts[-1] <= 9
    generator.drop_cache()
    answers(["ann"] * 20, prompts)
    assert len(tapes) > counts[-1]


def test_a_graph_of_other_weights_is_not_used(tapes, caplog):
    """The first step of a call is compared with a step without a graph, which detects any move of weights."""
    model = family_model("qwen3")
    store, taken = steps.StepStore(), []
    for _ in range(2):
        fixed = store.start(model, torch.ones(4, 30, dtype=torch.long), torch.full((4,), 1), key="the same")
        fixed.begin(0)
        with torch.no_grad():
            taken.append([fixed.logits(torch.full((4, 1), 7)).clone() for _ in range(8)])
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.5  # at another address
    assert len(tapes) == 1 and taken
    assert "without CUDA graphs: ValueError: the logits of the graph differ" in caplog.text
    assert not torch.equal(taken[0][0], taken[1][0])


def test_memory_is_kept_for_all_that_fits_and_not_for_ever():
    model, store = family_model("qwen3"), steps.StepStore()

    def started(rows, size):
        return store.start(model, torch.ones(rows, size, dtype=torch.long), torch.ones(rows, dtype=torch.long), "key")

    first = started(4, 200)
    assert (first.rows, first.size) == (4, 256)
    assert started(4, 190) is first and started(2, 130) is first  # fewer rows take the first places
    second = started(8, 150)
    assert (second.rows, second.size) == (8, 256) and started(4, 200) is second
    third = started(4, 20)
    assert (third.rows, third.size) == (4, 64)  # a much larger cache would cost time
    store.clear()
    assert started(4, 20) is not third


def test_stop_texts_end_generation_at_the_next_check(model_folder, tmp_path, tokenizer, monkeypatch):
    """Not at the maximum length: if the first token completes a stop text, all rows end after eight steps."""
    taken, logits = [], steps.FixedSteps.logits
    monkeypatch.setattr(
        steps.FixedSteps, "logits", lambda fixed_steps, tokens: (taken.append(1), logits(fixed_steps, tokens))[1]
    )
    settings = {"cache_implementation": "static", "max_completion_length": 30}
    settings["generation_kwargs"] = {"min_new_tokens": 30}
    everything = [chr(code) for code in range(32, 127)]
    trainer = team_trainer(model_folder, tmp_path, agents=[AgentSpec("ann", stop=everything)], settings=settings)
    greedy(trainer)(["ann"] * 3, [tokenizer("1 + 2")["input_ids"]] * 3)
    assert len(taken) in (8, 16)


def test_a_plan_has_the_memory_that_captured_decoding_keeps(model_folder, tmp_path, monkeypatch):
    trainer = team_trainer(model_folder, tmp_path)
    plain = trainer.memory_plan()
    monkeypatch.setattr(type(trainer.parts.runner.generator), "keeps_cache", True)
    plan = trainer.memory_plan()
    assert plan.cache == plain.kept == 0 and plan.kept > plain.cache > 0
    most = max(plan.gradients + plan.activations, plan.prefill)
    assert plan.total == plan.base + plan.adapters + plan.optimizer + plan.kept + most


def test_stop_texts_end_turns_of_fixed_steps(model_folder, tmp_path, tokenizer):
    """They are checked every eighth step; the tokens after them and their log-probabilities are cut off."""
    turns_by_cache = []
    for kind in ("dynamic", "static"):
        agents = [AgentSpec("ann", stop=["1", "+", "3"])]
        settings = {"cache_implementation": kind, "max_completion_length": 30, "num_iterations": 2}
        trainer = team_trainer(model_folder, tmp_path, agents=agents, settings=settings)
        prompts = [tokenizer(f"{row} + {row + 3}")["input_ids"] for row in range(12)]
        turns_by_cache.append(greedy(trainer)(["ann"] * 12, prompts))
    assert [turn.ids for turn in turns_by_cache[0]] == [turn.ids for turn in turns_by_cache[1]]
    assert any("1" in tokenizer.decode(turn.ids) for turn in turns_by_cache[1])


@pytest.mark.parametrize(("kind", "line"), [(None, "replays CUDA"), ("dynamic", "does not use CUDA graphs: `cache_")])
def test_where_steps_are_captured(model_folder, tmp_path, monkeypatch, caplog, kind, line):
    trainer = static_team(model_folder, tmp_path)
    generator, sampling = trainer.parts.runner.generator, Sampling.from_agent(AgentSpec("ann"), trainer.args)
    settings = {"cache_implementation": kind}
    assert not generator.keeps_shapes(settings, sampling, None)
    on_gpu = {"device": torch.device("cuda"), "__getattr__": lambda self, name: getattr(trainer.model, name)}
    monkeypatch.setattr(TrlEngine, "model", type("OnGPU", (), on_gpu)())
    with caplog.at_level("INFO", logger="marft_trl"):
        assert generator.keeps_shapes(settings, sampling, None) == (kind is None)
    assert line in caplog.text


@pytest.mark.slow
def test_steps_of_a_base_in_4_bits_are_captured(model_folder, tmp_path, tapes, caplog):
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    ids_by_cache = []
    for kind in ("dynamic", "static"):
        settings = {"cache_implementation": kind, "model_init_kwargs": {"quantization_config": four}}
        trainer = team_trainer(model_folder, tmp_path, settings=settings | {"max_completion_length": 20})
        torch.manual_seed(0)
        shake(trainer.model, 0.2)
        answers, prompts = greedy(trainer), [[5, 6, 7 + row % 3, 8][row % 2 :] for row in range(10)]
        names = ("reasoner", "actor", "reasoner")
        ids_by_cache.append([[turn.ids for turn in answers([name] * 10, prompts)] for name in names])
    assert ids_by_cache[0] == ids_by_cache[1] and ids_by_cache[0][0] != ids_by_cache[0][1]
    assert tapes and "without CUDA graphs" not in caplog.text
