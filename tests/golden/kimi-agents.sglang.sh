#!/usr/bin/env bash
# kimi-agents: kimi-k2.6 on sglang 0.5.23, 24 GPUs, 84.48 USD/h
# prefill: 2 instances of 8 h200-sxm (tp 8, pp 1, ep 8, attention_dp 8, dcp 1); weights native, KV fp8_e4m3; memory fraction 0.871, 64 running requests of at most 131072 tokens, pages of 64, chunks of 8192; 1372160 KV tokens an instance; 3.52 USD a GPU-hour.
# decode: 1 instance of 8 h200-sxm (tp 8, pp 1, ep 1, attention_dp 1, dcp 1); weights native, KV fp8_e4m3; memory fraction 0.929, 96 running requests of at most 131072 tokens, pages of 64, chunks of 8192; 1372160 KV tokens an instance; 3.52 USD a GPU-hour; checksum at the handoff.
# Router cache_aware, affinity none; KV over rdma; prefix cache on.
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
#
# Usage: bash FILE prefill|decode|router [further arguments of the engine]
#   prefill: run it 2 times, on a node each
#   decode: run it once
set -euo pipefail

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

start_prefill() {
  local checkpoint=moonshotai/Kimi-K2.6
  local PREFILL_MODEL="${PREFILL_MODEL:-$checkpoint}"
  local slot=0
  exec python3 -m sglang.launch_server \
    --model-path "$PREFILL_MODEL" \
    --served-model-name kimi-k2.6 \
    --tp-size 8 \
    --ep-size 8 \
    --attn-dp-size 8 \
    --mem-fraction-static 0.871 \
    --max-running-requests 64 \
    --context-length 131072 \
    --page-size 64 \
    --chunked-prefill-size 8192 \
    --kv-cache-dtype fp8_e4m3 \
    --disaggregation-mode prefill \
    --disaggregation-transfer-backend mooncake \
    --disaggregation-enable-kv-checksum \
    --host 0.0.0.0 \
    --port "$((30000 + slot))" \
    --disaggregation-bootstrap-port "$((8998 + slot))" \
    "$@"
}

start_decode() {
  local checkpoint=moonshotai/Kimi-K2.6
  local DECODE_MODEL="${DECODE_MODEL:-$checkpoint}"
  local slot=0
  exec python3 -m sglang.launch_server \
    --model-path "$DECODE_MODEL" \
    --served-model-name kimi-k2.6 \
    --tp-size 8 \
    --mem-fraction-static 0.929 \
    --max-running-requests 96 \
    --context-length 131072 \
    --page-size 64 \
    --chunked-prefill-size 8192 \
    --kv-cache-dtype fp8_e4m3 \
    --disaggregation-mode decode \
    --disaggregation-transfer-backend mooncake \
    --disaggregation-enable-kv-checksum \
    --host 0.0.0.0 \
    --port "$((30000 + slot))" \
    "$@"
}

# sglang-router 0.3.2: pip install sglang-router==0.3.2
start_router() {
  local url
  local -a urls arguments=()
  read -ra urls <<< "${PREFILL_URLS:-}"
  (( ${#urls[@]} == 2 )) || fail 'PREFILL_URLS: the 2 URLs of prefill, such as http://10.0.0.1:30000'
  for url in "${urls[@]}"; do arguments+=(--prefill "$url" 8998); done
  read -ra urls <<< "${DECODE_URLS:-}"
  (( ${#urls[@]} == 1 )) || fail 'DECODE_URLS: the URL of decode, such as http://10.0.0.1:30000'
  for url in "${urls[@]}"; do arguments+=(--decode "$url"); done
  exec python3 -m sglang_router.launch_router \
    --pd-disaggregation \
    --policy cache_aware \
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
