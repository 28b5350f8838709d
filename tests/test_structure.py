"""The house: imports run one way, the leaves stay light, and rules that a reader cannot see are kept."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parent.parent / "marft_trl"
FILES = sorted(PACKAGE.rglob("*.py"))

# Each module may import from its own layer's predecessors only.
LAYERS = [
    {"hints", "loops", "prefixes", "randomness", "trainer.functional"},
    {"tools", "forward"},
    {"episodes"},
    {"agents", "transcripts", "presets", "choices", "curves", "progress", "metrics", "metrics.team_exact_match"},
    {"rewards.environment", "rewards.background", "rewards.texts", "rewards.fence", "rewards.jail", "rewards.answers"},
    {"rewards.code", "rewards.math"},
    {"rewards.steps"},
    {"anonymity"},
    {"manifest", "workflows.base", "configs", "rewards"},
    {"workflows.sequential", "workflows.graph", "workflows.ready_made", "workflows.orchestrated"}
    | {"workflows.environment"},
    {"workflows.rebuild"},
    {"workflows"},
    {"rollout", "rollout.replay", "rollout.views", "rollout.encoding", "rollout.tool_calls", "rollout.decoding"}
    | {"rollout.stopping"},
    {"rollout.transformers_generator"},
    {"rollout.prompts"},
    {"rollout.collector", "rollout.model_engine"},
    {"rollout.runner"},
    {
        "tiny",
        "trainer.adapters",
        "trainer.batching",
        "trainer.gradients",
        "trainer.memory",
        "trainer.metrics",
        "trainer.reach",
        "trainer.schedules",
        "trainer.trl_seams",
        "trainer.validation",
    },
    {"trainer.adapter_files", "trainer.fingerprints", "trainer.references"},
    {"trainer.cards", "trainer.checkpointing", "trainer.critic", "trainer.evaluation", "trainer.turn_rewards"}
    | {"trainer.fitting", "trainer.scoring"},
    {"trainer.rollouts", "trainer.setup"},
    {
        "trainer.advantages",
        "trainer.planning",
        "trainer.reporting",
        "trainer.updates",
        "trainer.valuing",
    },
    {"team"},
    {"trainer.persistence"},
    {"trainer.marft_trainer"},
    {"trainer"},
    {""},
]


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix("__init__").removesuffix(".")


def imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, and top-level names of others behind a `!`."""
    found = set()
    package = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {"!" + alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add("!" + node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            base = ".".join(part for part in base if part)
            for alias in node.names:
                inner = f"{base}.{alias.name}" if base else alias.name
                exists = (PACKAGE / Path(*inner.split("."))).with_suffix(".py").exists()
                found.add(inner if exists else base)
    return found


def test_imports_run_one_way():
    level = {module: index for index, layer in enumerate(LAYERS) for module in layer}
    for path in FILES:
        mine = module_name(path)
        assert mine in level, f"{mine} has no layer"
        for other in imports(path):
            if not other.startswith("!"):
                assert level[other] < level[mine] or mine == "", f"{mine} imports {other}"


@pytest.mark.parametrize(
    "module",
    [
        *(
            "episodes",
            "agents",
            "tools",
            "hints",
            "loops",
            "transcripts",
            "rewards.environment",
            "workflows.base",
            "workflows.sequential",
        ),
        *("workflows.graph", "workflows.ready_made", "workflows.orchestrated", "workflows.environment"),
    ],
)
def test_leaves_need_no_torch(module):
    heavy = {"!torch", "!trl", "!transformers", "!datasets", "!accelerate"}
    assert not heavy & imports((PACKAGE / Path(*module.split("."))).with_suffix(".py"))
    assert imports(PACKAGE / "trainer" / "functional.py") == {"!__future__", "!torch"}


def test_adapters_are_switched_in_one_place():
    for path in FILES:
        if path.name != "adapters.py":
            assert not re.search(r"\.set_adapter\(|\.disable_adapter\(", path.read_text()), path


def test_nothing_is_unpickled_evaluated_or_run():
    for path in FILES:
        text = path.read_text()
        assert not re.search(r"\bpickle\b(?!s)|weights_only=False|(?<![.\w])(eval|exec)\(|torch\.load\(", text), path


def test_sizes_stay_readable():
    sizes = []
    for path in FILES:
        text = path.read_text()
        assert text.count("\n") <= 600, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                sizes.append(node.end_lineno - node.lineno + 1)
                assert sizes[-1] <= 90, f"{path.name}:{node.name}"
    assert sorted(sizes)[len(sizes) // 2] < 20


def test_a_workflow_can_be_written_without_loading_a_model_library():
    code = (
        "import sys, types, importlib.util\n"
        f"package = types.ModuleType('marft_trl'); package.__path__ = [{str(PACKAGE)!r}]\n"
        "sys.modules['marft_trl'] = package\n"
        "import marft_trl.workflows\n"
        "assert not {'torch', 'trl', 'transformers'} & set(sys.modules), set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
