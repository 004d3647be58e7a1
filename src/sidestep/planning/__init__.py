"""What fits, what to move where, and what it costs."""
