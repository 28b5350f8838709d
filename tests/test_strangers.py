"""Untrusted repositories, datasets and texts cannot change the base, open connections or inject page elements."""

import contextlib
import copy
import dataclasses
import inspect
import json
import math
import shutil
import socket

from marft_trl import Team, load_adapters
from marft_trl.adapters.manifest import BaseModel, Inference, TeamManifest
from marft_trl.extras.apps import ByTools, ExternalApp
from marft_trl.reporting.model_card import team_card
from marft_trl.reporting.transcripts import Transcript, TranscriptMessage, html_page
from marft_trl.system.json_fields import has_type
from marft_trl.tiny import tiny_agents
from marft_trl.workflows import (
    ByColumn,
    Debate,
    EnvironmentLoop,
    Graph,
    MixtureOfAgents,
    Orchestrated,
    Sequential,
    UntilApproved,
    rebuild,
)
from marft_trl.workflows.base import _ready_made

import pytest
import torch
from huggingface_hub import constants
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from .families import family_base
from .helpers import team_trainer
from .test_transcripts import CHROMIUM, Reader, run_browser


# A value that is not the default for each field of a LoRA config, as an attacker may write it
FIELDS = {
    **{"task_type": "SEQ_CLS", "peft_type": "LOHA", "peft_version": "99", "revision": "main", "inference_mode": False},
    **{"base_model_name_or_path": "somebody/other", "megatron_config": {"a": 1}, "megatron_core": "antigravity"},
    "auto_mapping": {"base_model_class": "Popen", "parent_library": "subprocess"},
    # What is trained, and how it is scaled
    **{"target_modules": "all-linear", "exclude_modules": ["q_proj"], "target_parameters": ["weight"]},
    **{"modules_to_save": ["lm_head"], "trainable_token_indices": [1], "bias": "all", "lora_bias": True},
    **{"layers_to_transform": [0], "layers_pattern": "layers", "layer_replication": [[0, 2], [1, 2]]},
    **{"r": 3, "rank_pattern": {"q_proj": 2}, "lora_alpha": 1e9, "alpha_pattern": {"q_proj": 3}, "use_rslora": True},
    **{"lora_dropout": 0.5, "fan_in_fan_out": True, "ensure_weight_tying": True},
    # Kinds of adapters
    **{"init_lora_weights": "pissa", "loftq_config": {"loftq_bits": 4}, "eva_config": {"rho": 2.0}, "use_dora": True},
    **{"corda_config": {"cache_file": "/etc/passwd"}, "lora_ga_config": {"direction": "ArB2r"}, "use_qalora": True},
    **{"velora_config": {"num_groups": 2}, "alora_invocation_tokens": [1, 2], "qalora_group_size": 2},
    **{"monteclora_config": {"x": 1}, "runtime_config": {"ephemeral_gpu_offload": True}, "kasa_config": {"x": 1}},
    **{"use_bdlora": {"nblocks": 2}, "arrow_config": {"top_k": 1}},
}


@pytest.fixture(scope="module")
def saved(model_folder, tmp_path_factory):
    """A saved team, and its base's weights."""
    folder = tmp_path_factory.mktemp("saved")
    team_trainer(model_folder, folder).save_model()
    return folder


def changed(folder, name, change):
    """Change a JSON file of a copy."""
    path = folder / name
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def weights_of(base):
    """The tensors of a base, whether or not it has adapters by now."""
    state = {name.replace(".base_layer.", "."): tensor for name, tensor in base.state_dict().items()}
    return {name.removeprefix("base_model.model."): tensor for name, tensor in state.items() if "lora_" not in name}


def assert_same_weights(base, before, name=""):
    after = weights_of(base)
    assert after.keys() == before.keys(), name
    assert all(torch.equal(after[key], before[key]) for key in before), name


def test_no_field_of_an_adapters_config_changes_the_base(model_folder, saved, tmp_path):
    field_names = {field.name for field in dataclasses.fields(LoraConfig)}  # an older PEFT has fewer
    assert field_names <= set(FIELDS)
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    before = copy.deepcopy(weights_of(base))
    loaded, path = [], shutil.copytree(saved, tmp_path / "theirs") / "actor/adapter_config.json"
    config = json.loads(path.read_text())
    for name in field_names:
        path.write_text(json.dumps(config | {name: FIELDS[name]}))
        model = copy.deepcopy(base)
        with contextlib.suppress(ValueError):
            model = load_adapters(model, tmp_path / "theirs")
            loaded.append(name)
        assert_same_weights(model, before, name)
    assert {"peft_version", "alpha_pattern", "base_model_name_or_path"} <= set(loaded)


