"""Tokenizers of five kinds with the control tokens of ten families of chat templates, trained offline."""

import functools
from importlib.resources import files

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


# Control tokens of each family: special ones, and ones that are added without being special
FAMILIES = {
    "qwen2_5": (["<|im_start|>", "<|im_end|>"], ["<tool_call>", "</tool_call>"]),
    "qwen3": (
        ["<|im_start|>", "<|im_end|>"],
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
    ),
    "llama3": (["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], []),
    "gemma3": (["<start_of_turn>", "<end_of_turn>"], []),
    "gemma4": (
        ["<|turn>", "<turn|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|channel>", "<channel|>"],
        [],
    ),
    "phi3": (["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], []),
    "deepseekv3": (
        [
            f"<\uff5c{name}\uff5c>"
            for name in ("User", "Assistant", "end▁of▁sentence", "tool▁output▁begin", "tool▁output▁end")
        ],
        ["<think>", "</think>"],
    ),
    "glm4moe": (
        ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        ["<think>", "</think>", "<tool_response>", "</tool_response>"],
    ),
    "gptoss": (["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"], []),
    "lfm2": (["<|im_start|>", "<|im_end|>", "<|tool_response_start|>", "<|tool_response_end|>"], []),
}
# Templates whose marks are plain text
PLAIN_MARKS = {
    "llama2": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ '[INST] <<SYS>>\\n' + m.content + "
        "'\\n<</SYS>>\\n\\n' }}{% elif m.role == 'user' %}{{ ('' if loop.index0 == 1 and messages[0].role == 'system' "
        "else '[INST] ') + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
    ),
    "zephyr": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\\n{% endif %}"
    ),
    "vicuna": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content + ' ' }}{% elif m.role == 'user' %}"
        "{{ 'USER: ' + m.content + ' ' }}{% else %}{{ 'ASSISTANT: ' + m.content + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    ),
}
KINDS = ("byte_level", "lowering", "metaspace", "unigram", "wordpiece")
READS_NO_LINES = ("wordpiece",)
_BYTES = [f"<0x{number:02X}>" for number in range(256)]
_CORPUS = ["[planner] [solver] [tool] [environment] the answer is 4, not 5!\n", "system user assistant > <|im_start|>"]


def chat_template(family):
    """The template of a family, as TRL has it."""
    return PLAIN_MARKS.get(family) or files("trl").joinpath("chat_templates", f"{family}.jinja").read_text()


@functools.cache
def tokenizer_of(kind, family):
    """A tokenizer of a kind, with the control tokens and the template of a family."""
    special, added = FAMILIES.get(family.removesuffix("_training"), ([], []))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=_MAKERS[kind](),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=special,
    )
    fast.add_tokens([AddedToken(token, normalized=False, special=False) for token in added])
    fast.chat_template = chat_template(family)
    return fast


def _byte_level(normalizer=None):
    """As of GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return tokenizer


def _lowering():
    """Compatibility characters, accents and case are lost."""
    steps = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    return _byte_level(normalizers.Sequence(steps))


def _metaspace():
    """As of Llama 2 and Gemma: spaces become U+2581, unknown characters their bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = _spaces_and_bytes()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", *_BYTES], initial_alphabet=["\n"])
    tokenizer.train_from_iterator([line.replace(" ", "▁") for line in _CORPUS], trainer)
    vocab = tokenizer.get_vocab()
    # The bytes are tokens of the model here, not added ones
    rebuilt = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    rebuilt.normalizer, rebuilt.decoder = tokenizer.normalizer, tokenizer.decoder
    return rebuilt


def _unigram():
    """As of T5 with bytes: NFKC, invisible characters are removed, and words for bytes are read as these bytes."""
    pieces = [("<unk>", 0.0), *[(byte, -8.0) for byte in _BYTES], ("\n", -2.0), ("▁", -2.0)]
    seen = sorted({letter for line in _CORPUS for letter in line} - {"\n", " "})
    pieces += [(letter, -4.0) for letter in seen] + [("[planner]", -3.0), ("▁answer", -3.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    invisible = normalizers.Replace(Regex("[\\u200b\\u200c\\u200d\\ufeff\\u00ad\\x00-\\x08\\x0b\\x0e-\\x1f]"), "")
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), invisible])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = _spaces_and_bytes()
    return tokenizer


def _wordpiece():
    """As of BERT: line breaks are spaces."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    letters = [chr(number) for number in range(33, 127)]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["<unk>"], initial_alphabet=letters)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def _spaces_and_bytes():
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


_MAKERS = {
    "byte_level": _byte_level,
    "lowering": _lowering,
    "metaspace": _metaspace,
    "unigram": _unigram,
    "wordpiece": _wordpiece,
}
