"""The precision ladder: the same model with one change of arithmetic at a time, and what each step costs."""
