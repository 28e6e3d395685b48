"""Assigns test files to pytest-xdist workers, also after a worker has died.

A test that hangs kills its worker (pytest-timeout's thread method). pytest-xdist 3.8 assigns that
test to the next worker again; if it was the last one of its file, that worker then waits for ever
for a following test.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class FileScheduling(LoadFileScheduling):
    """A test that killed its worker counts as failed and is not run again; all others are run."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Remove a worker and reassign its remaining tests.

        Returns:
            The test that killed it; None if it had finished all of its tests.
        """
        workload = self.assigned_work.pop(node)
        left = [test for file in workload.values() for test, is_done in file.items() if not is_done]
        if not left:
            return None
        workload[self._split_scope(left[0])][left[0]] = True
        self.workqueue.update(
            {name: file for name, file in workload.items() if not all(file.values())}
        )
        for other in self.nodes:
            self._reschedule(other)
        return left[0]

    def _reschedule(self, node: WorkerController) -> None:
        super()._reschedule(node)
        # A worker runs a test only once it knows the following test, or that there is none.
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)
