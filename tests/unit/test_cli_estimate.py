"""``estimate``: from flags to a table, JSON or a plot. Only the last test counts real parameters."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pytest import MonkeyPatch

from megatron_rl_patches.inference.memory import estimate as estimate_module
from megatron_rl_patches.inference.memory.parameters import Parameter, Stage
from tests.worlds import command_line


def assign(**values: object) -> list[str]:
    return [f"--set={name}={value}" for name, value in values.items()]


SMALL = assign(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=100)
GEMMA_3_27B = {  # google/gemma-3-27b-it, the language model
    "model_type": "gemma3_text",
    "num_hidden_layers": 62,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "vocab_size": 262208,
}


@pytest.fixture
def counter(monkeypatch: MonkeyPatch) -> Mock:
    """Stands in for the count of parameters: there are two stages, of which the second is larger."""
    stages = ([[Parameter(numel, "bf16", False)]] for numel in (10**9, 2 * 10**9))
    counter = Mock(return_value=[Stage(chunks, chunks) for chunks in stages])
    monkeypatch.setattr(estimate_module, "count_parameters", counter)
    return counter


def fields(counter: Mock) -> dict[str, Any]:
    config, described, _ = counter.call_args.args
    return {**config, **described}


invoke = partial(command_line.invoke, "estimate")
invoke_json = partial(command_line.invoke_json, "estimate")
refuse = partial(command_line.refuse, "estimate")


@pytest.mark.parametrize("place", ["cache", "folder", "file"])
def test_a_model_by_its_place(counter: Mock, tmp_path: Path, monkeypatch: MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    message = refuse("google/gemma")
    assert "`hf download google/gemma config.json`" in message and len(message.splitlines()) == 1
    folder = tmp_path / "hub" / "models--google--gemma" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(GEMMA_3_27B))
    invoke({"cache": "google/gemma", "folder": folder, "file": folder / "config.json"}[place])
    assert fields(counter)["hidden_size"] == 5376
    invoke("--hf-config", folder / "config.json", *assign(num_layers=2))  # which overrides it
    assert (fields(counter)["num_layers"], fields(counter)["hidden_size"]) == (2, 5376)


def test_every_option_is_shown_in_80_columns(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = invoke("--help").stdout
    names = ("set", "tp", "pp", "cp", "ep", "dp", "world-size", "dist-opt", "plot", "json")
    assert [name for name in names if f" --{name}" not in shown] == []


def test_table_of_the_worst_stage_and_totals_of_all(counter: Mock) -> None:
    assert invoke(*SMALL, "--teachers=2").stdout.splitlines() == [
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
        "--use-distributed-optimizer divides the states of the optimizer by the number of replicas",
    ]


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_breaks_no_word(counter: Mock, monkeypatch: MonkeyPatch, columns: int) -> None:
    """The widest table there is."""
    for name, value in (("COLUMNS", columns), ("FORCE_COLOR", 1), ("TERM", "xterm")):
        monkeypatch.setenv(name, str(value))
    shown = invoke(*SMALL, "--teachers=128", "--teacher-heads", "--set=optimizer_cpu_offload=true").stdout
    assert "\x1b[" in shown
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()]
    table = lines[: lines.index("")]
    assert table[0].split("  ")[0] == "GB" and table[0].endswith("training + 128 teachers")
    assert [line.split("  ")[0] for line in table[1:]] == [
        *("parameters", "gradients", "main parameters", "teachers"),
        *("total", "total in GiB", "host memory"),
    ]
    assert max(map(len, table)) <= columns


def test_json_is_in_bytes_and_a_plot_is_drawn(counter: Mock, tmp_path: Path) -> None:
    answer = invoke_json(*SMALL)
    assert answer["worst_stage"] == 1
    assert answer["stages"][1]["inference_only"]["total"] == 4 * 10**9
    assert answer["teachers"] == 1
    invoke(*SMALL, f"--plot={tmp_path / 'memory.png'}")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_flags_of_the_model_and_the_groups(counter: Mock) -> None:
    flags = assign(add_bias_linear="false", normalization="RMSNorm", moe_layer_freq=[0, 1])
    invoke(*SMALL, *flags, "--dtype=fp16")
    small = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    more = {"add_bias_linear": False, "normalization": "RMSNorm", "moe_layer_freq": [0, 1]}
    assert (fields(counter), counter.call_args.args[2]) == ({**small, **more}, "fp16")
    parts = invoke_json(*SMALL, "--tp=2", "--context-parallel-size=2", "--world-size=16", "--dist-opt")
    assert fields(counter) == {**small, "tensor_model_parallel_size": 2, "context_parallel_size": 2}
    assert parts["stages"][0]["training"]["exp_avg"] == 4 * 10**9 / 8


def test_flags_of_the_optimizer(counter: Mock) -> None:
    def parts(*flags: str) -> dict[str, int]:
        device = invoke_json(*SMALL, *flags)["stages"][0]["training"]
        return {name: size // 10**9 for name, size in device.items()}

    assert parts()["gradients"] == 4
    assert parts("--set=accumulate_allreduce_grads_in_fp32=false")["gradients"] == 2
    assert parts("--use-distributed-optimizer", "--dp=4")["exp_avg"] == 1
    aware = ("--use-distributed-optimizer", "--set=use_precision_aware_optimizer=true")
    assert parts(*aware)["main_parameters"] == 2
    assert parts(*aware, "--set=optimizer_cpu_offload=true")["main_parameters"] == 0


def test_refusals(counter: Mock, tmp_path: Path) -> None:
    for arguments, message in (
        (assign(hidden_size=64, num_attention_heads=4), "missing: num_layers, vocab_size"),
        ((*SMALL, "--tp=4", "--world-size=6"), "no multiple of 4"),
        ((*SMALL, "--dp=2", "--world-size=2"), "not both"),
        ((*SMALL, "--dtype=fp8"), "dtype is 'fp8'"),
        (("--set=num_layers",), "--set num_layers: expected FIELD=VALUE"),
        ((*SMALL, f"--plot={tmp_path / 'memory.foo'}"), "ends in .png"),
    ):
        assert message in refuse(*arguments)
    file = tmp_path / "config.json"
    for content in (b"\xff\xfe", b"[" * 100_000, b"[1]", b"null", b'{"model_type": []}', b"{"):
        file.write_bytes(content)
        assert len(refuse("--hf-config", file).splitlines()) == 1
    assert "is not JSON" in refuse("--hf-config", file)
    for error in (ZeroDivisionError("by zero"), KeyError("x"), OSError("no"), MemoryError()):
        counter.side_effect = error
        message = refuse(*SMALL)
        assert f"no such model can be estimated: {type(error).__name__}" in message
        assert len(message.splitlines()) == 1


@pytest.mark.usefixtures("one_process")
def test_the_case_of_a_27b_teacher(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GEMMA_3_27B))
    [stage] = invoke_json("--hf-config", file)["stages"]
    assert stage["dense_parameters"] == 27_009_023_744
    assert stage["inference_only"]["total"] == 54_018_047_488
    training = stage["training"]
    assert training["gradients"] == training["main_parameters"] == 2 * training["parameters"]
    assert training["exp_avg"] + training["exp_avg_sq"] == 216_072_189_952
