"""Everything that is published beside the code: pages, pictures, examples, benchmarks, the verification."""
