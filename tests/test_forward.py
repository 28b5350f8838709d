"""The fast forward pass against each row alone: sharing prefixes does not change the results."""

import contextlib
import dataclasses
import itertools
from collections import Counter

from marft_trl import AgentSpec
from marft_trl.learning.batching import make_groups_adjacent
from marft_trl.seams.models import keep_4bit_weights
from marft_trl.shared_prefix import decoding, forward
from marft_trl.shared_prefix.forward import Cluster, clusters, plan_passes
from marft_trl.tiny import tiny_agents, tiny_dataset

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from trl.trainer.utils import add_fused_lm_head

from .families import FAMILIES, VOCABULARY, family_base, family_model, logps_alone, ragged_rows
from .helpers import lora, moved_by_training, pairs, shake, team_trainer, weights


sequences = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=5)


def common(rows):
    length = len(list(itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*rows, strict=False))))
    return min(length, min(map(len, rows)) - 1)


def partitions(items):
    if not items:
        yield []
        return
    for parts in partitions(items[1:]):
        yield [[items[0]], *parts]
        for index, part in enumerate(parts):
            yield [*parts[:index], [items[0], *part], *parts[index + 1 :]]


@given(rows=sequences)
def test_clusters_are_a_partition_that_shares_common_prefixes(rows):
    found_clusters = clusters(rows)
    assert sorted(row for cluster in found_clusters for row in cluster.rows) == list(range(len(rows)))
    for cluster in found_clusters:
        assert cluster.length == common([rows[row] for row in cluster.rows])
    best = max(
        sum(common([rows[row] for row in part]) * (len(part) - 1) for part in parts)
        for parts in partitions(list(range(len(rows))))
    )
    assert sum(cluster.saved for cluster in found_clusters) >= 0.6 * best


def test_clusters_by_hand():
    system, question, other, near, rest = [1, 2, 3], [4, 5, 6], [7, 8], [1, 0, 0, 1, 1, 0], [1, 0, 0, 1]
    two_pairs = [[*system, *question, 9], [*system, *question, 10, 11], [*system, *other, 9], [*system, *other, 9]]
    for rows, expected in (
        (two_pairs, [(6, (0, 1)), (5, (2, 3))]),  # 6 and 5 tokens: 11 saved; all four the system prompt: 9
        ([[*system, token, token] for token in range(20, 24)], [(3, (0, 1, 2, 3))]),
        # three share 6 among themselves, 12 saved; with the two others they would share 3, 12 saved, and lose these
        ([[*near, 0], [*near, 0], [*near, 2], rest, [1, 1, 0], rest], [(6, (0, 1, 2)), (3, (3, 5)), (2, (4,))]),
    ):
        assert [(cluster.length, cluster.rows) for cluster in clusters(rows)] == expected


def test_rows_are_shared_only_where_that_computes_less():
    same = [[1, 2, 3, 4, 5]] * 4  # 4 + 4 * 4 tokens instead of 4 * 8
    assert plan_passes(same, [3] * 4) == [Cluster(4, (0, 1, 2, 3))]
    assert plan_passes([[1, 2, 3], [2, 3, 4]], [1, 1]) == []
    eights = [[1] * 8, [1] * 8, [9] * 8]  # 2 * 7 + 3 * 2 tokens instead of 3 * 9
    assert plan_passes(eights, [1, 1, 1]) == [Cluster(7, (0, 1)), Cluster(7, (2,))]
    # Padded to the longest, prefixes would take 2 * 4 tokens and suffixes 3 * 4, whole rows take 3 * 5
    assert plan_passes([[1, 2], [1, 2], [9] * 5], [3, 3, 0]) == []


def test_nested_histories_neither_recurse_nor_crawl():
    history = list(range(3000))
    rows = [history[: 2 * turn + 1] for turn in range(1500)]
    assert sum(len(cluster.rows) for cluster in clusters(rows)) == 1500


def gradients(model, logps, entropies):
    weight = torch.linspace(-1, 1, len(logps))
    (logps * weight + 0.1 * entropies * weight).sum().backward()
    gradients_by_name = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients_by_name


