"""A finished model in use: exported for devices, typed on, and finished by one person for themselves."""
