"""cpu_backend: real megatron-core trains on gloo ranks, and everything is undone on exit."""

import importlib
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo import eval_frame
from torch.distributed import distributed_c10d
from torch.utils.checkpoint import DefaultDeviceType

from megatron_rl_patches.testing import TinyModel, cpu_backend
from megatron_rl_patches.testing.transformer_engine.functions import FusedAdam
from tests.ranks import on_ranks


@on_ranks(2)
def test_models_of_one_layout_share_process_groups() -> None:
    """Each set of gloo groups starts fifty threads."""
    from megatron.core import parallel_state

    from tests.worlds.model import World

    def groups() -> set[Any]:
        return {group for group in distributed_c10d._world.pg_map if group is not None}

    first, of_first = World(tp=2), groups()
    second = World(tp=2)
    assert groups() == of_first and first.train(2) == second.train(2)
    World(pp=2, vpp=2)
    assert groups() > of_first
    # The groups of somebody else in between are no reason to take them for those of the layout.
    for somebody_else in (False, True):
        if somebody_else:
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(1)
        else:
            parallel_state.set_virtual_pipeline_model_parallel_rank(1)
        TinyModel(pp=2, vpp=2).initialize()
        assert parallel_state.get_pipeline_model_parallel_world_size() == 2
        assert parallel_state.get_virtual_pipeline_model_parallel_rank() == 0


@pytest.mark.parametrize("import_first", [False, True])
@on_ranks(1, cpu_backend=False)
def test_gaps_of_megatron_are_filled_meanwhile(import_first: bool) -> None:
    """The router of experts expects TransformerEngine's name to exist, and optimizers a fused Adam."""
    names = [f"megatron.core.{name}" for name in ("transformer.moe.moe_utils", "optimizer", "utils")]
    if import_first:
        for name in names:
            importlib.import_module(name)
    with cpu_backend():
        moe_utils, optimizer, utils = map(importlib.import_module, names)
        distributed = optimizer.distrib_optimizer
        assert optimizer.Adam is distributed.Adam is FusedAdam
        assert distributed.USING_TE_OPTIMIZER and distributed.HAVE_APEX_OR_TE
        tokens, weight = torch.ones(3, 4, requires_grad=True), torch.ones(2, 4, requires_grad=True)
        logits = moe_utils.router_gating_linear(tokens, weight, None, torch.float32)
        logits.sum().backward()
        assert logits.tolist() == [[4.0, 4.0]] * 3 and weight.grad is not None
        assert not utils.is_te_min_version("1.0")
    assert not hasattr(moe_utils, "te_general_gemm")
    assert optimizer.Adam is torch.optim.AdamW and not distributed.HAVE_APEX_OR_TE


def main_parameters(optimizer: Any) -> torch.Tensor:
    [inner] = (one.optimizer for one in optimizer.chained_optimizers)
    main = getattr(inner, "param_to_fp32_param", {})
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    return torch.cat([main.get(parameter, parameter).detach().flatten() for parameter in parameters])


@on_ranks(2, timeout=240)
def test_adam_in_host_memory(tmp_path: Path) -> None:
    """It takes the steps of the ordinary one, with any share of the parameters, and continues from a file."""
    from tests.worlds.model import NO_OVERLAP, World

    def built(**adam: Any) -> World:
        return World(bf16=True, adam=adam, **NO_OVERLAP)

    ordinary = built()
    ordinary.train()
    expected = main_parameters(ordinary.optimizer)
    ordinary.train(3)
    for share, overlap in ((0.0, False), (0.3, True), (1.0, False)):
        host = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}
        host |= {"optimizer_offload_fraction": share, "overlap_cpu_optimizer_d2h_h2d": overlap}
        world = built(**host)
        [inner] = (one.optimizer for one in world.optimizer.chained_optimizers)
        assert (bool(inner.cpu_optimizers), bool(inner.gpu_optimizer)) == (share > 0, share < 1)
        world.train()
        torch.testing.assert_close(main_parameters(world.optimizer), expected, rtol=1e-6, atol=1e-8)
        folder = world.save(tmp_path / f"{share} {overlap}")
        world.train(3)
        # Later gradients depend on how an unequal last bit rounds to bfloat16.
        assert world.losses == pytest.approx(ordinary.losses, rel=1e-5)
        if share < 1:
            continue  # once loaded, Megatron sets the count of steps of Adam on the GPU back at each step

        resumed = built(**host)
        resumed.load(folder)
        resumed.done = 1
        resumed.train(3)
        assert torch.equal(main_parameters(resumed.optimizer), main_parameters(world.optimizer))


