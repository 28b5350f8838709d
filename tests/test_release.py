"""The parts of a release: one version, pinned actions, a wheel with all files that the package reads."""

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import marft_trl

import pytest
import yaml


ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_actions_are_pinned_by_hash():
    for file in WORKFLOWS:
        used = re.findall(r"uses: (\S+)(.*)", file.read_text())
        assert used and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) for action, _ in used), file.name
        assert all(re.fullmatch(r" # v\d+\.\d+\.\d+", version) for _, version in used), file.name


def test_workflows_run_targets_that_there_are():
    targets = {*re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)}
    for file in WORKFLOWS:
        jobs = yaml.safe_load(file.read_text())["jobs"]
        for job in jobs.values():
            assert {*job.get("strategy", {}).get("matrix", {}).get("target", ())} <= targets | {"fuzz"}, file.name
            assert job["timeout-minutes"] <= 90
    assert "permissions" in yaml.safe_load((ROOT / ".github" / "workflows" / "publish.yml").read_text())


def test_one_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert PROJECT["version"] == cited == newest == marft_trl.__version__


@pytest.mark.slow
def test_the_wheel_has_all_files_that_the_package_reads(tmp_path):
    tracked = subprocess.run(["git", "ls-files", "marft_trl"], cwd=ROOT, capture_output=True, text=True, check=True)
    copy = tmp_path / "copy"  # a build leaves files behind
    for name in [*tracked.stdout.split(), "pyproject.toml", "setup.py", "README.md", "LICENSE"]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    if done.returncode and "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("needs an index with setuptools")
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == {*tracked.stdout.split()}


def test_the_readme_of_the_wheel_has_absolute_links(monkeypatch):
    """As soon as the address of the repository is known; `python -m build` makes the rest."""
    made, address = [], 'Repository = "https://example.org/a/b"'
    monkeypatch.setattr("setuptools.setup", lambda **arguments: made.append(arguments["long_description"]))
    runpy.run_path(str(ROOT / "setup.py"))
    read = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, **options: read(path, **options).replace("[project.urls]", f"[project.urls]\n{address}"),
    )
    runpy.run_path(str(ROOT / "setup.py"))
    assert made[0] == (ROOT / "README.md").read_text()
    base = f"https://example.org/a/b/blob/v{PROJECT['version']}/"
    assert f"]({base}docs/index.md)" in made[1] and f'src="{base.replace("blob", "raw")}docs/pictures/team' in made[1]
    links = re.findall(r'(?:\]\(|src="|srcset=")([^)"]+)', re.sub(r"```.*?```", "", made[1], flags=re.DOTALL))
    assert len(links) > 20 and all(link.startswith("https://") for link in links)
