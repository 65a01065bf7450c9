#!/bin/bash
# Run a command whose results are kept in outputs/bench, and copy all of them to $OUT when it ends,
# however it ends: $OUT may be emptied before the next call, and outputs/bench is not.
results=$OUT; unset OUT
keep() { mkdir -p "$results" outputs/bench && cp -a outputs/bench/. "$results"; }
trap keep EXIT; trap 'kill "$child"; wait "$child"; exit 143' TERM INT
"$@" & child=$!
wait "$child"