def test_an_adapter_on_a_moe_reaches_experts_and_no_other_parameters(tokenizer, tmp_path):
    base = family_base("qwen3_moe", len(tokenizer))
    before = copy.deepcopy(weights_of(base))
    team_trainer(copy.deepcopy(base), tmp_path / "mine", processing_class=tokenizer).save_model()
    config = json.loads((tmp_path / "mine/actor/adapter_config.json").read_text())
    assert set(config["target_parameters"]) == {"gate_up_proj", "down_proj", "gate.weight"}

    def refused(message, config, weights):
        folder = tmp_path / "theirs"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "mine", folder)
        (folder / "actor/adapter_config.json").write_text(json.dumps(config))
        save_file(weights, folder / "actor/adapter_model.safetensors")
        with pytest.raises(ValueError, match=message):
            load_adapters(base, folder)
        assert_same_weights(base, before)

    weights = load_file(tmp_path / "mine/actor/adapter_model.safetensors")
    for name in ("weight", "norm.weight", "q_proj.weight", "lm_head.weight", "proj", "model.embed_tokens.weight", ""):
        changed_config = {**config, "target_parameters": [*config["target_parameters"], name]}
        refused("targets parameters of the base", changed_config, weights)
    key = next(key for key in weights if "experts.base_layer.lora_A" in key)
    rank, inputs = weights[key].shape
    for shape, message in ([rank * 2, inputs], "rank 16 .* config has"), ([rank, inputs + 1], "another base"):
        refused(message, config, {**weights, key: torch.zeros(shape)})
    for deeper in (".base_layer.base_layer", ".base_layer.gate", ".down_proj"):
        refused("another base", config, {**weights, key.replace(".base_layer", deeper): weights[key].clone()})
    refused("another base", {**config, "target_parameters": ["down_proj", "gate.weight"]}, weights)


BROKEN = [b"", b"{", b"[]", b"5", b"null", b"\xff\xfe", b"[" * 100_000]
TEMPLATES = [
    *("{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ messages[5].content }}", "{% for m in messages %}"),
    *("{% include 'x' %}", "", "{{ none + 1 }}", "{{ ''.__class__.__mro__ }}", "{{ messages[0].content }}\ud800"),
]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *((file, content) for file in ("tokenizer.json", "tokenizer_config.json") for content in BROKEN),
        *(("actor/adapter_config.json", content) for content in BROKEN),
        *(("chat_template.jinja", template.encode(errors="surrogatepass")) for template in TEMPLATES),
    ],
)
def test_broken_files_of_a_team_are_named(model_folder, saved, tmp_path, file, content):
    shutil.copytree(saved, tmp_path / "team")
    (tmp_path / "team" / file).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{tmp_path / 'team'}") as raised:
        Team.from_pretrained(tmp_path / "team", model=model_folder).run(["How many?"])
    assert str(file) in str(raised.value) or "chat template" in str(raised.value)


@pytest.mark.parametrize(
    "settings", [{"model_max_length": "a"}, {"chat_template": "{{ messages[0].content }}\ud800"}], ids=str
)
def test_a_tokenizer_that_loads_and_cannot_be_used_is_named(model_folder, saved, tmp_path, settings):
    shutil.copytree(saved, tmp_path / "team")
    (tmp_path / "team" / "chat_template.jinja").unlink()
    changed(tmp_path / "team", "tokenizer_config.json", lambda data: data.update(settings))
    with pytest.raises(ValueError, match=rf"tokenizer of the team in {tmp_path / 'team'} cannot be loaded"):
        Team.from_pretrained(tmp_path / "team", model=model_folder)


@pytest.mark.parametrize("file", ["actor/adapter_config.json", "actor/adapter_model.safetensors", "tokenizer.json"])
def test_missing_files_are_not_looked_up_on_the_hub(model_folder, saved, tmp_path, monkeypatch, file):
    calls = []

    def refuse(*address):
        calls.append(address)
        raise OSError("no network")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved, "team")
    (tmp_path / "team" / file).unlink()
    with pytest.raises((OSError, ValueError)):  # FileNotFoundError is an OSError
        Team.from_pretrained("team", model=model_folder)
    assert calls == []


@pytest.mark.parametrize("name", ["/etc/passwd", "../secret", "a/b/c", "~/model", "./x", "x\n", "", "a`b"])
def test_a_manifest_cannot_name_a_local_file_as_base(saved, tmp_path, name):
    folder = shutil.copytree(saved, tmp_path / "team")
    changed(folder, "marft_team.json", lambda data: data["base"].update(name=name, is_local=False))
    with pytest.raises(ValueError, match="not a valid Hub id"):
        TeamManifest.load(folder)