@on_ranks(2)
def test_collectives_written_for_nccl() -> None:
    group = dist.new_group([0, 1], backend="nccl", pg_options=object())
    assert dist.get_backend(group) == "gloo"
    dist.barrier(group, device_ids=[torch.cuda.current_device()])

    rank = dist.get_rank()
    sent = [1, 2] if rank == 0 else [3, 4]
    received = [1, 3] if rank == 0 else [2, 4]
    output = torch.empty(sum(received), device="cuda")
    for kind in (list, torch.tensor):
        sizes = kind(received), kind(sent)
        dist.all_to_all_single(output.zero_(), torch.full((sum(sent),), float(rank)), *sizes, group=group)
        assert output.tolist() == [0.0] * received[0] + [1.0] * received[1]

    scaled_sum = dist._make_nccl_premul_sum(0.5)
    values = torch.full((2,), 2.0 + rank)
    dist.all_reduce(values, op=scaled_sum)
    assert values.tolist() == [2.5, 2.5]
    shard, values = torch.empty(1), torch.tensor([2.0, 4.0])
    dist.reduce_scatter_tensor(shard, values, op=scaled_sum)
    assert (shard.item(), values.tolist()) == ([2.0, 4.0][rank], [2.0, 4.0])
    gathered = torch.empty(2, 4)
    dist.all_gather_into_tensor(gathered, torch.full((2, 2), float(rank)))
    assert gathered.tolist() == [[0.0] * 4, [1.0] * 4]
    mesh = dist.device_mesh.init_device_mesh("cuda", (2,))
    assert mesh.device_type == "cpu" and mesh.size() == 2

    # What a pipeline schedule does: the data is freed, and its memory used again, before it is received.
    message = torch.full((4096,), 7.0) if rank == 0 else torch.empty(4096)
    if rank == 1:
        time.sleep(0.5)
    [request] = dist.batch_isend_irecv([dist.P2POp(dist.irecv if rank else dist.isend, message, 1 - rank)])
    if rank == 0:
        message.data = torch.empty(1)
        reused = [torch.full((4096,), math.nan) for _ in range(8)]
    request.wait()
    assert reused if rank == 0 else message.eq(7.0).all()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group()  # without a name torch would make a group of NCCL's, too
    assert dist.get_backend() == "gloo"
    dist.barrier()


def _snapshot() -> dict[tuple[str, str], object]:
    """Every attribute that the namespaces have themselves which the backend touches."""
    owners = [torch, torch.accelerator, torch.cuda, torch.cuda.random, torch.cuda.nvtx, torch.Tensor]
    owners += [torch.nn.Module, torch.autograd.Variable, dist, distributed_c10d, DefaultDeviceType]
    owners += [torch.serialization, dist.device_mesh.DeviceMesh]
    return {(repr(owner), name): value for owner in owners for name, value in vars(owner).items()}


def _differences(before: dict[Any, object], after: dict[Any, object]) -> list[Any]:
    return [name for name in before | after if before.get(name, before) is not after.get(name, before)]


@pytest.mark.parametrize("body_raises", [False, True])
def test_everything_is_undone(body_raises: bool) -> None:
    assert "torch._dynamo" in sys.modules  # what the import of Megatron has compiled runs eagerly inside
    before, modes = _snapshot(), torch._C._len_torch_function_stack()
    with suppress(LookupError), cpu_backend(), cpu_backend():
        assert len(_differences(before, _snapshot())) > 50 and eval_frame._stance.stance == "force_eager"
        if body_raises:
            raise LookupError
    assert _differences(before, _snapshot()) == [] and eval_frame._stance.stance == "default"
    assert torch._C._len_torch_function_stack() == modes


