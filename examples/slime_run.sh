#!/usr/bin/env bash
# A launch script of slime with the patches on. The new lines, as a diff:
#
#     "env_vars": {
#       "PYTHONPATH": "/root/Megatron-LM/",
#   -   "CUDA_DEVICE_MAX_CONNECTIONS": "1"
#   +   "CUDA_DEVICE_MAX_CONNECTIONS": "1",
#   +   "MEGATRON_RL_PATCHES": "1"
#     }
#
#    PERF_ARGS=(
#      --tensor-model-parallel-size 2
#   +  --overlap-grad-reduce
#   +  --overlap-param-gather
#    )
#
# Install the package first, on every node, into the Python that Ray's workers run. Rank 0 of the actor logs one line
# that names the patches in place before the first training step.
set -euo pipefail

MODEL=${MODEL:-/root/Qwen3-4B}
DATA=${DATA:-/root/dapo-math-17k/dapo-math-17k.jsonl}
GPUS=${GPUS:-8}
SLIME=${SLIME:-/root/slime}

source "${SLIME}/scripts/models/qwen3-4B.sh" # sets MODEL_ARGS

CKPT_ARGS=(
  --hf-checkpoint "${MODEL}"
  --load "${MODEL}_slime"
  --ref-load "${MODEL}_torch_dist"
  --save "${MODEL}_slime"
  --save-interval 20
)
ROLLOUT_ARGS=(
  --prompt-data "${DATA}"
  --input-key prompt
  --label-key label
  --apply-chat-template
  --rm-type deepscaler
  --num-rollout 3000
  --rollout-batch-size 32
  --n-samples-per-prompt 8
  --rollout-max-response-len 8192
  --global-batch-size 256
)
PERF_ARGS=(
  --tensor-model-parallel-size 2
  --sequence-parallel
  --use-dynamic-batch-size
  --max-tokens-per-gpu 9216
  --overlap-grad-reduce  # possible because train() can be called again
  --overlap-param-gather
)
TRAIN_ARGS=(
  --advantage-estimator grpo
  --optimizer adam
  --lr 1e-6
  --lr-decay-style constant
  --attention-dropout 0.0 # with Megatron's default, 0.1, training and scoring give different log-probabilities
  --hidden-dropout 0.0
)

RUNTIME_ENV_JSON="{
  \"env_vars\": {
    \"PYTHONPATH\": \"/root/Megatron-LM/\",
    \"CUDA_DEVICE_MAX_CONNECTIONS\": \"1\",
    \"MEGATRON_RL_PATCHES\": \"1\"
  }
}"

ray start --head --num-gpus "${GPUS}" --disable-usage-stats
ray job submit --address="http://127.0.0.1:8265" \
  --runtime-env-json="${RUNTIME_ENV_JSON}" \
  -- python3 "${SLIME}/train.py" \
  --actor-num-nodes 1 --actor-num-gpus-per-node "${GPUS}" --colocate \
  "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${PERF_ARGS[@]}" "${TRAIN_ARGS[@]}"
