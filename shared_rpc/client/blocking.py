"""The blocking driver: safe to use from many threads, which share one connection."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from shared_rpc.client.base import OWN_TIMEOUT, BaseClient, Turn
from shared_rpc.client.exchange import PROMPT
from shared_rpc.client.handle import Lease
from shared_rpc.client.link import BlockingLink, Link, nobody_listens
from shared_rpc.client.session import RENEWAL, RETRY, Renewal, Search, renewing, takeover
from shared_rpc.client.steps import (
    BlockingMethods,
    Lend,
    Notify,
    Operation,
    Reach,
    Reply,
    Request,
    Step,
    Tell,
    Within,
    Work,
    ask,
    drive,
)
from shared_rpc.client.suspension import lease_ended, renewed
from shared_rpc.client.transfer import TransferClosed
from shared_rpc.errors import ConnectError, ConnectionClosed, DeadlineExceeded, SharedRPCError
from shared_rpc.errors.interrupts import is_interrupt, is_of_handler, passed_over
from shared_rpc.lifecycle.finalizer import FINALIZER, Job, weakly
from shared_rpc.memory.mapping import MAPPINGS
from shared_rpc.protocol import messages as m

T = TypeVar("T")

#: Seconds until the end of a retired session is tried again; and after which a thread that waits for another one to connect
#: looks whether that has ended.
_LOOK = 0.5
_SLICE = 0.05


class _Opening:
    """The attempt of one operation to reach the server, for which those of other threads wait."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.thread = threading.get_ident()
        self.ended = threading.Event()


