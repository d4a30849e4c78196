"""The commands: what they print for people, pipes and programs, and their exit codes."""

import json
import os
import re
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pytest import MonkeyPatch

from megatron_rl_patches import __version__
from megatron_rl_patches.engine import registry
from megatron_rl_patches.engine.patch import Patch
from megatron_rl_patches.inference.memory import estimate as estimate_module
from megatron_rl_patches.inference.memory.parameters import Parameter, Stage
from tests.references.hugging_face import GEMMA_3_27B
from tests.worlds.command_line import invoke, invoke_json, refuse
from tests.worlds.files import write

TARGET = "mrp_framework.model.train"
DRIFTED = "def train(chunks): ..."


@pytest.fixture(autouse=True)
def _one_patch(monkeypatch: MonkeyPatch) -> None:
    """A registry with one patch, no variables, and the output of a pipe."""
    patch = Patch("test-patch", "it can be called again", upstream=("owner/project#1",))
    patch.wrap("mrp_framework.model", "train", parameters=("model",))(lambda call: None)
    monkeypatch.setattr(registry, "patches", lambda: {patch.name: patch})
    for name in [name for name in os.environ if name.startswith("MEGATRON_RL_PATCHES")]:
        monkeypatch.delenv(name)


def framework(folder: Path, text: str = "def train(model): ...") -> Path:
    return write(folder, {"mrp_framework/__init__.py": "", "mrp_framework/model.py": text})


