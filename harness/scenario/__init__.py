"""A scenario: one TOML file that a person can read, and the system that it describes."""

from harness.scenario.scenario import Scenario, embedded, job, load, parse, show, system, workload_of

__all__ = ["Scenario", "embedded", "job", "load", "parse", "show", "system", "workload_of"]
