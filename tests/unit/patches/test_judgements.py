"""How the sites of patches are judged, on code in the shapes that upstream has or may have."""

import textwrap
from typing import Any

import pytest

from megatron_rl_patches.engine import registry
from megatron_rl_patches.engine.judge import judge_site
from megatron_rl_patches.engine.sources import Files

#: What stands in place of parameters where the text is that of the module, not of the function.
MODULE = ""
#: A target, or several that are judged alike; parameters of the function, its body (or the text of the
#: module), state or "STATE: a reason". What is not needed names its reason, or it could pass for another one.
Case = tuple[str | list[str], str, str | None, str]
FITS = "fits: has the bug that the patch fixes"
WITHOUT = "not needed: does not contain"
MENDED = "not needed: without assuming that the hooks are"
MAY_END = "the first iteration of a call may end an interval"

DDP = "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel"
MODEL = "slime.backends.megatron_utils.model"
LOSS = "slime.backends.megatron_utils.loss"
PPO_UTILS = "slime.utils.ppo_utils"
MILES = "miles.backends.training_utils"
ENGINE = "verl.workers.engine.megatron.transformer_impl"


def in_each(modules: tuple[str, ...], function: str) -> list[str]:
    return [f"{module}.{function}" for module in modules]


def expert_norm() -> list[Case]:
    layers = "megatron.core.tensor_parallel.layers"
    duplicate = f"{layers}.param_is_not_tensor_parallel_duplicate"
    copy = f"{layers}.copy_tensor_model_parallel_attributes"
    groups, both = "megatron.core.optimizer._get_param_groups", "param, tp_group=None, expert_tp_group=None"
    rank, ours = "return tp_group.rank() == 0", "if not param.allreduce: tp_group = expert_tp_group"
    counts, helps = "not needed: upstream itself counts experts", "fits: helps param_is_not_tensor_parallel"
    return [
        (duplicate, "param", "return get_rank() == 0", "fits"),  # up to 0.15
        (duplicate, "param, tp_group=None", rank, "fits"),  # up to 0.18
        (duplicate, both, f"{ours}\n    {rank}", counts),
        (duplicate, "p", rank, "drifted"),
        (copy, "destination_tensor, source_tensor", "...", helps),
        (groups, "model_chunks, config, config_overrides", "...", helps),
    ]


def finite_loss() -> list[Case]:
    # A bound of one branch, or a mask, which may come too late for the gradient, is no reason.
    kl = "if kl_loss_type == 'low_var_kl': x = clamp(x, max=10)\n    return x.exp()"
    policy, masks = "args, batch, logits, sum_of_sample_mean", "return policy(where(active, kl, 0.0))"
    value_loss, ratio = "value_loss_function", "return torch.clamp(-ppo_kl, -20, 20).exp()"
    utils = PPO_UTILS, f"{MILES}.loss_hub.math_utils", f"{MILES}.loss.hub.math_utils"
    losses = LOSS, f"{MILES}.loss_hub.losses", f"{MILES}.loss.hub.losses"
    return [
        (in_each(utils, "compute_policy_loss"), "ppo_kl, eps", ratio, "fits"),
        (in_each(utils, "compute_approx_kl"), "log_probs, log_probs_base, kl_loss_type", kl, "fits"),
        (in_each(utils, "compute_approx_kl"), "log_probs, ref, kl_loss_type", kl, "drifted"),
        (in_each(losses, "policy_loss_function"), policy, masks, "fits"),
        # Releases without a value loss.
        (f"{LOSS}.{value_loss}", MODULE, f"def policy({policy}): ...", f"{WITHOUT} {value_loss}"),
    ]


