"""The memory report: what it measures, with a made-up GPU, and the line that it makes."""

from __future__ import annotations

import dataclasses
import json
import mmap

import psutil
import pytest
import torch

from megatron_rl_patches.inference import memory_report
from megatron_rl_patches.inference.memory.usage import DeviceMemory, HostMemory, MemoryReport, TeacherMemory

GIB = 2**30


def test_host() -> None:
    size = 64 * 2**20
    before = memory_report().host
    with mmap.mmap(-1, size) as ballast:  # not from the heap, which may have pages to spare
        for page in range(0, size, mmap.PAGESIZE):
            ballast[page] = 1
        after = memory_report().host
    assert after.rss - before.rss == pytest.approx(size, rel=0.1)
    assert after.total == psutil.virtual_memory().total
    assert 0 < after.available < after.total


@pytest.mark.parametrize("is_available", [False, True])
def test_no_device_without_a_cuda_context(is_available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    report = memory_report()
    assert report.device is None
    assert str(report).startswith("host: ")


def test_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"is_available": True, "is_initialized": True, "current_device": 1}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (index * GIB, 80 * GIB))
    for name, value in {"memory_allocated": 2, "max_memory_allocated": 3, "memory_reserved": 4}.items():
        monkeypatch.setattr(torch.cuda, name, lambda index, value=value: value * GIB)
    expected = DeviceMemory(1, 2 * GIB, 3 * GIB, 4 * GIB, free=1 * GIB, total=80 * GIB)
    assert memory_report().device == expected
    assert memory_report(5).device == dataclasses.replace(expected, index=5, free=5 * GIB)


def test_one_line_and_json() -> None:
    host = HostMemory(rss=GIB, available=2 * GIB, total=4 * GIB)
    report = MemoryReport(DeviceMemory(0, GIB, 2 * GIB, 3 * GIB, 4 * GIB, 5 * GIB), host)
    assert str(report) == (
        "cuda:0: 1.00 GiB allocated, peak 2.00 GiB, 3.00 GiB reserved, 4.00 GiB of 5.00 GiB free; "
        "host: 1.00 GiB in this process, 2.00 GiB of 4.00 GiB free"
    )
    with_teachers = dataclasses.replace(report, teachers=TeacherMemory(2, 3 * GIB, GIB))
    assert str(with_teachers) == f"{report}; 2 teachers: 3.00 GiB in host memory, output layers 1.00 GiB"
    of_host = {"rss": GIB, "available": 2 * GIB, "total": 4 * GIB}
    assert json.loads(json.dumps(report.as_dict()))["host"] == of_host