def scored_together(base, prompts, completions):
    hidden = forward.hidden_states(base.base_model, prompts, completions)
    states = torch.cat([state[: len(completion)] for state, completion in zip(hidden, completions, strict=True)])
    return forward.score(base, states, torch.tensor([token for completion in completions for token in completion]))


@pytest.mark.parametrize(("family", "checkpointing", "others_words"), pairs([*FAMILIES], [False, True], [False, True]))
def test_shared_passes_equal_each_row_alone(family, checkpointing, others_words):
    check_shared_passes(family_model(family, temperature=0.7), checkpointing, others_words, atol=1e-6)


def check_shared_passes(model, checkpointing, others_words, atol):
    base = model.get_base_model()
    assert forward.find_obstacle(base) is None
    prompts, completions = ragged_rows(int(others_words), others_words)
    assert len(plan_passes(prompts, list(map(len, completions)))) == 3
    expected = logps_alone(base, prompts, completions, 0.7)
    expected_gradients = gradients(model, *expected)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    scores = scored_together(base, prompts, completions)
    for score, expected_score in zip(scores, expected, strict=True):
        torch.testing.assert_close(score, expected_score, rtol=1e-5, atol=atol)
    found_gradients = gradients(model, *scores)
    assert found_gradients.keys() == expected_gradients.keys() and len(found_gradients) >= 6
    for name, gradient in expected_gradients.items():
        assert (found_gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_shared_passes_on_a_4_bit_base(model_folder, checkpointing):
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(model_folder, quantization_config=quantization)
    keep_4bit_weights(base)
    assert any(type(module).__name__ == "Linear4bit" for module in base.modules())
    add_fused_lm_head(base, temperature=0.7, outputs=("log_probs", "entropy"))
    torch.manual_seed(0)
    model = get_peft_model(base, lora()).train()
    shake(model, 0.1)
    check_shared_passes(model, checkpointing, others_words=True, atol=1e-5)


def test_checkpointed_layers_are_computed_again():
    model = family_model("qwen3")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    base, runs = model.get_base_model(), []
    layer, inner = base.model.layers[0], base.model.layers[0].mlp.forward
    layer.mlp.forward = lambda *args: (runs.append(1), inner(*args))[1]  # a hook is not called in the recomputation
    forward.hidden_states(base.base_model, *ragged_rows(0)).sum().backward()
    assert len(runs) == 4  # two passes, each recomputed once
    assert layer.gradient_checkpointing and not layer._can_checkpoint_with_cache


def test_the_head_takes_a_part_of_the_positions_at_a_time(monkeypatch):
    model = family_model("qwen3")
    base, (prompts, completions) = model.get_base_model(), ragged_rows(0)
    states = forward.hidden_states(base.base_model, prompts, completions).flatten(0, 1).detach().requires_grad_()
    tokens, runs = torch.randint(3, 60, (len(states),)), []

    def run():
        logps, entropies = forward.score(base, states, tokens)
        (gradient,) = torch.autograd.grad((logps + entropies).sum(), states)
        return logps, entropies, gradient

    whole = run()
    head = forward.fused_head
    monkeypatch.setattr(forward, "fused_head", lambda *args: (runs.append(len(args[2])), head(*args))[1])
    monkeypatch.setattr(forward, "_LOGITS_AT_ONCE", 7 * 64)
    for chunked, unchunked in zip(run(), whole, strict=True):
        torch.testing.assert_close(chunked, unchunked, rtol=1e-5, atol=1e-6)
    assert set(runs[:-1]) == {7} and sum(runs) == len(states)


LEARNING = {"learning_rate": 1e-2, "optim": "sgd", "max_grad_norm": 0.0}


def trained_weights(model, tmp_path, share, arguments=None, **settings):
    # Turns of one length, so that no row leaves the batch, and draws as in transformers: both get the same tokens
    fixed = {"generation_kwargs": {"min_new_tokens": 24}, "max_completion_length": 8, "share_prefixes": share}
    trainer = team_trainer(model, tmp_path, settings={**LEARNING, **fixed, **settings}, **(arguments or {}))
    assert trainer.parts.passes.share == share
    start = weights(trainer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "draw", lambda probabilities, draws=None: torch.multinomial(probabilities, 1))
        trainer.train()
    heads = trainer.critic.heads.state_dict() if trainer.critic is not None else {}
    return start, {**weights(trainer), **{f"head.{name}": weight for name, weight in heads.items()}}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"num_iterations": 2, "beta": 0.1}, marks=pytest.mark.slow),
        pytest.param({"level": "action", "action_logprob": "token", "num_iterations": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"gradient_accumulation_steps": 2, "loss_type": "grpo", "entropy_coef": 0.05}, marks=pytest.mark.slow
        ),
        {"advantage": "gae", "critic": "shared", "level": "token"},
        pytest.param({"advantage": "gae", "critic": "frozen", "level": "action", "beta": 0.1}, marks=pytest.mark.slow),
        pytest.param({"max_tokens_per_micro_batch": 200, "gradient_checkpointing": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_is_the_same_on_the_plain_path(model_folder, tmp_path, settings):
    assert_same_training(lambda: model_folder, tmp_path, **settings)


def assert_same_training(make_model, tmp_path, arguments=None, **settings):
    """Training ends with the same weights with and without shared passes, relative to how far they have moved."""
    runs = [trained_weights(make_model(), tmp_path, share, arguments, **settings) for share in (True, False)]
    (start, shared), (_, plain) = runs
    change = torch.cat([(plain[name] - start[name]).flatten() for name in start])
    error = torch.cat([(plain[name] - shared[name]).flatten() for name in plain])
    assert change.norm() > 0 and error.norm() <= 1e-4 * change.norm()


LEVELS = {
    "token": {"advantage": "gae", "critic": "shared", "level": "token", "beta": 0.1},
    "action": {"level": "action", "action_logprob": "token", "num_iterations": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("adapters", ["own_adapters", "one_adapter"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_the_same_in_every_family(tokenizer, tmp_path, family, level, adapters):
    shared = {"adapter": "both"} if adapters == "one_adapter" else {}
    arguments = {
        "agents": [dataclasses.replace(agent, **shared) for agent in tiny_agents()],
        "processing_class": tokenizer,
    }
    assert_same_training(
        lambda: family_base(family, len(tokenizer)), tmp_path, arguments, **LEVELS[level], max_steps=2
    )


def test_the_episodes_of_a_group_stay_together(model_folder, tmp_path):
    settings = {"steps_per_generation": 2, "gradient_accumulation_steps": 2}
    trainer = team_trainer(model_folder, tmp_path, settings=settings)
    trainer.model.train()
    rows = [row for row in tiny_dataset(4).to_list() for _ in range(4)]
    for _ in range(3):
        for slice_ in trainer.parts.batch_maker.for_training(rows):
            assert sorted(Counter(row.episode // 4 for row in slice_.rows).values()) == [8, 8]  # of two agents
    assert make_groups_adjacent(torch.tensor([3, 0, 2, 1]), [0, 0, 1, 1]).tolist() == [3, 2, 0, 1]


def test_agents_of_one_adapter_share_too(model_folder, tmp_path):
    team = [AgentSpec("left", system_prompt="a", adapter="both"), AgentSpec("right", adapter="both")]
    assert_same_training(lambda: model_folder, tmp_path, {"agents": team})


def test_a_state_space_model_takes_the_plain_path_and_logs_it(tokenizer, tmp_path, caplog):
    config = AutoConfig.for_model(
        "mamba", vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, state_size=4, use_mambapy=False,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    arguments = {"processing_class": tokenizer, "peft_config": LoraConfig(target_modules=["in_proj"])}
    trainer = team_trainer(model, tmp_path, settings={"max_steps": 1}, **arguments)
    assert "share_prefixes" in caplog.text and not trainer.parts.passes.share
    assert moved_by_training(trainer)


def test_sampled_log_probabilities_are_kept_only_where_scoring_gives_the_same(model_folder, tmp_path, monkeypatch):
    passes = team_trainer(model_folder, tmp_path).parts.passes
    assert passes.sample_what_they_score()
    with monkeypatch.context() as change:  # as `tf32=True` sets it
        change.setattr(torch, "get_float32_matmul_precision", lambda: "high")
        assert not passes.sample_what_they_score()
    monkeypatch.setattr(passes.base, "is_quantized", True, raising=False)
    assert not passes.sample_what_they_score()


def test_scoring_without_dropout_leaves_the_mode_of_the_model_as_it_was(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path)
    trainer.model.train()
    with trainer.parts.log_probs.scoring(dropout=False):
        assert not trainer.model.training and not torch.is_grad_enabled()
    assert trainer.model.training
    with trainer.parts.log_probs.scoring():
        assert trainer.model.training


def test_a_mixture_of_experts_whose_routers_are_trained_takes_the_plain_path(tokenizer, tmp_path):
    arguments = {"processing_class": tokenizer, "peft_config": LoraConfig(target_modules=["q_proj", "v_proj"])}
    for loss, shares in ((0.001, False), (0.0, True)):
        settings = {"max_steps": 1, "router_aux_loss_coef": loss}
        trainer = team_trainer(family_base("qwen3_moe", len(tokenizer)), tmp_path, settings=settings, **arguments)
        assert trainer.parts.passes.share == shares
        assert moved_by_training(trainer)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_length_of_a_row_are_not_shared(rope_type):
    model = family_model("llama").get_base_model()
    rope = {"rope_type": rope_type, "rope_theta": 10000.0}
    for parameters in (rope, {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}):
        model.config.rope_parameters = parameters
        assert rope_type in forward.find_obstacle(model)


def test_padding_does_not_move_models_that_have_learned_positions(tokenizer, tmp_path, monkeypatch):
    for dtype in (torch.float32, torch.bfloat16):
        families = {family for family in FAMILIES if forward.needs_positions(family_base(family).to(dtype))}
        assert families == {"gpt2"}
    monkeypatch.setattr(forward, "shared_pass", None)  # nothing is shared
    settings = {"share_prefixes": False, "num_iterations": 2}
    model = family_base("gpt2", len(tokenizer))
    trainer = team_trainer(model, tmp_path, processing_class=tokenizer, settings=settings)
    rows = [row for row in tiny_dataset(2).to_list() for _ in range(4)]
    scored = [row for slice_ in trainer.parts.batch_maker.for_training(rows) for row in slice_.rows]
    assert len({len(row.prompt_ids) for row in scored}) > 2  # padded in front
    ids = zip(*((row.prompt_ids.tolist(), row.completion_ids.tolist()) for row in scored), strict=True)
    expected, _ = logps_alone(trainer.model, *ids, trainer.temperature)
    assert not trainer.parts.runner.generator.records
    logps = torch.cat([row.old_per_token_logps for row in scored])
    torch.testing.assert_close(logps, expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("rwkv", {"attention_hidden_size": 32, "context_length": 64}),
        ("xlstm", {"num_heads": 4, "num_blocks": 2}),
        ("mamba", {"state_size": 8}),  # its state skips masked tokens
        ("recurrent_gemma", {"lru_width": 32, "attention_window_size": 16, "head_dim": 8}),
    ],
)
def test_a_model_that_reads_padding_is_refused(family, settings):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **settings)).float().train()
    state = torch.get_rng_state()
    reads = family in ("rwkv", "xlstm")
    with pytest.raises(ValueError, match="reads padding as text") if reads else contextlib.nullcontext():
        assert forward.needs_positions(model) == (family == "recurrent_gemma")
    assert model.training and torch.get_rng_state().equal(state)


def test_a_model_that_does_not_run_on_bare_tokens_keeps_its_passes(monkeypatch):
    model = family_base("gpt2").train()

    def refuse(*args, **kwargs):
        raise ValueError("more than tokens")

    monkeypatch.setattr(model.base_model.wte, "forward", refuse)
    assert not forward.needs_positions(model) and model.training


def test_a_model_that_computes_differently_with_a_cache_is_detected():
    base = family_model("llama").get_base_model()
    attention = base.model.layers[1].self_attn
    inner = attention.forward

    def forgetful(*args, past_key_values=None, cache=None, **kwargs):  # its name differs between versions
        return inner(*args, **kwargs)

    attention.forward = forgetful
    assert "cannot run" in forward.find_obstacle(base)
    attention.forward = inner
    assert forward.find_obstacle(base) is None
    positions = base.model.rotary_emb.forward

    def from_the_start(states, position_ids):
        return positions(states, torch.arange(states.size(1)).unsqueeze(0))

    base.model.rotary_emb.forward = from_the_start
    assert "when rows share a prefix" in forward.find_obstacle(base)