def finite_step() -> list[Case]:
    chained = "megatron.core.optimizer.optimizer.ChainedOptimizer.step"
    slime, its = f"{MODEL}.train_one_step", "args, model, optimizer, opt_param_scheduler"
    verl = f"{ENGINE}.MegatronEngine.optimizer_step"
    nemo_rl = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorkerImpl.train"
    norm = "grad_norm = self.get_grad_norm()\n    return (False if {} else self.step_with_ready_grads()), 0"
    tested = "norm = get()\n    if {}\n    return self.step_with_ready_grads()"
    skips = "not needed: upstream itself skips"
    step = "update_successful, grad_norm, zeros = self.optimizer.step()\n    "
    advances = f"{step}if update_successful: opt_param_scheduler.step(1)"
    return [
        (chained, "self", norm.format("found_inf"), "fits"),
        (chained, "self", norm.format("math.isfinite(threshold) and grad_norm > threshold"), "fits"),
        (chained, "self", norm.format("not math.isfinite(grad_norm)"), skips),
        (chained, "self", norm.format("math.isnan(grad_norm) or math.isinf(grad_norm)"), skips),
        (chained, "self", tested.format("not torch.isfinite(norm) or a: return False"), skips),
        (chained, "self", tested.format("not torch.isfinite(norm): log(1)"), "fits"),
        (chained, "self", tested.format("torch.isfinite(norm): return False"), "fits"),
        (slime, its, f"{step}assert update_successful", "fits"),
        (slime, its, advances, "not needed: does not assert that a step succeeds"),
        (verl, "self", f"{step}if not update_successful: raise NotImplementedError('failed')", "fits"),
        (verl, "self", f"{step}if not update_successful: log(1)", "not needed: does not raise where a step"),
        (nemo_rl, "self", f"{step}self.scheduler.step(increment=1)", "fits"),
        (nemo_rl, "self", step, "not needed: does not advance the schedule"),
    ]


def inference_only() -> list[Case]:
    initialize = "initialize_model_and_optimizer"
    both = f"{MODEL}.{initialize}"
    builds = f"def {initialize}(args, role='actor'): return setup_model_and_optimizer(args, role)\n"
    one_model = f"def {initialize}(args): return setup_model_and_optimizer(args)"
    model = "model = get_model(get_model_provider_func(args, role), wrap_with_ddp=False)"
    own_way = f"def _setup_inference_only_model(args, role):\n    return {model.partition(' = ')[2]}\n"
    ddp = "model = [DDP(config, ddp_config, chunk) for chunk in model]"
    wraps_itself = f"def setup_model_and_optimizer(args, role='actor'):\n    {model}\n    {ddp}\n"
    role, setup = "args, role='actor'", f"{MODEL}.setup_model_and_optimizer"
    of_miles = setup.replace("slime", "miles")  # radixark/miles#2685
    its = "config, load_optimizer=True"
    names = "setup_reference_model_state", "setup_model_and_optimizer"
    nemo_rl = [f"nemo_rl.models.megatron.setup.{name}" for name in names]
    passes = "model = get_model(model, ddp, wrap_with_ddp=load_optimizer)"
    areal = "areal.engine.megatron_engine.MegatronEngine.initialize"
    make = "self.model = make_mcore_model(mcore_config=self.mcore_config)"
    decides = "self.mcore_config.wrap_with_ddp = self.optimizer_config is not None"
    return [
        (both, MODULE, builds, "fits"),
        (both, MODULE, builds + own_way, "not needed: way of its own"),
        (both, MODULE, builds + wraps_itself, "fits"),
        (both, MODULE, one_model, "not needed: it builds one model, and that one trains"),
        (both, MODULE, f"def {initialize}(args, model_name): ...", "drifted: it no longer takes role"),
        ([setup, of_miles], role, "if args.num_rollout == 0: return model, None, None", "fits"),
        (setup, role, "return model", "not needed: no evaluation-only branch"),
        (nemo_rl, its, "model = get_model(model, ddp)", "fits"),
        (nemo_rl, its, passes, "not needed: it passes wrap_with_ddp itself"),
        (nemo_rl, its, f"if a: {passes}\n    else: model = get_model(model)", "fits"),
        (areal, "self, addr", make, "fits"),
        (areal, "self, addr", f"{decides}\n    {make}", "not needed: the engine decides about DDP itself"),
    ]


