# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The model card of a team."""

from __future__ import annotations

import functools
import html
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Template

from ..adapters.lora import max_lora_rank
from ..adapters.manifest import BaseModel, TeamManifest, is_hub_id
from ..seams.libraries import installed_version
from ..system.hints import brief


# Characters that mean something in Markdown, also in links without brackets. HTML is escaped before.
_MARKUP = re.compile(r"[\\`*_{}\[\]()#|~!:@]|(?<=www)\.")
CARD_NAME = "README.md"
_PACKAGES = ("marft-trl", "trl", "transformers", "peft")
_template = functools.cache(Template)  # `ModelCard.from_template` would compile the card for each save
TAGS = ["trl", "marft_trl", "marft", "multi-agent", "grpo"]  # tags of every model card
PAPER = {
    "title": "MARFT: Multi-Agent Reinforcement Fine-Tuning",
    "id": "2504.16129",
    "citation": """@article{liao2025marft,
  title   = {{MARFT: Multi-Agent Reinforcement Fine-Tuning}},
  author  = {Liao, Junwei and Wen, Muning and Wang, Jun and Zhang, Weinan},
  journal = {arXiv preprint arXiv:2504.16129},
  year    = {2025}
}""",
}

_PLACE = "path/to/the/base/model"  # of a local base
_CARD = """---
{{ card_data }}
---

# {{ title }}

A team of {{ num_agents }} LLM agents, trained together with
[marft_trl](https://pypi.org/project/marft-trl/){% if base %} on
{{ base }}{% endif %}{% if dataset %} and the dataset
{{ dataset }}{% endif %}.

## Agents

{{ agents_table }}

Workflow: {{ workflow }}

{% if picture %}```mermaid
{{ picture }}
```

{% endif %}{% if metrics_table %}## Metrics

{{ metrics_table }}

{% endif %}{% if of_application %}## Use the agents

The agents were trained as the models of an application, which is not part of this repository. Serve the agents, and
use the name of an agent as the model name in the application:

```bash
marft serve {{ repo }}{{ option }}
```

```python
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="none")
client.chat.completions.create(model="{{ agent }}", messages=[...])
```

{% else %}## Use the team

```python
from marft_trl import Team

team = Team.from_pretrained("{{ repo }}"{{ arguments }})
print(team("..."{{ images }}))  # `team.run(prompts)` returns whole episodes
```

{% endif %}{% if bases %}## Use one agent with PEFT

```python
from peft import PeftModel
from transformers import {{ classes }}
{% for base in bases %}
base = {{ base.model_class }}.from_pretrained("{{ base.name }}")
tokenizer = {{ base.processing_class }}.from_pretrained("{{ repo }}"{{ base.tokenizer }})
{{ base.first }} = PeftModel.from_pretrained(base, "{{ repo }}", subfolder="{{ base.first }}")
{%- endfor %}
```

{% if not images %}## Serve the team with vLLM

One server has all adapters of a base, each under its name as the model name. The server does not know the system
prompts or the workflow: clients send the system prompt of an agent, from `marft_team.json`, and the messages that the
workflow shows the agent.

```bash
hf download {{ repo }} --local-dir team
{%- for base in bases %}
vllm serve {{ base.name }} --enable-lora --max-lora-rank {{ rank }} --generation-config vllm \\
  --tokenizer team{{ base.folder }} --chat-template team{{ base.folder }}/chat_template.jinja \\
  --lora-modules {{ base.modules }}{% if base.port %} --port {{ base.port }}{% endif %}
{%- endfor %}
```

{% endif %}{% endif %}{% if policies %}## Use the policy alone

{% if policies|length == 1 %}All agents{% else %}The agents of a base{% endif %} share one fully trained policy; \
`marft_team.json` contains their system prompts and the workflow.

```python
from transformers import {{ classes }}
{% for policy in policies %}
model = {{ policy.model_class }}.from_pretrained("{{ repo }}"{{ policy.tokenizer }})
tokenizer = {{ policy.processing_class }}.from_pretrained("{{ repo }}"{{ policy.tokenizer }})
{%- endfor %}
```

{% endif %}
## Training

{% if facts_table %}{{ facts_table }}

{% endif %}Trained with MARFT, a method introduced in
[{{ paper.title }}](https://huggingface.co/papers/{{ paper.id }}).

{{ versions }}

## Citation

```bibtex
{{ paper.citation }}
```
"""


