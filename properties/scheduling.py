"""xdist's scheduler of groups, for items that share compiled functions and for workers that die.

Items of one backend and config go to one worker. xdist tells groups by a suffix that it gives to the items' names, and
pytest 9.2 takes no notice of it.

The item that killed a worker is reported once, and the rest goes on. xdist's own scheduler hands that item to the next
worker, which it kills too; and it hands work to replacements that have not collected their items yet, which is lost.
"""

from xdist.scheduler import LoadGroupScheduling
from xdist.workermanage import WorkerController


class SurvivingScheduling(LoadGroupScheduling):
    """`--dist loadgroup`."""

    def _split_scope(self, nodeid: str) -> str:
        """The group of an item: its parameters, which are backend and config."""
        _, bracket, parameters = nodeid.partition("[")
        return parameters.removesuffix("]") if bracket else nodeid

    def remove_node(self, node: WorkerController) -> str | None:
        """Take a dead worker's items back, but for the one that it died of, which is returned."""
        workload = self.assigned_work.pop(node)
        for unit in workload.values():
            running = next((item for item, done in unit.items() if not done), None)
            if running is not None:
                unit[running] = True
                break
        else:
            return None
        self.workqueue.update({scope: unit for scope, unit in workload.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return running

    def _reschedule(self, node: WorkerController) -> None:
        """Give a worker more to do, if it has said what it collected."""
        if node in self.registered_collections:
            super()._reschedule(node)