def lean_loss() -> list[Case]:
    losses = in_each((LOSS, f"{MILES}.loss", f"{MILES}.loss.objective"), "loss_function")
    its, passes = "args, batch, logits", "not needed: it passes use_reentrant itself"
    checkpoint = "if args.recompute_loss_function:\n        return "
    entropy = "logits, tokens, tp_group, with_entropy=False, chunk_size=-1"
    name = "calculate_log_probs_and_entropy"
    scores, log_probs = f"{PPO_UTILS}.{name}", f"{PPO_UTILS}.compute_log_probs"
    reduce = "dist.nn.all_reduce(torch.zeros(length, requires_grad={}))"
    of_miles = in_each((f"{MILES}.cp_utils", f"{MILES}.data.context_parallel"), "allgather_cp_redistribute")
    gathers = [f"{LOSS}._allgather_cp_redistribute", *of_miles]
    cross_entropy = "fused_vocab_parallel_cross_entropy"
    verl = f"{ENGINE}.MegatronEngineWithLMHead._lm_head_logits_processor"
    processor = "self, logits, label, *, calculate_entropy, distillation_only"
    clones = "return vocab_parallel_log_probs_from_logits({}, label)"
    return [
        (losses, its, f"{checkpoint}checkpoint(func, args, batch, logits)", "fits"),
        (losses, its, f"{checkpoint}checkpoint(func, args, use_reentrant=False)", passes),
        (losses, its, f"{checkpoint}checkpoint(func, args, use_reentrant=True)", "fits"),
        (losses, its, f"{checkpoint}partial(checkpoint, func)(args)", "fits"),
        (losses, its, f"{checkpoint}func(args, batch, logits)", "not needed: it does not checkpoint"),
        (losses[0], its, "return checkpoint(func, args)", "drifted: no longer uses recompute_loss_function"),
        (gathers, "res, *, args", reduce.format("True"), "fits"),
        (gathers, "res, *, args", reduce.format("value.requires_grad"), "not needed: requires grad when the"),
        (gathers[0], MODULE, "def loss_function(args): ...", f"{WITHOUT} allgather_cp"),
        # The first slime scores in the module of its loss; then come three eras.
        (scores, MODULE, "def compute_log_probs(logits): ...", f"{WITHOUT} {name}"),
        (scores, entropy, "...", "fits"),
        (scores, f"{entropy}, log_prob_keep_mask=None, with_entropy_grad=True", "...", "fits"),
        (scores, "hidden, weight, tokens", "...", "drifted"),
        # Which of its functions it calls does not matter: it is tried.
        (f"{MILES}.loss.hub.logit_processors.get_log_probs_and_entropy", "logits, args", "fused()", "fits"),
        (log_probs, "logits, tokens, process_group", f"return -{cross_entropy}(logits, tokens)", "fits"),
        (log_probs, "logits, tokens, process_group", f"return 0\nother = {cross_entropy}", "drifted"),
        (verl, processor, clones.format("logits.clone()"), "fits"),
        (verl, processor, clones.format("logits"), "not needed: it does not clone the logits"),
        (verl, MODULE, None, "not needed: no source of module"),  # verl before its engine
    ]


