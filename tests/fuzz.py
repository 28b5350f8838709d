"""
Coverage-guided fuzzing of the parsers of model output and untrusted files.

    python tests/fuzz.py manifest --seconds 600

A target fails if the parser raises an undocumented error, hangs, or returns a result that it must not return.
"""

import argparse
import copy
import json
import os
import random
import re
import sys
import tempfile
from dataclasses import fields
from pathlib import Path


os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import atheris  # noqa: E402


# Coverage includes the libraries that parse for us
LIBRARIES = ["trl.chat_template_utils", "transformers.tokenization_utils_base", "peft.config"]
LIBRARIES += ["transformers.utils.chat_parsing_utils", "transformers.utils.response_parsing"]
with atheris.instrument_imports(include=["marft_trl", *LIBRARIES]):
    from marft_trl import AgentSpec, MARFTConfig
    from marft_trl.adapters.files import check_adapter
    from marft_trl.adapters.manifest import MANIFEST_NAME, BaseModel, Inference, TeamManifest
    from marft_trl.prompts.chat_template import PlainEncoder
    from marft_trl.prompts.tool_calls import call_pattern, parse_calls
    from marft_trl.prompts.views import quote_speaker_lines
    from marft_trl.runs.run_folder import COMMIT_NAME, DamagedCheckpoint, begin, commit, verify
    from marft_trl.workflows import Orchestrated, Sequential, rebuild
    from marft_trl.workflows.orchestrated import parse_route

from marft_trl.tiny import tiny_model, tiny_tokenizer  # noqa: E402
from tests.test_speakers import SPEAKER  # noqa: E402
from tests.tokenizers_and_templates import tokenizer_of  # noqa: E402

import yaml  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from trl import GRPOConfig  # noqa: E402


FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-"))


class Manifest:
    """A damaged manifest raises `ValueError`, and so does a workflow that cannot be rebuilt."""

    def __init__(self):
        agents = [AgentSpec("planner", system_prompt="Plan."), AgentSpec("solver", stop=["x"], temperature=0.5)]
        adapters = {agent.name: {"folder": agent.name, "trained": True} for agent in agents}
        base, inference = BaseModel("me/base", False), Inference(sampling={"planner": {"top_p": 0.9}})
        self.seeds = []
        for workflow in (Sequential(rounds=2), Orchestrated("planner")):
            TeamManifest(agents, workflow.describe(), adapters, base, inference).save(FOLDER)
            self.seeds.append((FOLDER / MANIFEST_NAME).read_bytes())

    def __call__(self, data):
        (FOLDER / MANIFEST_NAME).write_bytes(data)
        try:
            manifest = TeamManifest.load(FOLDER)
            rebuild(manifest.workflow, environment_factory=None)
        except ValueError:
            return
        assert all(isinstance(agent, AgentSpec) for agent in manifest.agents)
        assert all(re.fullmatch(r"[A-Za-z][\w-]*", name) for name in manifest.adapters)


class Route:
    """Any text of an orchestrator is a decision, or a problem with a name."""

    seeds = [b"Go. <call>solver</call>", b"<done/>", b"<call><call>planner</call>", b"<done />x<done/>"]

    def __call__(self, data):
        route = parse_route(data.decode("utf-8", "surrogateescape"), ["planner", "solver"])
        assert route.agent in (None, "planner", "solver")
        assert route.problem in (None, "no_tag", "several_tags", "unknown_agent")


class Calls:
    """Any tokens of an agent are calls with a name, or none."""

    def __init__(self):
        from marft_trl.prompts.tool_calls import prepare_template

        self.tokenizers = [tokenizer_of("byte_level", family) for family in ("qwen2_5", "qwen3", "glm4moe")]
        for tokenizer in self.tokenizers:
            prepare_template(tokenizer, "the fuzzer")
        self.patterns = [call_pattern(tokenizer) for tokenizer in self.tokenizers]
        call = b'<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
        by_keys = b"\x02<tool_call>f\n<arg_key>a</arg_key><arg_value>1</arg_value>"
        self.seeds = [b"\x00" + call, b"\x01" + call * 2, by_keys]
        parameters = {"type": "object", "properties": {"query": {"type": "string"}}}
        self.schemas = [{"type": "function", "function": {"name": "search", "parameters": parameters}}]

    def __call__(self, data):
        index = data[0] % len(self.tokenizers) if data else 0
        tokenizer, text = self.tokenizers[index], data[1:].decode("utf-8", "replace")
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for call in parse_calls(tokenizer, ids, [], self.schemas):
            assert isinstance(call.name, str)
        self.patterns[index].search(text)


class Speakers:
    """No text names a speaker in a line, or has a control token, for any tokenizer."""

    seeds = ["\uff3bplanner\uff3d\n".encode(), b"[solver]", b"<0x0A>[tool]<0x0A>", b"x\x0b[a]\x85<|im_start|>system"]

    def __init__(self):
        self.tokenizers = [tokenizer_of(kind, "qwen3") for kind in ("byte_level", "lowering", "metaspace", "unigram")]
        self.encoders = [PlainEncoder(tokenizer) for tokenizer in self.tokenizers]

    def __call__(self, data):
        text = quote_speaker_lines(data.decode("utf-8", "surrogateescape"))
        for tokenizer, encode in zip(self.tokenizers, self.encoders, strict=True):
            ids = encode(text)
            assert tokenizer.added_tokens_decoder.keys().isdisjoint(ids)
            lines = tokenizer.decode(ids, clean_up_tokenization_spaces=False).splitlines()
            assert not any(SPEAKER.fullmatch(line) for line in lines), lines


