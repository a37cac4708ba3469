"""HTML."""
def render(summary): return "todo"