def reentrant_train() -> list[Case]:
    disable, its = f"{DDP}.disable_forward_pre_hook", "self, param_sync=True"
    handles = "self.remove_forward_pre_hook_handles"
    removes = f"{handles}[module].remove()"
    loop = f"for module in self.module.modules(): {removes}"
    checked = f"for module in self.module.modules():\n        if module in {handles}: {removes}"
    uses = "assert self.use_forward_hook\n    "
    train = "if overlap{}:\n        {}config.no_sync_func = [chunk.no_sync for chunk in model]"
    guarded = train.format(" and config.no_sync_func is None", "")
    clears = "\n    try:\n        train_one_step(model)\n    finally:\n        config.no_sync_func = None"
    loops = in_each(("slime", "vime", "miles"), "backends.megatron_utils.model.train")
    those = "model, optimizer, opt_param_scheduler"
    save, saved, rollout = f"{MODEL}.save", f"iteration, {those}", f"rollout_id, {those}"
    body = "disable_forward_pre_hook(model)\n    {}: save()\n    {}: enable_forward_pre_hook(model)"
    timed, synced = "megatron.training.training.save_checkpoint_and_time", "force_param_sync(model)"
    logs, logged = "megatron.training.training.training_log", "total_loss_dict, iteration, is_first_iteration"
    reset = "should_reset = not is_first_iteration"
    verl = "verl.utils.megatron_utils.register_megatron_training_hooks"
    per_chunk = "for one_model in model:\n        assert config.no_sync_func is None"
    return [
        (disable, "self, param_sync: bool = True", uses + loop, FITS),
        (disable, its, f"for handle in {handles}.values(): handle.remove()", f"{MENDED} on"),
        (disable, its, f"if not {handles}: return\n    {loop}", f"{MENDED} on"),
        (disable, its, checked, f"{MENDED} on"),
        (disable, "self", loop, "drifted: it no longer takes param_sync"),
        (f"{DDP}.enable_forward_pre_hook", "self", f"{uses}assert len({handles}) == 0", FITS),
        (f"{DDP}.enable_forward_pre_hook", "self", f"{uses}if {handles}: return", f"{MENDED} off"),
        (loops, rollout, train.format("", "assert config.no_sync_func is None; "), FITS),
        (loops, rollout, guarded, FITS),  # an exception still leaves everything behind
        (loops, rollout, guarded + clears, "not needed: it does not fail after an earlier call"),
        (loops, rollout, f"{guarded}\n    if a:{clears.replace('    ', '        ')}", FITS),
        (loops, rollout, f"{guarded}{clears}\n    train_one_step(model)", FITS),
        (save, saved, body.format("if 1", "if 1"), FITS),
        (save, saved, body.format("try", "finally"), "not needed: it restores the hooks"),
        (timed, "iteration, model", f"timers('interval-time').stop()\n    {synced}", FITS),
        (timed, "iteration, model", synced, "not needed: it does not switch forward pre-hooks"),
        # The first iteration of a call ends no interval.
        (logs, logged, reset, FITS),
        (logs, logged, f"{reset} or iteration % args.log_interval == 0", f"not needed: {MAY_END}"),
        (logs, "total_loss_dict, iteration", "pass", f"not needed: {MAY_END}"),  # up to 0.15
        (logs, MODULE, "def train(): pass", f"{WITHOUT} is_first_iteration"),
        # verl asserts once per chunk; before, it did not install the function.
        (verl, "model, optimizer", per_chunk, FITS),
        (verl, "model, optimizer", per_chunk.replace("for one_model in", "if"), "not needed: for each chunk"),
        (verl, MODULE, "def get_model(): pass", f"{WITHOUT} no_sync_func"),
    ]


