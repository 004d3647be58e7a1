"""Ways in from other libraries. Each is a module of its own, which nobody pays for who does not import it."""
