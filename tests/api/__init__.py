"""What users write: public names and the kit alone, a file for each subject."""
