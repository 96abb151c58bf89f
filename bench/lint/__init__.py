"""Known mistakes in sbatch scripts, found without running them.

Each rule is documented by its docstring; docs/lint.md is made of them.
"""

from __future__ import annotations

from bench.lint.engine import Rule, lint_script, rules

__all__ = ["Rule", "lint_script", "rules"]
