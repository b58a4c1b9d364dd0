#!/usr/bin/env bash
# The third tier of the tests, in shards that take at most an hour each on two slow cores; a page of results in nightly/.
#
#   scripts/nightly.sh                          # all shards, one after the other
#   scripts/nightly.sh --shard gpu              # one, after a change in its area; pytest's own arguments may follow
#   scripts/nightly.sh --list                   # their names
#
# nightly/results.md has a row for each shard that has run, and the failures; nightly/SHARD.log is what pytest printed. Goes on after a
# failure, and fails in the end if one of the shards did.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

shards=(conformance golden gpu unit security e2e fuzz learning cpus)

paths() { # what pytest is to collect for a shard
    case $1 in
        unit) echo tests/unit --ignore=tests/unit/security ;;
        security) echo tests/unit/security ;;
        *) echo "tests/$1" ;;
    esac
}

run() { # the shard's tests; what follows is for pytest
    local shard=$1
    shift
    if [ "$shard" = cpus ]; then
        scripts/other_cpus.sh "$@"
    else
        # shellcheck disable=SC2046
        pytest -m nightly $(paths "$shard") "$@"
    fi
}

page() { # nightly/results.md from the shards' rows and logs
    echo "# Nightly tests"
    echo
    echo "| shard | result | seconds | commit | day | processor |"
    echo "|---|---|---|---|---|---|"
    for shard in "${shards[@]}"; do [ -e "nightly/$shard.row" ] && cat "nightly/$shard.row"; done
    echo
    for shard in "${shards[@]}"; do
        [ -e "nightly/$shard.log" ] && grep -E '^(FAILED|ERROR) ' "nightly/$shard.log" | sed 's/^/- /' | cut -c1-300
    done
    return 0
}

case ${1-} in
    --list) printf '%s\n' "${shards[@]}" && exit 0 ;;
    --shard)
        if [[ " ${shards[*]} " != *" ${2-} "* ]]; then echo "--shard ${2-}: the shards are ${shards[*]}" >&2 && exit 2; fi
        chosen=("$2")
        shift 2
        ;;
    -h | --help) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" && exit 0 ;;
    *) chosen=("${shards[@]}") ;;
esac

mkdir -p nightly
processor=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -1)
family=$(awk -F ': *' '/^cpu family/ {f = $2} /^model\t/ {m = $2} /^$/ {exit} END {if (m) print " (family " f ", model " m ")"}' /proc/cpuinfo 2>/dev/null)
worst=0
for shard in "${chosen[@]}"; do
    began=$SECONDS
    run "$shard" "$@" 2>&1 | tee "nightly/$shard.log"
    status=${PIPESTATUS[0]}
    [ "$status" -eq 5 ] && [ $# -gt 0 ] && status=0 # the arguments chose none of its tests
    [ "$status" -eq 0 ] || worst=1
    result=$(grep -E '^=+ .* in [0-9.]+s|^[0-9]+ (passed|failed).* in [0-9.]+s' "nightly/$shard.log" | tail -1 | tr -d '=' | sed 's/ in [0-9.]*s.*//; s/^ *//')
    [ "$shard" != cpus ] || result=$(grep -E 'return code' nightly/cpus.log | tail -4 | awk '{print $1, $2}' | paste -sd';')
    printf '| %s | %s | %d | %s | %s | %s%s |\n' "$shard" "${result:-ended with $status}" $((SECONDS - began)) \
        "$(git rev-parse --short HEAD 2>/dev/null)" "$(date -I)" "${processor:-$(uname -m)}" "$family" >"nightly/$shard.row"
    page >nightly/results.md
done
cat nightly/results.md
exit $worst
