# Sourced: environments that are made once, and again when what they are made from has changed.
#
#   if outdated STAMP FILE...; then         # not made yet, or not from these files as they are
#       new_environment VENV                 # an empty one; "${pip[@]}" installs into it
#       "${pip[@]}" torch
#       finished STAMP                       # only now it counts as made
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
    # shellcheck disable=SC2034  # for whoever sources this
    pip=("$1/bin/python" -m pip install --quiet --disable-pip-version-check -c ci/constraints.txt)
}

finished() { # STAMP, of the last that was outdated
    echo "$wanted" > "$1"
}