def test_custom_tokenizer_code_is_not_run(model_folder, saved, tmp_path, monkeypatch):
    folder = shutil.copytree(saved, tmp_path / "team")
    (folder / "theirs.py").write_text(f"open({str(tmp_path / 'taken')!r}, 'w')\nclass Theirs: pass\n")
    auto_map = {"AutoTokenizer": ["theirs.Theirs", "theirs.Theirs"], "AutoConfig": "theirs.Theirs"}
    changed(folder, "tokenizer_config.json", lambda data: data.update(tokenizer_class="Theirs", auto_map=auto_map))
    monkeypatch.setattr("builtins.input", lambda *args: "y")  # nor is a user who answers yes to every question exposed
    with pytest.raises(Exception, match="trust_remote_code"):
        Team.from_pretrained(folder, model=model_folder)
    assert not (tmp_path / "taken").exists()


def test_pickled_adapter_weights_are_not_loaded(model_folder, saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "team")
    (folder / "actor" / "adapter_model.safetensors").unlink()
    torch.save({"x": torch.zeros(1)}, folder / "actor" / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match=r"has no adapter_model\.safetensors"):
        load_adapters(AutoModelForCausalLM.from_pretrained(model_folder), folder)
    save_file({"x": torch.zeros(1)}, folder / "actor" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="not part of a LoRA"):
        load_adapters(AutoModelForCausalLM.from_pretrained(model_folder), folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_full_weights_refuse_pickles_and_additional_adapters(model_folder, tmp_path, name):
    team_trainer(model_folder, tmp_path, peft_config=None).save_model()
    Team.from_pretrained(tmp_path)
    (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=f"full weights of a policy and also {name}"):
        Team.from_pretrained(tmp_path)
    (tmp_path / name).unlink()
    base = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.save(base.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError, match="model.safetensors"):
        Team.from_pretrained(tmp_path)


# ---- Pages, cards and pictures ----


ATTACKS = [
    "<script>document.title = 'taken'</script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "</pre></article></section><h1>taken</h1>",
    '"><svg onload=alert(1)>',
    "</td></tr></table><iframe src=https://evil.example></iframe>",
    "[click](javascript:alert(1)) ![x](https://evil.example/x.png) <https://evil.example>",
    "https://evil.example www.evil.example me@evil.example",
    "```\n# taken\n```\n\n| a |\n|---|\n| b |",
    "`</code>` ``x`` {{ ''.__class__ }} {% raw %} &lt;b&gt; <!-- x --> $x$ ~~x~~ **x** __x__",
    "a | b \\| c\n\n> quote\n\n- list\n\n---\nbase_model: evil",
    '"]; click n0 "javascript:alert(1)"; n0["x',
    "\u202etaken\u202c\x1b[2J\x00",
]


PLAIN = "no id of a repository"


def card_with(attack):
    """A card of a team that has an attack wherever a stranger can put a text."""
    agents = [dataclasses.replace(agent, system_prompt=attack) for agent in tiny_agents()]
    adapters = {agent.adapter: {"folder": agent.adapter, "trained": True} for agent in agents}
    workflow = {"class": attack, "x": attack, attack: 1}
    manifest = TeamManifest(agents, workflow, adapters, BaseModel(attack, is_local=False), Inference())
    picture = Sequential().mermaid(["a", attack], [("a", attack), (attack, attack)])
    return team_card(manifest, attack, attack, attack, metrics={attack: 1.0}, picture=picture)


def as_page(card):
    """The card as the Hub shows it: Markdown with tables and HTML."""
    markdown = pytest.importorskip("markdown_it").MarkdownIt("commonmark", {"html": True}).enable("table")
    return f"<!doctype html><title>card</title><body>{markdown.render(card.text)}</body>"


def elements(page):
    return [tag for tag, _ in Reader.read(page).tags]


@pytest.mark.parametrize("attack", ATTACKS)
def test_cards_have_no_injected_elements(attack):
    card = card_with(attack)
    assert card.data.to_dict().keys() <= {
        "base_model", "library_name", "model_name", "pipeline_tag", "tags", "datasets", "licence",
    }  # fmt: skip
    assert elements(as_page(card)) == elements(as_page(card_with(PLAIN)))
    lines = Sequential().mermaid(["a", attack], [("a", attack)]).splitlines()
    assert len(lines) == 4 and all('"' not in line[8:-2] for line in lines[1:3])


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_finds_no_injected_elements(tmp_path):
    pages = {"card": "".join(as_page(card_with(attack)) for attack in ATTACKS), "page": page_with(ATTACKS)}
    plain = {"card": as_page(card_with(PLAIN)), "page": page_with([PLAIN])}
    for name, page in pages.items():
        (tmp_path / f"{name}.html").write_text(page, encoding="utf-8", errors="replace")
        (tmp_path / "plain.html").write_text(plain[name], encoding="utf-8")
        files = [tmp_path / f"{stem}.html" for stem in (name, "plain")]
        dom, plain_dom = (run_browser(file, "--virtual-time-budget=2000", "--dump-dom") for file in files)
        assert set(elements(dom)) <= set(elements(plain_dom)), name
        assert "<title>taken" not in dom and "evil.example/x.png" not in sources(dom)


def page_with(attacks):
    messages = [
        TranscriptMessage(attack, attack, (attack,), attack, tokens, advantages)
        for attack in attacks
        for tokens, advantages in (((), None), ((), 0.5), ((attack, attack), (0.5, -0.5)))
    ]
    messages.append(TranscriptMessage("x", attacks[0], is_feedback=True))
    pages = [Transcript(attack, attack, tuple(messages), {attack: 1.0, "y": None}) for attack in attacks]
    return html_page(pages, attacks[0])


def sources(page):
    return [value for _, attributes in Reader.read(page).tags for value in attributes]


# ---- Workflows, rules and settings of a stranger's manifest ----


def ready_made_workflows():
    """Every workflow that a manifest can name, with a description that `describe` wrote."""
    workflows = [
        Sequential(["reasoner", "actor"], rounds=2),
        Graph({"plan": [], "do": ["plan"]}, {"plan": "reasoner", "do": "actor"}),
        Debate(["reasoner", "actor"], judge="actor"),
        MixtureOfAgents([["reasoner"]], "actor"),
        UntilApproved("reasoner", "actor"),
        Orchestrated("reasoner", agents=["actor"], penalty=-0.5),
        EnvironmentLoop(World, agents=["actor"]),
        ByColumn({"a": Sequential()}),
        ExternalApp(["true"], answer="actor", agent_of=ByTools({"grep": "actor"}, default="reasoner")),
    ]
    assert {type(workflow) for workflow in workflows} == set(_ready_made().values())
    return workflows


class World:
    def reset(self, **row):
        return ""

    def step(self, turns):
        return "", 0.0, True


@pytest.mark.parametrize("workflow", ready_made_workflows(), ids=lambda workflow: type(workflow).__name__)
def test_a_manifest_sets_no_argument_of_a_workflow_that_is_not_stored(workflow):
    """Arguments that `describe` does not write are refused by name, and those that it writes by their types."""
    description = json.loads(json.dumps(workflow.describe()))
    factory = World if isinstance(workflow, EnvironmentLoop) else None
    assert rebuild(description, factory).describe() == workflow.describe()
    for name in {*inspect.signature(type(workflow)).parameters, "self", "__class__", "max_wait_for_episodes"}:
        if name not in description:
            with pytest.raises(ValueError, match=f"has the unknown field '{name}'"):
                rebuild({**description, name: ["bash", "-c", "touch /tmp/x"]}, factory)
    stored = set(description) - {"class", "vote_function", "approves_function"}
    assert stored == set(type(workflow).described)
    for name in stored:
        with pytest.raises(ValueError, match=f"as '{name}', which must be of type"):
            rebuild({**description, name: 1.5j}, factory)


@pytest.mark.parametrize("field", ["app", "cwd", "earns", "together"])
def test_an_untrusted_team_runs_no_command(model_folder, saved, tmp_path, field):
    witness = tmp_path / "witness"
    command = ["bash", "-c", f"touch {witness}"]
    folder = shutil.copytree(saved, tmp_path / "team")
    workflow = {"class": "ExternalApp", "answer": "actor", "tools": False, "app": command, field: command}
    changed(folder, "marft_team.json", lambda data: data.update(workflow=workflow))
    with pytest.raises(ValueError, match="`ExternalApp` of the team has the unknown field"):
        Team.from_pretrained(folder, model=model_folder).run(["x"])
    del workflow[field]
    workflow.pop("app", None)
    changed(folder, "marft_team.json", lambda data: data.update(workflow=workflow))
    with pytest.raises(Exception, match="does not include its application"):
        Team.from_pretrained(folder, model=model_folder).run(["x"])
    assert not witness.exists()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({}, "needs a 'rule'"),
        ({"rule": "ByTools"}, "needs a 'rule'"),
        ({"rule": "os.system", "agents": {}}, "needs a 'rule' .BySystemPrompt or ByTools."),
        ({"rule": "ByTools", "agents": {"x": 1}}, "as 'agents', which must be of type"),
        ({"rule": "ByTools", "agents": {}, "call": "x"}, "unknown field 'call'"),
        ("ByTools", "as 'agent_of', which must be of type"),
    ],
    ids=str,
)
def test_malformed_rules_of_a_manifest_are_named(rule, message):
    with pytest.raises(ValueError, match=message):
        rebuild({"class": "ExternalApp", "agent_of": rule})


