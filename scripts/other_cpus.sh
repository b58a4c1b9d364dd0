#!/usr/bin/env bash
# The tests as other CPUs would round: under each setting one library takes kernels made for less than this CPU's AVX-512.
#
#   scripts/other_cpus.sh                               # README's tests under each setting, some four minutes each
#   scripts/other_cpus.sh tests/conformance -k iql      # pytest's arguments, in place of README's
#   CPUS="MKL_CBWR=COMPATIBLE" scripts/other_cpus.sh    # other settings
#
# Goes on after a failure; ends with a line for each setting, and fails if one of them did. AMD's CPUs do not heed MKL_ENABLE_INSTRUCTIONS,
# only MKL_CBWR; and where there is no AVX-512, what asks for AVX2 changes nothing.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

read -ra settings <<<"${CPUS:-ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2}"

cache=""
trap '[ -z "$cache" ] || rm -rf "$cache"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
worst=0 lines=()
for setting in "${settings[@]}"; do
    echo "== $setting"
    cache=$(mktemp -d) || exit 2 # or Inductor would take what it compiled for another CPU
    began=$SECONDS
    env "$setting" TORCHINDUCTOR_CACHE_DIR="$cache" pytest "$@"
    status=$?
    rm -rf "$cache"
    verdict=passed
    if [ $status -ne 0 ]; then verdict=failed worst=1; fi
    lines+=("$(printf '%-32s %s %5d s, return code %d' "$setting" "$verdict" $((SECONDS - began)) "$status")")
done
printf '%s\n' "" "${lines[@]}"
exit $worst
