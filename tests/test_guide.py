"""
Every block of Python in the README and the documentation runs, from the first to the last of a page.

Replacements keep the blocks small: a tiny model for models of the Hub, a team that the test saved for saved teams, a
few rows for datasets of the Hub, one step for every config, and earlier arguments of the page for three dots.
"""

import ast
import builtins
import contextlib
import doctest
import itertools
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer, Team
from marft_trl.reporting.evaluation import write_samples

import pytest
from datasets import Dataset

from .helpers import lora
from .test_serve import serving


ROOT = Path(__file__).parent.parent
GUIDE = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
OTHERS = sorted({*(ROOT / "docs").rglob("*.md")} - {*GUIDE})
PAGES = [*GUIDE, *(page for page in OTHERS if "```python" in page.read_text())]
SLOW_PAGES = ("evaluate_and_compare",)  # which compares the runs of two teams, with its own bootstrap
PAIR = [AgentSpec("planner", system_prompt="Plan."), AgentSpec("solver", system_prompt="Solve.")]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def made_small(code: str, model: str, team: str) -> str:
    code = re.sub(r'Team\.from_pretrained\("me/[^"]+"', f'Team.from_pretrained("{team}", model="{model}"', code)
    code = code.replace("Team.from_pretrained(folder", f'Team.from_pretrained(folder, model="{model}"')
    code = re.sub(r'"me/[^"]+"|(?<=folder = )"math-duo"', f'"{team}"', code)
    code = re.sub(r', engine="[^"]+"', "", code)  # `make test-vllm` has servers
    code = re.sub(r'"HuggingFaceTB/[^"]+"', '"other-base"', code)
    code = re.sub(r'"Qwen/[^"]+"', f'"{model}"', code).replace("smollm2()", f'"{model}"')
    code = code.replace("tiny_team_model()", f'"{model}"')
    code = re.sub(r"\bload_dataset\(", "rows(", code)
    code = re.sub(r"MARFTConfig\((\.\.\.,)?", "small(", code)
    code = re.sub(r"MARFTTrainer\(\s*\.\.\.,", "made(", code)
    code = code.replace('SFTConfig("', 'SFTConfig(use_cpu=True, bf16=False, max_steps=1, report_to=[], output_dir="')
    code = re.sub(r"max_completion_length=\d+", "max_completion_length=8", code)
    code = re.sub(r"\bsize=\d+", "size=16", code)  # of reasoning-gym, which takes a minute for thousands
    return code.replace(".push_to_hub()", ".create_model_card()")


def rows(*names, **kwargs):
    prompts = [[{"role": "user", "content": f"{number} + 1 = ?"}] for number in range(16)]
    answers = [str(number + 1) for number in range(16)]
    column, numbers = "problem" if "MATH-500" in names[0] else "prompt", list(range(16))
    return Dataset.from_dict({column: prompts, "solution": answers, "number": numbers, "seed": numbers})


