"""The recipes of published systems, one TOML file each; `carpool.recipes` says what is in one."""
