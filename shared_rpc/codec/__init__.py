"""Values taken apart into records, and rebuilt. ``arguments`` and ``results`` are the doors; both load torch."""
