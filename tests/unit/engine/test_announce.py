"""Nobody shall have to guess whether a patch is in place."""

from __future__ import annotations

import importlib
import io
import logging
import sys
from collections.abc import Callable

import pytest

from megatron_rl_patches import apply
from megatron_rl_patches.engine import announce, installer
from megatron_rl_patches.engine.spec import Patch

from .conftest import patch_of, tag

Host = Callable[..., str]
Engine = dict[str, Patch]


@pytest.fixture(autouse=True)
def single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def test_one_summary_line_at_the_first_call(
    host: Host, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train", "save")
    caplog.set_level(logging.INFO, "megatron_rl_patches")
    apply()
    module = importlib.import_module(f"{name}.model")
    assert caplog.messages == []
    for _ in range(3):
        module.train("m")
    [line] = caplog.messages
    assert line.endswith(f"tagging ({name}: 2 applied)")


def test_stderr_when_no_handler_is_configured(
    host: Host, engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda self: False)
    apply()
    importlib.import_module(f"{name}.model").train("m")
    assert capsys.readouterr().err.count("1 applied") == 1


def test_stderr_when_the_handlers_are_for_warnings_only(
    host: Host, engine: Engine, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    caplog.set_level(logging.WARNING, "megatron_rl_patches")
    apply()
    importlib.import_module(f"{name}.model").train("m")
    assert capsys.readouterr().err.count("1 applied") == 1


def test_silent_on_other_ranks(
    host: Host, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    monkeypatch.setenv("RANK", "3")
    caplog.set_level(logging.INFO, "megatron_rl_patches")
    apply()
    importlib.import_module(f"{name}.model").train("m")
    assert caplog.messages == []


def test_a_skipped_site_is_warned_of_once(
    host: Host, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "run")
    apply()
    importlib.import_module(f"{name}.model")
    apply()
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"skipped tagging: {name}.model.run: missing" in record.message


def test_a_module_that_is_not_there_is_warned_of(
    host: Host, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    engine["other"] = Patch("other", "")
    engine["other"].wrap(f"{name}.modle", "train")(tag)
    apply()
    importlib.import_module(f"{name}.model").train("m")
    assert f"skipped other: {name}.modle.train: missing" in caplog.text


def test_exit_warns_of_a_host_whose_patched_module_was_never_imported(
    host: Host, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    used, unused = host(), host()
    engine["tagging"] = patch_of(used, "train")
    engine["other"] = patch_of(unused, "train", name="other")
    apply()
    importlib.import_module(used)
    installer.installer.at_exit()
    [line] = caplog.messages
    assert f"{used}.model.train" in line
    assert unused not in line


def test_a_process_that_never_called_anything_is_told_at_exit(
    host: Host, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    name = host()
    engine["tagging"] = patch_of(name, "train")
    caplog.set_level(logging.INFO, "megatron_rl_patches")
    apply()
    importlib.import_module(f"{name}.model")
    installer.installer.at_exit()
    assert [line.endswith(f"tagging ({name}: 1 applied)") for line in caplog.messages] == [True]


def test_a_closed_stderr_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda self: False)
    monkeypatch.setattr(sys, "stderr", closed)
    monkeypatch.setattr(announce, "done", False)
    announce.once([])


def test_no_stderr_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda self: False)
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(announce, "done", False)
    announce.once([])
