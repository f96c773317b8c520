"""What is asked of a provider by name: the same operations in every role."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shared_rpc.handle import Handle
from shared_rpc.protocol.tasks import TaskInfo
from shared_rpc.runtime import Runtime

if TYPE_CHECKING:
    import torch

__all__ = ["Operations"]


class Operations(ABC):
    """Calls, tasks, buffers and the cache, carried out by the role that this process plays."""

    @abstractmethod
    def _runtime(self) -> Runtime:
        """The role at work, which begins with the first operation."""

    def call(self, endpoint: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call an endpoint by name; in the client role the server alone has to know it. See :meth:`Client.call`."""
        return self._runtime().call(endpoint, args, kwargs)

    def submit(self, endpoint: str, /, *args: Any, **kwargs: Any) -> str:
        """Have an endpoint run as a task: its id. In every role; see :meth:`Client.submit`."""
        return self._runtime().tasks.submit(endpoint, *args, **kwargs)

    def execute(
        self,
        endpoint: str,
        /,
        *args: Any,
        wait: bool = True,
        timeout: float | None = None,
        callback: Callable[[TaskInfo], object] | None = None,
        **kwargs: Any,
    ) -> Any:
        """:meth:`submit`, and with ``wait`` :meth:`wait_for_task`: the result, else the task's id."""
        task_id = self.submit(endpoint, *args, **kwargs)
        return self.wait_for_task(task_id, timeout, callback) if wait else task_id

    def get_task_status(self, task_id: str) -> TaskInfo:
        """A task now; see :meth:`Client.get_task_status`."""
        return self._runtime().tasks.get_task_status(task_id)

    def get_task_result(self, task_id: str) -> Any:
        """The result of a task that has ended; see :meth:`Client.get_task_result`."""
        return self._runtime().tasks.get_task_result(task_id)

    def wait_for_task(
        self, task_id: str, timeout: float | None = None, callback: Callable[[TaskInfo], object] | None = None
    ) -> Any:
        """Wait for a task to end: its result; see :meth:`Client.wait_for_task`."""
        return self._runtime().tasks.wait_for_task(task_id, timeout, callback)

    def cancel_task(self, task_id: str) -> bool:
        """Cancel a task, or ask it to stop; see :meth:`Client.cancel_task`."""
        return self._runtime().tasks.cancel_task(task_id)

    def list_tasks(self, status: str | None = None) -> list[TaskInfo]:
        """Tasks in the order they were submitted; see :meth:`Client.list_tasks`."""
        return self._runtime().tasks.list_tasks(status)

    def invalidate_call_cache(self, endpoint: str, /, *args: Any, **kwargs: Any) -> int:
        """Drop the cached result of one call; 1 if there was one. Handles that are out stay valid."""
        return self._runtime().invalidate_call(endpoint, args, kwargs)

    def invalidate_endpoint_cache(self, endpoint: str) -> int:
        """Drop all cached results of an endpoint; how many there were. Handles that are out stay valid."""
        return self._runtime().invalidate_endpoint(endpoint)

    def create_buffer(
        self,
        shape_or_nbytes: int | Sequence[int],
        dtype: torch.dtype | str = "uint8",
        device: torch.device | str | None = None,
        *,
        zero: bool = False,
        ttl: float | None = None,
        max_accesses: int | None = None,
        keep: bool = False,
    ) -> Handle[torch.Tensor]:
        """New shared memory that belongs to no endpoint; see :meth:`Client.create_buffer`.

        In the local role nobody else can get it; in the server role the server's clients can.
        """
        return self._runtime().buffers.create_buffer(
            shape_or_nbytes, dtype, device, zero=zero, ttl=ttl, max_accesses=max_accesses, keep=keep
        )

    def get_buffer(self, buffer_id: str) -> Handle[torch.Tensor]:
        """The buffer of that id, whoever made it; see :meth:`Client.get_buffer`."""
        return self._runtime().buffers.get_buffer(buffer_id)

    def free_buffer(self, buffer: Handle[Any] | str) -> bool:
        """Have nobody get a buffer any more; False if nobody could. See :meth:`Client.free_buffer`."""
        return self._runtime().buffers.free_buffer(buffer)

    def list_devices(self) -> list[dict[str, Any]]:
        """The devices that buffers may lie on, and what is used of them; see :meth:`Client.list_devices`."""
        return self._runtime().buffers.list_devices()
