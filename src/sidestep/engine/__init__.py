"""The engine: devices, slots, stores."""
