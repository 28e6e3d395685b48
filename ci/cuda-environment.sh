# Sourced by ci/test-cuda and ci/bench-cuda: checks what a machine with a GPU must have, and installs
# what pip can provide.
#
#   require_gpu           exits 77 without a GPU, and 1 with the reason if the backend can't use it;
#                         prints a line about the GPUs
#   install_sanitizer     sets $sanitizer to compute-sanitizer: the toolkit's, or else PyPI's
#   install_flashinfer    installs FlashInfer, and nvcc, with which it compiles its kernels
# shellcheck shell=bash
# shellcheck source=ci/environment.sh
. ci/environment.sh

fail() { # REASON
    echo "failed: $1" >&2
    exit 1
}

require_gpu() {
    compgen -G '/dev/nvidia[0-9]*' > /dev/null || { echo "skipped: no CUDA device (/dev/nvidia0)"; exit 77; }
    command -v "${CC:-gcc}" > /dev/null || fail "no C compiler, which Triton needs for its launchers: apt-get install gcc g++"
    local header='import sysconfig, pathlib, sys; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())'
    "${PYTHON:-python3}" -c "$header" || fail "no Python.h: apt-get install python3-dev"
    "${PYTHON:-python3}" -c 'import ensurepip' || fail "can't create a venv: apt-get install python3-venv"
    ci/install dev
    found=$(.venv/bin/python ci/cuda_facts.py) || fail "$found"
    echo "$found"
    # shellcheck disable=SC2034  # used by the scripts that source this
    pip_into .venv
    cuda=$(.venv/bin/python -c 'import torch; print(torch.version.cuda)')
}

install_sanitizer() {
    sanitizer=$(command -v compute-sanitizer || true)
    [ -z "$sanitizer" ] || return 0
    local suffix=
    [ "${cuda%%.*}" -ge 13 ] || suffix=-cu${cuda%%.*}
    "${pip[@]}" "nvidia-cuda-sanitizer-api$suffix==$cuda.*" \
        || fail "no compute-sanitizer: install the CUDA toolkit's, and put it on PATH"
    sanitizer=$(find .venv/lib -path '*/bin/compute-sanitizer' | head -1)
    [ -n "$sanitizer" ] || sanitizer=$(find .venv/lib -type f -name compute-sanitizer | head -1)
    [ -n "$sanitizer" ] || fail "PyPI's nvidia-cuda-sanitizer-api$suffix has no compute-sanitizer"
    chmod -R u+x "$(dirname "$(dirname "$sanitizer")")"
}

install_flashinfer() {
    "${pip[@]}" ninja -e 'backends/cuda[flashinfer]'
    export PATH=$PWD/.venv/bin:$PATH
    [ -z "${CUDA_HOME:-}" ] || return 0
    ! command -v nvcc > /dev/null || return 0
    [ "${cuda%%.*}" -ge 13 ] || fail "FlashInfer compiles its kernels: install CUDA $cuda's nvcc, and put it on PATH"
    "${pip[@]}" "cuda-toolkit[nvcc,cudart,cccl,curand,cublas]==$cuda.*"
    CUDA_HOME=$(dirname "$(dirname "$(find "$PWD/.venv/lib" -path '*/bin/nvcc' | head -1)")")
    # the wheels lack the lib*.so names that the linker looks for
    local links=$PWD/.cache/cuda-links library
    mkdir -p "$links"
    for library in "$CUDA_HOME"/lib/lib*.so.*; do
        ln -sf "$library" "$links/$(basename "${library%%.so.*}").so"
    done
    export CUDA_HOME FLASHINFER_EXTRA_LDFLAGS="-L$links -Wl,-rpath,$CUDA_HOME/lib"
}