def test_doctor_names_a_fault_of_what_is_selected(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    assert "no problems" in invoke("doctor").stdout
    diagnosis = invoke_json("doctor")
    assert diagnosis["python"] == sys.version.split()[0]
    assert diagnosis["frameworks"] == [{"name": "mrp_framework", "path": None, "version": None}]
    assert len(diagnosis["out_of_reach"]) == 4
    monkeypatch.syspath_prepend(framework(tmp_path, DRIFTED))
    invoke("doctor")
    monkeypatch.setenv("MEGATRON_RL_PATCHES", "1")
    message = f"test-patch: {TARGET}: drifted: it no longer takes model"
    remedy = "export MEGATRON_RL_PATCHES=0"
    shown = invoke("doctor", code=1).stdout
    assert f"- {message}\n  {remedy}\n" in shown
    assert shown.count("it no longer takes model") == 1
    assert {"message": message, "remedy": remedy} in invoke_json("doctor", code=1)["problems"]


def test_check_this_environment(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    assert "no framework that a patch knows is in this environment" in refuse("check")
    monkeypatch.syspath_prepend(framework(tmp_path, f"raise AssertionError('imported')\n{DRIFTED}"))
    summary, *_, fault, _ = invoke("check", code=1).stdout.splitlines()
    assert summary == "test-patch (default): it can be called again"
    assert fault == f"test-patch: {TARGET}: drifted: it no longer takes model"
    (status,) = invoke_json("check", code=1)
    assert (status["source"], status["state"]) == ("this environment", "drifted")


def test_a_patch_that_nobody_names_is_no_fault(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    explicit = Patch("extra", "it trains otherwise", upstream=("owner/project#2",), selected_by="by name")
    explicit.wrap("mrp_framework.model", "gone")(lambda call: None)
    monkeypatch.setattr(registry, "patches", lambda: {"extra": explicit})
    assert "mrp_framework.model does not define gone" in invoke("check", framework(tmp_path)).stdout
    monkeypatch.syspath_prepend(tmp_path)
    assert "extra (by name): " in invoke("check").stdout
    monkeypatch.setenv("MEGATRON_RL_PATCHES", "extra")
    invoke("check", tmp_path, code=1)


def test_tables_for_people_and_for_a_page(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    places = framework(tmp_path / "one"), framework(tmp_path / "two", DRIFTED)
    sources = [f"framework {number}={place}" for number, place in enumerate(places, 1)]
    assert invoke("check", *sources, code=1).stdout.splitlines() == [
        "mrp_framework",
        "patch       framework 1  framework 2  function",
        f"test-patch  patched      drifted      {TARGET}",
        f"framework 2: test-patch: {TARGET}: drifted: it no longer takes model",
        "",
    ]
    page = tmp_path / "page.md"
    invoke("check", *sources, "--markdown", page, code=1)
    text = page.read_text()
    assert str(tmp_path) not in text and text.startswith("# Compatibility\n")
    assert text.endswith(
        f"""\
## mrp_framework

All: framework 1, framework 2.

| patch | function | result | in |
| --- | --- | --- | --- |
| test-patch | `{TARGET}` | patched | framework 1 |
| test-patch | `{TARGET}` | **drifted**: it no longer takes model | framework 2 |
"""
    )
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[32mpatched" in invoke("check", places[0]).stdout
    monkeypatch.setenv("COLUMNS", str(len(TARGET) + 15))
    shown = re.sub(r"\x1b\[\d*m", "", invoke("check", places[0]).stdout)
    assert f"\ntest-patch  patched\n  {TARGET}\n" in shown


def test_check_as_json(tmp_path: Path) -> None:
    """Of code that the parser warns of, too."""
    (status,) = invoke_json("check", framework(tmp_path / "one", "DOT = '\\.'\ndef train(model): ..."))
    assert status.pop("fingerprint")
    of_site = {"patch": "test-patch", "framework": "mrp_framework", "target": TARGET, "source": "one"}
    of_code = {"state": "fits", "reason": "has the bug that the patch fixes", "detail": "", "because_of": ""}
    assert status == of_site | of_code


def test_sources_that_cannot_be_judged(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    one, other = framework(tmp_path / "a" / "same"), framework(tmp_path / "b" / "same")
    result = invoke("check", one, tmp_path / "empty")
    assert "no framework that a patch knows is in empty" in result.stderr
    assert "empty" not in result.stdout
    assert "no framework that a patch knows" in refuse("check", tmp_path / "empty")
    assert "called 'same'; name them: NAME=SOURCE" in refuse("check", one, other)


def test_configured_sites(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.undo()  # the real registry: reentrant-train turns the variable into sites
    monkeypatch.setenv("MEGATRON_RL_PATCHES_TRAIN_FUNCTIONS", "mrp_framework.model:train")
    statuses = invoke_json("check", framework(tmp_path))
    assert [f["state"] for f in statuses if f["target"] == TARGET] == ["fits"]


def test_demo_is_handed_its_options(monkeypatch: MonkeyPatch) -> None:
    given: dict[str, object] = {}
    module = types.ModuleType("megatron_rl_patches.demo")
    module.run_demo = lambda **options: given.update(options) or 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for options, ranks in (((), 2), (("--ranks", 3), 3)):
        invoke("demo", "--rollouts", 2, *options, code=3)
        assert given == {"rollouts": 2, "ranks": ranks, "seed": 0}
    invoke("demo", "--rollouts", 1, code=2)


@pytest.mark.parametrize(("command", "option"), [("check", "--markdown"), ("estimate", "--plot")])
def test_output_that_cannot_be_written_is_refused_at_once(command: str, option: str, tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    source = [framework(tmp_path / "framework")] if command == "check" else []
    for file in ("folder.png", "none/file.png"):
        message = refuse(command, *source, option, tmp_path / file)
        assert f": {option} is {tmp_path / file}, which cannot be written" in message


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = refuse("estimate", "--plot", tmp_path / "memory.png")
    assert "--plot needs matplotlib: pip install matplotlib" in message
    monkeypatch.setitem(sys.modules, "torch", None)
    for arguments in (("demo",), ("estimate", *SMALL)):
        needed = "needs torch and megatron-core: pip install torch megatron-core\n"
        assert refuse(*arguments).endswith(needed)


def test_version_and_help() -> None:
    assert invoke("--version").stdout == f"megatron-rl-patches {__version__}\n"
    assert all("Exit code" in invoke(one, "--help").stdout for one in ("doctor", "check", "estimate"))


def assign(**values: object) -> list[str]:
    return [f"--set={name}={value}" for name, value in values.items()]


FIELDS = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
SMALL = assign(**FIELDS)


@pytest.fixture
def counter(monkeypatch: MonkeyPatch) -> Mock:
    """Stands in for the count of parameters: there are two stages, of which the second is larger."""
    stages = ([[Parameter(numel, "bf16", False)]] for numel in (10**9, 2 * 10**9))
    counter = Mock(return_value=[Stage(chunks, chunks) for chunks in stages])
    monkeypatch.setattr(estimate_module, "count_parameters", counter)
    return counter


def fields(counter: Mock) -> dict[str, Any]:
    described, _ = counter.call_args.args
    return dict(described)


estimate, estimate_json, refuse_estimate = (
    partial(function, "estimate") for function in (invoke, invoke_json, refuse)
)


@pytest.mark.parametrize("place", ["cache", "folder", "file"])
def test_a_model_by_its_place(counter: Mock, tmp_path: Path, monkeypatch: MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert "`hf download google/gemma config.json`" in refuse_estimate("google/gemma")
    for file in ("nope.json", "./google/gemma", "a/b/c"):
        assert refuse_estimate(file).endswith(f"there is no file or folder {file}\n")
    folder = tmp_path / "hub" / "models--google--gemma" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(GEMMA_3_27B))
    estimate({"cache": "google/gemma", "folder": folder, "file": folder / "config.json"}[place])
    assert fields(counter)["hidden_size"] == 5376
    estimate("--hf-config", folder / "config.json", *assign(num_layers=2))  # which overrides it
    assert (fields(counter)["num_layers"], fields(counter)["hidden_size"]) == (2, 5376)


def test_table_of_the_worst_stage_and_totals_of_all(counter: Mock) -> None:
    assert estimate(*SMALL, "--teachers=2").stdout.splitlines() == [
        "GB               training  inference-only  training + 2 teachers",
        "parameters       4.00      4.00            4.00",
        "gradients        8.00      -               8.00",
        "main parameters  8.00      -               8.00",
        "exp avg          8.00      -               8.00",
        "exp avg sq       8.00      -               8.00",
        "teachers         -         -               4.00",
        "total            36.00     4.00            40.00",
        "total in GiB     33.53     3.73            37.25",
        "host memory      -         -               8.00",
        "",
        "stage, in GB  training  inference-only  training + 2 teachers",
        "0             18.00     2.00            20.00",
        "1             36.00     4.00            40.00",
        "",
        "stage 1 takes most: 36.00 GB (33.53 GiB) per device for training, 4.00 GB (3.73 GiB) inference-only "
        "(88.9% less); activations not counted",
        "--use-distributed-optimizer divides the states of the optimizer over the replicas",
    ]


def test_logits_and_loss_have_a_table_of_their_own(counter: Mock) -> None:
    flags = ("--tokens=1000000", "--response-share=0.5")
    *_, header, loss, _, _, _ = estimate(*SMALL, *flags).stdout.splitlines()
    assert header == "GB               stock  lean-loss  lean-head"
    assert loss == "logits and loss  1.54   1.02       0.51"
    loss = {"stock": 1_536_000_000, "lean-loss": 1_024_000_000, "lean-head": 512_016_384}
    assert estimate_json(*SMALL, *flags)["loss"] == loss and estimate_json(*SMALL)["loss"] is None


def test_an_estimate_as_json_is_in_bytes_and_a_plot_is_drawn(counter: Mock, tmp_path: Path) -> None:
    answer = estimate_json(*SMALL)
    assert answer["worst_stage"] == 1
    assert answer["stages"][1]["inference_only"]["total"] == 4 * 10**9
    assert answer["teachers"] == 1
    estimate(*SMALL, f"--plot={tmp_path / 'memory.png'}")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_flags_of_the_model_and_the_groups(counter: Mock) -> None:
    flags = assign(add_bias_linear="false", normalization="RMSNorm", moe_layer_freq=[0, 1])
    estimate(*SMALL, *flags, "--dtype=fp16")
    more = {"add_bias_linear": False, "normalization": "RMSNorm", "moe_layer_freq": [0, 1]}
    assert counter.call_args.args == ({**FIELDS, **more}, "fp16")
    parts = estimate_json(*SMALL, "--tp=2", "--context-parallel-size=2", "--world-size=16", "--dist-opt")
    assert fields(counter) == {**FIELDS, "tensor_model_parallel_size": 2, "context_parallel_size": 2}
    assert parts["stages"][0]["training"]["exp_avg"] == 4 * 10**9 / 8


def test_estimates_that_are_refused(counter: Mock, tmp_path: Path) -> None:
    for arguments, message in (
        ((*SMALL, "--tp=4", "--world-size=6"), "no multiple of 4"),
        ((*SMALL, "--dp=2", "--world-size=2"), "not both"),
        ((*SMALL, "--dtype=fp8"), "dtype is 'fp8'"),
        ((*SMALL, "--response-share=0.5"), "--response-share needs --tokens"),
        ((*SMALL, "--tokens=8", "--response-share=50"), "tokens is 8 and response_share 50.0"),
        (("--set=num_layers",), "--set num_layers: expected FIELD=VALUE"),
        ((*SMALL, f"--plot={tmp_path / 'memory.foo'}"), "ends in .png"),
    ):
        assert message in refuse_estimate(*arguments)
    file = tmp_path / "config.json"
    for content in (b"\xff\xfe", b"[" * 100_000, b"[1]", b"null", b'{"model_type": []}', b"{"):
        file.write_bytes(content)
        message = refuse_estimate("--hf-config", file)
    assert "is not JSON" in message
    for error in (ZeroDivisionError("by zero"), KeyError("x"), OSError("no"), MemoryError()):
        counter.side_effect = error
        assert f"no such model can be estimated: {type(error).__name__}" in refuse_estimate(*SMALL)
