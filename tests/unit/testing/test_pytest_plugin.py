"""The plugin of pytest, in runs of pytest of its own, in which files are as users have them."""

import sys

import pytest

from megatron_rl_patches.errors import InvalidInputError
from tests.worlds.files import write

pytest_plugins = "pytester"
TESTS = """
    import logging, os, time, urllib.error
    import pytest, torch
    import torch.distributed as dist
    from helper import check_equal
    pytestmark = pytest.mark.ranks(timeout=60)
    class Value:
        def __init__(self, number): self.number = number
    @pytest.fixture(params=[1, 2])
    def value(request): return Value(request.param)
    @pytest.mark.ranks(2)
    def test_passes(value, tmp_path):
        print("said by", dist.get_rank())
        dist.all_reduce(total := torch.full((1,), value.number, device="cuda"))
        assert total.item() == 2 * value.number and tmp_path.exists()
    @pytest.mark.ranks(2)
    def test_fails():
        print("shown for", dist.get_rank())
        logging.getLogger().info("logged")
        assert {"rank": dist.get_rank()} == {"rank": 0}
    @pytest.mark.ranks(1)
    def test_helper_fails(): check_equal([1, 2], [1, 3])
    @pytest.mark.ranks(2, timeout=2)
    def test_hangs():
        print("before the end", flush=True)
        time.sleep(600) if dist.get_rank() else pytest.skip("alone")
    @pytest.mark.ranks(1)
    def test_request(request): pass
    @pytest.mark.ranks(2)
    def test_skips(): pytest.importorskip("no_such_module") if dist.get_rank() else None
    @pytest.mark.xfail(raises=urllib.error.ContentTooShortError, strict=True)
    @pytest.mark.ranks(lambda count: count)
    class TestOfAClass:
        def setup_method(self): self.zero = 0
        @pytest.mark.parametrize("count", [2])
        def test_xfails(self, count, tiny_model):
            from megatron.core import parallel_state
            tiny_model(tp=2).initialize()
            assert parallel_state.get_tensor_model_parallel_world_size() == 2 + self.zero
            raise urllib.error.ContentTooShortError("pickle would call", "it with one of these")
    @pytest.mark.ranks(1, transformer_engine=True)
    def test_layers(): import megatron.core.extensions.transformer_engine as te; assert te.HAVE_TE
    @pytest.mark.ranks(1, env={"NAME": "value"}, cpu_backend=False)
    def test_variable(): assert os.environ["NAME"] == "value"
"""
SHOWN = [
    "*AssertionError: assert {'rank': 1} == {'rank': 0}",
    "*Differing items:*",
    "*ranks ?1? of 2 failed, in this order*",
    "*Captured stdout on rank 0 call*",
    "shown for 0",
    "*Captured log on rank 0 call*",
    "*assert *1, 2* == *1, 3*",
    "*At index 1 diff: 2 != 3*",
    "no result after 2 s; still running: rank 1",
    "*line * in test_hangs",
    "*Captured stdout on rank 1 call*",
    "before the end",
    "'request' cannot be pickled and belongs to pytest's process: use it *",
    "SKIPPED*test_ranks.py:*could not import 'no_such_module'*",
]
WAYS = {"flat": [], "importlib": ["--import-mode=importlib"], "workers": ["-n2", "--timeout=100"]}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_runs_on_ranks(pytester: pytest.Pytester, way: str) -> None:
    pytester.makeconftest("import pytest; pytest.register_assert_rewrite('helper')")
    pytester.makepyfile(helper="def check_equal(a, b): assert a == b", test_ranks=TESTS)
    pytester.syspathinsert()
    pytester.makeini("[pytest]\nlog_level = INFO")
    result = pytester.runpytest_subprocess("--strict-markers", "-rsP", "-Wignore", *WAYS[way], timeout=280)
    result.assert_outcomes(passed=4, failed=4, skipped=1, xfailed=1)
    (result.stdout.fnmatch_lines_random if way == "workers" else result.stdout.fnmatch_lines)(SHOWN)
    result.stdout.fnmatch_lines(["*Captured stdout on rank 1 call*", "said by 1"])


WRONG = [pytest.mark.ranks(count) for count in (0, -1, True, "2", 1.5, lambda n: n // 2, lambda nope: nope)]
WRONG += [pytest.mark.ranks(1, **x) for x in ({"timeout": 0}, {"timeout": "60"}, {"env": {"X": 3}})]
WRONG += [pytest.mark.ranks(1, transformer_engine=True, cpu_backend=False)]


@pytest.mark.parametrize("n", [pytest.param(1, marks=mark) for mark in WRONG])
@pytest.mark.xfail(raises=InvalidInputError, strict=True)
def test_refuses_wrong_options(n: int) -> None:
    pass


QUIET = """
    import multiprocessing, sys, pytest
    @pytest.fixture
    def ranks(): return "the user's"
    def test_nothing_has_happened(ranks, pytestconfig):
        loaded = {name.partition(".")[0] for name in sys.modules}
        assert not loaded & {"torch", "megatron", "wrapt", "psutil", "multiprocessing.popen_spawn_posix"}
        assert ranks == "the user's"
        assert multiprocessing.get_start_method(allow_none=True) is None
"""


def test_who_does_not_use_it(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is imported, and nothing warns. One option switches it off, and the marker is unknown then."""
    # As a wheel, whose modules pytest would rewrite, with a warning if they are imported already.
    files = {
        "METADATA": "Name: as-a-wheel",
        "entry_points.txt": "[pytest11]\nempty = empty",
        "RECORD": "megatron_rl_patches/__init__.py,,\n_megatron_rl_patches_startup.py,,",
    }
    write(pytester.path, {f"wheel-1.dist-info/{name}": text for name, text in files.items()})
    pytester.makepyfile(QUIET, empty="")
    monkeypatch.setenv("PYTHONPATH", str(pytester.path))
    run = ["--strict-markers", "-Werror", "-pno:xdist", "-pno:asyncio"]
    for before in ("", ", megatron_rl_patches, _megatron_rl_patches_startup"):
        code = f"import sys{before}, pytest; sys.exit(pytest.main({run}))"
        assert pytester.run(sys.executable, "-c", code).ret == 0
    pytester.makepyfile("import pytest\n@pytest.mark.ranks(2)\ndef test_marked(): pass")
    result = pytester.runpytest_subprocess(*run, "-pno:megatron_rl_patches")
    result.stdout.fnmatch_lines(["*'ranks' not found in `markers` configuration option*"])
