"""Small helps that know nothing of models: atomic writes, YAML, plugins by name, statistics, exact compilation."""
