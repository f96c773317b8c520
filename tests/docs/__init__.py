"""What is told: pages, pictures, examples, benchmarks, the verification."""
