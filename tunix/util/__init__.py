"""Small utilities that do not depend on models: atomic writes, YAML, plugins by name, statistics, exact compilation."""
