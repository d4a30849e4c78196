"""What happens every night, on repositories of our own: fetch ``main``, judge it, run it, report changes."""

import re
import shutil
from pathlib import Path

import pytest

from tests.frameworks import mains
from tests.frameworks.checkouts import REPOSITORIES
from tests.worlds.files import git

MODEL = "slime/backends/megatron_utils/model.py"
TRAIN = "slime.backends.megatron_utils.model.train"

pytestmark = pytest.mark.slow


def commit(folder: Path) -> str:
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--allow-empty", "--message=x")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of https://github.com, with a repository per framework."""
    folder = tmp_path / "upstream"
    for repository in REPOSITORIES.values():
        (folder / repository).mkdir(parents=True)
        git(folder / repository, "init", "--quiet")
        (folder / repository / "setup.py").write_text(f"# of {repository}")
    pinned = commit(folder / "NVIDIA/Megatron-LM")
    for place in ("THUDM/slime", "Gen-Verse/OpenClaw-RL/slime"):
        (folder / place / "docker").mkdir(parents=True)
        (folder / place / "docker/Dockerfile").write_text(f"ARG MEGATRON_COMMIT={pinned}\n")
    shutil.copytree(mains.HERE / "stand_in" / "slime", folder / "THUDM/slime/slime")
    for repository in REPOSITORIES.values():
        commit(folder / repository)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://{folder}/.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://github.com/")
    return folder


def test_main_is_fetched_and_judged(upstream: Path, tmp_path: Path) -> None:
    checkouts, slime = tmp_path / "checkouts", upstream / "THUDM/slime"
    mains.fetch(checkouts)
    first = {known.source: known for known in mains.judge(checkouts, [])}
    assert first["slime main"].verdicts["slime"]["reentrant-train"][TRAIN] == "fits"
    megatron = {source: known.commit for source, known in first.items() if source.startswith("Megatron-LM ")}
    assert set(megatron) == {"Megatron-LM main", "Megatron-LM for slime main"}
    assert len(set(megatron.values())) == 2

    (slime / MODEL).write_text(re.sub(r"\ndef train\(", "\ndef train_anew(", (slime / MODEL).read_text()))
    newest = commit(slime)
    mains.fetch(checkouts)
    second = {known.source: known for known in mains.judge(checkouts, [*first.values()])}
    changed = second.pop("slime main")
    assert changed.commit == newest
    assert changed.verdicts["slime"]["reentrant-train"][TRAIN].startswith("missing")
    assert second == {source: known for source, known in first.items() if source != "slime main"}
    after = [changed, *second.values()]
    assert mains.changed_sources([*first.values()], after) == ["slime main"]
    assert mains.changed_sources(after[1:], after) == mains.changed_sources(after, after) == []

    (slime / "docker/Dockerfile").write_text("FROM scratch\n")
    commit(slime)
    with pytest.raises(SystemExit, match="MEGATRON_COMMIT"):
        mains.fetch(checkouts)