def router_replay() -> list[Case]:
    slime = "slime.backends.megatron_utils.actor.MegatronTrainRayActor.train_actor"
    router = "megatron.core.transformer.moe.router.TopKRouter.__init__"
    train, clears, replays_none = "train(self.model)", "RoutingReplay.clear_all()", "it replays no routes"
    cleans_up = f"try: {train}\n    finally: {clears}"
    core = "megatron.core"
    old, new = f"{core}.ssm.mamba_block.MambaStack", f"{core}.models.hybrid.hybrid_block.HybridStack"
    re_export = f"from {new.rpartition('.')[0]} import *"
    return [
        (f"{old}.forward", "self, hidden_states", "return hidden_states", "fits"),
        # The module that only gives a stack its old name has nothing to patch.
        (f"{old}.forward", MODULE, re_export, f"{WITHOUT} hidden_states"),
        (f"{new}.__init__", "self, config", "pass", "fits"),
        (f"{new}.__init__", "self, transformer_config", "pass", "drifted: it no longer takes config"),
        (slime, "self, rollout_id", f"{train}\n    {clears}", "fits"),
        (slime, "self, rollout_id", cleans_up, "not needed: it clears its routes when it raises"),
        (slime, "self, rollout_id", f"try: a()\n    finally: {clears}\n    {train}", "fits"),
        (slime, "self, rollout_id", train, f"not needed: {replays_none}"),
        # A slime without replay needs no function that clears routes.
        (slime, MODULE, f"def train(self, rollout_id): {clears}", "missing"),
        (slime, MODULE, "def train(self, rollout_id): ...", f"{WITHOUT} clear_all"),
        # Old routers replay nothing.
        (router, "self, config", "self.router_replay = None", "fits"),
        (router, "self, config", "self.topk = None", f"not needed: {replays_none}"),
    ]


def scheduler_resume() -> list[Case]:
    """Needed where the scheduler is advanced."""
    target = "miles.backends.megatron_utils.model.initialize_model_and_optimizer"
    loads = "iteration, _ = load_checkpoint(model, optimizer, opt_param_scheduler)\n    "
    advances, its = "opt_param_scheduler.step(increment=iteration{})", "args, role='actor'"
    return [
        (target, its, loads + advances.format(" * args.global_batch_size"), "fits"),
        (target, its, f"{loads}if iteration > 0: {advances.format('')}", "fits"),
        (target, its, f"{loads}optimizer.step()", "not needed: it does not advance the scheduler after"),
    ]


def distillation() -> list[Case]:
    target = "verl.trainer.distillation.megatron.losses.compute_forward_kl_topk"
    inputs = "student_logits, teacher_topk_log_probs, teacher_topk_ids, config"
    new, tail = f"{inputs}, data_format", ", tail_log_prob"
    both = "preprocess_thd_engine(teacher_topk_ids) or preprocess_bshd_engine(teacher_topk_ids)\n    return "
    kl = f"{both}_VocabParallelKLDivergence.apply(student_logits{{}})"
    return [
        (target, new, kl.format(""), "fits"),
        (target, new, kl.format(tail), "not needed: verl counts the tail itself"),
        (target, inputs, kl.format(""), "drifted"),
        (target, new, f"{both}topk_divergence(student_logits)", "drifted"),
    ]


TABLES = [expert_norm, finite_loss, finite_step, inference_only, lean_loss, reentrant_train, router_replay]
TABLES += [scheduler_resume, distillation]


@pytest.mark.parametrize(
    ("name", "target", "parameters", "text", "expected"),
    [
        (table.__name__.replace("_", "-"), target, *case)
        for table in TABLES
        for targets, *case in table()
        for target in ([targets] if isinstance(targets, str) else targets)
    ],
)
def test_sites_are_judged_by_code(name: str, target: str, parameters: str, text: Any, expected: str) -> None:
    """A method's class is put around it; without a text there is no such module."""
    [site] = [site for site in registry.patches()[name].sites if site.target == target]
    owner, _, function = site.qualname.rpartition(".")
    source = textwrap.dedent(text or "").strip()
    if parameters:
        source = f"def {function}({parameters}):\n    {text}"
    if owner:
        source = f"class {owner}:\n{textwrap.indent(source, '    ')}"
    files = {} if text is None else {f"{site.module.replace('.', '/')}.py": source.encode()}
    verdict = judge_site(site, Files("", files, files.__getitem__))
    state, _, reason = expected.partition(": ")
    assert verdict.state == state and reason in verdict.reason, verdict
    assert reason or state != "not needed"
