"""Only complete checkpoints count, and only one run at a time uses an output folder."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from marft_trl.runs import run_folder as commits
from marft_trl.runs.resume import check_same_team, check_structure, read_accepted, tunables
from marft_trl.runs.run_folder import LOCK_NAME, CheckpointError, DamagedCheckpoint, RunFolder
from marft_trl.seams.runs import save_checkpoint_now
from marft_trl.system.processes import Processes
from marft_trl.workflows import Sequential

import pytest
import torch
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TrainerCallback

from .helpers import StopAt, began_at, team_trainer, varied_reward
from .test_health import Do


SAVE = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "per_device_train_batch_size": 4}
CRITIC = {"advantage": "gae", "critic": "shared", "num_generations": 1}


def trainer_in(folder, model, callbacks=None, **arguments):
    settings = {**SAVE, **arguments.pop("settings", {})}
    return team_trainer(model, folder, settings=settings, callbacks=callbacks, **arguments)


@pytest.fixture(scope="module")
def trained(small_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    trainer_in(folder, small_model, settings={**CRITIC, "max_steps": 3, "save_total_limit": 2}).train()
    return folder


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    return RunFolder(tmp_path / "run")


def test_every_damage_is_seen_and_the_checkpoint_before_is_used(run, caplog):
    """Each file of a checkpoint missing, cut at 8 points, with one bit flipped at 16: 25 damages a file."""
    damaged = run.path / "checkpoint-3"
    assert run.newest()[0] == damaged
    files, count = sorted(path for path in damaged.rglob("*") if path.is_file()), 0
    for path in files:
        data = path.read_bytes()
        cuts = [data[: len(data) * cut // 8] for cut in range(8)]
        bits = {(len(data) * 8 - 1) * flip // 15 for flip in range(16)}
        flips = [data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :] for bit in bits]
        for broken in (None, *cuts, *flips):
            caplog.clear()
            path.unlink() if broken is None else path.write_bytes(broken)
            newest, _ = run.newest()
            assert newest.name == "checkpoint-2", (path, broken is None, broken and len(broken))
            assert sum(record.message.startswith("Skipped: ") for record in caplog.records) == 1
            assert "checkpoint-3" in caplog.text
            path.write_bytes(data)
            count += 1
    assert {path.suffix for path in files} >= {".safetensors", ".json", ".pt", ".pth", ".bin"}
    assert count >= 24 * len(files) and len(files) >= 19
    assert run.newest()[0] == damaged  # all put back


@pytest.mark.parametrize("name", ["optimizer.pt", "marft_rollouts_0.json"])
def test_a_damaged_checkpoint_that_is_named_is_refused(small_model, run, name):
    path = run.path / "checkpoint-3" / name
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    trainer = trainer_in(run.path, small_model, settings=CRITIC)
    with pytest.raises(DamagedCheckpoint, match=rf"{name} has {size - 1} bytes, but {size} were written"):
        trainer.train(resume_from_checkpoint=str(path.parent))


def test_foreign_renamed_mixed_and_empty_folders_are_skipped(run, tmp_path, caplog):
    newest, earlier = run.path / "checkpoint-3", run.path / "checkpoint-2"
    (run.path / "checkpoint-9").mkdir()
    (run.path / "checkpoint-x").mkdir()
    shutil.copytree(newest, run.path / "checkpoint-5")
    foreign = run.path / "checkpoint-7"
    shutil.copytree(newest, foreign)
    commits.commit(foreign, "somebody-else", 7, {})
    assert run.newest()[0] == newest
    log_text = caplog.text
    assert "checkpoint-9 has no marft_commit.json" in log_text and "checkpoint-5 holds step 3" in log_text
    assert "checkpoint-7 belongs to another run" in log_text
    shutil.copy(earlier / "optimizer.pt", newest / "optimizer.pt")  # a mixture of two
    assert run.newest()[0] == earlier


def test_a_commit_that_was_written_by_hand_does_not_count(run):
    path = run.path / "checkpoint-3" / commits.COMMIT_NAME
    data = json.loads(path.read_text())
    data["content"]["step"] = 4
    for text in (json.dumps(data), "[]", "null", '{"format": 2}', "[" * 100_000, '{"format": 1}'):
        path.write_text(text)
        with pytest.raises(DamagedCheckpoint):
            commits.verify(path.parent)


def test_a_pickle_in_a_checkpoint_is_not_run(small_model, run, tmp_path):
    """Even with a matching commit: transformers loads only tensors."""
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(canary),)

    for name in ("optimizer.pt", "rng_state.pth", "scheduler.pt"):
        folder = run.path / "checkpoint-3"
        before = (folder / name).read_bytes()
        torch.save({"state": Evil()}, folder / name)
        written = commits.read_commit(folder)
        commits.commit(folder, written.run, 3, written.settings)
        with pytest.raises(Exception, match="(?i)weights.only|unsupported|unpickl"):
            trainer_in(run.path, small_model, settings=CRITIC).train(resume_from_checkpoint=True)
        (folder / name).write_bytes(before)
        assert not canary.exists(), name


def written(folder: RunFolder, step: int, state: str, run: str | None = None) -> Path:
    path = folder.path / f"checkpoint-{step}"
    commits.begin(path, run or folder.run, step)
    (path / "file").write_text(state)
    if state in ("complete", "foreign"):
        commits.commit(path, "another" if state == "foreign" else folder.run, step, {})
    if state == "bare":
        (path / commits.OPEN_NAME).unlink()
    return path


@settings(max_examples=60)
@given(
    states=st.lists(st.sampled_from(["complete", "complete", "open", "foreign", "bare"]), max_size=8),
    limit=st.one_of(st.none(), st.integers(0, 4)),
    best=st.one_of(st.none(), st.integers(0, 7)),
)
def test_rotation_keeps_the_newest_the_best_and_foreign_checkpoints(tmp_path_factory, states, limit, best):
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    folder.continue_run("me")
    paths = [written(folder, step, state) for step, state in enumerate(states)]
    best_path = paths[best] if best is not None and best < len(paths) else None
    folder.rotate(limit, best_path)
    own = [path for path, state in zip(paths, states, strict=True) if state == "complete"]
    left = [path for path in own if path.exists()]
    assert all(commits.verify(path) for path in left)
    assert not own or own[-1] in left
    assert best_path not in own or best_path in left
    if limit:
        assert len(left) == min(len(own), max(limit, len({*own[-1:], *([best_path] if best_path in own else [])})))
    else:
        assert left == own
    for path, state in zip(paths, states, strict=True):
        assert path.exists() == (state in ("foreign", "bare") or path in left), state


@pytest.mark.parametrize("moment", ["opened", "written", "closed"])
def test_rewriting_a_checkpoint_keeps_the_old_copy_until_the_new_copy_is_complete(tmp_path, moment):
    folder = RunFolder(tmp_path)
    folder.continue_run("me")
    written(folder, 2, "complete")
    (tmp_path / "checkpoint-2" / "stray").write_text("of before")
    commits.commit(tmp_path / "checkpoint-2", "me", 2, {})
    path = folder.open(2)
    assert not (path / "stray").exists()
    if moment != "opened":
        (path / "file").write_text("new")
    if moment == "closed":
        folder.close(path, {})
    newest, _ = RunFolder(tmp_path).newest()
    assert newest == path and commits.verify(newest).step == 2
    assert (path / "stray").exists() == (moment != "closed")
    assert not list(tmp_path.glob("_previous-*"))


def test_a_folder_belongs_to_one_run_at_a_time(small_model, tmp_path):
    """The lock is released by the system when a process ends, however it ends."""
    code = (
        "import sys, time; from marft_trl.runs.run_folder import RunFolder\n"
        f"folder = RunFolder({str(tmp_path)!r})\n"
        "with folder.held():\n    folder.continue_run('other'); print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        trainer = trainer_in(tmp_path, small_model, settings={"max_steps": 1})
        with pytest.raises(CheckpointError, match=rf"in use by another run \(process {other.pid} on "):
            trainer.train()
        other.kill()
    trainer.train()
    assert trainer.state.global_step == 1 and (tmp_path / LOCK_NAME).exists()


@pytest.mark.slow
def test_a_removed_folder_is_locked_again(small_model, tmp_path, caplog):
    folder = tmp_path / "run"
    trainer_in(folder, small_model, [Do(2, on_step_begin=lambda: shutil.rmtree(folder))]).train()
    assert "was removed during the run" in caplog.text and (folder / LOCK_NAME).exists()
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-4"}


def test_a_folder_that_another_run_has_taken_is_left_to_it(small_model, tmp_path):
    folder = tmp_path / "run"
    other = FileLock(str(folder / LOCK_NAME))

    def take():
        shutil.rmtree(folder)
        folder.mkdir()
        other.acquire(timeout=0)

    with pytest.raises(CheckpointError, match="is in use by another run"):
        trainer_in(folder, small_model, [Do(2, on_step_begin=take)]).train()
    assert not list(folder.glob("checkpoint-*"))
    other.release()


@pytest.mark.parametrize("where", ["reward", "workflow", "callback"])
def test_a_forked_child_that_comes_back_ends(small_model, tmp_path, capfd, monkeypatch, where):
    """Before it takes a step or acts as its parent among the processes."""
    parent, children = os.getpid(), []
    together = Processes.failing_together

    @contextlib.contextmanager
    def noted(processes):
        with together(processes):
            try:
                yield
            finally:
                assert where == "callback" or os.getpid() == parent or os._exit(71)

    monkeypatch.setattr(Processes, "failing_together", noted)

    def fork(place):
        if place == where and not children:
            children.append(os.fork())
            if not children[0]:
                signal.alarm(30)  # otherwise it would run the tests in parallel to this process

    def reward(completions, **kwargs):
        fork("reward")
        return [float(index % 2) for index in range(len(completions))]

    class Forking(Sequential):
        async def run(self, episode):
            fork("workflow")
            await super().run(episode)

    class Steps(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            with open(tmp_path / "steps", "a") as file:
                file.write(f"{os.getpid()}\n")
            fork("callback")
            if where == "callback" and not children[0]:
                raise RuntimeError("in the child")

    trainer_in(tmp_path, small_model, [StopAt(1), Steps()], reward_funcs=reward, workflow=Forking()).train()
    assert os.getpid() == parent and len(children) == 1
    _, status = os.waitpid(children[0], 0)
    assert os.waitstatus_to_exitcode(status) == 70
    assert "A reward, a workflow or a tool forked process" in capfd.readouterr().err
    assert (tmp_path / "steps").read_text() == f"{parent}\n"
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-1"}


@pytest.mark.slow
def test_a_new_run_among_old_checkpoints_is_not_mixed_with_them(small_model, run, caplog):
    """It warns about them, and resumes only from checkpoints of this run."""
    trainer = trainer_in(run.path, small_model, [StopAt(1)])
    trainer.train()
    assert "has checkpoints of an earlier run (checkpoint-2, checkpoint-3)" in caplog.text
    again = trainer_in(run.path, small_model, [StopAt(2)])
    again.train(resume_from_checkpoint=True)
    assert began_at(again) == 1 and "checkpoint-3 belongs to another run" in caplog.text


def test_an_unwritable_folder_raises_before_training(small_model, tmp_path):
    (tmp_path / "file").write_text("")
    trainer = trainer_in(tmp_path / "output", small_model)
    trainer.parts.checkpoints.folder.path = tmp_path / "file" / "output"
    with pytest.raises(CheckpointError, match=r"cannot be written to: .*Nothing has been trained"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_damaged_newest_checkpoint_is_set_aside_and_costs_no_other(small_model, tmp_path):
    """A run that resumes from the checkpoint before it saves an earlier step than that of the damaged checkpoint."""
    trainer_in(tmp_path, small_model, settings={"save_steps": 2}).train()
    assert [folder.name for folder in RunFolder(tmp_path).checkpoints()] == ["checkpoint-2", "checkpoint-4"]
    path = tmp_path / "checkpoint-4" / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:-1])
    calls = []

    def fails_later(completions, **kwargs):
        calls.append(1)
        return varied_reward(completions) if len(calls) == 1 else 1 / 0

    settings = {"save_steps": 2, "save_total_limit": 1}
    again = trainer_in(tmp_path, small_model, settings=settings, reward_funcs=fails_later)
    with pytest.raises(ZeroDivisionError):
        again.train(resume_from_checkpoint=True)
    assert began_at(again) == 2 and RunFolder(tmp_path).newest()[1].step == 3
    assert (tmp_path / "_aside-checkpoint-4").exists()


@pytest.mark.slow
def test_resuming_from_an_earlier_step_renames_later_checkpoints(small_model, tmp_path, caplog):
    trainer_in(tmp_path, small_model, settings={"max_steps": 3}).train()
    back = trainer_in(tmp_path, small_model, [StopAt(2)], settings={"save_total_limit": 2})
    back.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert [folder.name for folder in RunFolder(tmp_path).checkpoints()] == ["checkpoint-1", "checkpoint-2"]
    assert "Renamed checkpoint-3 to _aside-checkpoint-3, because the run resumes from step 1" in caplog.text
    again = trainer_in(tmp_path, small_model)
    again.train(resume_from_checkpoint=True)
    assert began_at(again) == 2


def test_a_run_that_was_started_by_mistake_hides_no_other(small_model, run):
    """It has saved nothing, so the folder still belongs to the run before."""
    before = run.known_run()
    with pytest.raises(ZeroDivisionError):
        trainer_in(run.path, small_model, reward_funcs=lambda **_: 1 / 0, settings={"save_strategy": "no"}).train()
    assert RunFolder(run.path).known_run() == before and RunFolder(run.path).newest()[1].step == 3


def test_files_that_cannot_be_removed_or_read_cost_no_checkpoint(small_model, tmp_path, monkeypatch, caplog):
    def fails(*arguments):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    monkeypatch.setattr(commits, "remove", fails)
    trainer_in(tmp_path, small_model, settings={"save_total_limit": 1, "max_steps": 2}).train()
    assert "Could not remove an older checkpoint" in caplog.text and RunFolder(tmp_path).newest()[1].step == 2

    def unreadable(path):
        if "checkpoint-2" in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    original = commits._sha256
    monkeypatch.setattr(commits, "_sha256", lambda path: unreadable(path) or original(path))
    assert RunFolder(tmp_path).newest()[1].step == 1 and "a file cannot be read" in caplog.text


_FURTHER = [pytest.param(number, errno.ENOSPC, marks=pytest.mark.slow) for number in (1, 2, 4, 6, 9)]


@pytest.mark.parametrize(("number", "code"), [(3, errno.EROFS), *_FURTHER])
def test_a_full_or_read_only_disk_keeps_the_checkpoint_before(small_model, tmp_path, monkeypatch, number, code):
    """Whether the disk fails in the files of the parent class, in ours or in the commit."""
    trainer = trainer_in(tmp_path, small_model, settings={"max_steps": 2})
    writes = []

    def failing(original):
        def call(*arguments, **named):
            if trainer.state.global_step == 2:
                writes.append(original)
                if len(writes) >= number:
                    raise OSError(code, os.strerror(code))
            return original(*arguments, **named)

        return call

    monkeypatch.setattr(os, "fsync", failing(os.fsync))
    monkeypatch.setattr(torch, "save", failing(torch.save))
    monkeypatch.setattr("peft.peft_model.safe_save_file", failing(__import__("safetensors.torch").torch.save_file))
    with pytest.raises(CheckpointError) as raised:
        trainer.train()
    monkeypatch.undo()
    messages = (
        f"Could not write {tmp_path}/checkpoint-2",
        os.strerror(code),
        f"The run resumes from {tmp_path}/checkpoint-1",
    )
    assert all(message in str(raised.value) for message in messages)
    assert not (tmp_path / "checkpoint-2").exists()
    assert RunFolder(tmp_path).newest()[1].step == 1
    again = trainer_in(tmp_path, small_model, settings={"max_steps": 2})
    again.train(resume_from_checkpoint=True)
    assert began_at(again) == 1 and RunFolder(tmp_path).newest()[1].step == 2


def test_weights_that_are_not_finite_are_neither_saved_nor_loaded(small_model, tmp_path):
    trainer = trainer_in(tmp_path, small_model, [StopAt(1)])
    trainer.train()
    parameter = next(iter(trainer.policies.parameters("actor").values()))
    with torch.no_grad():
        parameter.view(-1)[3] = torch.nan
    for step in (2, 1):  # a save that is refused leaves what stands
        trainer.state.global_step = step
        with pytest.raises(CheckpointError, match="The weights of 'actor' are not finite"):
            save_checkpoint_now(trainer)
    assert not (tmp_path / "checkpoint-2").exists() and commits.verify(tmp_path / "checkpoint-1").step == 1
    trainer.save_model(tmp_path / "broken")
    with pytest.raises(ValueError, match="The weights of the adapter 'actor' in .* are not finite"):
        trainer.parts.checkpoints.load_weights(tmp_path / "broken")


SETTINGS = {
    "agents": {"a": "a", "b": "b"},
    "adapters": {"a": {"trained": True, "r": 4}, "b": {"trained": True, "r": 4}},
    "dataset": {"rows": 8},
    "versions": {"torch": "2.13"},
    "tunable": {"learning_rate": 0.1, "temperature": 1.0},
}


def changed(part, **values):
    return {**SETTINGS, part: {**SETTINGS[part], **values}}


def test_structural_changes_are_refused_with_a_table_and_others_announced():
    assert check_structure(SETTINGS, SETTINGS, (), "c") == []
    with pytest.raises(ValueError, match=r"(?s)adapters\.b\.r +4 +8.*dataset\.rows +8 +9.*'accept': \['dataset'\]"):
        both = {**changed("dataset", rows=9), "adapters": {**SETTINGS["adapters"], "b": {"trained": True, "r": 8}}}
        check_structure(SETTINGS, both, (), "c")
    accepted = read_accepted({"accept": ["dataset"]})
    assert check_structure(SETTINGS, changed("dataset", rows=9), accepted, "c") == ["dataset.rows: 8 -> 9"]
    versions = check_structure(SETTINGS, changed("versions", torch="2.14"), (), "c")
    assert versions == ["versions.torch: 2.13 -> 2.14"]
    assert tunables(SETTINGS, changed("tunable", learning_rate=0.2)) == [("learning_rate", "0.1", "0.2")]
    # Of a checkpoint of an earlier version, which recorded less
    later = changed("tunable", **{"torch_compile": False, "team.rewards[1]": "f"}) | {"workflow": {"team": ["a", "b"]}}
    earlier = changed("tunable", trackio_bucket_id=None) | {"workflow": {}}
    assert check_structure(earlier, later, (), "c") == []
    assert tunables(earlier, later) == [("team.rewards[1]", "(not recorded)", "f")]


def test_the_order_of_the_team_is_compared():
    before, after = ({"workflow": {"team": team}} for team in (["a", "b"], ["b", "a"]))
    assert check_structure(before, after, ["workflow"], "") == ["workflow.team: ['a', 'b'] -> ['b', 'a']"]
    with pytest.raises(ValueError, match=r"workflow\.team +\['a', 'b'\] +\['b', 'a'\]"):
        check_structure(before, after, (), "")


@pytest.mark.parametrize(
    ("team_agents", "message"),
    [(["a", "c"], r"\(new: c; missing: b\)"), (["a", "b", "c"], r"\(new: c\)"), (["a"], r"\(missing: b\)")],
)
def test_another_team_is_refused_and_the_way_is_named(team_agents, message):
    with pytest.raises(ValueError, match=message + r".*`model=load_adapters\(base, 'run/checkpoint-2'\)`"):
        check_same_team(["a", "b"], team_agents, "run/checkpoint-2")
    check_same_team(["a", "b"], ["b", "a"], "run/checkpoint-2")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (["accept"], TypeError, "must be a dictionary"),
        ({"accepts": ["seed"]}, ValueError, "Did you mean 'accept'"),
        ({"add": ["verifier"]}, ValueError, r"got 'add'\..* start a new run .*load_adapters\(base, checkpoint\)"),
        ({"accept": "seed"}, TypeError, "must be a list of names"),
        ({"accept": ["datasets"]}, ValueError, "Did you mean 'dataset'"),
    ],
)
def test_changes_that_make_no_sense(changes, error, message):
    with pytest.raises(error, match=message):
        read_accepted(changes)


def test_a_process_that_sees_another_folder_raises_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr("marft_trl.runs.run_folder._SEEN_WITHIN", 0.0)
    shared, other = RunFolder(tmp_path), RunFolder(tmp_path / "of-another-node")
    with shared.marked() as mark:
        RunFolder(tmp_path).check_mark(mark)
        with pytest.raises(CheckpointError, match="is not the one that the first process of the run writes to"):
            other.check_mark(mark)
    assert not list(tmp_path.iterdir())


def test_a_disk_has_to_have_room_for_two_checkpoints(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * 10**6))
    RunFolder(tmp_path).check_space(10**6)
    assert not caplog.records
    RunFolder(tmp_path).check_space(10**6 + 1)
    assert "has 2 MB left, and a checkpoint needs about 1 MB. Saving may fail" in caplog.text


def test_resuming_from_an_earlier_step_renames_no_checkpoint_of_another_run(tmp_path):
    folder = RunFolder(tmp_path)
    folder.continue_run("me")
    for step, state in ((1, "complete"), (2, "foreign"), (3, "complete")):
        written(folder, step, state)
    RunFolder(tmp_path).continue_run("me", 1)
    assert [path.name for path in folder.checkpoints()] == ["checkpoint-1", "checkpoint-2"]
    assert (tmp_path / "_aside-checkpoint-3").is_dir()


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    folder = RunFolder(tmp_path)
    folder.continue_run("me")
    for step in (9, 100, 10):
        written(folder, step, "complete")
    assert [path.name for path in folder.checkpoints()] == ["checkpoint-9", "checkpoint-10", "checkpoint-100"]
    assert folder.newest()[1].step == 100
    folder.rotate(2)
    assert [path.name for path in folder.checkpoints()] == ["checkpoint-10", "checkpoint-100"]