@pytest.fixture(scope="module")
def team(model_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("guide") / "team"
    made_by(model_folder)(agents=PAIR, args=small(str(folder))).save_model()
    return str(folder)


def small(output_dir="run", **settings):
    merged = {"max_completion_length": 8, "per_device_train_batch_size": settings.get("num_generations", 8)}
    merged |= {"report_to": [], "disable_tqdm": True, **settings, "max_steps": 1}
    return MARFTConfig(output_dir, **merged)


def made_by(model):
    def made(**arguments):
        defaults = {"reward_funcs": lambda completions, **columns: [0.0] * len(completions), "agents": PAIR}
        defaults |= {"model": model, "args": small("rest"), "train_dataset": rows("data"), "peft_config": lora()}
        return MARFTTrainer(**{**defaults, **arguments})

    return made


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if page.stem in SLOW_PAGES else (), id=page.stem) for page in PAGES],
)
def test_every_block_of_a_page_runs(page, model_folder, team, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    team = str(shutil.copytree(team, "team"))  # a page may change it
    if page.stem == "evaluate_and_compare":  # of runs that the page compares
        samples = [{"question": str(q), "sample": s, "right": q % 2 == s % 2} for q in range(4) for s in range(4)]
        for run in [f"{name}-{seed}" for name in ("ours", "theirs") for seed in range(5)]:
            write_samples(tmp_path / run, samples, "eval", 1, 0)
    if page.stem == "different_models":
        shutil.copytree(model_folder, "other-base")
    if page.stem == "tasks":  # a package of OpenEnv, which is not on PyPI
        monkeypatch.setitem(sys.modules, "echo_env", SimpleNamespace(EchoEnv=dict, EchoAction=dict))
    server = contextlib.nullcontext("")
    if page.stem == "use_extend_publish":  # what `marft serve` runs
        server = serving(Team.from_pretrained(team, model=model_folder), name="math-duo")
    with server as url:
        run_blocks(page, model_folder, team, url)


def run_blocks(page, model_folder, team, url):
    space = {"rows": rows, "small": small, "made": made_by(model_folder), "__name__": "guide"}
    for number, block in enumerate(blocks(page)):
        code = made_small(block, model_folder, team).replace("http://127.0.0.1:8080", url)
        if ">>>" in code:
            tested = doctest.DocTestParser().get_doctest(code, space, page.stem, str(page), number)
            runner = doctest.DocTestRunner()
            runner.run(tested, clear_globs=False)
            assert not runner.summarize(verbose=False).failed, f"{page.stem}, block {number + 1}"
            continue
        exec(compile(code, f"{page.stem}, block {number + 1}", "exec"), space)  # noqa: S102  # our own documentation


# Of fragments that show only arguments, and of the reader's own program
NOT_IMPORTED = {"MARFTConfig", "MARFTTrainer", "client", "score"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_of_a_page_import_what_they_use(page):
    """Replacements would hide a missing import."""
    known = {*dir(builtins), "__name__", *NOT_IMPORTED}
    for tree in (ast.parse(block) for block in blocks(page) if ">>>" not in block):
        nodes = list(ast.walk(tree))
        for node in nodes:
            bound = getattr(node, "name", None) or getattr(node, "arg", None)  # of definitions, arguments, patterns
            known |= {bound} if isinstance(bound, str) and not isinstance(node, ast.alias) else set()
            known |= {node.asname or node.name.partition(".")[0]} if isinstance(node, ast.alias) else set()
        names = [node for node in nodes if isinstance(node, ast.Name)]
        known |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
        assert {node.id for node in names} <= known, page


def test_no_page_and_no_template_pays_for_a_text_that_contains_the_answer():
    """A reply with a list of guesses would get this reward."""
    templates = (ROOT / "marft_trl" / "extras" / "commands" / "templates").glob("*.py")
    pays = re.compile(r"""(target|answer|solution|expected)["'\]]* in [\w.\[\]"'-]*(text|content)""")
    for page in [*PAGES, *templates, *(ROOT / "examples").glob("*.py")]:
        assert not pays.search(page.read_text()), (page, pays.search(page.read_text()))


def slug(heading: str) -> str:
    """The anchor that a heading has on GitHub."""
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)}


def test_every_link_of_the_documentation_leads_somewhere():
    others = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md", "examples/README.md")
    for page in [*(ROOT / name for name in others), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
            path, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            linked_page = (page.parent / path).resolve() if path else page
            assert linked_page.exists(), (page.name, target)
            assert not anchor or anchor in anchors(linked_page), (page.name, target)


def test_the_guide_is_read_in_order_and_stays_short():
    index = (ROOT / "docs" / "index.md").read_text()
    order = re.findall(r"^\d+\. \[[^\]]*\]\(guide/(\w+)\.md\)", index, re.MULTILINE)
    assert sorted(order) == [page.stem for page in GUIDE[1:]]
    for name, after in itertools.pairwise(order):
        page = (ROOT / "docs" / "guide" / f"{name}.md").read_text()
        assert f"]({after}.md)" in page.rstrip().split("\n\n")[-1], name
    words = {page.stem: len(page.read_text().split()) for page in GUIDE}
    print(words, "lines of the README:", (ROOT / "README.md").read_text().count("\n"))
    assert words.pop("README") <= 750 and (ROOT / "README.md").read_text().count("\n") <= 120
    assert sum(words.values()) <= 11_000, words
    everything = sum(len(page.read_text().split()) for page in (ROOT / "docs").rglob("*.md"))
    print("words of all pages:", everything)
    assert everything <= 45_000


@pytest.mark.parametrize(("folder", "most"), [("reference", 14_000), ("reports", 6_000)])
def test_reference_and_reports_stay_short(folder, most):
    """Tables, which are looked up, and code are not counted."""
    texts = {page.stem: without_code(page.read_text()) for page in (ROOT / "docs" / folder).glob("*.md")}
    words = {name: len(re.sub(r"^\|.*$", "", text, flags=re.MULTILINE).split()) for name, text in texts.items()}
    assert sum(words.values()) <= most, words
