#!/usr/bin/env bash
# A launch script of verl's Megatron engine with the patches on. The new lines, as a diff:
#
#      python3 -m verl.trainer.main_ppo \
#        model_engine=megatron \
#   +    +ray_kwargs.ray_init.runtime_env.env_vars.MEGATRON_RL_PATCHES=default \
#   +    +actor_rollout_ref.actor.megatron.override_ddp_config.overlap_grad_reduce=True \
#   +    +actor_rollout_ref.actor.megatron.override_ddp_config.overlap_param_gather=True \
#
# Write `default`, which means the same as `1`: Hydra turns `1` into an integer, and Ray refuses variables that are
# not strings. Install the package first, on every node, into the Python that Ray's workers run. Rank 0 of the workers
# logs one line that names the patches in place before the first training step.
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen3-8B}
DATA=${DATA:-$HOME/data/gsm8k}
GPUS=${GPUS:-8}
NODES=${NODES:-1}

python3 -m verl.trainer.main_ppo \
  model_engine=megatron \
  +ray_kwargs.ray_init.runtime_env.env_vars.MEGATRON_RL_PATCHES=default \
  +actor_rollout_ref.actor.megatron.override_ddp_config.overlap_grad_reduce=True \
  +actor_rollout_ref.actor.megatron.override_ddp_config.overlap_param_gather=True \
  algorithm.adv_estimator=grpo \
  algorithm.use_kl_in_reward=False \
  data.train_files="${DATA}/train.parquet" \
  data.val_files="${DATA}/test.parquet" \
  data.train_batch_size=256 \
  data.max_prompt_length=1024 \
  data.max_response_length=4096 \
  actor_rollout_ref.model.path="${MODEL}" \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  trainer.n_gpus_per_node="${GPUS}" \
  trainer.nnodes="${NODES}" \
  trainer.save_freq=20 \
  trainer.total_epochs=1