class BlockingDriver(BaseClient, BlockingMethods):
    """The driver of :class:`shared_rpc.Client`.

    A signal handler may raise between any two instructions of an operation, and so between getting a reply, a lease or a chunk
    of a pool, and noting it. Operations are not made proof against that. Unless it came in the wait for the first answer, the
    session is retired: another one takes over the leases of the existing handles, and all that the old one had, noted or not,
    ends with it, as soon as no operation of another thread uses it.
    """

    #: Starts a server where none listens: called with the socket's path, the seconds for the start, and the deadline.
    _summon: Callable[[str, float, float], None] | None = None

    def _begin(self) -> None:
        self._closed = False
        self._new_transfer = self._transfers()
        self._disconnected()

    def _disconnected(self) -> None:
        self._lock = threading.RLock()
        self._opening: _Opening | None = None
        #: The session; None before the first one, after it was retired, and after :meth:`close`.
        self._link: BlockingLink | None = None
        #: Operations under way. :attr:`Turn.ended` notes the end of each; :meth:`_end_retired` acts on it.
        self._turns: set[Turn] = set()
        #: Sessions with an interrupted operation, and the operations that may still use them.
        self._retired: dict[BlockingLink, set[Turn]] = {}

    def _end_job(self) -> Job | None:
        # A client whose constructor failed has no sessions.
        links = self._links() if hasattr(self, "_retired") else []
        return functools.partial(_end, links) if links else None

    def _after_fork(self) -> None:
        super()._after_fork()
        self._disconnected()

    def _links(self) -> list[BlockingLink]:
        return [link for link in (self._link, *self._retired) if link is not None]

    def close(self) -> None:
        """Close the connection and release the leases. Tensors stay valid; every later operation fails."""
        self._unwatch()
        with self._lock:
            self._closed = True
            links = self._links()
        try:
            _end(links)
            self._link, self._retired = None, {}
        except BaseException:
            FINALIZER.start()
            FINALIZER.submit(functools.partial(_end, links))
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    # Requests of handles.

    def _end_lease(self, object_id: str, session: object) -> None:
        if session is not self._link:
            return
        with passed_over(SharedRPCError, OSError):  # the connection has ended, and the session's leases with it
            self._run(ask(Request(m.Release([object_id]), "release", sessions=[session]), m.Count), patience=0)
            self._run(lease_ended(self, [object_id]), patience=0)
            MAPPINGS.drain()

    def _end_lease_soon(self, object_id: str, session: object) -> None:
        super()._end_lease_soon(object_id, session)
        MAPPINGS.drain()

    def _interrupted(self, session: object) -> None:
        if isinstance(session, BlockingLink):
            self._retire(session)

    def _has_lease(self, handle: Lease[Any]) -> bool:
        # A session that was retired keeps its leases until another one has them.
        return any(handle.in_session(link) for link in self._links())

    # Driving of operations.

    def _known(self) -> BlockingLink | None:
        return self._link if not self._closed else None

    def _run(self, operation: Operation[T], *, patience: float | None = None, timeout: float | None = OWN_TIMEOUT) -> T:
        """Drive an operation, which may be interrupted anywhere: nothing is left over then."""
        turn = Turn(self._connect_timeout if patience is None else patience)
        turn.deadline = Within(self._timeout if timeout is OWN_TIMEOUT else timeout).deadline(time.monotonic())
        try:
            self._turns.add(turn)
            return drive(operation, functools.partial(self._perform, turn))
        except BaseException as error:
            if is_interrupt(error):
                turn.ended = True
                self._was_interrupted(turn)
            raise
        finally:
            turn.ended = True
            self._turns.discard(turn)
            if self._retired:
                self._end_soon()

    def _perform(self, turn: Turn, step: Step) -> Any:
        match step:
            case Request():
                return self._exchange(step, turn)
            case Work():
                return step.function()
            case Lend():
                return self._lend(step, None if self._closed else turn.link)
            case Notify():
                return step.callback(step.info)
            case Reach():
                return self._connected(turn, turn.deadline)
            case Within():
                turn.deadline = step.deadline(time.monotonic())
            case Tell():
                self._tell(step, turn.link)
        return None

    def _exchange(self, request: Request, turn: Turn) -> Reply:
        """Send a request; return the reply. Where the server went away and the request can be repeated, it goes to the next
        server.
        """
        deadline = max(turn.deadline, time.monotonic() + PROMPT) if request.at_once else turn.deadline
        turn.request = request
        while True:
            link = (self._retired and self._home(request, turn)) or self._connected(turn, deadline)
            if request.transfer is not None and request.transfer is not link.transfer:
                raise TransferClosed
            turn.link = link
            if request.sessions:
                request.keep_to(link)
            try:
                reply = link.exchange(request, deadline)
            except SharedRPCError as error:
                if self._closed and isinstance(error, ConnectionClosed):
                    raise ConnectionClosed(f"this client was closed during {request.what}") from error
                if is_of_handler(error) or not self._repeats(request, link, error) or time.monotonic() > deadline:
                    raise
            else:
                turn.answers += 1
                return reply

    def _home(self, request: Request, turn: Turn) -> BlockingLink | None:
        """Return the retired session that a request must go to; None for the current one."""
        with self._lock:
            if request.transfer is not None:
                return next((link for link in self._retired if link.transfer is request.transfer), None)
            sessions = request.sessions if len(request.sessions) == 1 else [turn.link]
            return next((link for link in self._retired if link in sessions), None)

    # The connection.

    def _connected(self, turn: Turn, deadline: float) -> BlockingLink:
        """Return the link; one operation at a time connects, if there is none."""
        until = deadline if turn.patience > 0 else min(deadline, time.monotonic() + RETRY)
        while True:
            link = self._link
            if link is not None and not self._closed:
                if link.ready:
                    return link
                if link.usable:
                    self._retire(link)
            opening: _Opening | None = None
            try:
                with self._lock:
                    if self._closed:
                        raise ConnectionClosed("this client is closed")
                    if self._link is not link:
                        continue  # another thread has connected meanwhile
                    opening = self._opening
                    if opening is None:
                        opening = self._opening = _Opening(turn)
                # The thread that connects may be this one, below the handler of a signal.
                if opening.turn is turn or opening.thread == threading.get_ident():
                    self._connect(turn, deadline)
                elif time.monotonic() > until:
                    raise ConnectError(f"cannot connect to {self.socket_path}: another thread waits for its server still")
                else:
                    opening.ended.wait(_SLICE)
            finally:
                if opening is not None and opening.turn is turn and self._opening is opening:
                    self._opening = None
                    opening.ended.set()

    def _connect(self, turn: Turn, deadline: float) -> None:
        """Wait for a server, and begin a session, which has the leases of the one that it follows."""
        earlier = self._link
        link, renewal = self._reach(turn, deadline, earlier)
        with self._lock:
            if self._closed or self._link is not earlier:
                link.close()
                return
            link.transfer = self._new_transfer()
            if earlier is not None:
                self._retired[earlier] = {turn}  # handles are moved later that a signal handler has left there
            self._link = turn.link = link
            if renewal is not None:
                renewal.move(link)
            if earlier is not None:
                del self._retired[earlier]
        if earlier is not None:
            _end([earlier])
        if renewal is not None:
            self._correct(renewal, link, min(RENEWAL, max(deadline - time.monotonic(), 0.0)))

    def _reach(self, turn: Turn, deadline: float, earlier: Link | None) -> tuple[BlockingLink, Renewal | None]:
        search = Search(self.socket_path, turn.patience, deadline, self._summon)
        while True:
            link: BlockingLink | None = None
            try:
                link = BlockingLink.open(search.path, max(deadline - time.monotonic(), RETRY))
                renewal = takeover(self._leases, earlier, link)
                if renewal is not None:
                    with renewing(search.path):
                        renewal.granted(link.exchange(renewal.request, time.monotonic() + PROMPT))
                return link, renewal
            except ConnectError as error:
                if link is not None:
                    link.close()
                time.sleep(search.failed(error))
            except BaseException:
                if link is not None:
                    link.close()
                raise

    def _correct(self, renewal: Renewal, link: BlockingLink, seconds: float) -> None:
        """Correct the leases that a session has taken over, and renew memory that was replaced meanwhile."""
        for message in renewal.corrections():
            with passed_over(SharedRPCError):
                link.post(message)
        if outdated := renewal.outdated():
            self._renew(outdated, seconds)

    def _renew(self, handles: Sequence[Lease[Any]], seconds: float) -> None:
        self._run(renewed(self, handles), patience=0, timeout=seconds)

    # Interrupted operations.

    def _was_interrupted(self, turn: Turn) -> None:
        """Retire the session of an operation that was interrupted at a place that is not known."""
        request = turn.request
        if request is not None and request.withdrawn and not turn.answers:
            return
        if request is not None and request.frame is not None:
            request.frame.close()
        link = turn.link if turn.link is not None else self._link
        if isinstance(link, BlockingLink):
            self._retire(link)

    def _retire(self, link: BlockingLink) -> None:
        """Have another session take over the leases of this one, which ends."""
        with self._lock:
            if link is not self._link:
                return  # it is retired already, or has ended
            self._link = None
            self._retired[link] = set(self._turns)
        # The session's end returns what the interrupted operation has of the pool, so no other operation may wait for it there.
        link.transfer.arguments.refuse()
        FINALIZER.start()
        self._end_soon()

    def _end_soon(self) -> None:
        """End retired sessions that waited for an operation that has ended."""
        FINALIZER.submit(weakly(self._end_retired))

    def _end_retired(self) -> None:
        """End the retired sessions that no operation is in any more, in a thread that no signal handler runs in."""
        for link, turns in tuple(self._retired.items()):
            if all(turn.ended for turn in turns) and not self._taken_over(link):
                FINALIZER.submit(weakly(self._end_retired), after=_LOOK)

    def _taken_over(self, link: BlockingLink) -> bool:
        """Have another session take over the leases of a retired one, and end that; return False if it is to be tried again."""
        try:
            handles = self._leases.of(link)
            if handles:
                self._take_over(link, Renewal(self._leases, handles))
        except (DeadlineExceeded, ConnectError) as error:
            if not self._closed and not (isinstance(error, ConnectError) and nobody_listens(error)):
                return False  # the server is stuck: the handles still need the old session
        except SharedRPCError:
            pass  # the session has ended, and its leases with it
        _end([link])
        self._retired.pop(link, None)
        return True

    def _take_over(self, link: BlockingLink, renewal: Renewal) -> None:
        turn = Turn(0)
        turn.deadline = time.monotonic() + PROMPT
        renewal.granted(self._exchange(renewal.request, turn))
        following = turn.link
        assert isinstance(following, BlockingLink), "a reply comes over a link"
        if following.server_id == link.server_id:
            renewal.move(following)
        self._correct(renewal, following, RENEWAL)


def _end(links: Sequence[Link]) -> None:
    """End sessions; also those whose end was interrupted before."""
    for link in links:
        link.ended = True
        link.close()
        link.transfer.close()