@pytest.mark.parametrize(
    ("place", "field", "value", "message"),
    [
        ("inference", "device", "cuda", "'inference' has the unknown field 'device'"),
        ("inference", "view", 3, "'inference' has 3 as 'view'"),
        ("inference", "chat_template_kwargs", {"tokenizer_kwargs": {}}, "which is an argument of the tokenizer"),
        ("base", "trust_remote_code", True, "'base' has the unknown field 'trust_remote_code'"),
        ("base", "name", None, "'base' has None as 'name'"),
    ],
)
def test_unknown_and_mistyped_fields_of_a_manifest_are_named(saved, tmp_path, place, field, value, message):
    folder = shutil.copytree(saved, tmp_path / "team")
    changed(folder, "marft_team.json", lambda data: data[place].update({field: value}))
    with pytest.raises(ValueError, match=message):
        TeamManifest.load(folder)


def test_fields_of_agents_that_are_not_stored_are_named(saved, tmp_path):
    for field in ("reply", "tools", "peft_config", "view", "reward_funcs", "nmae"):
        folder = shutil.copytree(saved, tmp_path / field)
        changed(folder, "marft_team.json", lambda data, field=field: data["agents"][1].update({field: None}))
        with pytest.raises(ValueError, match=f"agent 2 has the unknown field '{field}'"):
            TeamManifest.load(folder)


