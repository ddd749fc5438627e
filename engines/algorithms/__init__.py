"""What to optimise, as data (`spec`, `presets`: torch-free) and as pure functions (the other modules)."""
