"""The figures of the documentation, by name."""

from __future__ import annotations

from drawing import Drawing


def system() -> Drawing:
    """Who runs, who holds, who maps."""
    d = Drawing(
        "system", 760, 400, "Workers make memory and hand descriptors to the broker; it hands copies to clients, which map it."
    )
    d.box(16, 40, 168, 92, "worker", "imports app.py", "runs the endpoints", "torch, CUDA", kind="process")
    d.box(16, 150, 168, 44, "worker", "may crash, is restarted", kind="process")
    d.box(
        290, 40, 180, 154, "broker", "sessions, leases, tasks", "records and descriptors", "no torch, no CUDA", kind="process"
    )
    d.box(576, 40, 168, 66, "client", "app.py, or a Client", "may be killed at any time", kind="process")
    d.box(576, 128, 168, 66, "client", "shares its mapping", "among all its threads", kind="process")
    d.arrow((184, 74), (290, 74), kind="fds", label="fds, records")
    d.arrow((290, 108), (184, 108), label="runs", at=(237, 124))
    d.arrow((184, 172), (290, 172), kind="dashed", both=True)
    d.arrow((470, 66), (576, 66), kind="fds", label="fds, records")
    d.arrow((576, 92), (470, 92), label="calls, leases", at=(523, 108))
    d.arrow((470, 162), (576, 162), kind="fds", both=True)
    d.words(237, 28, "socket pair", kind="note")
    d.words(523, 28, "Unix socket, 0600", kind="note")
    d.box(16, 270, 728, 116, kind="area")
    d.words(380, 376, "memory: of a GPU (VMM allocations), or of the host (memfds)", kind="area")  # below the arrows
    for number in range(4):
        d.box(40 + number * 172, 292, 160, 56, f"segment {number + 1}", "up to 1 GiB", kind="memory")
    d.arrow((100, 194), (100, 290), label="makes, maps", at=(146, 244))
    d.arrow((380, 194), (380, 290), kind="dashed", label="keeps alive", at=(424, 244))
    d.arrow((660, 194), (660, 290), label="maps: no copy", at=(610, 244))
    return d


def life() -> Drawing:
    """The states of an object, and what moves it from one to the next."""
    d = Drawing("life", 760, 372, "An object is built, then cached, held or both; when it is neither, its memory goes.")
    d.box(20, 44, 120, 52, "called", "bound, key made", kind="plain")
    d.box(206, 44, 130, 52, "building", "one run for all", kind="process")
    d.arrow((140, 70), (206, 70), label="no hit", at=(172, 62))
    d.box(410, 34, 150, 72, "cached", "listed under its key,", "no lease", kind="memory")
    d.box(410, 156, 150, 72, "cached and held", "listed,", "leases ≥ 1", kind="memory")
    d.box(410, 278, 150, 72, "held only", "unlisted,", "leases ≥ 1", kind="memory")
    d.box(640, 156, 104, 72, "gone", "pages back", "to the kernel", kind="plain")
    d.arrow((336, 62), (410, 62), label="record", at=(372, 54))
    d.arrow((300, 96), (300, 192), (408, 192), label="managed", at=(348, 184))
    d.arrow((240, 96), (240, 314), (408, 314), label="managed, cache=False", at=(316, 306))
    d.arrow((80, 44), (80, 14), (485, 14), (485, 34), label="hit", at=(280, 10))
    d.arrow((460, 106), (460, 156), label="call", at=(440, 136))
    d.arrow((510, 156), (510, 106), label="last release", at=(556, 136))
    d.arrow((485, 228), (485, 278), label="refresh, invalidate", at=(552, 258))
    d.arrow((560, 70), (692, 70), (692, 156), label="invalidate, idle_ttl, max_bytes", at=(650, 62))
    d.arrow((560, 314), (692, 314), (692, 228), label="last release", at=(630, 306))
    return d


def roles() -> Drawing:
    """From the environment to what a call does."""
    d = Drawing("roles", 760, 330, "The environment chooses one of four roles; the same call does what the role says.")
    d.box(250, 10, 260, 48, "app.py", "provider.share, load_model()", kind="plain")
    d.words(380, 84, "SHARED_TENSOR_ENABLED, SHARED_TENSOR_ROLE, Provider(execution_mode=…)", kind="note")
    kinds = [
        ("local", "runs it here,", "shares nothing", "nothing set, or disabled"),
        ("server", "runs it here, keeps it,", "lets clients in", "ROLE=server"),
        ("client", "calls the server,", "maps its answers", "ROLE=client, or ENABLED=1"),
        ("spawn", "a client that starts", "a missing server", "ROLE=spawn"),
    ]
    for number, (name, first, second, when) in enumerate(kinds):
        x = 14 + number * 186
        d.arrow((380, 92), (380, 104), (x + 87, 104), (x + 87, 132))
        d.box(x, 132, 174, 76, name, first, second, kind="process")
        d.words(x + 87, 226, when, kind="note")
    d.box(14, 262, 174, 50, "private memory", "cache of the process", kind="memory")
    d.box(200, 262, 546, 50, "shared memory", "one copy, for all processes of this base path and device", kind="memory")
    for x, kind in ((101, ""), (287, "fds"), (473, "fds"), (659, "fds")):
        d.arrow((x, 234), (x, 262), kind=kind)
    return d


