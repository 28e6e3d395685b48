"""The ``staged`` transport: GPU memory through pinned host memory, over tcp; no special network.

Its other end may be a process without a GPU, whose host memory is then not staged.
"""
