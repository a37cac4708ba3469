"""The baseline of a source model: fixed inputs, what it answers, what each of its layers does."""