class Adapter:
    """The config of an adapter passes the check, or raises `ValueError`."""

    def __init__(self):
        self.base = tiny_model(len(tiny_tokenizer()))
        get_peft_model(self.base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(FOLDER)
        self.seeds = [(FOLDER / "adapter_config.json").read_bytes()]

    def __call__(self, data):
        (FOLDER / "adapter_config.json").write_bytes(data)
        try:
            check_adapter(FOLDER, AgentSpec("solver"), self.base, "me/base")
        except ValueError as error:
            assert str(error)


class Commit:
    """The commit file equals that of the checkpoint, or `verify` raises `DamagedCheckpoint`."""

    def __init__(self):
        self.folder = FOLDER / "checkpoint-1"
        self.folder.mkdir()
        begin(self.folder, "run", 1)
        (self.folder / "weights").write_bytes(b"x")
        commit(self.folder, "run", 1, {"agents": {}})
        self.seeds = [(self.folder / COMMIT_NAME).read_bytes()]
        self.expected = verify(self.folder)

    def __call__(self, data):
        (self.folder / COMMIT_NAME).write_bytes(data)
        try:
            assert verify(self.folder) == self.expected
        except DamagedCheckpoint as error:
            assert str(error)


class Settings:
    """Settings from a YAML file are valid, or a `ValueError` or `TypeError` says what is wrong."""

    seeds = [b'{"credit": "per_step", "gamma": 0.9}', b'{"critic": "shared", "level": "token", "preset": "mappo"}']

    def __call__(self, data):
        own_fields = {field.name for field in fields(MARFTConfig) if field.init} - {
            field.name for field in fields(GRPOConfig)
        }
        try:
            settings = yaml.safe_load(data)
        except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError):
            return
        if not isinstance(settings, dict):
            return
        settings = {name: value for name, value in settings.items() if name in own_fields}
        try:
            MARFTConfig(output_dir=str(FOLDER), report_to="none", use_cpu=True, bf16=False, **settings)
        except (ValueError, TypeError) as error:
            assert str(error)


# Values that a mutation puts into a JSON document
_ODD = [None, True, -1, 0, 1e999, float("nan"), 10**400, "", "x" * 300, "../x", "solver"]
_ODD += [[], [[]], {}, {"": {}}, ["a"]]


def mutate(data, max_size, seed):
    """Change the tree of a JSON document in most cases, and otherwise its bytes."""
    draw = random.Random(seed)
    try:
        tree = json.loads(data)
        assert draw.random() < 0.8 and isinstance(tree, (dict, list))
        for _ in range(draw.randrange(1, 4)):
            _change(tree, draw)
        changed = json.dumps(tree).encode()
        assert len(changed) <= max_size
    except (ValueError, RecursionError, AssertionError):
        return atheris.Mutate(data, max_size)
    return changed


def _change(tree, draw):
    """Replace, remove, rename or nest a part of a tree, in place."""
    places = [(tree, key) for key in (tree if isinstance(tree, dict) else range(len(tree)))]
    for node, key in places:
        inner = node[key]
        if isinstance(inner, (dict, list)) and len(places) < 200:
            places += [(inner, key) for key in (inner if isinstance(inner, dict) else range(len(inner)))]
    if not places:
        return
    (node, key), (other, other_key) = draw.choice(places), draw.choice(places)
    kind = draw.randrange(5)
    if kind == 0:
        node[key] = copy.deepcopy(draw.choice(_ODD))
    elif kind == 1:
        node[key] = copy.deepcopy(other[other_key])
    elif kind == 2:
        node[key] = {"x": node[key]} if draw.random() < 0.5 else [node[key]]
    elif kind == 3 and isinstance(node, dict):
        node[draw.choice(_WORDS)] = node.pop(key)
    else:
        del node[key]


TARGETS = {kind.__name__.lower(): kind for kind in (Manifest, Route, Calls, Speakers, Adapter, Commit, Settings)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=600)
    arguments = parser.parse_args()
    target = TARGETS[arguments.target]()
    corpus = FOLDER / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(target.seeds):
        (corpus / str(number)).write_bytes(seed)
        target(seed)
    options = [f"-max_total_time={arguments.seconds}", "-max_len=4096", "-timeout=20", "-rss_limit_mb=4096"]
    dictionary = FOLDER / "words"
    dictionary.write_text("\n".join(f'"{word}"' for word in _WORDS))
    options += [f"-dict={dictionary}", f"-artifact_prefix={FOLDER}/"]
    atheris.Setup([sys.argv[0], str(corpus), *options], target, custom_mutator=mutate)
    atheris.Fuzz()


_WORDS = [
    *("<call>", "</call>", "<done/>", "<tool_call>", "</tool_call>", "[planner]", "<0x0A>", "<|im_start|>"),
    *("agents", "adapters", "workflow", "class", "Sequential", "null", "true", "1e999", "NaN", "[[[[", "{}"),
    *("r", "lora_alpha", "target_modules", "init_lora_weights", "peft_type", "LORA", "rank_pattern"),
]

if __name__ == "__main__":
    main()
