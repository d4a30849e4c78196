"""What the variable loads and when, in a fresh environment, and which processes it reaches."""

import json

import pytest

PROBE = "import probe; probe.report(patched=probe.patched(), **probe.state())"
UNRELATED = "import json, logging, probe; probe.report(**probe.state())"
COUNTS_TRIGGERS = (
    "import probe, sys; import _megatron_rl_patches_startup as startup; startup.main();"
    "probe.report(triggers=sum(finder is startup.finder for finder in sys.meta_path))"
)

SUBPROCESS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {PROBE!r}], check=True"
MULTIPROCESSING = """
import multiprocessing, os, probe
{before}
context = multiprocessing.get_context({method!r})
queue = context.SimpleQueue()
child = context.Process(target=probe.patched_in_child, args=(queue,))
child.start()
pid, patched = queue.get()
child.join()
probe.report(elsewhere=pid != os.getpid(), patched=patched, exitcode=child.exitcode)
"""
POOL = """
import probe
from concurrent.futures import ProcessPoolExecutor
if __name__ == "__main__":
    with ProcessPoolExecutor(1) as pool:
        probe.report(patched=pool.submit(probe.patched).result())
"""


def test_what_the_variable_does_in_which_processes(installed):
    failures = []

    def expect(name, expected, code=PROBE, *options, value="1"):
        try:
            state = installed.program(code, *options, value=value)
            assert {fact: state[fact] for fact in expected} == expected
        except AssertionError as error:
            failures.append(f"{name}: {error}")

    yes, no = {"patched": True}, {"patched": False}
    nothing = {"trigger": False, "wrapt": False, "package": False}
    expect("everything", dict.fromkeys(nothing, True) | yes)
    expect("no trace without it", nothing | no, value=None)
    expect("no trace where it says no", nothing | no, value="0")
    expect("nothing before a framework is imported", nothing | {"trigger": True}, UNRELATED)
    expect("one trigger, though startup files run twice", {"triggers": 1}, COUNTS_TRIGGERS)
    for option in ("-I", "-E", "-s", "-B"):
        expect(option, yes, PROBE, option)
    paths = [str(installed.site_packages), (installed.site_packages / "stand_in.pth").read_text().strip()]
    expect("-S", no, f"import sys; sys.path += {paths}; {PROBE}", "-S")
    expect("a subprocess", yes, f"{SUBPROCESS})")
    expect("a subprocess with a cleaned environment", no, f"{SUBPROCESS}, env={{}})")
    child = {"elsewhere": True, "patched": True, "exitcode": 0}
    for method in ("spawn", "fork", "forkserver"):
        for before in ("", "probe.patched()"):  # whether the parent has imported the framework
            expect(f"{method} {before}", child, MULTIPROCESSING.format(method=method, before=before))
    expect("a pool of processes", yes, POOL)
    assert not failures, "\n".join(failures)


def test_torchrun(with_torch, tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "worker.py"
    file = f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK'])"
    script.write_text(f"import os, pathlib, probe\n{file}.write_text(str(probe.patched()))\n")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    done = with_torch.run(*launch, MEGATRON_RL_PATCHES="1")
    assert done.returncode == 0, done
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["True", "True"]


RAY = """
import json, sys
import probe, ray

@ray.remote
def task():
    return probe.patched()

@ray.remote
class Inner:
    def patched(self):
        return probe.patched()

@ray.remote
class Outer:
    def __init__(self):
        self.inner = Inner.options(num_cpus=0).remote()
    def patched(self):
        return [probe.patched(), ray.get(self.inner.patched.remote())]

switched_on = {"env_vars": {"MEGATRON_RL_PATCHES": "1"}}
job, here = (switched_on if where == sys.argv[1] else None for where in ("job", "here"))
options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
ray.init("local", num_cpus=2, runtime_env=job, **options)

def patched(environment):
    outer = Outer.options(num_cpus=0, runtime_env=environment).remote()
    of_task = task.options(runtime_env=environment).remote()
    return [*ray.get(outer.patched.remote(), timeout=90), ray.get(of_task, timeout=90)]

in_each = [patched(environment) for environment in (here, None)]
ray.shutdown()
print(json.dumps(in_each))
"""


@pytest.mark.parametrize("where", ["job", "here", pytest.param("driver", marks=pytest.mark.nightly)])
def test_ray_actors_nested_actors_and_tasks(with_torch, tmp_path, where):
    pytest.importorskip("ray")
    script = tmp_path / "driver.py"
    script.write_text(RAY)
    variables = {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    if where == "driver":  # it starts the raylet, which starts the workers
        variables["MEGATRON_RL_PATCHES"] = "1"
    done = with_torch.run(script, where, **variables)
    assert done.returncode == 0, done
    # In the second half nobody has an environment of their own, also where others have one.
    assert json.loads(done.stdout.splitlines()[-1]) == [[True] * 3, [where != "here"] * 3]
