"""Source text from folders, wheels, git trees and this environment: the right file, and nothing imported."""

import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytest import FixtureRequest, MonkeyPatch
from pytest_mock import MockerFixture

from megatron_rl_patches.engine.sources import Environment, Source, open_source
from megatron_rl_patches.errors import MegatronRLPatchesError
from tests.worlds.files import git, write

Files = dict[str, str]

EXPLOSIVE = "raise AssertionError('imported')\n"
FILES: Files = {"framework/__init__.py": "", "framework/sub/model.py": "text = 1\n"}


def as_folder(path: Path, files: Files) -> Source:
    return open_source(str(write(path / "checkout", files)))


def as_wheel(path: Path, files: Files) -> Source:
    wheel = path / "framework-1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return open_source(str(wheel))


def as_git_tree(path: Path, files: Files) -> Source:
    repository = write(path / "repository", files)
    git(repository, "init")
    git(repository, "add", ".")
    git(repository, "commit", "-m", "one")
    git(repository, "tag", "v1")
    git(repository, "rm", "-r", "--quiet", ".")  # what counts is the commit, not the work tree
    return open_source(f"{repository}@v1")


Make = Callable[[Files], Source]


@pytest.fixture(params=[as_folder, as_wheel, as_git_tree])
def make(request: FixtureRequest, tmp_path: Path) -> Make:
    return lambda files: request.param(tmp_path, files)


@pytest.mark.parametrize("root", ["", "src/", "framework/", "third_party/vendored/"])
def test_layouts(make: Make, root: str) -> None:
    source = make({root + name: text for name, text in FILES.items()} | {"setup.py": "raise SystemExit\n"})
    assert source.has_package("framework")
    assert source.read("framework.sub.model") == "text = 1\n"
    assert source.read("framework") == ""
    assert source.read("framework.other") is None
    assert not source.has_package("sub")


def test_the_package_that_import_would_find_wins(make: Make) -> None:
    source = make(
        {
            "framework/framework/__init__.py": "",
            "framework/framework/model.py": "first\n",
            "a/deeper/copy/framework/__init__.py": "",
            "a/deeper/copy/framework/model.py": "second\n",
            "a/deeper/copy/framework/removed.py": "only in the copy\n",
            # A folder inside another package is another module.
            "verl/__init__.py": "",
            "verl/utils/miles/__init__.py": "",
            "verl/utils/miles/model.py": "",
            # Namespace packages are put together from all places; a bare folder is no package.
            "src/space/bridge/__init__.py": "",
            "3rdparty/lm/space/core/__init__.py": "",
            "3rdparty/lm/space/core/part.py": "core\n",
        }
    )
    assert source.read("framework.model") == "first\n"
    assert source.read("framework.removed") is None, "the copy must not fill a gap in the real one"
    assert not source.has_package("miles") and source.read("miles.model") is None
    assert source.has_package("space.bridge") and source.read("space.core.part") == "core\n"
    assert not source.has_package("space") and not source.has_package("space.training")


def test_encodings_line_ends_hidden_folders_and_loops(tmp_path: Path) -> None:
    (tmp_path / "framework.py").write_bytes("# coding: latin-1\r\nname = 'é'\r\n".encode("latin-1"))
    write(tmp_path, {".venv/lib/hidden/__init__.py": "", "src/other/__init__.py": ""})
    (tmp_path / "src" / "loop").symlink_to(tmp_path)
    source = open_source(str(tmp_path))
    assert source.read("framework") == "# coding: latin-1\nname = 'é'\n"
    assert source.has_package("other") and not source.has_package("hidden")


