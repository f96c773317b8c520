"""A client of the app: ``python -m tests.compat.visitor LIBRARY HOST DEVICE HEAVY CASE…`` prints what works, as JSON.

It prints one line for each case as it ends: ``{"case": …, "checks": {name: [outcome, words, seconds]}, "found": {…}}``. What
is found is what the page about compatibility says of an object; see ``findings.py``.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

from shared_rpc.errors import CapabilityError
from tests.compat import app
from tests.compat.cases import Case, cases_of
from tests.compat.checks import Visit, changes, checks_of, describe, outcome
from tests.compat.findings import attached, refused


def visit_case(
    library: str, name: str, case: Case, device: str, host: str, heavy: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All checks of a case, ``{name: [outcome, words, seconds]}``, and what was found of the object."""
    begin = time.monotonic()
    checks: dict[str, Any] = {}
    found: dict[str, Any] = {}

    def tell(check: str, said: tuple[str, str]) -> None:
        nonlocal begin
        now = time.monotonic()
        checks[check] = [*said, round(now - begin, 3)]
        begin = now

    # What is imported stays: collections need not walk over it again and again.
    gc.collect()
    gc.freeze()
    try:
        visit = Visit(library, name, case, device, host)
    except CapabilityError as error:
        expected = case.refused is not None and case.refused in str(error)
        tell("attach", ("refused" if expected else "fails", describe(error)))
        return checks, refused(error)
    except Exception as error:
        tell("attach", ("fails", describe(error)))
        return checks, found
    if case.refused is not None:
        tell("attach", ("fails", f"is shared, and was to be refused: {case.refused}"))
        return checks, found
    tell("attach", ("works", ""))
    found = attached(visit.handle, parameters_alone=case.parameters_alone)
    for check, function in checks_of(visit, heavy):
        if check in case.excused:
            tell(check, ("excused", case.excused[check]))
            continue
        tell(check, outcome(visit, function))
        if checks[check][0] != "works" or changes(visit, check):
            visit.own = visit.build()
            visit.attach_anew()
            begin = time.monotonic()
    tell("undisturbed", outcome(visit, Visit.undisturbed))
    visit.handle.release()
    return checks, found


def main(library: str, host: str, device: str, heavy: str, *names: str) -> None:
    """Visit cases of a library."""
    for name in names:
        checks, found = visit_case(library, name, cases_of(library)[name], device, host, heavy == "heavy")
        print(json.dumps({"case": name, "checks": checks, "found": found}), flush=True)
    app.provider.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
