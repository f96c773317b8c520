"""The wait for a signal, which may come at any moment of it."""

from __future__ import annotations

from tests.kit.processes import Child, python


def test_a_signal_at_any_moment_of_the_wait(children: list[Child]) -> None:
    """Between any two instructions of it, and another one at once, as timeout(1) sends them: who waits, or handles the first
    one, holds no lock that a handler would wait for.
    """
    child = python(
        """
        import faulthandler, signal, sys
        from shared_rpc.lifecycle.signals import End, wait_for_signal

        faulthandler.dump_traceback_later(30, exit=True)
        steps = moment = 1
        while steps >= moment:
            steps, moment = 0, moment + 1

            def trace(frame, event, argument):
                global steps
                frame.f_trace_opcodes = True
                if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                    return None  # the wait is over
                steps += 1
                if steps == moment:
                    signal.raise_signal(signal.SIGTERM)
                    signal.raise_signal(signal.SIGTERM)
                return trace

            def begin():
                sys.settrace(trace)
                sys._getframe(1).f_trace = trace
                return True

            asked = End()
            asked.set()
            try:
                wait_for_signal(begin, asked=asked)
            finally:
                sys.settrace(None)
        print("ended", moment > 10, flush=True)
        """
    )
    children.append(child)
    child.expect("ended True")
    assert child.close() == (0, "")
