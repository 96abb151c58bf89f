"""The rules, by what they look at; every module here is loaded by bench.lint.engine."""
