#!/usr/bin/env bash
# CANN's libraries are found through the environment that its own script sets.
set -e
for script in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/cann/set_env.sh; do
    # shellcheck disable=SC1090  # lies in the base image
    [ -r "$script" ] && { . "$script"; break; }
done
exec "$@"