def team_card(
    manifest: TeamManifest,
    model_name: str,
    repo: str | None = None,
    dataset_name: str | Sequence[str] | None = None,
    tags: Sequence[str] = (),
    metrics: dict[str, float] | None = None,
    max_rank: int = 16,
    picture: str | None = None,
    facts: Mapping[str, str] | None = None,
    seeing: Collection[str] = (),
) -> ModelCard:
    """
    The model card of a team. `picture` is a Mermaid flowchart, `facts` say how the team was trained, and the agents
    `seeing` have vision-language models.
    """
    hub_names = [base.name for base in manifest.bases if not base.is_local and is_hub_id(base.name)]
    repo = repo or model_name
    repo = repo if is_hub_id(repo) else "path/to/the/team"
    datasets = [dataset_name] if isinstance(dataset_name, str) else list(dataset_name or [])
    every = [_of_base(manifest, base, place, seeing) for place, base in enumerate(manifest.bases)]
    bases, policies = ([values for values in every if bool(values["modules"]) is has] for has in (True, False))
    local = [
        manifest.players_on(base)[0].name for base in manifest.bases if base.is_local and manifest.adapters_on(base)
    ]
    arguments, option = "", "".join(f" --model {name}={_PLACE}" for name in local)
    if local:
        arguments = f", model={json.dumps(dict.fromkeys(local, _PLACE))}"
    if local and not manifest.further_bases:
        arguments, option = f', model="{_PLACE}"', f" --model {_PLACE}"
    if manifest.inference.replies:
        arguments += f", replies={{{', '.join(f'{name!r}: ...' for name in manifest.inference.replies)}}}"
    entries = manifest.workflow.items()
    settings = ", ".join(f"{key}={value!r}" for key, value in entries if key != "class" and value is not None)
    card_data = ModelCardData(
        base_model=hub_names if len(hub_names) > 1 else next(iter(hub_names), None),
        library_name="peft" if manifest.adapters else "transformers",
        model_name=model_name,
        pipeline_tag="image-text-to-text" if seeing else "text-generation",
        tags=sorted({*tags, "generated_from_trainer"}),
        datasets=datasets or None,
    )
    content = _template(_CARD).render(
        card_data=card_data.to_yaml(),
        title=_markdown(model_name),
        base=" and ".join(_link(name, "") for name in hub_names) if len(hub_names) == len(manifest.bases) else None,
        dataset=", ".join(_link(name, "datasets/") for name in datasets),
        num_agents=len(manifest.agents),
        agents_table=_agents_table(manifest),
        workflow=_code(f"{manifest.workflow['class']}({settings})"),
        picture=picture,
        metrics_table=_table("metric", "value", {name: f"{value:.4g}" for name, value in (metrics or {}).items()}),
        of_application=manifest.workflow["class"] == "ExternalApp",
        arguments=arguments,
        option=option,
        agent=manifest.players[0].name,
        bases=bases,
        policies=policies,
        images=", images=[...]" if seeing else "",
        classes=", ".join(sorted({values[name] for values in every for name in ("model_class", "processing_class")})),
        repo=repo,
        rank=max_lora_rank([max_rank]),
        paper=PAPER,
        facts_table=_table("", "", facts or {}),
        versions="\n".join(f"- {name}: {installed_version(name)}" for name in _PACKAGES),
    )
    return ModelCard(content)


def _of_base(manifest: TeamManifest, base: BaseModel, place: int, seeing: Collection[str]) -> dict[str, Any]:
    """What the card says of a base and its adapters."""
    sees = any(agent.name in seeing for agent in manifest.players_on(base))
    return {
        "model_class": "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM",
        "processing_class": "AutoProcessor" if sees else "AutoTokenizer",
        "name": base.name if not base.is_local and is_hub_id(base.name) else _PLACE,
        "first": manifest.players_on(base)[0].adapter,
        "tokenizer": f', subfolder="{base.folder}"' if base.folder else "",
        "folder": f"/{base.folder}" if base.folder else "",
        "modules": " ".join(f"{name}=team/{name}" for name in manifest.adapters_on(base)),
        "port": 8000 + place if place else None,
    }


def _agents_table(manifest: TeamManifest) -> str:
    several = bool(manifest.further_bases)
    rows = [f"| agent |{' base |' if several else ''} adapter | trained | system prompt |"]
    rows.append("|---" * (4 + several) + "|")
    scripted = manifest.inference.replies
    bases = {agent.name: base.name for base in manifest.bases for agent in manifest.players_on(base)}
    for agent in manifest.agents:
        adapter = manifest.adapters.get(agent.adapter)
        place = f"[`{agent.adapter}`](./{agent.adapter})" if adapter else "all weights" if several else "shared policy"
        trained = "yes" if adapter is None or adapter["trained"] else "no"
        if agent.name in scripted:
            place, trained = f"none: {_code(scripted[agent.name])}", "no"
        own = f" {_markdown(bases.get(agent.name, ''))} |" if several else ""
        rows.append(f"| {agent.name} |{own} {place} | {trained} | {_markdown(agent.system_prompt or '(none)')} |")
    return "\n".join(rows)


def _table(name: str, value: str, rows: Mapping[str, str]) -> str:
    if not rows:
        return ""
    lines = [f"| {_markdown(key)} | {_markdown(text)} |" for key, text in rows.items()]
    return "\n".join([f"| {name} | {value} |", "|---|---|", *lines])


def _link(name: str, kind: str) -> str:
    """Return a link to a repository on the Hub, or the plain name if it cannot be the id of a repository."""
    return f"[{_markdown(name)}](https://huggingface.co/{kind}{name})" if is_hub_id(name) else _markdown(name)


def _code(text: str) -> str:
    text = " ".join(text.split())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{text}{fence}" if len(fence) == 1 else f"{fence} {text} {fence}"


def _markdown(text: str, limit: int = 200) -> str:
    """Text in one line of at most `limit` characters, without a meaning in Markdown and in HTML."""
    text = brief(" ".join(text.split()), limit)
    return _MARKUP.sub(r"\\\g<0>", html.escape(text, quote=False))