def test_what_is_no_source(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    as_git_tree(tmp_path, FILES)
    (tmp_path / "broken.whl").write_text("no archive")
    places = ("", "nowhere", "nowhere@v1", "name=nowhere", "missing.whl")
    revisions = ("v2", "--output=stolen", "HEAD:framework")
    for source, message in (
        *((place, "neither a folder, nor") for place in places),
        ("broken.whl", r"broken\.whl: File is not a zip file"),
        (".@HEAD", "not a git repository"),
        *((f"repository@{revision}", r"git -C .*fatal: ") for revision in revisions),
    ):
        with pytest.raises(MegatronRLPatchesError, match=message):
            open_source(source)
    assert not list(tmp_path.rglob("stolen*"))


@pytest.fixture
def put_first(tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts finders first; what they or others find fails when it is imported."""
    packages = ("mrp_framework", "mrp_framework/sub", "mrp_space/core", "mrp_checkout/mrp_checkout")
    write(tmp_path / "site", {f"{package}/__init__.py": EXPLOSIVE for package in packages})
    monkeypatch.syspath_prepend(tmp_path / "site")
    others = [*sys.meta_path]
    yield lambda *finders: monkeypatch.setattr(sys, "meta_path", [*finders, *others])
    assert not [name for name in sys.modules if name.startswith("mrp_")]


def test_reads_without_importing(tmp_path: Path, put_first: Any) -> None:
    assert Environment().read("mrp_framework.sub") == EXPLOSIVE
    assert Environment().read("mrp_framework.sub.absent") is None
    assert Environment().has_package("mrp_framework")
    assert Environment().has_package("mrp_space.core")
    assert not Environment().has_package("mrp_framework.absent.deeper")
    assert not Environment().has_package("mrp_checkout"), "a checkout in the current folder is no package"
    assert Environment().file_of("mrp_space.core") == str(tmp_path / "site/mrp_space/core/__init__.py")
    assert Environment().file_of("mrp_space") is None


@pytest.mark.parametrize("is_instance", [True, False])
def test_asks_editable_finders(tmp_path: Path, put_first: Any, is_instance: bool) -> None:
    """They map names to files: setuptools' is a class, scikit-build-core's and Bazel's are instances."""
    package = write(tmp_path / "mrp_editable", {"__init__.py": "", "it.py": "text = 3\n"})
    places: dict[str, tuple[Path, list[str] | None]] = {
        "mrp_editable": (package / "__init__.py", [str(package)]),
        "mrp_space.tool": (package / "it.py", None),  # of a namespace
    }

    class EditableFinder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            file, inside = places.get(name, (None, None))
            return file and spec_from_file_location(name, file, submodule_search_locations=inside)

    put_first(EditableFinder() if is_instance else EditableFinder)
    assert Environment().has_package("mrp_editable")
    assert Environment().read("mrp_editable.it") == "text = 3\n"
    # An instance may be an import hook, which would import the parent of a name that it is asked for.
    assert Environment().read("mrp_space.tool") == (None if is_instance else "text = 3\n")


def test_passes_over_finders_and_loaders_that_do_not_answer(put_first: Any, mocker: MockerFixture) -> None:
    """One that raises, one of the old kind, and one that rewrites modules, whose loaders have no text."""

    def rewrite(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        if spec is not None:
            spec.loader = object()  # type: ignore[assignment]
        return spec

    raises = SimpleNamespace(find_spec=mocker.Mock(side_effect=ZeroDivisionError))
    put_first(raises, object(), SimpleNamespace(find_spec=rewrite))
    assert Environment().read("mrp_framework") == EXPLOSIVE
    assert raises.find_spec.called
    assert not Environment().has_package("__main__.nothing")  # a loaded module without a spec
    assert Environment().read("mrp_nowhere") is None


@pytest.mark.usefixtures("put_first")
@pytest.mark.parametrize("namespace", ["mrp_spread", "mrp_outer/inner"])
def test_namespaces_add_up(tmp_path: Path, monkeypatch: MonkeyPatch, namespace: str) -> None:
    for part in ("first", "second"):
        write(tmp_path / part, {f"{namespace}/{part}/__init__.py": "", f"{namespace}/{part}/it.py": part})
        monkeypatch.syspath_prepend(str(tmp_path / part))
    names = [f"{namespace.replace('/', '.')}.{part}.it" for part in ("first", "second")]
    environment = Environment()
    assert environment.read(names[0]) == "first"
    (tmp_path / "other" / "inner").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "other"))  # a folder there has the last part of the name
    assert environment.read(names[1]) == "second"


def test_what_reports_call_a_source(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    (tmp_path / "at=home").mkdir()
    assert as_folder(tmp_path / "at=home", FILES).name == "checkout"
    assert as_wheel(tmp_path, FILES).name == "framework 1.2"
    assert as_git_tree(tmp_path, FILES).name == "repository v1"
    assert open_source(f"{tmp_path}/repository/.git@v1").name == "repository v1"
    for place in ("at=home/checkout", "framework-1.2-py3-none-any.whl", "repository@v1"):
        assert open_source(f"my framework={tmp_path}/{place}").name == "my framework"
    git(tmp_path, "clone", "--bare", "repository", "bare.git")
    bare = open_source(f"{tmp_path / 'bare.git'}@v1")
    assert (bare.name, bare.read("framework.sub.model")) == ("bare v1", "text = 1\n")
    in_the_path = as_git_tree(tmp_path / "me@home", FILES)
    assert (in_the_path.name, in_the_path.read("framework")) == ("repository v1", "")
    # A folder within the repository will do.
    (tmp_path / "repository" / "docs").mkdir()
    assert open_source(f"{tmp_path}/repository/docs@v1").has_package("framework")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MegatronRLPatchesError, match=r"^git is not .*needed for REPOSITORY@REVISION$"):
        open_source(f"{tmp_path}@v1")