def test_what_names_the_gpu_goes_to_the_cpu(tmp_path: Path) -> None:
    torch.save(torch.ones(2), file := tmp_path / "file.pt")
    with cpu_backend():
        device = torch.cuda.current_device()
        tensors = [
            torch.empty(2, device=device),
            torch.tensor([1.0], device="cuda"),
            torch.zeros(2, device=torch.device("cuda", 0), pin_memory=True),
            torch.ones(2).to("cuda:0"),
            torch.ones(2).to(device, torch.float64),
            torch.ones(2).to(device="cuda"),
            torch.ones(2).cuda(non_blocking=True).pin_memory(),
            torch.nn.Linear(2, 2).cuda().to("cuda").weight,
            torch.cuda.FloatTensor([1.0]),
            torch.empty_like(torch.ones(2), device="cuda"),
            *(torch.load(file, map_location=to) for to in ("cuda", torch.device("cuda", 0), None)),
            torch.load(file, map_location={"cpu": "cuda:0"}),
        ]
        assert {tensor.device.type for tensor in tensors} == {"cpu"}
        assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.ones(1).type("torch.cuda.HalfTensor").dtype is torch.float16
        assert torch.compile(len) is len
        with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.nvtx.range("nothing"):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            end.record(torch.cuda.current_stream())
            torch.cuda.synchronize()
        assert start.elapsed_time(end) >= 0
        assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 0
        free, total = torch.cuda.mem_get_info()
        assert 0 < free <= total


def test_queries_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks in (1, 4):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        with cpu_backend():
            assert torch.cuda.device_count() == torch.accelerator.device_count() == ranks
            assert torch.cuda.default_generators == [torch.default_generator] * ranks
    with cpu_backend():
        assert torch.cuda.nccl.version() >= (2, 0) and torch.cuda.power_draw() == 0
        with torch.device(torch.cuda.current_device()):
            assert torch.ones(2).device.type == "cpu"
        torch.set_default_device("cuda")
        assert torch.ones(2).device == torch.get_default_device() == torch.device("cpu")
        torch.set_default_device(None)


def test_the_accelerator_is_the_gpu() -> None:
    """torch itself asks for it, whether or not the program does: a wheel with CUDA says so without a GPU."""
    before = torch.accelerator.is_available()
    with cpu_backend():
        accelerator = torch.accelerator.current_accelerator()
        assert torch.accelerator.is_available()
        assert accelerator is not None and accelerator.type == DefaultDeviceType.get_device_type() == "cuda"
        assert torch.ones(1, device=accelerator).device.type == "cpu"
        assert torch.accelerator.current_device_index() == 0
        stream = torch.Stream(device=accelerator)
        torch.accelerator.set_stream(stream)
        torch.accelerator.synchronize()
        with torch.accelerator.current_stream() as stream:
            event = stream.record_event()
            assert not callable(stream)  # Megatron calls what is
        assert isinstance(stream, torch.Stream) and isinstance(event, torch.Event) and event.query()
        if hasattr(torch.accelerator, "get_memory_info"):  # in newer releases of torch
            with torch.accelerator.device_index(0):
                free, total = torch.accelerator.get_memory_info()
            assert 0 < free <= total and torch.accelerator.memory_reserved() == 0
    assert torch.accelerator.is_available() == before


def test_the_generators_are_one_and_new_ones_are_of_the_cpu() -> None:
    with cpu_backend():
        torch.cuda.manual_seed(3)
        state = torch.cuda.get_rng_state()
        drawn = torch.rand(4, device="cuda")
        torch.cuda.set_rng_state(state)
        assert torch.equal(drawn, torch.rand(4))
        for device in (torch.cuda.current_device(), "cuda", torch.device("cuda", 0)):
            generator = torch.Generator(device=device).manual_seed(1)
            assert isinstance(generator, torch.Generator)
            numbers = torch.rand(3, device="cuda", generator=generator)
            assert torch.equal(numbers, torch.rand(3, generator=torch.Generator().manual_seed(1)))
        assert not isinstance(torch, torch.Generator)
    assert type(torch.default_generator) is torch.Generator


def test_the_redirect_holds_in_backward() -> None:
    class AsksForCuda(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] + torch.zeros(1, device=torch.cuda.current_device())

    value = torch.ones(1, requires_grad=True)
    with cpu_backend():
        AsksForCuda.apply(value).backward()
        (grad,) = torch.autograd.grad(AsksForCuda.apply(value), value)
    assert value.grad is not None and value.grad.item() == grad.item() == 1.0


def test_other_threads_may_enter_and_leave_first() -> None:
    def device() -> str:
        return torch.ones(1, device="cuda").device.type

    def in_a_thread() -> str:
        with cpu_backend():
            return device()

    with cpu_backend(), ThreadPoolExecutor(1) as thread:
        assert thread.submit(in_a_thread).result() == device() == "cpu"
        assert torch.cuda.is_initialized()
