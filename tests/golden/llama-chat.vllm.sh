#!/usr/bin/env bash
# llama-chat: llama-3.1-70b on vllm 0.33.0, 8 GPUs, 19.92 USD/h
# serve: 2 instances of 4 h100-sxm (tp 4, pp 1, ep 1, attention_dp 1, dcp 1); weights fp8, KV fp8_e4m3; memory fraction 0.92, 256 running requests of at most 65536 tokens, pages of 16, chunks of 8192; 903424 KV tokens an instance; 2.49 USD a GPU-hour; llama-3.1-8b drafts 3 tokens, 2.375 accepted (0.25, 0.3, 0.275, 0.175).
# Router round_robin, affinity session; prefix cache on, 68719476736 bytes of host memory an instance.
# Found by simulation, 5 replications:
#   output tokens/s: 2187.5 (2101.25 to 2263.75)
#   output tokens/s/GPU (all GPUs): 136.719 (131.328 to 141.484)
#   output tokens/s/user: 34.1875 (33.5 to 34.875)
#   input tokens/s: 17920.5 (17213.8 to 18545.2)
#   TTFT p95, s: 4.125 (3.875 to 4.375)
#   TPOT p95, s: 0.03125 (0.0305 to 0.03225)
#   prompt tokens found in the cache, share: 0.6875
#   USD per hour: 19.92
#   USD per million output tokens: 7.15175 (6.91083 to 7.44531)
#   objective ttft_p95 5 s: met, 4.125 (3.875 to 4.375) s
#   objective tpot_p95 0.04 s: met, 0.03125 (0.0305 to 0.03225) s
# What binds: tpot_p95.
# Figures: tonnage 0.1.0, profile h200-sxm sglang 0.5.14 (imported), seed 11; plan seed 7.
# Assumed: fractions are the engine's defaults
# Assumed: prompts share no prefix
# Mind: clients send their session's id in the header x-session-id.
#
# Usage: bash FILE serve|router [further arguments of the engine]
#   serve: run it 2 times; up to 2 share a node, with SLOT 0 to 1
set -euo pipefail

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

start_serve() {
  local checkpoint=meta-llama/Llama-3.1-70B
  local SERVE_MODEL="${SERVE_MODEL:-$checkpoint}"
  local checkpoint=meta-llama/Llama-3.1-8B
  local SERVE_DRAFT_MODEL="${SERVE_DRAFT_MODEL:-$checkpoint}"
  local slot="${SLOT:-0}"
  (( slot >= 0 && slot < 2 )) || fail 'SLOT: 0 to 1'
  CUDA_VISIBLE_DEVICES="$(seq -s, "$((slot * 4))" "$((slot * 4 + 3))")"
  export CUDA_VISIBLE_DEVICES
  exec vllm serve \
    "$SERVE_MODEL" \
    --served-model-name llama-3.1-70b \
    --tensor-parallel-size 4 \
    --gpu-memory-utilization 0.92 \
    --max-num-seqs 256 \
    --max-model-len 65536 \
    --block-size 16 \
    --max-num-batched-tokens 8192 \
    --kv-cache-dtype fp8_e4m3 \
    --quantization fp8_per_tensor \
    --enable-prefix-caching \
    --kv-offloading-size 64 \
    --spec-method draft_model \
    --spec-model "$SERVE_DRAFT_MODEL" \
    --spec-tokens 3 \
    --host 0.0.0.0 \
    --port "$((8000 + slot))" \
    "$@"
}

# vllm-router 0.1.17: pip install vllm-router==0.1.17
start_router() {
  local url
  local -a urls arguments=()
  read -ra urls <<< "${SERVE_URLS:-}"
  (( ${#urls[@]} == 2 )) || fail 'SERVE_URLS: the 2 URLs of serve, such as http://10.0.0.1:8000'
  arguments+=(--worker-urls "${urls[@]}")
  exec vllm-router \
    --policy consistent_hash \
    --host 0.0.0.0 --port "${PORT:-8080}" "${arguments[@]}" "$@"
}

role="${1:-}"
shift || true
case "$role" in
  serve) start_serve "$@" ;;
  router) start_router "$@" ;;
  *) fail 'the first argument is one of: serve router' ;;
esac
