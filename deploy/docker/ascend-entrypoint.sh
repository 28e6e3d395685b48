#!/usr/bin/env bash
# Sources CANN's set_env.sh, which sets the paths of its libraries, and then runs the command.
set -e
for script in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/cann/set_env.sh; do
    # shellcheck disable=SC1090  # is in the base image
    [ -r "$script" ] && { . "$script"; break; }
done
exec "$@"