def test_links_out_of_a_teams_folder_are_not_followed(model_folder, saved, tmp_path):
    elsewhere = shutil.copytree(saved, tmp_path / "elsewhere")
    for name in ("adapter_config.json", "adapter_model.safetensors", ""):
        folder = shutil.copytree(saved, tmp_path / f"team-{name}")
        link, target = folder / "actor" / name, elsewhere / "actor" / name
        shutil.rmtree(link) if link.is_dir() else link.unlink()
        link.symlink_to(target)
        with pytest.raises(ValueError, match="is a link to .*elsewhere.*, outside of the team's folder"):
            load_adapters(AutoModelForCausalLM.from_pretrained(model_folder), folder)
    cache = tmp_path / "models--me--team"  # as the cache of the Hub keeps a repository
    snapshot = shutil.copytree(saved, cache / "snapshots" / "abc")
    (cache / "blobs").mkdir()
    weights = snapshot / "actor" / "adapter_model.safetensors"
    weights.rename(cache / "blobs" / "123")
    weights.symlink_to("../../../blobs/123")
    load_adapters(AutoModelForCausalLM.from_pretrained(model_folder), snapshot)


def test_numbers_of_any_size_are_refused_by_name():
    with pytest.raises(ValueError, match="`rounds` of `Debate` must be an integer of at least 1"):
        rebuild({"class": "Debate", "agents": ["a"], "rounds": -(10**400)})
    with pytest.raises(ValueError, match="as 'penalty'"):
        rebuild({"class": "Orchestrated", "orchestrator": "a", "penalty": float("nan")})


def test_loading_an_adapter_folder_as_a_team_names_peft(saved):
    with pytest.raises(FileNotFoundError, match="has a PEFT adapter: load that with `PeftModel.from_pretrained`"):
        Team.from_pretrained(f"{saved}/actor")


@pytest.mark.parametrize(
    ("value", "kind", "fits"),
    [
        (1, int, True), (True, int, False), (1.0, int, False), (1, float, True), (True, float, False),
        (1, bool, False), (math.nan, float, False), (["a"], list[str], True), ([1], list[str], False),
        ("a", list[str], False), ({"a": ["b"]}, dict[str, list[str]], True), (None, str | None, True),
        ({"a": [1]}, dict[str, list[str]], False),
    ],
)  # fmt: skip
def test_types_of_json_data(value, kind, fits):
    assert has_type(value, kind) == fits
