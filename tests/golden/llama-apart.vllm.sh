#!/usr/bin/env bash
# llama-apart: llama-3.1-70b on vllm 0.33.0, 24 GPUs, 84.48 USD/h
# prefill: 2 instances of 4 h200-sxm (tp 4, pp 1, ep 1, attention_dp 1, dcp 1); weights native, KV fp8_e4m3; memory fraction 0.871, 96 running requests of at most 131072 tokens, pages of 16, chunks of 8192; 1372160 KV tokens an instance; 3.52 USD a GPU-hour.
# decode: 1 instance of 16 h200-sxm (tp 8, pp 2, ep 1, attention_dp 2, dcp 1); weights native, KV fp8_e4m3; memory fraction 0.871, 96 running requests of at most 131072 tokens, pages of 16, chunks of 8192; 1372160 KV tokens an instance; 3.52 USD a GPU-hour.
# Router least_requests, affinity none; KV over rdma; prefix cache on.
# Found by simulation, 5 replications:
#   output tokens/s: 2187.5 (2101.25 to 2263.75)
#   output tokens/s/GPU (all GPUs): 136.719 (131.328 to 141.484)
#   output tokens/s/user: 34.1875 (33.5 to 34.875)
#   input tokens/s: 17920.5 (17213.8 to 18545.2)
#   TTFT p95, s: 4.125 (3.875 to 4.375)
#   TPOT p95, s: 0.03125 (0.0305 to 0.03225)
#   prompt tokens found in the cache, share: 0.6875
#   USD per hour: 84.48
#   USD per million output tokens: 7.15175 (6.91083 to 7.44531)
#   objective ttft_p95 5 s: met, 4.125 (3.875 to 4.375) s
#   objective tpot_p95 0.04 s: met, 0.03125 (0.0305 to 0.03225) s
# What binds: tpot_p95.
# Figures: tonnage 0.1.0, profile h200-sxm sglang 0.5.14 (imported), seed 11; plan seed 7.
# Assumed: fractions are the engine's defaults
# Assumed: prompts share no prefix
# Mind: link rdma: the hosts need their RDMA devices; without them it is slower.
# Mind: router.policy least_requests: the router has no such policy; power_of_two stands for it.
#
# Usage: bash FILE prefill|decode|router [further arguments of the engine]
#   prefill: run it 2 times; up to 2 share a node, with SLOT 0 to 1
#   decode: run it once, on 2 nodes each, with NODE_RANK 0 to 1 and LEADER set
set -euo pipefail

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

start_prefill() {
  local checkpoint=meta-llama/Llama-3.1-70B
  local PREFILL_MODEL="${PREFILL_MODEL:-$checkpoint}"
  local slot="${SLOT:-0}"
  (( slot >= 0 && slot < 2 )) || fail 'SLOT: 0 to 1'
  CUDA_VISIBLE_DEVICES="$(seq -s, "$((slot * 4))" "$((slot * 4 + 3))")"
  export CUDA_VISIBLE_DEVICES
  export VLLM_NIXL_SIDE_CHANNEL_HOST="${HOST_ADDRESS:-$(hostname -i)}"  # as the other pool reaches this node
  export VLLM_NIXL_SIDE_CHANNEL_PORT="$((5600 + slot * 1))"
  exec vllm serve \
    "$PREFILL_MODEL" \
    --served-model-name llama-3.1-70b \
    --tensor-parallel-size 4 \
    --gpu-memory-utilization 0.871 \
    --max-num-seqs 96 \
    --max-model-len 131072 \
    --block-size 16 \
    --max-num-batched-tokens 8192 \
    --kv-cache-dtype fp8_e4m3 \
    --enable-prefix-caching \
    --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_producer"}' \
    --host 0.0.0.0 \
    --port "$((8000 + slot))" \
    "$@"
}

start_decode() {
  local checkpoint=meta-llama/Llama-3.1-70B
  local DECODE_MODEL="${DECODE_MODEL:-$checkpoint}"
  local slot=0
  local rank="${NODE_RANK:-}" leader="${LEADER:-}"
  [[ -n $rank ]] || fail 'NODE_RANK: 0 to 1'
  (( rank >= 0 && rank < 2 )) || fail 'NODE_RANK: 0 to 1'
  [[ -n $leader ]] || fail 'LEADER: the address of node 0'
  local -a follower=()
  if (( rank > 0 )); then follower=(--headless); fi
  export VLLM_NIXL_SIDE_CHANNEL_HOST="${HOST_ADDRESS:-$(hostname -i)}"  # as the other pool reaches this node
  export VLLM_NIXL_SIDE_CHANNEL_PORT="$((5600 + slot * 2))"
  exec vllm serve \
    "$DECODE_MODEL" \
    --served-model-name llama-3.1-70b \
    --tensor-parallel-size 4 \
    --pipeline-parallel-size 2 \
    --data-parallel-size 2 \
    --gpu-memory-utilization 0.871 \
    --max-num-seqs 48 \
    --max-model-len 131072 \
    --block-size 16 \
    --max-num-batched-tokens 8192 \
    --kv-cache-dtype fp8_e4m3 \
    --kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}' \
    --host 0.0.0.0 \
    --port "$((8000 + slot))" \
    --nnodes 2 \
    --node-rank "$rank" \
    --master-addr "$leader" \
    ${follower[@]+"${follower[@]}"} \
    "$@"
}

# vllm-router 0.1.17: pip install vllm-router==0.1.17
start_router() {
  local url
  local -a urls arguments=()
  read -ra urls <<< "${PREFILL_URLS:-}"
  (( ${#urls[@]} == 2 )) || fail 'PREFILL_URLS: the 2 URLs of prefill, such as http://10.0.0.1:8000'
  for url in "${urls[@]}"; do arguments+=(--prefill "$url"); done
  read -ra urls <<< "${DECODE_URLS:-}"
  (( ${#urls[@]} == 1 )) || fail 'DECODE_URLS: the URL of decode, such as http://10.0.0.1:8000'
  for url in "${urls[@]}"; do arguments+=(--decode "$url"); done
  exec vllm-router \
    --vllm-pd-disaggregation \
    --policy power_of_two \
    --host 0.0.0.0 --port "${PORT:-8080}" "${arguments[@]}" "$@"
}

role="${1:-}"
shift || true
case "$role" in
  prefill) start_prefill "$@" ;;
  decode) start_decode "$@" ;;
  router) start_router "$@" ;;
  *) fail 'the first argument is one of: prefill decode router' ;;
esac
