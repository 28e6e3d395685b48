"""Operating-system processes: child processes, a local deployment, progress, time limits."""
