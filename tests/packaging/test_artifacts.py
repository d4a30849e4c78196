"""What is in the files that are uploaded."""

import base64
import csv
import hashlib
import io
import re
import sys
import zipfile
from email import message_from_bytes

import pytest
import trove_classifiers

from megatron_rl_patches import __version__

from .conftest import ROOT, VERSIONS, check_call

DIST_INFO = f"megatron_rl_patches-{__version__}.dist-info"
_STARTUP = "megatron_rl_patches_startup"
STARTUP_FILES = {f"{_STARTUP}.pth", f"{_STARTUP}.start", f"_{_STARTUP}.py"}


@pytest.fixture
def wheel(artifacts):
    with zipfile.ZipFile(artifacts.wheel) as wheel:
        yield wheel


@pytest.fixture
def metadata(wheel):
    return message_from_bytes(wheel.read(f"{DIST_INFO}/METADATA"))


def test_wheel_holds_the_startup_files_at_its_root_every_module_and_nothing_foreign(wheel):
    names = wheel.namelist()
    roots = {name.partition("/")[0] for name in names}
    assert roots == {*STARTUP_FILES, "megatron_rl_patches", DIST_INFO}
    assert names[-1].endswith(".dist-info/RECORD")
    modules = (ROOT / "megatron_rl_patches").rglob("*.py")
    assert {str(path.relative_to(ROOT)) for path in modules} | {"megatron_rl_patches/py.typed"} <= set(names)
    record = wheel.read(f"{DIST_INFO}/RECORD").decode()
    rows = {name: (digest, size) for name, digest, size in csv.reader(io.StringIO(record))}
    assert sorted(rows) == sorted(names)
    for name in set(rows) - {f"{DIST_INFO}/RECORD"}:
        content = wheel.read(name)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        assert rows[name] == (f"sha256={digest}", str(len(content))), name
    # The startup line is one plain line, and harmless when the variable is unset.
    line = wheel.read("megatron_rl_patches_startup.pth").decode()
    assert line.startswith('import os; os.environ.get("MEGATRON_RL_PATCHES") and exec("try: from ')
    assert line.count("\n") == 1 and line.endswith("\n") and line.isascii()


def test_metadata_says_what_is_needed_and_the_index_takes_the_files(artifacts, metadata):
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert set(metadata.get_all("Provides-Extra", [])) == {"plot", "test", "test-ray", "mutation", "docs"}
    needed = {line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert {"torch>=2.6", "megatron-core>=0.14", "wrapt<3,>=1.16"} <= needed
    stated = set(metadata.get_all("Classifier", []))
    assert stated <= trove_classifiers.classifiers | {"Private :: Do Not Upload"}
    assert {f"Programming Language :: Python :: {version}" for version in VERSIONS} <= stated
    check_call([sys.executable, "-m", "twine", "check", "--strict", artifacts.sdist, artifacts.wheel])
    names = "CHANGELOG.md CITATION.cff CODE_OF_CONDUCT.md CONTRIBUTING.md LICENSE README.md SECURITY.md"
    assert set(names.split()) <= {path.name for path in artifacts.tree.iterdir()}


def test_the_links_of_the_readme_work_on_the_index(metadata):
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL"))
    text, repository = metadata.get_payload(), urls["Repository"]
    assert "git clone" in text and "REPOSITORY" not in text
    links = set(re.findall(r"\]\(([^)]+)\)", text))
    assert all(link.startswith("https://") for link in links)
    version = re.escape(f"v{__version__}")
    into_the_tree = re.escape(f"{repository}/") + rf"(?:tree|blob|raw)/{version}/([^#]+)(?:#.*)?"
    files = [file[1] for link in links if (file := re.fullmatch(into_the_tree, link))]
    assert len(files) > 20
    assert [file for file in files if not (ROOT / file).exists()] == []
    pictures = re.findall(r"!\[[^]]{60,}\]\(([^)]+)\)", text)
    plots = ("teacher_memory.svg", "head_by_vocabulary.svg")
    assert pictures == [f"{repository}/raw/v{__version__}/docs/images/{name}" for name in plots]


def test_command_of_the_wheel(with_torch):
    where = with_torch.run("-c", "import megatron_rl_patches; print(megatron_rl_patches.__file__)").stdout
    assert where.startswith(str(with_torch.site_packages))
    command = with_torch.path / "bin" / "megatron-rl-patches"
    assert "reentrant-train" in with_torch.run(command, "check").stdout
