#!/usr/bin/env bash
# glm-long: glm-5.2 on sglang 0.5.23, 48 GPUs, 168.96 USD/h
# prefill: 1 instance of 16 h200-sxm (tp 8, pp 2, ep 1, attention_dp 1, dcp 1); weights native, KV fp8_e4m3; memory fraction 0.871, 96 running requests of at most 131072 tokens, pages of 64, chunks of 16384; 1372160 KV tokens an instance; 3.52 USD a GPU-hour.
# decode: 2 instances of 16 h200-sxm (tp 16, pp 1, ep 16, attention_dp 16, dcp 1); weights int4_g32, KV fp8_e4m3; memory fraction 0.871, 512 running requests of at most 131072 tokens, pages of 64, chunks of 8192; 1372160 KV tokens an instance; 3.52 USD a GPU-hour; mtp drafts 3 tokens, 2.5 accepted.
# Router token_aware, affinity none; KV over nvlink; prefix cache off.
# Found by simulation, 5 replications:
#   output tokens/s: 2187.5 (2101.25 to 2263.75)
#   output tokens/s/GPU (all GPUs): 136.719 (131.328 to 141.484)
#   output tokens/s/user: 34.1875 (33.5 to 34.875)
#   input tokens/s: 17920.5 (17213.8 to 18545.2)
#   TTFT p95, s: 4.125 (3.875 to 4.375)
#   TPOT p95, s: 0.03125 (0.0305 to 0.03225)
#   prompt tokens found in the cache, share: 0.6875
#   USD per hour: 168.96
#   USD per million output tokens: 7.15175 (6.91083 to 7.44531)
#   objective ttft_p95 5 s: met, 4.125 (3.875 to 4.375) s
#   objective tpot_p95 0.04 s: met, 0.03125 (0.0305 to 0.03225) s
# What binds: tpot_p95.
# Figures: tonnage 0.1.0, profile h200-sxm sglang 0.5.14 (imported), seed 11; plan seed 7.
# Assumed: fractions are the engine's defaults
# Assumed: prompts share no prefix
# Mind: pools.decode.weights int4_g32: name a checkpoint of glm-5.2 in it: --checkpoint decode=PATH.
# Mind: router.policy token_aware: the router has no such policy; power_of_two stands for it.
#
# Usage: bash FILE prefill|decode|router [further arguments of the engine]
#   prefill: run it once, on 2 nodes each, with NODE_RANK 0 to 1 and LEADER set
#   decode: run it 2 times, on 2 nodes each, with NODE_RANK 0 to 1 and LEADER set
set -euo pipefail

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

start_prefill() {
  local checkpoint=zai-org/GLM-5.2-FP8
  local PREFILL_MODEL="${PREFILL_MODEL:-$checkpoint}"
  local slot=0
  local rank="${NODE_RANK:-}" leader="${LEADER:-}"
  [[ -n $rank ]] || fail 'NODE_RANK: 0 to 1'
  (( rank >= 0 && rank < 2 )) || fail 'NODE_RANK: 0 to 1'
  [[ -n $leader ]] || fail 'LEADER: the address of node 0'
  exec python3 -m sglang.launch_server \
    --model-path "$PREFILL_MODEL" \
    --served-model-name glm-5.2 \
    --tp-size 8 \
    --pp-size 2 \
    --mem-fraction-static 0.871 \
    --max-running-requests 96 \
    --context-length 131072 \
    --page-size 64 \
    --chunked-prefill-size 16384 \
    --kv-cache-dtype fp8_e4m3 \
    --disable-radix-cache \
    --disaggregation-mode prefill \
    --disaggregation-transfer-backend nixl \
    --host 0.0.0.0 \
    --port "$((30000 + slot))" \
    --disaggregation-bootstrap-port "$((8998 + slot))" \
    --nnodes 2 \
    --node-rank "$rank" \
    --dist-init-addr "$leader:20000" \
    "$@"
}

start_decode() {
  [[ -n "${DECODE_MODEL:-}" ]] || fail 'set DECODE_MODEL to a checkpoint, a path or a repository'
  local slot=0
  local rank="${NODE_RANK:-}" leader="${LEADER:-}"
  [[ -n $rank ]] || fail 'NODE_RANK: 0 to 1'
  (( rank >= 0 && rank < 2 )) || fail 'NODE_RANK: 0 to 1'
  [[ -n $leader ]] || fail 'LEADER: the address of node 0'
  exec python3 -m sglang.launch_server \
    --model-path "$DECODE_MODEL" \
    --served-model-name glm-5.2 \
    --tp-size 16 \
    --ep-size 16 \
    --attn-dp-size 16 \
    --mem-fraction-static 0.871 \
    --max-running-requests 512 \
    --context-length 131072 \
    --page-size 64 \
    --chunked-prefill-size 8192 \
    --kv-cache-dtype fp8_e4m3 \
    --disaggregation-mode decode \
    --disaggregation-transfer-backend nixl \
    --speculative-algorithm NEXTN \
    --speculative-num-steps 3 \
    --speculative-eagle-topk 1 \
    --speculative-num-draft-tokens 4 \
    --host 0.0.0.0 \
    --port "$((30000 + slot))" \
    --nnodes 2 \
    --node-rank "$rank" \
    --dist-init-addr "$leader:20000" \
    "$@"
}

# sglang-router 0.3.2: pip install sglang-router==0.3.2
start_router() {
  local url
  local -a urls arguments=()
  read -ra urls <<< "${PREFILL_URLS:-}"
  (( ${#urls[@]} == 1 )) || fail 'PREFILL_URLS: the URL of prefill, such as http://10.0.0.1:30000'
  for url in "${urls[@]}"; do arguments+=(--prefill "$url" 8998); done
  read -ra urls <<< "${DECODE_URLS:-}"
  (( ${#urls[@]} == 2 )) || fail 'DECODE_URLS: the 2 URLs of decode, such as http://10.0.0.1:30000'
  for url in "${urls[@]}"; do arguments+=(--decode "$url"); done
  exec python3 -m sglang_router.launch_router \
    --pd-disaggregation \
    --policy power_of_two \
    --host 0.0.0.0 --port "${PORT:-8000}" "${arguments[@]}" "$@"
}

role="${1:-}"
shift || true
case "$role" in
  prefill) start_prefill "$@" ;;
  decode) start_decode "$@" ;;
  router) start_router "$@" ;;
  *) fail 'the first argument is one of: prefill decode router' ;;
esac
