"""GitHub's files. They cannot run here: tools judge them, and each of their commands is a make target."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, check_call

pytest.importorskip("check_jsonschema")  # from Python 3.11 on, as zizmor
yaml = pytest.importorskip("ruamel.yaml").YAML(typ="safe")

GITHUB = ROOT / ".github"
WORKFLOWS = [yaml.load(file) for file in (GITHUB / "workflows").iterdir()]
SCHEMAS = {
    "vendor.github-workflows": [*(GITHUB / "workflows").iterdir()],
    "custom.github-workflows-require-timeout": [*(GITHUB / "workflows").iterdir()],
    "vendor.github-issue-forms": [GITHUB / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "framework.yml")],
    "vendor.github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}
#: Targets that CI does not run as such -> the tests that it runs in their place.
IN_PARTS = {
    "release-check": ("tests/packaging/test_publishable.py", "tests/packaging/test_artifacts.py"),
    **dict.fromkeys(("checkouts", "verdicts", "runs"), ("tests/frameworks/test_mains.py",)),
    "report": (),  # it needs git and gh, and a repository to write to
    "demo": ("tests/real/test_demo.py",),
    "test-cuda-rehearsal": ("tests/lab/rehearsal/test_rehearsal.py",),
    "test-kernels": ("tests/lab/kernels/test_kernels.py",),
    **dict.fromkeys(("models", "test-nightly"), ("tests/real/test_models.py",)),
    "test-releases": ("tests/real/test_release.py",),
}

JOBS = [job for flow in WORKFLOWS for job in flow["jobs"].values()]
STEPS = [step["run"] for job in JOBS for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_schemas(schema):
    check_call([sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *SCHEMAS[schema]])


def test_zizmor_finds_nothing():
    zizmor = shutil.which("zizmor", path=Path(sys.executable).parent) or shutil.which("zizmor")
    check_call([zizmor, "--offline", "--strict-collection", "--persona=auditor", "--no-progress", GITHUB])


def test_every_command_is_a_make_target_that_takes_these_variables_and_ci_runs_it():
    makefile = (ROOT / "Makefile").read_text()
    ran_here = _reached(re.findall(r"\bmake(?: --[a-z-]+)* ([a-z-]+)", (ROOT / ".ci" / "run").read_text()))
    assert not ran_here & IN_PARTS.keys()
    commands = [line for step in STEPS for line in step.strip().splitlines()]
    assert commands
    for command in commands:
        make, *arguments = shlex.split(command)
        assert make == "make"
        variables = {argument.partition("=")[0] for argument in arguments if "=" in argument}
        assert all(re.search(rf"^{name} \?=", makefile, re.MULTILINE) for name in variables), command
        targets = [argument for argument in arguments if "=" not in argument]
        check_call(["make", "--dry-run", "--directory", ROOT, *targets])
        for target in targets:
            assert target in ran_here or all((ROOT / file).exists() for file in IN_PARTS[target])


def _reached(targets):
    """Return the targets and what they depend on."""
    rules = re.findall(r"^([a-z-]+): *(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    reached, waiting = set(), list(targets)
    while waiting:
        reached.add(target := waiting.pop())
        waiting += [name for name in dict(rules).get(target, "").split() if name in dict(rules)]
    return reached
