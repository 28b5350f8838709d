"""What ends a turn is decided on its own tokens: by generation, by cutting, and by what counts as cut off."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from marft_trl import AgentSpec
from marft_trl.rollout.generator import Sampling
from marft_trl.rollout.stopping import EndAtStopText, StopTexts
from marft_trl.rollout.transformers_generator import TransformersGenerator
from marft_trl.seams.trl import TrlEngine
from marft_trl.tiny import tiny_tokenizer

from .helpers import config, team_trainer


LONGEST = 12


@pytest.fixture(scope="module", params=[(True, True), (True, False), (False, True), (False, False)], ids=str)
def trainer(request, model_folder, tmp_path_factory):
    """A trainer for each way of generating, with the padding token apart from the end-of-sequence token or not."""
    share, is_apart = request.param
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = tiny_tokenizer()
    trainer = team_trainer(
        model,
        tmp_path_factory.mktemp("stops"),
        processing_class=tokenizer if is_apart else _with_pad_as_end(tokenizer),
        agents=[AgentSpec("solo")],
        args=config("stops", share_prefixes=share, num_iterations=2, max_completion_length=LONGEST),
    )
    assert (trainer.generation_kwargs["pad_token_id"] == tokenizer.eos_token_id) != is_apart
    return trainer


def _with_pad_as_end(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def generator_with(trainer, stop):
    """A generator whose agent stops at these texts; log-probabilities are kept on the fast path."""
    sampling = Sampling.of(AgentSpec("solo", stop=stop, max_completion_length=LONGEST), trainer.args)
    engine = TrlEngine(trainer, Sampling.of(AgentSpec("solo"), trainer.args).as_generation_kwargs())
    share = trainer.parts.passes.share
    return TransformersGenerator(engine, trainer.policies, {"solo": sampling}, share=share, records=share)


@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_nothing_that_was_not_sampled_is_part_of_a_turn(trainer, data, seed):
    tokenizer = trainer.processing_class
    ids = st.integers(3, len(tokenizer) - 1)
    prompts = data.draw(st.lists(st.lists(ids, min_size=1, max_size=6), min_size=1, max_size=5))
    # Texts that a turn may well hold, and texts that begin at the end of a prompt
    letters = st.text("abc=;+0123456789 \n", min_size=1, max_size=2)
    ends = st.sampled_from([tokenizer.decode(prompt)[-1:] for prompt in prompts])
    stop = data.draw(st.lists(letters | st.builds(str.__add__, ends, letters), min_size=1, max_size=2))
    generator = generator_with(trainer, [text for text in stop if text])
    torch.manual_seed(seed)
    sampled = generator.generate(["solo"] * len(prompts), prompts)

    rule = StopTexts(tokenizer, stop)
    for prompt, (completion, logps, _) in zip(prompts, sampled, strict=True):
        assert 1 <= len(completion) <= LONGEST
        assert not rule.are_in(completion[:-1])  # it ends with the first token that completes a stop text
        ended = completion[-1] in trainer.eos_token_ids or rule.are_in(completion)
        assert ended or len(completion) == LONGEST
        if not generator.records:
            continue
        assert len(logps) == len(completion)
        with torch.no_grad():
            logits = trainer.model(torch.tensor([[*prompt, *completion]])).logits[0].float()
        scores = logits[len(prompt) - 1 : -1].log_softmax(-1)
        expected = scores.gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(torch.tensor(logps), expected, atol=1e-4, rtol=0)


def test_a_stop_text_that_begins_in_the_prompt_ends_nothing(trainer):
    """The prompt ends in `a`: a turn `b...` does not hold `ab`, so it goes on."""
    tokenizer = trainer.processing_class
    criterion = EndAtStopText(StopTexts(tokenizer, ["ab"]))
    a, b, c = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc")
    rows = torch.tensor([[c, a, b], [a, c, a]])
    assert criterion(rows, None).tolist() == [False, False]
    rows = torch.cat([rows, torch.tensor([[a], [b]])], dim=1)
    assert criterion(rows, None).tolist() == [False, True]
    rows = torch.cat([rows, torch.tensor([[b], [c]])], dim=1)
    assert criterion(rows, None).tolist() == [True, True]


def test_a_turn_is_cut_after_the_token_that_completes_the_first_stop_text(tokenizer):
    ids = tokenizer.encode("1+2=3;4+5=9", add_special_tokens=False)
    rule = StopTexts(tokenizer, ["=9", "3;"])
    assert tokenizer.decode(rule.cut([*ids, 0, 0])) == "1+2=3;"
    assert rule.cut(ids[:4]) == ids[:4]
    assert [rule.end([ids[:n]])[0] for n in range(1, len(ids) + 1)].index(True) == len(rule.cut(ids)) - 1
    assert StopTexts(tokenizer, []).cut([1, 2, 0]) == [1, 2, 0]


def test_a_character_of_several_tokens_is_found(tokenizer):
    ids = tokenizer.encode("a\N{ROBOT FACE}b", add_special_tokens=False)
    rule = StopTexts(tokenizer, ["\N{ROBOT FACE}"])
    assert len(ids) > 3
    assert tokenizer.decode(rule.cut(ids)) == "a\N{ROBOT FACE}"
    assert [rule.end([ids[:n]])[0] for n in range(1, len(ids) + 1)].index(True) == len(ids) - 2
