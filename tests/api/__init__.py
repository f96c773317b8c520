"""The public API: tests that use public names and the kit alone, one file for each subject."""
