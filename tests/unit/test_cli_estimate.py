"""``estimate``: from flags to a table, JSON or a plot. Only the last test counts real parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from megatron_rl_patches.cli import main
from megatron_rl_patches.cli.commands import app
from megatron_rl_patches.inference.memory import estimate as estimate_module
from megatron_rl_patches.inference.memory.count import Parameter, Stage
from megatron_rl_patches.inference.memory.model import GPTDescription, ParallelSizes


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


class Counter:
    """Stands in for the count of parameters: keeps its arguments, returns two stages, the second larger."""

    description: GPTDescription
    sizes: ParallelSizes
    dtype: str
    error: Exception | None = None

    def __call__(self, description: GPTDescription, sizes: ParallelSizes, dtype: str) -> list[Stage]:
        self.description, self.sizes, self.dtype = description, sizes, dtype
        if self.error is not None:
            raise self.error
        stages = ([[Parameter(numel, "bf16", False)]] for numel in (10**9, 2 * 10**9))
        return [Stage(chunks, chunks) for chunks in stages]


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()
    monkeypatch.setattr(estimate_module, "count_parameters", counter)
    return counter


def invoke(*arguments: object) -> Result:
    result = CliRunner().invoke(app, ["estimate", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def invoke_json(*arguments: object) -> Any:
    return json.loads(invoke(*arguments, "--json").stdout)


def refuse(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as exit:
        main(["estimate", *map(str, arguments)])
    assert exit.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("place", ["cache", "folder", "file"])
def test_a_model_by_its_name_or_place(
    counter: Counter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    folder = tmp_path / "hub" / "models--google--gemma" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(GEMMA_3_27B))
    invoke({"cache": "google/gemma", "folder": folder, "file": folder / "config.json"}[place])
    assert counter.description.hidden_size == 5376


def test_what_to_download(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    message = refuse(capsys, "google/gemma")
    assert "`hf download google/gemma config.json`" in message and len(message.splitlines()) == 1


def test_every_option_is_shown_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = invoke("--help").stdout
    for name in (
        "--set",
        "--tp",
        "--pp",
        "--cp",
        "--ep",
        "--dp",
        "--world-size",
        "--dist-opt",
        "--plot",
        "--json",
    ):
        assert f" {name}" in shown


def test_table_per_stage_and_the_worst(counter: Counter) -> None:
    lines = invoke(*SMALL, "--teachers=2").stdout.splitlines()
    assert lines[0].split()[:5] == ["stage", "use", "where", "parameters", "(GB)"]
    assert lines[1].startswith("0      training") and "2.00" in lines[1]
    assert [line.split()[-2:] for line in lines if line.startswith("1 ")] == [
        ["36.00", "33.53"],
        ["4.00", "3.73"],
        ["40.00", "37.25"],
        ["8.00", "7.45"],
    ]
    assert lines[-2].startswith("stage 1 takes most: 36.00 GB (33.53 GiB) per device for training, 4.00 GB")


def test_json_is_in_bytes(counter: Counter) -> None:
    answer = invoke_json(*SMALL)
    assert answer["worst_stage"] == 1
    assert answer["stages"][1]["inference_only"]["device"]["total"] == 4 * 10**9
    assert answer["stages"][1]["with_teachers"]["teachers"] == 1


def test_plot(counter: Counter, tmp_path: Path) -> None:
    invoke(*SMALL, f"--plot={tmp_path / 'memory.png'}")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_flags_of_the_model(counter: Counter) -> None:
    invoke(*SMALL)
    assert counter.description == GPTDescription(2, 64, 4, 100)
    assert counter.dtype == "bf16"
    fields: dict[str, Any] = {"normalization": "RMSNorm", "num_experts": 8, "moe_layer_freq": [0, 1]}
    invoke(*SMALL, *assign(swiglu="true", add_bias_linear="false", **fields), "--dtype=fp16")
    assert counter.description == GPTDescription(2, 64, 4, 100, swiglu=True, add_bias_linear=False, **fields)
    assert counter.dtype == "fp16"


def test_flags_of_the_groups(counter: Counter) -> None:
    invoke(*SMALL, "--tp=2", "--context-parallel-size=2", "--world-size=16")
    assert counter.sizes == ParallelSizes(
        tensor_model_parallel_size=2, context_parallel_size=2, data_parallel_size=4
    )


def test_flags_of_the_optimizer(counter: Counter) -> None:
    def parts(*flags: str) -> dict[str, int]:
        device = invoke_json(*SMALL, *flags)["stages"][0]["training"]["device"]
        return {name: size // 10**9 for name, size in device.items()}

    assert parts()["gradients"] == 4
    assert parts("--set=accumulate_allreduce_grads_in_fp32=false")["gradients"] == 2
    assert parts("--use-distributed-optimizer", "--dp=4")["exp_avg"] == 1
    aware = ("--use-distributed-optimizer", "--set=use_precision_aware_optimizer=true")
    assert parts(*aware)["main_parameters"] == 2
    assert parts(*aware, "--set=optimizer_cpu_offload=true")["main_parameters"] == 0


def test_hf_config_and_what_overrides_it(counter: Counter, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GEMMA_3_27B))
    invoke("--hf-config", file, *assign(num_layers=2))
    assert (counter.description.num_layers, counter.description.hidden_size) == (2, 5376)


def test_refusals(counter: Counter, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "missing: num_layers, vocab_size" in refuse(capsys, *assign(hidden_size=64, num_attention_heads=4))
    assert "no multiple of 4" in refuse(capsys, *SMALL, "--tp=4", "--world-size=6")
    assert "not both" in refuse(capsys, *SMALL, "--dp=2", "--world-size=2")
    assert "dtype is 'fp8'" in refuse(capsys, *SMALL, "--dtype=fp8")
    assert "the fields are account_for_embedding" in refuse(capsys, "--set=layers=2")
    for wrong in ("num_layers=two", "num_layers=true", "swiglu=1", "moe_layer_freq=[[0]]", "num_layers"):
        assert f"--set {wrong}: expected" in refuse(capsys, f"--set={wrong}")
    (tmp_path / "config.json").write_text("{")
    counter.error = ZeroDivisionError("integer modulo by zero")
    assert "no such model can be built: ZeroDivisionError" in refuse(capsys, *SMALL)
    assert "is not JSON" in refuse(capsys, "--hf-config", tmp_path / "config.json")
    assert "ends in .png" in refuse(capsys, *SMALL, f"--plot={tmp_path / 'memory.foo'}")


def test_the_case_of_a_27b_teacher(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GEMMA_3_27B))
    [stage] = invoke_json("--hf-config", file)["stages"]
    assert stage["dense_parameters"] == 27_009_023_744
    assert stage["inference_only"]["device"]["total"] == 54_018_047_488
    training = stage["training"]["device"]
    assert training["gradients"] == training["main_parameters"] == 2 * training["parameters"]
    assert training["exp_avg"] + training["exp_avg_sq"] == 216_072_189_952
