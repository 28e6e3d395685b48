# Sourced: creates virtual environments once, and again when the files that they are built from change.
#
#   if outdated STAMP FILE...; then         # not built yet, or built from other versions of the files
#       new_environment VENV                 # creates an empty one; "${pip[@]}" installs into it
#       "${pip[@]}" torch
#       finished STAMP                       # marks it as complete
#   fi
# shellcheck shell=bash

outdated() {
    wanted=$(cat "${@:2}" | sha256sum)
    [ "$(cat "$1" 2>/dev/null)" != "$wanted" ]
}

new_environment() { # VENV [NOTE]
    echo "installing into $1 (once; ${2:-a few minutes})" >&2
    "${PYTHON:-python3}" -m venv --clear "$1"
    pip_into "$1"
}

pip_into() { # VENV
    # shellcheck disable=SC2034  # used by the scripts that source this
    pip=("$1/bin/python" -m pip install --quiet --disable-pip-version-check -c ci/constraints.txt)
}

finished() { # STAMP, the one last passed to outdated
    echo "$wanted" > "$1"
}