def record() -> Drawing:
    """What a record holds, and where its parts point."""
    d = Drawing("record", 760, 340, "A record is a skeleton, a table of storages and tensors, and the segments it points into.")
    d.box(14, 10, 224, 316, "record", kind="area")
    d.box(28, 40, 196, 62, "skeleton", "pickled, without tensors;", "“tensor 0”, “tensor 1”, …", kind="plain")
    d.box(28, 118, 196, 92, "table: tensors", "storage, offset, shape,", "strides, dtype,", "requires_grad, …", kind="plain")
    d.box(28, 226, 196, 84, "table: storages", "segment, offset, nbytes", kind="plain")
    d.box(330, 10, 414, 316, "segments: descriptor, nbytes, device, access", kind="area")
    d.words(346, 62, "segment 0", kind="head", anchor="start")
    d.box(346, 72, 150, 52, "storage 0", "0", kind="memory")
    d.box(504, 72, 96, 52, "storage 1", "512·k", kind="memory")
    d.box(608, 72, 120, 52, "free", "", kind="plain")
    d.words(346, 190, "segment 1: one large storage", kind="head", anchor="start")
    d.box(346, 200, 382, 52, "storage 2", "more than 1 GiB", kind="memory")
    notes = (
        "storages are aligned to 512 bytes, segments have up to 1 GiB",
        "tied weights and views are several tensors over one storage",
        "parts of other records may lie in the same segments",
    )
    for number, line in enumerate(notes):
        d.words(346, 276 + 17 * number, line, kind="note", anchor="start")
    d.arrow((126, 102), (126, 118))
    d.arrow((126, 210), (126, 226))
    d.arrow((224, 250), (290, 250), (290, 98), (346, 98), kind="fds")
    d.arrow((224, 284), (300, 284), (300, 226), (346, 226), kind="fds")
    return d


def cluster() -> Drawing:
    """Who plans, who carries it out, and which way the bytes go."""
    d = Drawing(
        "cluster", 760, 372, "The directory sends orders to agents; the bytes go from node to node, and attaches are local."
    )
    d.box(280, 10, 200, 62, "directory", "who has, builds, receives", "an actor of Ray", kind="process")
    for number, (name, task) in enumerate((("node 0", "builds"), ("node 1", "receives, sends on"), ("node 2", "receives"))):
        x = 14 + number * 252
        d.box(x, 130, 228, 232, name, kind="area")
        d.box(x + 14, 160, 200, 44, "agent", task, kind="process")
        d.box(x + 14, 234, 200, 44, "broker", "one copy of the record", kind="memory")
        d.box(x + 14, 308, 200, 40, "processes attach", kind="plain")
        d.arrow((x + 114, 204), (x + 114, 234), both=True)
        d.arrow((x + 114, 278), (x + 114, 308), kind="fds")
    d.arrow((300, 72), (128, 160), kind="dashed", both=True)
    d.arrow((380, 72), (380, 160), kind="dashed", both=True)
    d.arrow((460, 72), (632, 160), kind="dashed", both=True)
    d.words(132, 100, "requests, orders", kind="note")
    d.arrow((228, 192), (280, 192), label="parts", at=(254, 186))
    d.arrow((480, 192), (532, 192), label="parts", at=(506, 186))
    return d


def tiers() -> Drawing:
    """Where the bytes of an object are, and what moves them."""
    d = Drawing(
        "tiers", 760, 330, "An object's bytes are on its device, in the host's memory, or in a file; processes map the device."
    )
    d.box(14, 10, 330, 306, "a process with a handle", kind="area")
    d.box(34, 50, 290, 62, "active", "the memory is mapped,", "value can be used", kind="process")
    d.box(34, 214, 290, 62, "suspended", "addresses reserved, memory unmapped,", "the lease is kept", kind="plain")
    d.arrow((110, 112), (110, 214), label="suspend()", at=(70, 168))
    d.arrow((240, 214), (240, 112), label="resume()", at=(276, 168))
    d.box(404, 10, 342, 306, "the server", kind="area")
    d.box(424, 44, 302, 58, "device", "memory of the GPU, or the host's memory", kind="memory")
    d.box(424, 140, 302, 58, "host", "a copy in the host's memory, of a GPU's objects", kind="memory")
    d.box(424, 236, 302, 58, "file", "a copy in --spill-dir", kind="memory")
    d.arrow((324, 72), (424, 72), label="maps", at=(374, 64), kind="fds", both=True)
    d.arrow((490, 102), (490, 140), label="evict", at=(466, 126))
    d.arrow((490, 198), (490, 236), label="spill", at=(466, 222))
    d.arrow((660, 140), (660, 102), label="restore", at=(694, 126))
    d.arrow((660, 236), (660, 198), at=(694, 222), label="read")
    return d


FIGURES = {"system": system, "life": life, "roles": roles, "record": record, "cluster": cluster, "tiers": tiers}
