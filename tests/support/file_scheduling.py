"""Which worker of pytest-xdist runs which file, also after one of them has died.

A test that hangs ends its worker (pytest-timeout's thread method). pytest-xdist 3.8 gives that test
to the next worker again, and where it was the last one of its file, that worker waits for ever for
a test behind it.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class FileScheduling(LoadFileScheduling):
    """A test that ended its worker has failed and is not run again; all others are run."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Take a worker out, and give others what it left.

        Returns:
            The test that it died of; None if it had done all of its own.
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
        # A worker runs a test only when it knows the one behind it, or that there is none.
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)
