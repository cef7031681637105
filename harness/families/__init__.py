"""Families of scenarios: distributions over clusters, jobs, starts and conditions, whose members are drawn by number."""

from harness.families.families import FAMILIES, audience, member_name, members, parse_name, single

__all__ = ["FAMILIES", "audience", "member_name", "members", "parse_name", "single"]
